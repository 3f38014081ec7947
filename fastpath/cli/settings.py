"""Environment variables: one table of all that this program reads, and of those that it has no use for.

A variable of SETTINGS stands for an option that the command line did not give.  The names are those of the
system that this one follows, so that its users find them; docs/server.md has both tables (`table`), and a
test holds it to them.
"""

import os
from argparse import Action, ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ArgumentTypeError(f"{text!r} is neither 0 nor 1")
    return text == "0"


@dataclass(frozen=True)
class Setting:
    """
    option   that it stands for; "": it is read where `meaning` says
    convert  of a variable that turns a switch off; None: the option's own type
    """

    name: str
    option: str
    default: str
    meaning: str
    convert: Callable[[str], bool] | None = None


SETTINGS = (  # of two for one option the later one counts
    Setting("MAX_CONTEXT", "--context", "the model's", "tokens a conversation may hold"),
    Setting("TS_SCHED_SOLO_PREFILL_CHUNK", "--chunk", "1024 to 2048", "prompt tokens per call; 256 at most "
            "while answers are being written"),
    Setting("TS_PREFILL_CHUNK", "--chunk", "1024 to 2048", "the same; where both are set, this one counts"),
    Setting("TS_SCHED_PREFIX_CACHE", "--no-prefix-cache", "1", "0: nothing is kept for prompts that begin "
            "alike", _switch),
    Setting("TS_THINKING_BUDGET", "--thinking-budget", "a quarter of the answer, 64 at most, with thinking "
            "off; no limit with it on", "tokens of a thought; 0: no limit at all"),
    Setting("VIDEO_SAMPLE_FPS", "--fps", "1", "frames of a video that are shown of each second"),
    Setting("VIDEO_MAX_FRAMES", "--max-frames", "60", "frames of a video that are shown at most"),
    Setting("TWINPATH_API_KEY", "", "none", "serve: the key that clients must send"),
    Setting("TWINPATH_KERNELS", "", "the best that the CPU has", "which set of compiled kernels runs: same "
            "bytes, other speed"),
    Setting("NUMBA_CACHE_DIR", "", "the user's cache folder", "where compiled kernels are kept"),
    Setting("XDG_CACHE_HOME", "", "~/.cache", "the user's cache folder"),
)  # fmt: skip

WITHOUT_COUNTERPART = (
    ("TS_KV_INITIAL_TOKENS", "nothing grows by copying: pages take memory when they are first written to"),
    ("TS_PREFIX_CACHE_MODE", "there is one kind of prefix cache, the tree"),
    ("TS_BATCHED_N1_FAST_PATH TS_GEMMA4_BATCHED TS_GEMMA4_BATCHED_CAPS", "one forward call serves one "
     "sequence or many, with the same bytes: there is no other path to fall back to"),
    ("TS_FUSED_LAYER_PREFILL TS_G4_WHOLE_PREFILL TS_G4_MM_PREFILL TS_G4_PLE_IN_KERNEL TS_G4_VERIFY_SWAPREV",
     "for the same reason; --no-replay calls every op from Python"),
    ("TS_SPEC_DRAFT_MODEL TS_MTP_DRAFT_MODEL TS_GMTP_BATCHED_TRUNK TS_GMTP_NO_FUSED TS_GMTP_NO_FAST_ROLLBACK",
     "there is no speculative decoding here yet"),
    ("TS_GEMMA4_TP_FUSED_MOE", "one machine computes the whole model"),
    ("TS_TEST_GGML_BACKEND TS_TEST_MODEL_DIR TENSORSHARP_GGML_NATIVE_ENABLE_CUDA", "of that system's own "
     "tests and build"),
)  # fmt: skip


def take_over(parser: ArgumentParser, options: dict[str, Action]) -> None:
    """Makes what the environment says the default of options; a bad value ends with a line that names it."""
    for setting in SETTINGS:
        action, text = options.get(setting.option), os.environ.get(setting.name)
        if action is None or not text:
            continue
        convert = setting.convert or action.type
        try:
            value = convert(text) if callable(convert) else text
        except ArgumentTypeError as error:
            parser.error(f"environment variable {setting.name}: {error}")
        parser.set_defaults(**{action.dest: value})


def table() -> str:
    """Both tables as the documentation has them."""
    lines = ["| variable | option | default | meaning |", "|---|---|---|---|"]
    for each in SETTINGS:
        option = f"`{each.option}`" if each.option else ""
        lines.append(f"| `{each.name}` | {option} | {each.default} | {each.meaning} |")
    lines += ["", "Without a counterpart here:", "", "| variable | why |", "|---|---|"]
    for names, why in WITHOUT_COUNTERPART:
        lines.append(f"| {' '.join(f'`{name}`' for name in names.split())} | {why} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
