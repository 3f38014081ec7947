"""One run of `bench`: a model is loaded, its kernels are checked, tests are timed, rates measured between."""

import json
import mmap
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastpath.backend import ops_for
from fastpath.bench import measure, parity, profile, rates, report
from fastpath.bench.measure import Runner, workloads
from fastpath.cli.parts import Parts
from fastpath.cli.setup import prepare, say
from fastpath.cli.stats import own_bytes, peak_bytes
from fastpath.kv.geometry import cache_bytes
from fastpath.lanes import Lanes, default_chunk
from fastpath.load import Model, load_model
from fastpath.memory import available_bytes
from quant import QTensor


def run(args: Namespace, path: Path) -> tuple[list[dict[str, Any]], str]:
    """Rows, and the same as text."""
    from fastpath.cpu import machine, threads

    tests = workloads(args.n_prompt, args.n_gen, args.depth, args.batch)
    if not tests:
        raise ValueError("bench: nothing to measure. Give -p or -n a number above 0.")
    parts = Parts()
    with parts.measured("file"):
        model = load_model(path)
    engine = _engine(args, model, tests)
    prepare(args, engine, measure.positions(tests), "last", parts)
    model = engine.model  # packed, perhaps
    _touch_tables(model)
    n_cases = parity.check(model, engine.ops, engine.kv_type)
    n_cases += parity.check_replay(engine, sorted({test.n_seqs for test in tests if test.n_gen}))
    plain, samples = rates.PlainRead(rates.weight_memory(model.weights)), []
    runner, results = Runner(engine), []
    for i, test in enumerate(tests):
        say(f"test {i + 1} of {len(tests)}: {test.name}")
        results.append(runner.run(test, args.repetitions, lambda: samples.append(plain.best())))
    setting = report.Setting(
        model=model,
        model_size=sum(tensor.nbytes for tensor in model.file.tensors.values()),
        n_params=sum(tensor.n_rows * tensor.row_len for tensor in model.file.tensors.values()),
        kernels=machine.describe(),
        n_threads=threads.num_threads(),
        n_batch=args.batch_size or default_chunk(model.config),  # a short prompt does not fill one
        kv_types=_kv_types(args),
        is_packed=model.arena is not None,
        load_s=parts.seconds["file"] + parts.seconds.get("repack", 0.0),
        read_gb_s=max(samples) / 1e9,
        peak_tops=rates.int8_ops_per_s() / 1e12,
        own_bytes=own_bytes(),
        peak_bytes=peak_bytes(),
        n_parity_cases=n_cases,
    )
    rows = [report.row(setting, result) for result in results]
    text = report.head(setting) + "\n\n" + report.table(rows, [test.name for test in tests])
    if args.profile:
        limits = profile.Limits(setting.read_gb_s * 1e9, setting.peak_tops * 1e12, rates.fma_ops_per_s())
        text += "".join(f"\n\n{result.profiled.text(limits)}" for result in results)
    return rows, text


def _touch_tables(model: Model) -> None:
    """Lookup tables come into the page cache: rows of random tokens are not to be waited for by a disk."""
    for table in (model.weights.token_embd, model.weights.per_layer_token_embd):
        if isinstance(table, QTensor):
            table.data.reshape(-1)[:: mmap.PAGESIZE].sum()


def _kv_types(args: Namespace) -> tuple[str, str]:
    given = args.kv_type or "f16"
    return (given, given) if isinstance(given, str) else given


def _engine(args: Namespace, model: Model, tests: list[measure.Workload]) -> Lanes:
    n = measure.positions(tests)
    most = model.config.context_len
    if n > most:
        raise ValueError(f"bench: {n} positions asked for, but the model was made for {most}. Ask for fewer.")
    context = min(most, max(n, parity.REPLAY_STEPS))
    chunk, n_seqs = args.batch_size or default_chunk(model.config), measure.lanes(tests)
    _check_memory(model, n_seqs, context, min(chunk, context), _kv_types(args))
    return Lanes(
        model,
        ops_for("cpu"),
        context_len=context,
        chunk=chunk,
        n_seqs=n_seqs,
        kv_type=_kv_types(args),
        replay=not args.no_replay,
    )


def _check_memory(model: Model, n_seqs: int, n: int, chunk: int, kv_types: tuple[str, str]) -> None:
    """Keys, values and logits of all sequences fit, or ValueError; packed weights are asked for later."""
    kv, logits = cache_bytes(model.config, n_seqs, n, chunk, kv_types), 4 * n_seqs * model.config.vocab_size
    available = available_bytes()
    if available is not None and kv + logits > available:
        raise ValueError(
            f"bench: {n_seqs} sequences of {n} positions need {kv / 1e9:.1f} GB for keys and values and "
            f"{logits / 1e9:.1f} GB for logits, but {available / 1e9:.1f} GB are free. Ask for fewer: "
            "--batch, -p, -n, -d"
        )


def print_kernel_rates(*, as_json: bool) -> int:
    """What single kernels reach, on memory that no cache holds; none, where one is wrong."""
    from fastpath.bench import attention, kernels

    kernels.check()
    attention.check()
    rates: list[Any] = [*kernels.kernel_rates(), *attention.attention_rates()]
    print(json.dumps([asdict(rate) for rate in rates], indent=2) if as_json else "\n".join(map(str, rates)))
    return 0
