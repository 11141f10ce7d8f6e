# All that a developer needs; `make help` tells what there is. Nothing has to be installed or activated by hand.
#
# Everything lives in .venv and build/. A stamp file says when a step was done last; it is done again when its sources
# are newer. The package is installed into .venv, not linked to: tests and demo run what a user gets.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DELETE_ON_ERROR:
.NOTPARALLEL:

VENV := .venv
BIN := $(VENV)/bin
WHEELS := $(VENV)/wheel
SOURCES := $(shell find src horovod -type f -not -name '*.pyc') CMakeLists.txt pyproject.toml LICENSE
CXX_FILES := $(shell find src tests/cpp tests/fuzz benchmarks -name '*.cc' -o -name '*.h')

# More arguments for pytest, e.g. make test PYTEST_ARGS="-k broadcast -x".
PYTEST_ARGS ?=
# A worker a core and two more, since many tests mostly wait; but not so many that tests with seven ranks starve each
# other. -n0: one after another. A file's tests stay together: many of them share a group of ranks, a wheel or machines,
# which each worker would make again.
WORKERS := $(shell n=$$(($$(nproc) + 2)); echo $$((n < 4 ? n : 4)))
PYTEST_PARALLEL ?= -n $(WORKERS) --dist loadfile --no-loadscope-reorder
SOAK_MINUTES ?= 60
# For each fuzz target: seconds, or a number of inputs (2000x); and which of them, e.g. FUZZ_TARGETS="link records".
FUZZ_LIMIT ?= 20
FUZZ_TARGETS ?=
PYTHONS ?= 3.12 3.13
# Debian packages of tests with several machines, which are namespaces here (tests/python/machines.py, slurm.py).
TEST_PACKAGES := openssh-server openssh-client iproute2 nftables slurmctld slurmd slurm-client munge

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_PROGRESS_BAR := off
# A caller's environment must not decide what is tested.
unexport PYTHONPATH PYTHONHOME
ifdef CI
export NO_COLOR := 1
INSTALL_OPTIONS := --config-settings=cmake.define.HOROVOD_WERROR=ON
endif

.PHONY: help
help: ## Show this list
	@echo "Targets:"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

# ---- What the other targets need ---------------------------------------------------------------------------------------

.PHONY: install
install: $(VENV)/.installed ## Make .venv and install Horovod into it, with what demo and tests need

# Without pip's isolation the package's build is incremental; so the tools for it are installed here.
$(VENV)/.created:
	@python=$$(.ci/find-python) && echo "Making $(VENV) with $$($$python --version)" && $$python -m venv --clear $(VENV)
	@$(BIN)/pip install --quiet 'scikit-build-core>=0.10' cmake ninja
	@touch $@

# The requirements of an extra, without the package: $(call install_extra,lint)
install_extra = $(BIN)/python -c 'import tomllib; \
  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(1)"], sep="\n")' \
  | $(BIN)/pip install --quiet -r /dev/stdin

$(VENV)/.installed: $(VENV)/.created $(SOURCES)
	@echo "Building and installing Horovod"
	@rm -rf $(WHEELS)
	@$(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir $(WHEELS) $(INSTALL_OPTIONS) .
	@$(BIN)/pip install --quiet --no-deps --force-reinstall $(WHEELS)/*.whl
	@$(BIN)/pip install --quiet "$$(echo $(WHEELS)/*.whl)[test,test-torch,test-tensorflow,bench]"
	@$(call install_extra,test-keras2) --no-deps
	@touch $@

$(VENV)/.lint: $(VENV)/.created pyproject.toml
	@echo "Installing the checkers"
	@$(call install_extra,lint)
	@touch $@

# ---- For everyone --------------------------------------------------------------------------------------------------------

.PHONY: demo
demo: $(VENV)/.installed ## Train a small network on one process and on two, and compare
	@$(BIN)/python examples/speedup.py examples/pytorch_digits.py $(DEMO_ARGS)

.PHONY: test
test: test-cpp test-python ## Run all tests: C++ and Python

# Not in the repository's root: there `import horovod` would find the sources, not what is installed.
.PHONY: test-python
test-python: $(VENV)/.installed ## Run the Python tests; PYTEST_ARGS="-k name" for some of them
	@.ci/debian-packages $(TEST_PACKAGES)
	@cd tests/python && WHEEL=$$(realpath ../../$(WHEELS)/*.whl) ../../$(BIN)/pytest $(PYTEST_PARALLEL) $(PYTEST_ARGS)

.PHONY: test-package
test-package: $(VENV)/.installed ## Build the wheel as a user's pip does, with nothing but what it asks for, and test that
	@cd tests/python && ../../$(BIN)/pytest test_packaging.py

.PHONY: test-cpp
test-cpp: $(VENV)/.created ## Run the C++ tests (they need doctest: Debian's doctest-dev)
	@.ci/cpp-tests release

# ---- For developers ------------------------------------------------------------------------------------------------------

.PHONY: lint
lint: style types ## Check style and types

.PHONY: style
style: $(VENV)/.lint ## Check style: ruff, clang-format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

.PHONY: types
types: $(VENV)/.installed $(VENV)/.lint ## Check types: mypy
	@$(BIN)/mypy

.PHONY: format
format: $(VENV)/.lint ## Format all sources
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CXX_FILES)

.PHONY: sanitize
sanitize: $(VENV)/.created ## Run the C++ tests under ASan, UBSan and TSan, with warnings as errors
	@.ci/cpp-tests address,undefined
	@.ci/cpp-tests thread

.PHONY: fuzz
fuzz: $(VENV)/.installed ## Feed noise to all parsers, FUZZ_LIMIT (20 s) each (needs clang: Debian's clang, libclang-rt-14-dev)
	@.ci/fuzz $(FUZZ_LIMIT) $(FUZZ_TARGETS)

.PHONY: bench
bench: $(VENV)/.installed ## Measure against gloo, Open MPI, MPICH and the machine (BENCH_ARGS=--quick: a first picture)
	@$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

.PHONY: wheel
wheel: $(VENV)/.created ## Build the wheel into dist/
	@rm -rf dist && $(BIN)/pip wheel --quiet --no-deps --wheel-dir dist . && ls dist

.PHONY: test-versions
test-versions: wheel ## Run the Python tests on other Pythons, the oldest NumPy and older TensorFlows, with one wheel for all
	@PYTEST_PARALLEL='$(PYTEST_PARALLEL)' .ci/test-versions dist/*.whl $(PYTHONS)

.PHONY: soak
soak: test-cpp ## Stress the engine for SOAK_MINUTES (60)
	@.ci/soak build/release/tests/cpp/stress $(SOAK_MINUTES)

.PHONY: clean
clean: ## Remove everything that was made here
	rm -rf build dist .venv .venv-* .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
