# Everything runs from a virtual environment of the checkout's own, made on first use.
#
#   make setup      the environment, with this checkout installed editable
#   make warmup     setup, then measure this machine's kernels: liger-tune warmup
#   make test       first tier: lint, types, imports, tests, interpreter, a fixed sample of compiles
#   make test-ci    second tier, what CI adds: wheel and sdist, and all that is marked ci
#   make test-all   every test there is but those that need a GPU
#   make test-gpu   the tests that need a GPU
#   make audit      licences and known vulnerabilities of what is needed at run time
#   make fuzz       a million hostile tables, FUZZ='--inputs 10000000 --seed 3' for more
#   make package    wheel and sdist into dist/

# The first interpreter that starts and that the project supports; 3.11 leads because constraints.txt was frozen with it.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.10 python3 python; do \
	$$python -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
WORKERS ?= 2
# Handed to every pytest, for example PYTEST_FLAGS='-k rms_norm'.
PYTEST_FLAGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Each worker has one thread, so that they do not fight for cores; compiled test kernels stay out of the user's own cache.
TEST_ENV := OMP_NUM_THREADS=1 TRITON_CACHE_DIR=$(CURDIR)/.cache/triton TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/.cache/inductor
PYTEST := env -u TRITON_INTERPRET $(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --durations=10 $(PYTEST_FLAGS)
# TRITON_INTERPRET is read when Triton is imported, hence a process of its own.
INTERPRETER := env $(TEST_ENV) TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(WORKERS) --durations=10 $(PYTEST_FLAGS)
# pytest leaves with 5 if a marker selects nothing; only the tiers above the first allow it, directory by directory.
OR_NONE := || [ $$? -eq 5 ]

.DEFAULT_GOAL := test
.PHONY: setup warmup test test-ci test-all test-gpu audit fuzz check lint format types imports package clean

setup: $(STAMP)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python between 3.10 and 3.13 found; name one with PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The build backend comes first and unisolated, so that the constraints hold for it too.
$(STAMP): $(BIN)/python pyproject.toml $(CONSTRAINTS)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) hatchling editables
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) --no-build-isolation -e '.[test]'
	@touch $@

warmup: setup
	$(BIN)/liger-tune warmup

check: lint types imports

test: check
	$(PYTEST) tests --ignore=tests/compile
	$(INTERPRETER) tests/interpreter
	$(PYTEST) tests/compile

test-ci: setup
	$(PYTEST) -m "ci and not gpu and not slow" tests --ignore=tests/compile
	$(INTERPRETER) -m "ci and not gpu and not slow" tests/interpreter $(OR_NONE)
	$(PYTEST) -m "ci and not gpu and not slow" tests/compile $(OR_NONE)

test-all: check
	$(PYTEST) -m "not gpu" tests --ignore=tests/compile
	$(INTERPRETER) -m "not gpu" tests/interpreter
	$(PYTEST) -m "not gpu" tests/compile

# One process: tests that time kernels must not share the device.
test-gpu: setup
	env -u TRITON_INTERPRET $(BIN)/python -m pytest -m gpu $(PYTEST_FLAGS) tests

# Without a network pip-audit cannot be installed or answers nothing: the report says NOT AUDITED, and passes.
audit: setup
	-$(BIN)/python -m pip install -q -c $(CONSTRAINTS) pip-audit
	$(BIN)/python tests/supply/audit.py

FUZZ ?= --inputs 1000000
fuzz: setup
	$(BIN)/python -m tests.fuzz.drive $(FUZZ)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports --no-logo

package: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) build dist .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
