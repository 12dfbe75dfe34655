# On a bare machine with Python 3.11 and make: `make demo` trains and shows what it made, `make test` runs every test.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: demo test check format clean

demo: $(VENV)/.runtime
	$(BIN)/helicon demo image

test: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not slow"

format: $(VENV)/.dev
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

# torch goes first and by its exact pin: an open range would fetch another build.
$(VENV)/.runtime: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Helicon needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) -e '.[test,dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
