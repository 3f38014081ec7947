"""What rounding activations to int8 costs under outliers: `python -m tests.engine.outliers`.

Three ways of rounding the input of a product with K-quants, on weights as they are stored:

    per 256     refimpl/ops/integer.py: q = rint(x * (127 / amax)), scale amax / 127
    llama.cpp   quantize_row_q8_K_ref, per 256: q = min(127, rint(x * (-127 / max))), scale 1 / (-127 / max)
                with max the first value of the largest magnitude; its AMX and repacked paths round alike
    per 32      the first way, with a scale for each sub-block of Q4_K and Q5_K

First table: relative error of the results, |y' - y| / |y| over all rows, for three kinds of activations.
Second table: the demo checkpoint with its matrices in K-quants, on held-out conversations.  Its rows of 160,
320 and 640 values are padded with zeros to whole blocks.  The figures are in docs/adr/0015.
"""

from unittest import mock

import numpy as np

import refimpl.ops
from fastpath.load import DEMO, load_model
from quant import QTensor
from refimpl.ops.integer import round_activations
from tests.engine import held_out

FORMATS = ("Q4_K", "Q5_K", "Q6_K")
ROWS, OUTPUTS, COLUMNS = 128, 256, 2560
CONVERSATIONS = 120


def _per(block):
    def rounded(x):
        q, scale = round_activations(x.astype(np.float32), block)
        return (q * scale[..., None].astype(np.float64)).reshape(x.shape)

    return rounded


def _llama_cpp(x):
    blocks = x.astype(np.float32).reshape(-1, 256)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    inverse = np.float32(-127) / np.where(largest == 0, np.float32(1), largest)
    q = np.minimum(127, np.rint(inverse * blocks))
    scale = np.where(largest == 0, np.float32(0), np.float32(1) / inverse)
    return (q * scale.astype(np.float64)).reshape(x.shape)


SCHEMES = {"per 256": _per(256), "llama.cpp": _llama_cpp, "per 32": _per(32)}


def gaussian(rng):
    return rng.standard_normal((ROWS, COLUMNS))


def heavy_tailed(rng):
    return rng.standard_t(3, (ROWS, COLUMNS))


def outlier_channels(rng):
    x = rng.standard_normal((ROWS, COLUMNS))
    x[:, rng.permutation(COLUMNS)[: COLUMNS // 100]] *= 20
    return x


def massive_channel(rng):
    x = rng.standard_normal((ROWS, COLUMNS))
    x[:, 1000] *= 1000
    return x


KINDS = {
    "Gaussian": gaussian,
    "heavy-tailed (t, 3 degrees)": heavy_tailed,
    "1 % of the channels x 20": outlier_channels,
    "one channel x 1000": massive_channel,
}


def relative(y, exact):
    return float(np.linalg.norm(y - exact) / np.linalg.norm(exact))


def synthetic():
    print("| activations | weights | " + " | ".join(SCHEMES) + " |")
    print("|---|---|" + "---|" * len(SCHEMES))
    for kind, make in KINDS.items():
        rng = np.random.default_rng(15)
        x = make(rng).astype(np.float32).astype(np.float64)
        weight = rng.standard_normal((OUTPUTS, COLUMNS)) * 0.02
        for name in FORMATS:
            w = QTensor.from_array(weight.astype(np.float32), name).dequantize(np.float64)
            exact = x @ w.T
            cells = (f"{100 * relative(scheme(x) @ w.T, exact):.2f} %" for scheme in SCHEMES.values())
            print(f"| {kind} | {name} | {' | '.join(cells)} |")


class PaddedLinear:
    """`linear` on matrices requantised to a K format; `scheme` rounds the activations, or None."""

    def __init__(self, name, scheme):
        self.name, self.scheme, self.matrices = name, scheme, {}
        self.noise = self.signal = 0.0  # squared errors and squares of results

    def __call__(self, x, weight, activations):
        C = weight.row_len
        x = x.astype(np.float64)
        if weight.format.integer_parts is None:  # kept as it is, and multiplied without rounding
            return x @ weight.dequantize(np.float64).T
        if weight.name not in self.matrices:
            padded = np.pad(weight.dequantize(), ((0, 0), (0, -C % 256)))
            self.matrices[weight.name] = QTensor.from_array(padded, self.name).dequantize(np.float64)
        w = self.matrices[weight.name]
        x = np.pad(x, ((0, 0), (0, -C % 256)))
        exact = x @ w.T
        if self.scheme is None:
            return exact
        rounded = self.scheme(x) @ w.T
        self.noise += float(np.sum((rounded - exact) ** 2) / np.sum(exact**2))
        self.signal += 1
        return rounded


def demo():
    model = load_model(DEMO)
    texts = held_out.conversations(model.tokenizer, CONVERSATIONS)
    answers = np.concatenate([is_answer[1:] for _, is_answer in texts])
    print(
        "| weights | activations | error of a product | log-probability: text | answers | RMS of a change |"
    )
    print("|---|---|---|---|---|---|")
    for name in FORMATS:
        exact = None
        matrices = {}
        for label, scheme in {"float": None, **SCHEMES}.items():
            linear = PaddedLinear(name, scheme)
            linear.matrices = matrices
            with mock.patch.object(refimpl.ops, "linear", linear):
                found = held_out.by_definition(model, texts)
            exact = found if exact is None else exact
            error = f"{100 * (linear.noise / linear.signal) ** 0.5:.2f} %" if linear.signal else ""
            change = f"{np.sqrt(np.mean((found - exact) ** 2)):.4f}" if scheme else ""
            print(
                f"| {name} | {label} | {error} | {found.mean():.4f} | {found[answers].mean():.5f} "
                f"| {change} |",
                flush=True,
            )


if __name__ == "__main__":
    synthetic()
    print()
    demo()
