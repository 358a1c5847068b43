# Two commands on a fresh machine: `make demo` and `make test`. Each sets up .venv first, with what it needs and no more.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Written when the library is installed, and when every extra and development tool is.
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
# --no-compile: pip would compile thousands of modules, one after another, most of which the demo never imports.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Files and the tests in each are shuffled; the seed of the order is printed, and ORDER=--randomly-seed=N repeats it.
PYTEST := PYTHONHASHSEED=0 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ORDER)

# Packages of models for `make zoo`, and what they import; nothing else changes the versions of the library's own.
MODELS := transformers peft accelerate datasets tokenizers safetensors huggingface-hub httpx2 httpcore2 truststore regex \
	multiprocess pyarrow xxhash dill einops torchvision timm monai segmentation-models-pytorch torch-geometric

.PHONY: help venv demo test test-all lint bench zoo docs clean

help:  ## print this list (the default)
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

venv: $(READY)  ## set up .venv for development

$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	touch $@

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev]'
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true  # some packages ship files of Python 2
	touch $(DEMO) $@

demo: $(DEMO)  ## train digits with five clients, plain and veiled
	PYTHONDONTWRITEBYTECODE= $(BIN)/fedveil demo

test: lint  ## lint, type-check and run the quick tests, in shuffled order
	$(PYTEST) -m "not slow"

test-all: lint  ## the same with the slow tests, within an hour
	$(PYTEST)

lint: venv  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: venv  ## measure exactness, speed and memory on this machine
	$(BIN)/python -m benchmarks

zoo: venv  ## analyse published models, which it installs into .zoo (hours); ZOO="--limit 1" for one of each package
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .zoo $(MODELS)
	PYTHONPATH=.zoo:src OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.zoo --results zoo.jsonl $(ZOO)

docs: venv  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # not ours to heed: the theme announces its successor

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) .zoo build dist site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
