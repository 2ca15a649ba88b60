# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
AXE := $(VENV)/axe-core
READY := $(VENV)/.ready
PINS := -c constraints.txt
PIP = $(BIN)/pip install --quiet --disable-pip-version-check
SMOKE := .venv-smoke
GRAMMARS := xgrammar apache-tvm-ffi outlines outlines_core pydantic pydantic_core typing-inspection annotated-types \
	cloudpickle diskcache genson jsonschema jsonschema-specifications referencing rpds-py attrs

ECOSYSTEM := .venv-ecosystem
RAY := .venv-ray
CLIENTS := 'lm_eval[api]' trl langchain-openai llm 'pydantic-ai-slim[openai]'

MARKED := gpu or slow or grammars or ecosystem or ray or smollm2 or families or browser or soak
# A process for each CPU, with one thread each; files stay whole, since their tests share fixtures.
RUN := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile

.PHONY: env demo serve test test-typed test-newest test-oldest smoke-newest test-slow test-own-passes test-models test-grammars \
	test-ecosystem test-ray test-smollm2 test-browser soak site dist lint format clean

env: $(READY)

# torch goes first, from the pin, so that nothing else can pull in another build of it.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(PINS) torch
	$(PIP) $(PINS) -e '.[dev]'
	touch $(READY)

demo: env
	$(BIN)/polydraft demo

# An OpenAI-compatible server with the embedded pair, and its page: http://127.0.0.1:8000
serve: env
	$(BIN)/polydraft serve $(SERVE)

test: env
	$(RUN) -m "not ($(MARKED))"

# The same, with every call's types and shapes checked, which takes three times as long.
test-typed: env
	$(RUN) -m "not ($(MARKED) or wrong_types)" --jaxtyping-packages=polydraft,polydraft_lab,typechecking.typechecked

# The fast suite with the newest packages that the ranges of pyproject.toml allow, and with the oldest, each in an
# environment of its own; `make demo VENV=.venv-newest PINS=` runs something else there.
test-newest:
	rm -f .venv-newest/.ready
	$(MAKE) test VENV=.venv-newest PINS='--upgrade --upgrade-strategy eager'

test-oldest:
	$(MAKE) test VENV=.venv-oldest PINS='-c constraints-oldest.txt'

# What a newcomer does today, three minutes: README's install lines in a new environment, but for the public index of
# torch's CPU builds; README's blocks; one text of the chat model.
smoke-newest:
	rm -rf $(SMOKE)
	$(PYTHON) -m venv $(SMOKE)
	sed -n '/^## Install/,/^## Quick/{/^pip install torch/d;/^pip install /p}' README.md | PATH="$(CURDIR)/$(SMOKE)/bin:$$PATH" bash -ex
	$(SMOKE)/bin/pip install --quiet --disable-pip-version-check pytest
	$(SMOKE)/bin/pip list --disable-pip-version-check | grep -E '^(torch|transformers|typer|huggingface_hub|numpy|numba) '
	$(SMOKE)/bin/polydraft fetch smollm2
	POLYDRAFT_MEASURE=no $(SMOKE)/bin/python -m pytest --noconftest -p no:cacheprovider -m 'not slow' tests/test_readme.py

test-slow: env
	$(RUN) -m "slow and not gpu and not grammars and not ecosystem and not ray and not smollm2"

# What concerns passes once more, by models' own modules, which those of unknown anatomy run.
test-own-passes: env
	$(RUN) -m "not ($(MARKED))" --passes own tests/engine tests/exact tests/models tests/drafters tests/contract

# Every type of causal model that transformers registers, as a tiny model: ten minutes.
test-models: env
	$(RUN) --dist load -m families

# The real processors of grammar libraries, in a folder of their own: nothing else needs them.
test-grammars: env
	$(PIP) $(PINS) --no-deps --target $(VENV)/grammars $(GRAMMARS)
	PYTHONPATH=$(VENV)/grammars $(BIN)/python -m pytest -m grammars tests/engine/test_processors.py

# The packages of others that call polydraft, in an environment of their own; `SELECT=ecosystem` has SmolLM2 as well.
SELECT := ecosystem and not slow
test-ecosystem:
	$(MAKE) env VENV=$(ECOSYSTEM)
	$(ECOSYSTEM)/bin/pip install --quiet --disable-pip-version-check $(PINS) $(CLIENTS)
	OMP_NUM_THREADS=1 $(ECOSYSTEM)/bin/python -m pytest -m "$(SELECT)" tests/ecosystem

# Ray clusters of this machine alone, in an environment of their own.
test-ray:
	$(MAKE) env VENV=$(RAY)
	$(RAY)/bin/pip install --quiet --disable-pip-version-check $(PINS) -e '.[ray]'
	OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest -m ray tests/server tests/cli tests/test_examples.py

# A real chat model, fetched once into the user's cache.
test-smollm2: env
	$(BIN)/polydraft fetch smollm2
	$(BIN)/python -m pytest -m smollm2

# The server's page in Debian's Chromium, with axe-core for its accessibility where npm is there to fetch it. With
# POLYDRAFT_SCREENSHOTS=FOLDER every page is saved there as it looked at the end of its test.
test-browser: env
	$(PIP) $(PINS) playwright starlette uvicorn
	test -f $(AXE)/package/axe.min.js || ! command -v npm > /dev/null || { mkdir -p $(AXE) && cd $(AXE) && \
		npm pack --silent axe-core@4.14.1 > /dev/null && tar -xzf axe-core-4.14.1.tgz; } || \
		echo "axe-core could not be fetched: accessibility is not checked"
	$(BIN)/python -m pytest -m browser tests/server_page

# A server under mixed, slow and hostile clients, whose model's process is killed once, for so many minutes; and one
# whose draft learns, which is killed fifty times and sent noise: `make soak MINUTES=5`.
MINUTES := 30
soak: env
	POLYDRAFT_SOAK_MINUTES=$(MINUTES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m soak tests/server

# The documentation as a site, in build/site: pages gathered by docs/gather_pages.py, a reference from docstrings.
site: env
	$(PIP) $(PINS) -e '.[docs]'
	$(BIN)/python docs/gather_pages.py
	$(BIN)/mkdocs build --strict

# What would be published, in dist/: an sdist, and a wheel that is built from it.
dist: env
	$(PIP) $(PINS) build
	rm -rf dist
	$(BIN)/python -m build

lint: env
	$(BIN)/ruff format --check src lab tests examples
	$(BIN)/ruff check src lab tests examples
	$(BIN)/pyright

format: env
	$(BIN)/ruff format src lab tests examples
	$(BIN)/ruff check --fix src lab tests examples

clean:
	rm -rf $(VENV) .venv-newest .venv-oldest $(ECOSYSTEM) $(RAY) $(SMOKE) build dist src/*.egg-info .pytest_cache .ruff_cache
