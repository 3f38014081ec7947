"""What this Python thread is recording: nothing, or one program (program.py).

Rules for the wrappers of ops, so that a recorded step holds for other tokens and positions too:

    values of the call (token ids, positions, lanes, expert ids) are read from memory, inside kernels; no
    argument word, n, grain or size depends on them, only on shapes
    nothing is computed by NumPy on such values between kernels; what depends on the batch alone may: `host`
    no silent copies: an array that is not as a kernel wants it is `UnableError` while recording
"""

import threading


class _State(threading.local):
    program = None


of_thread = _State()  # set by assignment: where a call would do it, a Ctrl+C at its first line would not


class UnableError(ValueError):
    """An op cannot be recorded on these arrays; called as ever it works."""


def current():
    """The program that records, or None."""
    return of_thread.program


def host(step):
    """Run a step in Python now; a program that records runs it again before each replay.

    It may read the batch only, and writes into arrays of `buffers.output(..., of_host=True)`.
    """
    step()
    program = current()
    if program is not None:
        program.host_steps.append(step)
