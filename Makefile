# Every target prepares its own environment first: a fresh clone needs nothing but Python and make.
PYTHON    ?= python3
VENV      ?= .venv
PIP_FLAGS ?=
ARGS      ?=

VENV_PYTHON := $(VENV)/bin/python
INSTALLED   := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow bench lint clean

help: ## list the targets
	@echo "usage: make TARGET [PYTHON=python3.11] [VENV=.venv] [PIP_FLAGS='...'] [ARGS='...']"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(INSTALLED) ## create the virtual environment and install requirements.txt into it

$(INSTALLED): requirements.txt
	@command -v "$(PYTHON)" >/dev/null || \
	  { echo "No '$(PYTHON)' found. Install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python3" >&2; \
	    exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, but $(PYTHON) is $$("$(PYTHON)" -V 2>&1)." \
	         "Name another: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -m venv "$(VENV)" || \
	  { echo "$(PYTHON) cannot make a virtual environment: install its venv module (on Debian: python3-venv)." >&2; exit 1; }
	@echo "Installing requirements.txt into $(VENV), once; torch makes this a long download."
	"$(VENV_PYTHON)" -m pip install --quiet --requirement requirements.txt $(PIP_FLAGS)
	@touch $@

demo: $(INSTALLED) ## post-train the bundled tiny model on this machine and show what improved
	"$(VENV_PYTHON)" -m scripts.tiny.demo $(ARGS)

test: $(INSTALLED) ## run the tests; ARGS are pytest's, for example ARGS='tests/unit -x'
	"$(VENV_PYTHON)" -m pytest -q -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(INSTALLED) ## run only the tests that take many minutes
	"$(VENV_PYTHON)" -m pytest -q -m slow $(ARGS)

bench: $(INSTALLED) ## measure against plain code and compare with the committed results of this kind of machine
	"$(VENV_PYTHON)" -m benchmarks $(ARGS)

lint: $(INSTALLED) ## check style, docstrings and annotations
	"$(VENV_PYTHON)" -m ruff check .
	"$(VENV_PYTHON)" -m ruff format --check .

clean: ## remove the virtual environment and the caches; outputs and weights stay
	rm -rf "$(VENV)" .pytest_cache .ruff_cache .hypothesis
	find . -type d -name __pycache__ -prune -exec rm -rf {} +
