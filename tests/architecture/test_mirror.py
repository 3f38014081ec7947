"""The op tables are one table: same names, same parameters, same files."""

import inspect
import warnings
from pathlib import Path

import pytest

import fastpath.cpu
import refimpl.ops

ROOT = Path(__file__).parents[2]
FAST = {"cpu": fastpath.cpu}
try:
    import fastpath.cuda.ops
except Exception as error:  # numba-cuda raises errors of its own
    warnings.warn(f"the op table on CUDA is not looked at: {error}", stacklevel=1)
else:
    FAST["cuda"] = fastpath.cuda.ops


@pytest.mark.parametrize("backend", FAST)
def test_names(backend):
    assert sorted(FAST[backend].__all__) == sorted(refimpl.ops.__all__)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("op", refimpl.ops.__all__)
def test_parameters(op, backend):
    """As in the reference, and `out`, keyword-only and None, where an array is returned."""
    definition = list(inspect.signature(getattr(refimpl.ops, op)).parameters.values())
    fast = list(inspect.signature(getattr(FAST[backend], op)).parameters.values())
    if fast[-1].name == "out":
        out = fast.pop()
        assert out.kind is inspect.Parameter.KEYWORD_ONLY and out.default is None
    else:
        assert op in ("write_kv", "set_rows"), f"{op} returns an array and has no out="
    assert [(p.name, p.default, p.kind) for p in fast] == [(p.name, p.default, p.kind) for p in definition]


@pytest.mark.parametrize("backend", FAST)
def test_files(backend):
    """A reader finds an op under the same file name in every table."""
    for op in refimpl.ops.__all__:
        definition = Path(inspect.getsourcefile(getattr(refimpl.ops, op))).name
        fast = Path(inspect.getsourcefile(getattr(FAST[backend], op))).name
        assert definition == fast, f"{op}: {definition} in refimpl/ops, {fast} in fastpath/{backend}"
        header = (ROOT / "fastpath" / backend / fast).read_text().splitlines()[0]
        assert f"refimpl/ops/{definition}" in header, (
            f"fastpath/{backend}/{fast}: its first line names no definition"
        )
