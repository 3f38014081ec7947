# Every command of this project.  `make demo` and `make test` are all that a new clone needs.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python

.PHONY: demo serve test test-slow test-page soak lint goldens bench-peers clean

demo: $(VENV)/.installed          ## install, then let the embedded checkpoint answer a prompt
	$(PY) -m fastpath.cli --prompt "What is Twinpath?" --stats

serve: $(VENV)/.installed-server   ## a chat page and OpenAI's, Anthropic's and Ollama's APIs on port 5000 (ARGS="--model FILE")
	$(PY) -m fastpath.cli serve $(ARGS)

test: $(VENV)/.installed-test     ## the whole suite; no torch, no GPU, no model files needed
	$(PY) -m pytest -m "not live and not slow and not gpu"

test-slow: $(VENV)/.installed-test  ## the same suite with ten times the examples, and the slow tests
	HYPOTHESIS_PROFILE=nightly $(PY) -m pytest -m "not live and not gpu"

test-page: $(VENV)/.installed-page  ## the chat page in headless Chromium (Debian: apt install chromium); a minute
	$(PY) -m pytest tests/server/page

soak: $(VENV)/.installed-test  ## 2,000 random requests with aborts, on ample and on scarce pages; minutes
	$(PY) -m tests.soak

lint: $(VENV)/.installed-dev      ## style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

goldens: $(VENV)/.installed-oracles  ## record again what transformers says (oracles/README.md; llama.cpp: see there)
	$(PY) -m oracles.record

bench-peers: $(VENV)/.installed    ## llama.cpp and ours in turn, into docs/performance.md (which says how; LLAMA_BENCH=, ROWS=)
	$(PY) -m fastpath.bench.peers

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "twinpath needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	@echo "installing twinpath into $(VENV) ..."
	$(PY) -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-server: $(VENV)/bin/python pyproject.toml
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[server]"
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-test: $(VENV)/bin/python pyproject.toml
	@echo "installing twinpath and its test tools into $(VENV) ..."
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[test,test-server]"
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-page: $(VENV)/bin/python pyproject.toml
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[test-page]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

$(VENV)/.installed-oracles: $(VENV)/bin/python pyproject.toml
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[test,oracles]"
	@touch $@
