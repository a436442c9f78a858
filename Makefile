# Every target does its own set-up. A fresh clone needs python3 (3.11 or newer) and make, nothing else.
#
#   make demo         train a small model at a 16K-token context and compare with standard training, about 5 minutes
#   make test         lint, types and tests; TESTS=memory runs one folder of tests/
#   make test-quick   the fast tests, in under 90 seconds
#   make test-full    the exhaustive sweeps: every model type, long kill-and-resume runs
#   make stress       20 rounds of the tests that use processes, signals, threads or terminals, on busy cores
#   make lint         lint and types
#   make docs         the documentation site, in site/
#   make bench        time and memory against standard training (longer contexts need a GPU)

PYTHON ?= python3
VENV ?= .venv
# Any torch the package accepts works; the tests were run with this one.
TORCH ?= torch==2.13.0
# The same for other packages. `make test CONSTRAINTS=` upgrades to the newest releases the package accepts.
CONSTRAINTS ?= tests/constraints.txt
# Folders of tests/ to run, such as "memory ops". Default: all.
TESTS ?=
JOBS ?= 2
REPEATS ?= 20
BENCH_ARGS ?=
BIN := $(VENV)/bin
# Marks a finished set-up, and with which releases.
STAMP := $(VENV)/.oomb-setup$(if $(CONSTRAINTS),,-newest)
# The workers share the cores, so torch gets one thread in each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)
QUICK := attention data engine memory models ops planner utils

.PHONY: setup demo test test-quick test-full stress lint docs bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "oomb needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV): installing $(TORCH), several minutes the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@echo "setting up $(VENV): installing oomb, transformers and what the tests need"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test]" "$(TORCH)" \
		$(if $(CONSTRAINTS),--constraint $(CONSTRAINTS),--upgrade --upgrade-strategy eager)
	@rm -f $(VENV)/.oomb-setup*
	@touch $@

demo: setup
	$(BIN)/oomb demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST) $(TESTS:%=tests/%) $(PYTEST_ARGS)

test-quick: setup
	$(PYTEST) -q -m "not slow and not timing and not full and not gpu" $(or $(TESTS:%=tests/%),$(QUICK:%=tests/%)) $(PYTEST_ARGS)

test-full: setup
	$(PYTEST) -m full $(TESTS:%=tests/%) $(PYTEST_ARGS)

stress: setup
	@burners=; trap 'kill $$burners' EXIT; \
	for core in $$(seq $$(nproc)); do (while :; do :; done) & burners="$$burners $$!"; done; \
	for repeat in $$(seq $(REPEATS)); do \
		echo "repeat $$repeat of $(REPEATS)"; \
		$(PYTEST) -q -m "timing and not full" $(PYTEST_ARGS) || exit 1; \
	done

docs: setup
	$(BIN)/python docs/build_site.py

bench: setup
	$(BIN)/oomb bench $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
