# Each target works on a fresh machine: it makes .venv first if that is missing or older than what it is made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

# A Python with a CUDA build of torch, Triton, pytest and pytest-xdist, for what needs a GPU.
GPU_PYTHON ?= python3
GPU_WORKERS ?= 12
RESULTS ?= benchmarks/results
COMMIT ?= $(shell git rev-parse --short HEAD)
ARGS ?=

.PHONY: demo test test-gpu emulate bench readme docs crosscompile sass lint format clean

demo: $(VENV)/installed
	$(BIN)/python examples/demo.py

test: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q

# pytest-benchmark, where it is installed, warns beside xdist, and warnings are errors.
test-gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -p no:benchmark -n $(GPU_WORKERS) --dist worksteal -q tests/kernels tests/gpu \
		--ignore tests/kernels/test_crosscompile.py --ignore tests/kernels/test_emulated.py --summary $(RESULTS)/test_gpu.jsonl --commit $(COMMIT)

# Compiled kernels on an emulated GPU: make emulate ARGS="accuracy junction mhc_lite --channels 257 --without f_bias"
emulate: $(VENV)/installed
	$(BIN)/python tests/kernels/emulated.py $(ARGS)

# While working on a kernel, without writing results: PYTHONPATH=src python3 -m mhckit bench --quick
bench:
	PYTHONPATH=src $(GPU_PYTHON) -m mhckit bench --output $(RESULTS)/junction.jsonl --commit $(COMMIT) $(ARGS)

# The README's results and what `mhckit doctor` compares with, from the committed measurements; needs no GPU.
readme: $(VENV)/installed
	$(BIN)/python -m mhckit bench readme
	$(BIN)/python -m mhckit bench committed

# The documentation as a site that opens from disk: site/index.html. Its drawings first, from their script.
docs: $(VENV)/installed
	$(BIN)/python tools/draw_concepts.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Every kernel configuration, for GPUs this machine need not have; `make test` does a sample.
crosscompile: $(VENV)/installed
	$(BIN)/python tools/crosscompile.py check --everything

# Registers, shared memory and instructions of one operator's kernels: make sass ARGS="--operator enter --streams 2"
sass: $(VENV)/installed
	$(BIN)/python tools/crosscompile.py sass $(ARGS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) dist build site

# torch goes in alone and first: pip then takes it as given and pulls no accelerator packages for it.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
