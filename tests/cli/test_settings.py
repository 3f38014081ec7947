"""Environment variables: each is read, each of the description's is spoken of, and the page says the same."""

from pathlib import Path

import pytest

from fastpath.cli import arguments, chat, run, serve
from fastpath.cli.settings import SETTINGS, WITHOUT_COUNTERPART, table

DESCRIBED = """TS_BATCHED_N1_FAST_PATH TS_FUSED_LAYER_PREFILL TS_G4_MM_PREFILL TS_G4_PLE_IN_KERNEL
TS_G4_VERIFY_SWAPREV TS_G4_WHOLE_PREFILL TS_GEMMA4_BATCHED TS_GEMMA4_BATCHED_CAPS TS_GEMMA4_TP_FUSED_MOE
TS_GMTP_BATCHED_TRUNK TS_GMTP_NO_FUSED TS_GMTP_NO_FAST_ROLLBACK TS_KV_INITIAL_TOKENS TS_MTP_DRAFT_MODEL
TS_PREFILL_CHUNK TS_PREFIX_CACHE_MODE TS_SCHED_PREFIX_CACHE TS_SCHED_SOLO_PREFILL_CHUNK TS_SPEC_DRAFT_MODEL
TS_TEST_GGML_BACKEND TS_TEST_MODEL_DIR TS_THINKING_BUDGET MAX_CONTEXT VIDEO_MAX_FRAMES VIDEO_SAMPLE_FPS
TENSORSHARP_GGML_NATIVE_ENABLE_CUDA""".split()
VALUES = {  # variable: (a value, what the option becomes, a value that is none)
    "MAX_CONTEXT": ("300", 300, "-3"),
    "TS_PREFILL_CHUNK": ("77", 77, "many"),
    "TS_SCHED_SOLO_PREFILL_CHUNK": ("512", 512, "0"),
    "TS_SCHED_PREFIX_CACHE": ("0", True, "no"),
    "TS_THINKING_BUDGET": ("0", 0, "1.5"),
    "VIDEO_SAMPLE_FPS": ("2.5", 2.5, "0"),
    "VIDEO_MAX_FRAMES": ("8", 8, "x"),
}
PROGRAMS = {"run": run.add_run, "chat": chat.add_chat, "serve": serve.add_serve}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for setting in SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)


def parser_of(program):
    parser = arguments.Parser(prog=program)
    PROGRAMS[program](parser)
    return parser


def dest_of(parser, option):
    return parser._option_string_actions[option].dest


@pytest.mark.parametrize("program", sorted(PROGRAMS))
@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.option], ids=lambda s: s.name)
def test_each_is_read_and_the_option_counts_more(program, setting, monkeypatch, capsys):
    if setting.option not in parser_of(program)._option_string_actions:
        assert (program, setting.name) == ("run", "TS_THINKING_BUDGET")
        return
    given, wanted, bad = VALUES[setting.name]
    dest = dest_of(parser_of(program), setting.option)
    before = getattr(parser_of(program).parse([]), dest)
    assert before != wanted
    monkeypatch.setenv(setting.name, "")
    assert getattr(parser_of(program).parse([]), dest) == before
    monkeypatch.setenv(setting.name, given)
    assert getattr(parser_of(program).parse([]), dest) == wanted
    if setting.convert is None:
        assert getattr(parser_of(program).parse([f"{setting.option}=9"]), dest) == 9
    monkeypatch.setenv(setting.name, bad)
    with pytest.raises(SystemExit):
        parser_of(program).parse([])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"environment variable {setting.name}: '{bad}' is n" in said


def test_the_one_named_last_counts(monkeypatch):
    monkeypatch.setenv("TS_PREFILL_CHUNK", "77")
    monkeypatch.setenv("TS_SCHED_SOLO_PREFILL_CHUNK", "512")
    assert parser_of("serve").parse([]).chunk == 77


def test_what_they_set_reaches_the_engine(monkeypatch):
    pytest.importorskip("fastapi")
    for name, (given, _, _) in VALUES.items():
        monkeypatch.setenv(name, given)
    monkeypatch.setenv(serve.KEY, "sesame")
    service = serve.make_service(parser_of("serve").parse(["--parallel=2", "--log-prompts", "--no-repack"]))
    try:
        exchange, engine = service.exchange, service.exchange.worker.engine
        assert exchange.context_len == 300 and engine.lanes.chunk == 77
        assert engine.prefix_counters is None and exchange.budget == 0
        assert (exchange.sampling.fps, exchange.sampling.max_frames) == (2.5, 8)
        assert service.settings.api_key == "sesame" and service.settings.log_prompts
    finally:
        service.close(0)


def test_every_variable_of_the_description_is_spoken_of():
    without = [name for names, _ in WITHOUT_COUNTERPART for name in names.split()]
    every = [*(setting.name for setting in SETTINGS), *without]
    assert len(every) == len(set(every)) and set(DESCRIBED) <= set(every)
    assert {name for name in every if not name.startswith(("TWINPATH", "NUMBA", "XDG"))} == set(DESCRIBED)


def test_the_page_has_the_table():
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    assert table() in page, "put there what python -m fastpath.cli.settings prints"
