# Every target does its own set-up. A fresh clone needs python3 (3.11 or newer) and make, nothing else.
#
#   make demo     train a small model at a 16K-token context and compare with standard training, about 5 minutes
#   make test     lint, types and tests
#   make stress   the tests that use processes, signals, threads or terminals, 20 times, next to a load on every core
#   make lint     lint and types alone
#   make bench    time and memory beside standard training (a GPU is needed for the larger contexts)

PYTHON ?= python3
VENV ?= .venv
# Any torch the package accepts will do; this is the one the tests were run with.
TORCH ?= torch==2.13.0
# The same of other packages. `make test CONSTRAINTS=` upgrades to the newest that the package accepts.
CONSTRAINTS ?= tests/constraints.txt
JOBS ?= 2
REPEATS ?= 20
BENCH_ARGS ?=
BIN := $(VENV)/bin
# One of the two is there: which releases are installed.
STAMP := $(VENV)/.oomb-setup$(if $(CONSTRAINTS),,-newest)

.PHONY: setup demo test stress lint bench clean

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

# One torch thread per worker: the workers share the cores already.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

stress: setup
	@burners=; trap 'kill $$burners' EXIT; \
	for core in $$(seq $$(nproc)); do (while :; do :; done) & burners="$$burners $$!"; done; \
	for repeat in $$(seq $(REPEATS)); do \
		echo "repeat $$repeat of $(REPEATS)"; \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) -m timing $(PYTEST_ARGS) || exit 1; \
	done

bench: setup
	$(BIN)/oomb bench $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
