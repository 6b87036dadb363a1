# All targets work in a fresh clone: `make demo` and `make test` set up what they need, once.
#
#   make demo         train a small model on two hosts with Gloo, its fp16 hook and gflow, table and plot
#   make test         what a developer runs after a change (under 10 minutes on two cores)
#   make thorough     what make test leaves out: slow tests, other layouts of hosts, all of PyTorch's suite
#   make conformance  all of PyTorch's own backend suite
#   make bench        compare gflow with Gloo, MPI and the memory's limit in one interleaved run
#   make bench-ddp    a training step of AlexNet on two hosts at 1 Gbit/s (needs root)
#   make bench-loss   the demo with a GPT of 25 M parameters and with AlexNet: time to a loss (hours; needs root)
#   make bench-quality  does training end as well: all methods, four tasks, three seeds (hours; goes on)
#   make lint         formatters and linters, as CI runs them
#   make wheel        a wheel in dist/
#   make clean        remove what was built, and .venv

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test thorough conformance bench bench-ddp bench-loss bench-quality lint wheel clean build

# The interpreter for .venv; override as in `make test PYTHON=python3.12`.
PYTHON ?= python3
TORCH ?= torch==2.15.*
BIN := .venv/bin
# The venv's tools come first: ninja makes later builds incremental.
export PATH := $(CURDIR)/$(BIN):$(PATH)

SOURCES := Cargo.toml Cargo.lock setup.py pyproject.toml \
	$(shell find rust csrc -type f) torch_plugin/version.py

help:
	@sed -n 's/^#   make/  make/p' Makefile

# --- set-up ---------------------------------------------------------------------------------

.venv/.tools:
	@bash tools/check_toolchain.sh "$(PYTHON)"
	@echo "gflow: making .venv and installing torch (a few minutes, once)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)" setuptools wheel
	@touch $@

.venv/.dev: .venv/.tools pyproject.toml
	@echo "gflow: installing what tests, demo and linters need"
	$(BIN)/python tools/requirements.py demo dev | xargs $(BIN)/python -m pip install --quiet
	@touch $@

.venv/.built: .venv/.dev $(SOURCES)
	@bash tools/check_toolchain.sh "$(PYTHON)"
	@echo "gflow: building the engine and the shim (about two minutes the first time)"
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

build: .venv/.built

# --- what people run ------------------------------------------------------------------------

demo: build
	$(BIN)/python examples/demo.py

# Prints how long each stage took.
STAGE = @$(BIN)/python tools/stage.py
# How many Python tests run in parallel; for "auto" see tests/schedule.py.
WORKERS ?= auto
# Tests that failed last time run first.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --failed-first --durations=20
LOOM = env RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=$(1) \
	cargo test --locked --quiet --lib --target-dir target/loom model
NVRTC = env GFLOW_CACHE=$(CURDIR)/target/kernels \
	LD_LIBRARY_PATH="$$($(BIN)/python tools/nvrtc_folder.py)$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}" \
	cargo test --profile quick --locked --quiet --lib -- --ignored nvrtc

test: build
	$(STAGE) "Rust tests" cargo test --profile quick --locked --quiet --lib
	$(STAGE) "CUDA kernels, compiled for every kind of GPU (no GPU is needed)" $(NVRTC)
	$(STAGE) "models of the lock-free code (loom)" $(call LOOM,3)
	$(STAGE) "Python tests" $(PYTEST)
	$(STAGE) "a part of PyTorch's own backend suite" $(BIN)/python -m tests.conformance --quick

thorough: build
	$(STAGE) "Python tests that are slow or repeat a case on another layout" $(PYTEST) -m thorough
	$(STAGE) "all of PyTorch's own backend suite" $(BIN)/python -m tests.conformance
	$(STAGE) "Rust tests, compiled as they are shipped" cargo test --release --locked --quiet --lib

conformance: build
	$(BIN)/python -m tests.conformance

bench: build
	$(BIN)/gflow bench allreduce

bench-ddp: build
	$(BIN)/gflow bench ddp --rate 1gbit

bench-loss: build
	$(BIN)/python examples/demo.py --task gpt --json demo-gpt.json
	$(BIN)/python examples/demo.py --task alexnet --json demo-alexnet.json

bench-quality: build
	$(BIN)/gflow bench quality

lint: .venv/.dev
	cargo fmt --check
	$(BIN)/python tools/check_layers.py
	$(BIN)/python tools/check_docs.py
	cargo clippy --release --locked --all-targets --quiet -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build/mypy && ln -sfn ../../torch_plugin build/mypy/gflow
	$(BIN)/python -m mypy
	$(BIN)/clang-format --dry-run --Werror \
		$$(find csrc rust torch_plugin tests -name '*.cpp' -o -name '*.[ch]' -o -name '*.cu')

wheel: .venv/.dev
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

clean:
	rm -rf .venv target build dist *.egg-info torch_plugin/_C*.so torch_plugin/_built_for.py
