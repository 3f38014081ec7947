"""Turns of a rendered prompt: each closed before the next begins, and the last one the model's, open.

Published templates slip here.  Of the four generations in use each leaves a turn open, writes text after one
it has closed, or ends without a turn for the model, where calls, results, text and empty messages meet.  What
they write is kept; the markers around it are put right.
"""

import re

_MARKER = re.compile(r"(<\|turn>(?:\w+\n)?|<turn\|>\n?)")
_OPEN, _CLOSE = "<|turn>", "<turn|>\n"
MODEL_TURN = "<|turn>model\n"
TURN_MARKERS = ("<|turn>", "<turn|>")


def balanced(text: str, *, open_model_turn: bool) -> str:
    """The text with every turn closed once, and nothing between turns.

    text             as a template wrote it: markers that others wrote are not spelled as such
    open_model_turn  the text is to end inside a turn of the model
    """
    before, *rest = _MARKER.split(text)
    pieces, role = [before], ""  # role: of the open turn
    for marker, between in zip(rest[::2], rest[1::2], strict=True):
        if marker.startswith(_OPEN):
            opened = marker.removeprefix(_OPEN).strip()
            if role == opened == "model":
                marker = ""  # a model's turn goes on over calls, results and further answers
            elif role:
                marker = _CLOSE + marker
            role = opened
        else:
            marker = marker if role else ""
            role = ""
            if between.strip():  # only the model is ever gone on with
                marker, role = marker + MODEL_TURN, "model"
        pieces += [marker, between]
    if open_model_turn and role != "model":
        pieces.append(_CLOSE * bool(role) + MODEL_TURN)
    return "".join(pieces)
