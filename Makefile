# The two commands of the README are `make demo` and `make test`; both make and use .venv in this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint format bench wheel clean help

help:
	@echo "make demo   set up, then diagnose the real vLLM run that ships with pdtrace"
	@echo "make test   set up, then run all tests"
	@echo "make lint   ruff, mypy, import contracts"
	@echo "make bench  speed and size against peers (minutes)"

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("pdtrace needs Python 3.11 or newer; try: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . --group dev
	@touch $@

demo: $(STAMP)
	$(BIN)/pdtrace demo

test: $(STAMP)
	$(BIN)/python -m pytest -q

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group bench
	$(BIN)/python -m bench

wheel: $(STAMP)
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
