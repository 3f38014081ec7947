"""Oracle: llama.cpp, through the ctypes bindings of the llama-cpp-python package.

Only the bindings are imported, so a source tree with a built library beside it is enough: `--lib` (or the
environment variable LLAMA_CPP_LIB_PATH) names the folder of the shared library, PYTHONPATH the package's.

Caches are float32 and flash attention is off, to keep llama.cpp's own roundings few: what is left is its
table of GELU values in half precision, and its integer dot products when weights are quantised.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import types

import numpy as np

from oracles import protocol

F32, F16, I32, I64 = 0, 1, 26, 27
NUMPY_TYPES = {F32: np.float32, F16: np.float16, I32: np.int32, I64: np.int64}
FLASH_ATTENTION_OFF = 0


class GGMLTensor(ctypes.Structure):
    """The head of `struct ggml_tensor` in ggml.h, down to the name."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    ]


def bindings(lib: str | None) -> types.ModuleType:
    """The module llama_cpp.llama_cpp, without the rest of its package."""
    if lib:
        os.environ["LLAMA_CPP_LIB_PATH"] = lib
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llama_cpp: not found; install llama-cpp-python or put its folder on PYTHONPATH")
    package = types.ModuleType("llama_cpp")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["llama_cpp"] = package
    return importlib.import_module("llama_cpp.llama_cpp")


def version_of(module: types.ModuleType) -> str:
    """The version of the package, and llama.cpp's own description of the build."""
    try:
        package = importlib.metadata.version("llama_cpp_python")
    except importlib.metadata.PackageNotFoundError:
        line = open(os.path.join(os.path.dirname(module.__file__), "__init__.py")).read()
        package = line.partition('__version__ = "')[2].partition('"')[0]
    return f"llama-cpp-python {package}"


def as_array(tensor: GGMLTensor) -> np.ndarray:
    """Copies a CPU tensor, views included: ggml's ne[0] is the last axis; leading axes of 1 are dropped."""
    dtype = np.dtype(NUMPY_TYPES[tensor.type])
    shape, strides = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
    span = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + dtype.itemsize
    memory = np.ctypeslib.as_array(ctypes.cast(tensor.data, ctypes.POINTER(ctypes.c_uint8)), (span,))
    array = np.lib.stride_tricks.as_strided(memory[: dtype.itemsize].view(dtype), shape, strides).copy()
    return array.reshape(rows_first(shape))


def rows_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[1, 1, T, D] -> [T, D], [1, T, N, H] -> [T, N, H]."""
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    return shape


def run(path: str, tokens: list[int], trace: protocol.Trace, lib: str | None, chunk: int) -> str:
    """Runs the tokens, `chunk` at a time, and returns the version of the library."""
    api = bindings(lib)
    silence = api.llama_log_callback(lambda level, text, user: None)
    api.llama_log_set(silence, None)
    api.llama_backend_init()
    params = api.llama_model_default_params()
    params.n_gpu_layers = 0
    model = api.llama_model_load_from_file(path.encode(), params)
    if not model:
        sys.exit(f"{path}: llama.cpp does not load it")

    pieces: dict[str, np.ndarray] = {}

    def observe(address, ask, user):
        tensor = ctypes.cast(address, ctypes.POINTER(GGMLTensor)).contents
        name = tensor.name.decode()
        if ask:
            return trace.wants(name) and tensor.type in NUMPY_TYPES and is_callback_name(name)
        pieces[name] = as_array(tensor)
        return True

    context = api.llama_context_default_params()
    step = chunk or len(tokens)
    context.n_ctx, context.n_batch, context.n_ubatch = len(tokens) + 32, step, step
    context.n_threads = context.n_threads_batch = 1
    context.type_k = context.type_v = F32
    context.flash_attn_type = FLASH_ATTENTION_OFF
    callback = api.ggml_backend_sched_eval_callback(observe)
    context.cb_eval = callback
    ctx = api.llama_init_from_model(model, context)
    if not ctx:
        sys.exit(f"{path}: llama.cpp makes no context for it")
    for start in range(0, len(tokens), step):
        pieces.clear()
        ids = tokens[start : start + step]
        _decode(api, ctx, ids, start)
        for name, array in _with_heads(pieces).items():
            trace.add(name, array)
    api.llama_free(ctx)
    api.llama_model_free(model)
    return version_of(api)


def _with_heads(pieces: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Projections get their name before they are split into heads, expert weights while one axis is 1."""
    shaped = dict(pieces)
    for name, array in pieces.items():
        kind, _, layer = name.partition("-")
        if f"{kind}_normed-{layer}" in pieces:
            shaped[name] = array.reshape(pieces[f"{kind}_normed-{layer}"].shape)
        elif kind == "ffn_moe_weights":
            shaped[name] = array[..., 0]
    return shaped


def _decode(api, ctx, ids: list[int], start: int) -> None:
    batch = api.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for t, token in enumerate(ids):
        batch.token[t], batch.pos[t], batch.n_seq_id[t], batch.logits[t] = token, start + t, 1, 1
        batch.seq_id[t][0] = 0
    status = api.llama_decode(ctx, batch)
    api.llama_batch_free(batch)
    if status:
        sys.exit(f"llama_decode: status {status}")


def is_callback_name(name: str) -> bool:
    """Tensors that Gemma's graph names; not weights, nameless nodes, views, or a norm before its weight."""
    return (
        " " not in name
        and not name.startswith(("node_", "leaf_", "blk.", "cache_", "norm", "embd"))
        and name != ""
    )


def main() -> None:
    parser = protocol.parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--lib", help="folder of libllama (default: LLAMA_CPP_LIB_PATH, or the package's own)"
    )
    args = parser.parse_args()
    trace = protocol.Trace(args.names)
    version = run(str(args.model), args.tokens, trace, args.lib, args.chunk)
    protocol.save(args, trace, oracle="llama_cpp", version=version)


if __name__ == "__main__":
    main()
