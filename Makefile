# The two commands of the README are `make demo` and `make test`; both make and use .venv in this folder.
# The first Python that is new enough is taken; to choose: make PYTHON=/path/to/python3.12 demo
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(or $(firstword $(foreach name,python3 python3.13 python3.12 python3.11 python3.14 python,\
  $(shell $(name) -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && echo $(name)))),python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Errors only: setuptools warns at length of editable installs.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check

.PHONY: help demo demo-live test test-slow test-engines lint format docs bench bench-accuracy wheel clean

help:
	@echo "make demo    set up, then diagnose the real vLLM run that ships with pdtrace"
	@echo "make demo-live  run a small P/D router and its workers, load them, diagnose their traces"
	@echo "make test    set up, then run all tests"
	@echo "make test-slow       accuracy of the interference detectors against their goals (20 minutes at most)"
	@echo "make test-engines    install real engines into .engines/ (up to 3 GB) and check what pdtrace reads of them"
	@echo "make lint    ruff, mypy, import contracts"
	@echo "make format  let ruff format and fix"
	@echo "make docs    make docs/pictures and the generated pages anew, build the site into build/site"
	@echo "make bench   speed and size against peers (minutes)"
	@echo "make bench-accuracy  the same table without judging"
	@echo "make wheel   build dist/*.whl"

# pip reads dependency groups from 25.1 on; the one that comes with Python may be older.
$(STAMP): pyproject.toml
	@$(PYTHON) -c '$(NEW_ENOUGH)' || { echo "pdtrace needs Python 3.11 or newer; try: make PYTHON=python3.12 demo" >&2; exit 1; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version) (once, a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install "pip>=25.1"
	@$(PIP) install --editable . --group dev
	@$(BIN)/python -m compileall -q pdtrace collectors dashboards
	@touch $@

demo: $(STAMP)
	@mkdir -p build && rm -f build/report.html
	@$(BIN)/pdtrace demo --report build/report.html
	@echo "the same with pictures: build/report.html"

test: $(STAMP)
	$(BIN)/python -m pytest -q -n auto --dist worksteal

# Fails where a goal is missed. Each process works on one core.
test-slow: $(STAMP)
	OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 $(BIN)/python -W error -m bench.accuracy --check

# Real Dynamo, smg and vLLM, each in an environment of its own; one that cannot be had is skipped with its reason.
test-engines: $(STAMP)
	$(PIP) install --group engines
	PDTRACE_TEST_ENGINES=1 nice $(BIN)/python -m pytest -q -n0 -ra tests/engines

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo-live: $(STAMP)
	@rm -rf build/demo-live
	@$(BIN)/python examples/pd/run.py build/demo-live 12
	@$(BIN)/pdtrace diagnose build/demo-live

docs: $(STAMP)
	$(BIN)/python docs/make_pages.py
	$(BIN)/python docs/make_pictures.py
	$(PIP) install --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "the site: build/site/index.html; with its search: $(BIN)/python -m http.server -b 127.0.0.1 -d build/site"

bench: $(STAMP)
	$(PIP) install --group bench
	$(BIN)/python -m bench

bench-accuracy: $(STAMP)
	OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 $(BIN)/python -m bench.accuracy --each

wheel: $(STAMP)
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
