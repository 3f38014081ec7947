"""Images, sounds and videos on the kernels: soft tokens close to the truth, and the tokens that follow."""

import numpy as np
import pytest

import fastpath.cpu
import refimpl.ops
from fastpath.cuda import device, ops
from fastpath.lanes import Lanes
from fastpath.load import load_model
from fastpath.media import Encoders
from refimpl.batch import SoftTokens
from refimpl.media_tensors import load_media
from tests import tiny
from tests.gpu_on_cpu import devices, launching
from tests.media import tiny_mmproj, tiny_prompts
from tests.oracle import goldens
from tests.tolerances import ORACLE_F32_ABS

N_NEW = 3
WHOLE = ("e2b", "12b")  # towers for pixels and sounds, and a model without towers


def _slow_but(families):
    """All families as parameters; those that are not named are slow."""
    return [
        pytest.param(family, marks=[] if family in families else [pytest.mark.slow])
        for family in tiny_mmproj.ENCODERS
    ]


# an image of more tokens than the windows of 7 and 8; a sound, where a family hears; two frames of a video
PROMPTS = (
    [(tiny_prompts.IMAGE, "odd")],
    [(tiny_prompts.AUDIO, "short")],
    [(tiny_prompts.VIDEO, "square"), (tiny_prompts.VIDEO, "wide")],
)


@pytest.fixture(scope="module")
def executor():
    with device.use(devices.executor_one((launching.LOCKSTEP,))) as made:
        yield made


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    return {
        family: (
            tiny.make(folder / f"{family}.gguf", family),
            tiny_mmproj.make(folder / f"mmproj-{family}.gguf", family),
        )
        for family in tiny_mmproj.ENCODERS
    }


def _piece(name):
    if name in tiny_mmproj.CANVASES:
        return "image", tiny_mmproj.canvas(name)
    return "audio", tiny_mmproj.clip(name)


def _prompt(family, media, parts):
    """Two words, then each medium in its brackets and a word."""
    tokens, starts = [2, 300], []
    if media.audio is None:
        parts = [
            (tiny_prompts.IMAGE, "tall") if kind == tiny_prompts.AUDIO else (kind, n) for kind, n in parts
        ]
    for kind, name in parts:
        begin, end = tiny_prompts.BRACKETS[kind]
        starts.append(len(tokens) + 1)
        tokens += [begin, *[kind] * tiny_prompts.n_soft(family, name), end, 301 + len(starts)]
    return {"tokens": tokens, "starts": starts, "media": [name for _, name in parts]}


def _answers(table, model, media, cases):
    """Greedy tokens after each prompt: prompts in chunks, then one token of all of them at a time."""
    encoders = Encoders(media, table, activations="float")
    lanes = Lanes(
        model, table, context_len=96, chunk=16, n_seqs=len(cases), page=32, largest_image=16, replay=False,
        activations="float", kv_type="f32",
    )  # fmt: skip
    found = []
    for lane, case in enumerate(cases):
        soft = [
            SoftTokens(start, encoders.run(*_piece(name)), name in tiny_mmproj.CANVASES)
            for start, name in zip(case["starts"], case["media"], strict=True)
        ]
        found.append([int(lanes.prefill(case["tokens"], lane=lane, soft=soft).argmax())])
    for _ in range(N_NEW - 1):
        rows = lanes.extend([(lane, tokens[-1:]) for lane, tokens in enumerate(found)])
        for tokens, row in zip(found, rows, strict=True):
            tokens.append(int(row.argmax()))
    return found


@pytest.mark.parametrize("family", _slow_but(WHOLE))
def test_the_tokens_that_follow(family, files, executor):
    model, media = load_model(files[family][0]), load_media(files[family][1])
    cases = [_prompt(family, media, parts) for parts in PROMPTS]
    got = _answers(ops, model, media, cases)
    for table in (fastpath.cpu, refimpl.ops):
        assert got == _answers(table, model, media, cases)


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("family", _slow_but(("e2b", "12b", "26b")))
def test_soft_tokens(family, activations, files, executor):
    """All that is traced: against the definitions; with rounded activations, against the CPU's kernels."""
    media = load_media(files[family][1])
    for name in ("wide", *(("ragged",) if media.audio else ())):
        kind, piece = _piece(name)
        traces = []
        for table in (ops, fastpath.cpu if activations == "int8" else refimpl.ops):
            seen = []
            rows = Encoders(media, table, activations=activations).run(
                kind, piece, lambda key, x, seen=seen: seen.append((key, np.array(x)))
            )
            traces.append([*seen, ("rows", rows)])
        assert [key for key, _ in traces[0]] == [key for key, _ in traces[1]]
        for (key, got), (_, want) in zip(*traces, strict=True):
            assert goldens.max_abs_in_deviations(got, want) <= ORACLE_F32_ABS, f"{name}: {key}"
