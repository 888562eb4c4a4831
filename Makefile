# make serve: an answer on this machine.   make test: the tests.   make check: the linters and type checkers.
# make test-cluster: the tests of clusters of several hosts, which it makes on this one (Linux, as root).
# make fuzz: 5,000 cases made from the OpenAPI document.   make load-clients: evalscope and aiperf against a cluster.
# make soak: every kind of fault ten times, and for 30 minutes at least, then 12 minutes of none, on a cluster of its own.
# make test-gpu, make bench-gpu: what needs CUDA.   make format: the formatter.   make clean: removes what was made.
# Needs python3 (3.11 or newer) with its venv module. Every target sets up what it needs, once.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests run beside each other's processes on the same cores: more threads than that only wait for one another.
# Byte code is kept whatever the user's variables say: else each process of a cluster compiles all sources anew.
TEST_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0
# Several clusters share the cores with tests that compute. Engines compute at niceness 10: beside dozens of threads at 0
# they would wait for seconds.
TEST_NICENESS := nice -n 9
CODE := cluster simulation prefill decode kv_transfer router engine tests benchmarks scripts

.PHONY: help install serve test test-gpu bench-gpu test-cluster fuzz load-clients soak check format clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# make/make/p' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Baton needs Python 3.11 or newer; name one with: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Installing Baton and what it needs into $(VENV), once: some minutes, most of them for torch and Ray" >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=24"
	@echo "Choosing versions, downloading (a line for each package that is not kept from before), then unpacking" >&2
	@rm -f $(VENV)/.failed; \
		{ $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -e ".[dev]" || touch $(VENV)/.failed; } | \
		grep --line-buffered -oE '^ *Downloading [^ ]+( \([^)]*\))?|^Installing collected packages' >&2; \
		test ! -e $(VENV)/.failed
	@touch $@

# Options go to the command: make serve ARGS="--port 9000"
serve: $(STAMP)
	@exec $(BIN)/baton serve $(ARGS)

# Three processes, though two cores have enough to do for two: many tests wait. Each takes a file at a time, or all of those
# whose tests share clusters. What takes longest begins first, clusters beside what needs none
# (tests/support/cluster/side_by_side.py). make test TESTS=tests/router: only some of them, one after another.
TESTS ?=
test: $(STAMP)
ifeq ($(TESTS),)
	@$(TEST_ENV) $(TEST_NICENESS) $(BIN)/python -m pytest --numprocesses 3 --no-loadscope-reorder --dist loadgroup tests
else
	$(TEST_ENV) $(BIN)/python -m pytest $(TESTS)
endif

# Hosts out of network namespaces, the real `ray up`, and faults: minutes. Fails, with the reason, where they cannot be made.
# make test-cluster ARGS="--figures-json benchmarks/results/hosts.json": keep the figures seen.
test-cluster: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest tests/cluster $(ARGS)

# All that runs on a GPU: needs CUDA.
test-gpu: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -W default tests/gpu

bench-gpu: $(STAMP)
	$(BIN)/python -m benchmarks.gpu --json benchmarks/results/gpu.json $(ARGS)
	$(BIN)/python -m benchmarks.gpu_http --json benchmarks/results/gpu_http.json

fuzz: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m scripts.fuzz --cases 5000 $(ARGS)

load-clients: $(STAMP)
	$(BIN)/python -m benchmarks.load_clients --json benchmarks/results/load_clients.json $(ARGS)

# make soak SOAK="--minutes 5 --each 1": shorter. The seed draws the order of the faults.
SOAK ?= --minutes 30 --each 10 --seed 7
soak: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m benchmarks.soak $(SOAK) --json benchmarks/results/soak.json

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(CODE) -type d -name __pycache__ -prune -exec rm -rf {} +
