# Two commands do everything on a fresh machine that has Python 3.11 or newer: make audit, make test.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
CORE := $(VENV)/.core-installed
DEV := $(VENV)/.dev-installed
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: audit test reproduce lint types format readme figures results bench check clean

audit: $(CORE)  ## say which divergence every KL loss of the catalogue descends
	$(BIN)/klgrad audit $(ARGS)

test: $(DEV)  ## all tests
	$(BIN)/python -m pytest $(ARGS)

reproduce: $(DEV)  ## the papers' tabular results, each with its claim checked
	$(BIN)/klgrad reproduce $(ARGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

readme: $(DEV)  ## regenerate the README's tables
	$(BIN)/python scripts/readme.py

figures: $(DEV)  ## redraw the pictures of the README and the docs
	$(BIN)/python docs/figures/coefficients.py

results: $(DEV)  ## recompute docs/results.md and its figures
	$(BIN)/klgrad reproduce --fresh --out build/reproduced
	$(BIN)/python scripts/results.py build/reproduced

bench: $(DEV)  ## side-by-side timings, written to benchmarks/results
	$(BIN)/python benchmarks/bench_reproduce.py

check: test lint types  ## what CI runs
	$(BIN)/python scripts/readme.py --check

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

# Torch comes first and alone, so that nothing else chooses its version.
$(CORE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install torch
	$(PIP) install -e .
	touch $@

$(DEV): $(CORE)
	$(PIP) install -e '.[dev]'
	touch $@
