# make demo   raw text to a pre-trained BERT in a few minutes, on text that ships with the package
# make test   lint, types and every test
# make lint   lint and types only
# make clean  remove the virtual environment and the demo
#
# Each target first makes the virtual environment (.venv) and installs into it; that is done once, and again when
# pyproject.toml changes. PYTHON=python3.12 chooses another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint install clean

demo: install
	$(BIN)/bertsmith demo --out demo

# The quick tests come before the slow ones (tests/conftest.py), so that a plain mistake shows in the first minute.
test: lint
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "bertsmith needs Python 3.11 or newer, but '$(PYTHON)' is not: $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another interpreter: make PYTHON=python3.12 ..."; exit 2; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make a virtual environment; on Debian and Ubuntu install the package python3-venv."; \
	  exit 2; } >&2
	$(PYTHON) -m venv $(VENV)
	@echo "Installing bertsmith and what it needs into $(VENV) (once; torch alone is a large download)."
	$(BIN)/python -m pip install --editable '.[dev]'
	@touch $(INSTALLED)

clean:
	rm -rf $(VENV) demo
