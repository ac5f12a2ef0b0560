# make demo    a virtual environment, the package, and the example trained on two ranks
# make smoke    the same environment with what the tests need, and in a minute or two the quickest tests of each package
# make test    the tests
# make test-all [SHARD=1/4]    with them every case of long sweeps, and the tests that take minutes; or a part of it all
# make databases    the modules and operators of PyTorch's own databases, and the table of them (BACKEND=eager or inductor)
# make fuzz N=300 SEED=0 KINDS="eager tp"    random models under random plans against plain PyTorch; see docs/fuzzing.md
# make mutations    faults planted in zgraph one by one, and the table of the tests that find them
# make docs    the documentation as a site, in site/
# make bench-overlap    training steps of zgraph and its peers over a modelled link, into benchmarks/results
#
# torch is pinned. PyPI's own Linux build of it is for CUDA; to take another (say the small CPU build):
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c '$(SUPPORTED)' >/dev/null 2>&1 && { echo $$p; break; }; done)
TORCH ?= torch==2.13.0
VENV ?= .venv
NPROC ?= 2
ARGS ?=
N ?= 300
SEED ?= 0
KINDS ?=
BACKEND ?= eager
SHARD ?=
PACKAGING := pyproject.toml setup.py
# How many workers "auto" is, and in which order files go to them, tests/conftest.py says.
PYTEST := --numprocesses auto --dist loadfile --no-loadscope-reorder
# Tests start a hundred processes, each of which would compile all sources where Python is told to keep nothing of that.
TESTS := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1
SMOKE := $(foreach name,plan optimizers schedules loss_scaling stage_schedules program_json program_text digest \
	call_signature storages version_counters sharding_rules known_masks verifier passes bucket simulator virtual verify_models update_programs train_step \
	nonfinite files checkpoint checkpoint_values checkpoint_manifest compile asserts errors deepspeed repro sweeps shards floors beliefs,\
	$(or $(wildcard tests/*/test_$(name).py tests/passes/*/test_$(name).py),$(error there is no tests/*/test_$(name).py)))

.PHONY: help demo smoke test test-all databases fuzz mutations docs lint types test-torch bench-overlap clean toolchain

help:
	@grep '^# make' Makefile | cut -c3-
	echo "make lint    ruff, style and format;  make types  mypy;  make test-torch TORCH=torch==2.11.0  the core tests on another torch, in an environment of its own"

demo: $(VENV)/.demo toolchain
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m torch.distributed.run --standalone --nproc-per-node $(NPROC) \
		examples/train_lm.py $(ARGS)

# No processes, and nothing that Inductor compiles.
smoke: $(VENV)/.dev
	@$(TESTS) $(VENV)/bin/python -m pytest $(PYTEST) -m "not gloo and not inductor and not slow" -k "not inductor" $(SMOKE) $(ARGS)

test: $(VENV)/.dev toolchain
	@$(TESTS) $(VENV)/bin/python -m pytest $(PYTEST) -m "not slow" $(ARGS)

test-all: $(VENV)/.dev $(VENV)/.docs toolchain
	@$(TESTS) $(VENV)/bin/python -m pytest $(PYTEST) $(if $(SHARD),--shard $(SHARD)) $(ARGS)

databases: $(VENV)/.dev toolchain
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.databases --backend $(BACKEND) --write docs/databases.md $(ARGS)

fuzz: $(VENV)/.dev toolchain
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.fuzz -n $(N) --seed $(SEED) --kinds $(KINDS) $(ARGS)

mutations: $(VENV)/.dev toolchain
	@OMP_NUM_THREADS=1 $(VENV)/bin/python tests/mutations.py --write docs/mutations.md $(ARGS)

# Strict: a broken link is an error. (The variable silences an advertisement of the theme's.)
docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet
	echo "site/index.html; with search: $(VENV)/bin/python -m http.server --directory site"

bench-overlap: $(VENV)/.bench toolchain
	@$(VENV)/bin/python benchmarks/overlap.py --out benchmarks/results $(ARGS)

lint: $(VENV)/.dev
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

# mypy knows nothing of setuptools' package-dir, so it is shown the tree that is installed, made of links.
types: $(VENV)/.dev
	@rm -rf .types && mkdir -p .types/zgraph
	ln -s ../../passes ../../codegen .types/zgraph/
	for entry in zgraph/*; do ln -s ../../$$entry .types/zgraph/; done
	MYPYPATH=.types $(VENV)/bin/mypy -p zgraph

# An environment for each torch: .venv-torch-2.11.0, say. A Triton that belongs to it is named beside it: TORCH="torch==2.11.0 triton==3.6.0".
test-torch: OTHER := .venv-$(subst ==,-,$(firstword $(TORCH)))
test-torch:
	@$(MAKE) --no-print-directory VENV=$(OTHER) $(OTHER)/.dev
	$(TESTS) $(OTHER)/bin/python -m pytest $(PYTEST) -m core $(ARGS)

clean:
	@rm -rf $(VENV) .venv-torch-* .types build dist site *.egg-info

$(VENV)/bin/python:
	@if ! "$(PYTHON)" -c '$(SUPPORTED)' 2>/dev/null; then
		echo "zgraph needs Python 3.11 to 3.14, and '$(or $(PYTHON),python3)' is none of them." >&2
		echo "Install one, or name it: make PYTHON=/path/to/python3.12 …" >&2
		exit 1
	fi
	if ! "$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null; then
		echo "$(PYTHON) can't make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2
		exit 1
	fi
	"$(PYTHON)" -m venv $(VENV)

# The stamps make a second call fast. The package is installed in place: changes in the sources need no new install.
$(VENV)/.demo: $(PACKAGING) | $(VENV)/bin/python
	@$(VENV)/bin/python -m pip install --quiet $(TORCH)
	$(VENV)/bin/python -m pip install --quiet -e .
	touch $@

$(VENV)/.dev: $(PACKAGING) | $(VENV)/.demo
	@$(VENV)/bin/python -m pip install --quiet -e '.[test,dev]'
	touch $@

$(VENV)/.docs: $(PACKAGING) | $(VENV)/.demo
	@$(VENV)/bin/python -m pip install --quiet -e '.[docs]'
	touch $@

$(VENV)/.bench: $(PACKAGING) | $(VENV)/.demo
	@$(VENV)/bin/python -m pip install --quiet -e '.[bench]'
	touch $@

# Inductor compiles C++ on CPU, against Python's headers.
toolchain: | $(VENV)/bin/python
	@headers=$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')
	if ! command -v "$${CXX:-g++}" >/dev/null || [ ! -e "$$headers/Python.h" ]; then
		echo "Inductor needs a C++ compiler and Python's headers. On Debian and Ubuntu: apt install g++ python3-dev" >&2
		exit 1
	fi
