# Everything runs from an empty clone: each target first creates the environment that it needs,
# from PyPI alone, and a second run reuses it. Needs git, make, Python >= 3.11 with venv and pip.

PYTHON ?= python3
VENV   ?= .venv
NEWEST ?= .venv-newest

# What each suite runs, for narrowing from the command line or here.
TESTS        ?= tests
# The newest jax runs what depends on jax; all of it: make test-newest NEWEST_TESTS=tests
NEWEST_TESTS ?= tests/distributed/test_training.py \
  tests/kernels/test_adam_compiled.py tests/kernels/test_adam_dispatch.py \
  tests/test_accumulate.py tests/test_checkpoint.py tests/test_broadcast.py tests/test_control.py tests/test_ddp.py \
  tests/test_ddp_rules.py tests/test_facts.py tests/test_leaves.py tests/test_program.py \
  tests/test_reduction.py tests/test_report.py tests/test_step.py
WHEEL_TESTS  ?= tests/test_layers.py tests/test_public_api.py tests/test_packaging.py
PYTEST_ARGS  ?=
# Tests run in so many processes, each of up to 2 GB; JOBS=1: in one, for a debugger.
JOBS         ?= 2
DEMO_ARGS    ?=
BENCHES      ?= $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))
BENCH_ARGS   ?=

BIN := $(VENV)/bin
PIP := -m pip --disable-pip-version-check --no-input
INSTALL := $(PIP) install -qq --progress-bar off --root-user-action ignore
# Each process begins with a run of neighbours, which share compiled programs.
PARALLEL = $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist worksteal)

# An environment of ours sees no other environment's modules.
unexport PYTHONPATH PYTHONHOME
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DELETE_ON_ERROR:
.PHONY: help env demo test test-slow test-newest lint format types bench wheel-test clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# ---------------------------------------------------------------- environments

# create-env: $(1) directory, $(2) command of a Python
define create-env
	@rm -rf $(1)
	@echo "Creating $(1) with $$($(2) --version)"
	@$(2) -m venv $(1) && $(1)/bin/python -m pip --version >/dev/null || { rm -rf $(1); \
	  echo "Could not create an environment: this Python lacks venv or pip." \
	    "On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@touch $@
endef

$(VENV)/.created:
	@tools/find-python any "$(PYTHON)" >/dev/null
	$(call create-env,$(VENV),$$(tools/find-python any "$(PYTHON)"))

$(NEWEST)/.created:
	@tools/find-python newest >/dev/null
	$(call create-env,$(NEWEST),$$(tools/find-python newest))

# ENV/.installed-EXTRA: jzero and the extra, installed so that edits to the source take effect.
$(VENV)/.installed-%: pyproject.toml $(VENV)/.created
	@echo "Installing jzero[$*] into $(VENV) (once; takes a few minutes)"
	@$(BIN)/python $(INSTALL) --editable ".[$*]"
	@touch $@

$(NEWEST)/.installed-%: pyproject.toml $(NEWEST)/.created
	@echo "Installing jzero[$*] with the newest jax into $(NEWEST) (once; takes a few minutes)"
	@$(NEWEST)/bin/python $(INSTALL) --upgrade --upgrade-strategy eager --editable ".[$*]"
	@touch $@

.PRECIOUS: $(VENV)/.created $(NEWEST)/.created $(VENV)/.installed-% $(NEWEST)/.installed-%

env: $(VENV)/.installed-dev ## Create the development environment, .venv

# ---------------------------------------------------------------- what a newcomer runs

demo: $(VENV)/.installed-examples ## Train a GPT on 8 devices, optimizer state sharded
	@$(BIN)/python examples/train_gpt.py $(DEMO_ARGS)

test: $(VENV)/.installed-dev ## Run the tests
	@$(BIN)/python -m pytest $(TESTS) $(PARALLEL) $(PYTEST_ARGS)

# ---------------------------------------------------------------- what a developer runs

test-slow: $(VENV)/.installed-dev ## Run only the tests marked slow
	@$(BIN)/python -m pytest $(TESTS) -m slow $(PYTEST_ARGS)

test-newest: $(NEWEST)/.installed-dev ## Run the tests on the newest Python and jax found
	@$(NEWEST)/bin/python -c "import sys, jax; print('Python', sys.version.split()[0], 'jax', jax.__version__)"
	@$(NEWEST)/bin/python -m pytest $(NEWEST_TESTS) $(PARALLEL) $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## Check style, formatting and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(MAKE) --no-print-directory types

types: $(VENV)/.installed-dev ## Check types
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-dev ## Mend style and formatting
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: $(VENV)/.installed-dev ## Run the benchmarks
	@set -e; for bench in $(BENCHES); do echo "== $$bench"; $(BIN)/python $$bench $(BENCH_ARGS); done

# The wheel is tested where no source of jzero is in reach, in a clean environment.
wheel-test: ## Build the wheel and test it outside the source tree
	@set -e; python=$$(tools/find-python any "$(PYTHON)"); \
	work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	"$$python" -m venv "$$work/venv"; \
	"$$work/venv/bin/python" $(PIP) wheel -qq --no-deps --wheel-dir "$$work/dist" .; \
	"$$work/venv/bin/python" $(INSTALL) "$$work"/dist/jzero-*.whl 'pytest>=9.0' 'hypothesis>=6.150'; \
	cp -R tests pyproject.toml "$$work"; \
	cd "$$work" && JZERO_TEST_WHEEL=1 venv/bin/python -m pytest $(WHEEL_TESTS) $(PYTEST_ARGS)

clean: ## Remove environments, builds and caches
	rm -rf .venv .venv-newest build dist out .pytest_cache .ruff_cache .hypothesis .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
