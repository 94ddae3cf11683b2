# make run    the demo: three real training jobs, resized while they train, on this machine
# make test   what proves the product, in at most fifteen minutes
# make lint   style, types, import rules
# Each sets up its own virtual environment in .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests wait for half of their time, so there are three processes for two CPUs (with four, some that are about leases and
# deaths may fail). One that has nothing left to do takes tests from another one.
SPREAD ?= --numprocesses $$(( ($$(getconf _NPROCESSORS_ONLN) * 3 + 1) / 2 )) --dist worksteal
STAMP := $(VENV)/.installed

.PHONY: run test test-all lint format references clean

$(STAMP): pyproject.toml pslite/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . --group dev
	touch $@

run: $(STAMP)
	$(BIN)/dl2d demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" $(SPREAD)

test-all: $(STAMP)
	$(BIN)/python -m pytest $(SPREAD)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The configuration and command references under docs/, from the code and etc/dl2d.yaml.
references: $(STAMP)
	$(BIN)/python docs/references.py

format: $(STAMP)
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
