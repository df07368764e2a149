# One command each. The first one makes .venv and installs what it needs; after that they start at once.
#
#   make run PYTHON=python3.13
#   make test PYTEST_ARGS="-x tests/policy"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
PYTEST_ARGS ?=
COVERAGE_MIN ?=
WORKERS ?= auto

.PHONY: help run test test-long test-all test-crash test-ecosystem lint types codec docs bench bench-full bench-compare .bench .bench-full .bench-compare clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/.installed-demo  ## a demonstration
	@$(PY) -m segmentlog demo

# Many tests wait for something: one process more than there are cores.
MORE_WORKERS = $(if $(filter auto,$(WORKERS)),$(shell expr $$(nproc) + 1),$(WORKERS))

# The quick tests work in memory where there is room for them: half of their time would be fsyncs. The others use the disk.
TEST_FOLDER ?= $(shell [ -w /dev/shm ] && [ "$$(($$(stat -f -c '%a * %S' /dev/shm)))" -gt $$((2 << 30)) ] && echo /dev/shm || echo $${TMPDIR:-/tmp})

# Coverage makes the quick tests take half as long again, so it is off unless COVERAGE_MIN is set.
COVERAGE = $(if $(COVERAGE_MIN),--cov --cov-report=term --cov-fail-under=$(COVERAGE_MIN))

test: $(VENV)/.installed-test  ## the quick tests: six minutes at most on two cores; COVERAGE_MIN=90 also measures coverage
ifeq ($(strip $(PYTEST_ARGS)),)
	@folder=$$(mktemp -d "$(TEST_FOLDER)/segmentlog-tests-XXXXXX"); trap 'rm -rf "$$folder"' EXIT; \
	PYTEST_DEBUG_TEMPROOT=$$folder $(PY) -m pytest -n $(MORE_WORKERS) --dist worksteal --durations=12 $(COVERAGE) -m "not long and not spark and not ecosystem"
else
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)
endif

# Coverage counts the quick tests alone: the long tests repeat what those run, and would take half as long again.
test-long: $(VENV)/.installed-test  ## the long tests and the tests with Spark: 20 minutes on two cores
	$(PY) -m pytest -n $(MORE_WORKERS) --dist loadgroup --durations=25 -m "(long or spark) and not ecosystem"

test-all:  ## test with COVERAGE_MIN=90, then test-long: half an hour
	@$(MAKE) --no-print-directory test PYTEST_ARGS= COVERAGE_MIN=$(or $(COVERAGE_MIN),90)
	@$(MAKE) --no-print-directory test-long

test-crash: $(VENV)/.installed-test  ## hours of crashes: 1,000,000 power cuts, 10,000 kills
	SEGMENTLOG_CRASH_STATES=1000000 SEGMENTLOG_REMOUNT_STATES=200000 SEGMENTLOG_COMPACTION_STATES=100000 \
	    SEGMENTLOG_COMPACTION_VARIANTS=4 \
	    SEGMENTLOG_KILL_ROUNDS=10000 SEGMENTLOG_CRASHFS_ROUNDS=200 SEGMENTLOG_GROUP_ROUNDS=1000 \
	    SEGMENTLOG_DELIVERY_ROUNDS=5000 SEGMENTLOG_DELIVERY_STATES=50000 SEGMENTLOG_EMBEDDED_ROUNDS=30000 \
	    SEGMENTLOG_TRANSFER_EXAMPLES=5000 SEGMENTLOG_LOADING_POINTS=1000 SEGMENTLOG_DESCRIPTOR_STEP=1 \
	    SEGMENTLOG_FORK_POINTS=0 SEGMENTLOG_LOCAL_ERRORS_EVERY=1 SEGMENTLOG_FAULTS_EVERY=1 SEGMENTLOG_INTERRUPT_POINTS=0 \
	    SEGMENTLOG_ADMIN_ROUNDS=5000 SEGMENTLOG_PROTOCOL_ROUNDS=2000 SEGMENTLOG_SHIPPING_ROUNDS=5000 \
	    SEGMENTLOG_STANDBY_ROUNDS=5000 SEGMENTLOG_STANDBY_STATES_EVERY=1 \
	    SEGMENTLOG_MACHINES_ROUNDS=2000 SEGMENTLOG_MACHINES_OUTAGE_S=60 \
	    SEGMENTLOG_S3_ROUNDS=1000 SEGMENTLOG_REWINDING_ROUNDS=2000 SEGMENTLOG_COST_ELEMENTS=100000 \
	    SEGMENTLOG_SANITIZED_BATCHES=10000000 SEGMENTLOG_REPLICATION_RUNS=1500000 \
	    $(PY) -m pytest -n $(WORKERS) --timeout 0 tests/crash tests/groups/test_groups.py tests/exchange/test_record_files.py \
	    tests/cli/test_loading.py tests/damage/test_batches_in_values.py tests/log/test_lost_descriptors.py \
	    tests/ecosystem/protocol tests/objects/upload/test_service.py tests/objects/test_real_stores.py \
	    tests/objects/standby tests/machines \
	    tests/objects/restore/test_point_in_time.py tests/server/test_costs.py \
	    tests/format/test_speedups.py tests/replication \
	    $(PYTEST_ARGS)

test-ecosystem: $(VENV)/.installed-test  ## an hour of what people build around Kafka, killed while it works
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup --durations=25 tests/ecosystem $(PYTEST_ARGS)

lint: $(VENV)/.installed-test  ## mistakes, layout, the order of imports between packages, spelling, plain English
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(VENV)/bin/lint-imports --config setup.cfg --no-logo
	$(VENV)/bin/codespell segmentlog pyspark_segmentlog tests tools bench docs *.md setup.* Makefile
	$(PY) tools/plain_english.py --limits tools/english_limits.cfg

types: $(VENV)/.installed-test  ## mypy, strict
	$(PY) -m mypy --strict segmentlog

codec: $(VENV)/.installed-test  ## generate the classes of Kafka's messages from its schemas
	$(PY) -m tools.codec.generate

# From scratch each time: Sphinx reports a fault in a page only when it reads that page.
docs: $(VENV)/.installed-docs  ## README and docs/ as a site: build/docs/index.html
	$(PY) -m sphinx --quiet --fresh-env --fail-on-warning --doctree-dir build/doctrees --conf-dir docs . build/docs

# Users run the distribution's Python, which is optimised: benches run on it, in an environment of its own where .venv has
# another Python. BENCH_PYTHON names a different one; where neither can be used, benches run in .venv and warn.
BENCH_PYTHON ?= $(shell /usr/bin/python3 -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo /usr/bin/python3)
BENCH_VENV = $(if $(BENCH_PYTHON),$(if $(filter $(realpath $(BENCH_PYTHON)),$(realpath $(PY))),$(VENV),.venv-bench),$(VENV))
IN_BENCH_VENV = $(MAKE) --no-print-directory VENV=$(BENCH_VENV) $(if $(BENCH_PYTHON),PYTHON=$(BENCH_PYTHON))
BASE ?= HEAD

bench:  ## fsync trade-offs, limits, scaling: some ten minutes, and a report below bench/results
	@$(IN_BENCH_VENV) .bench

bench-full:  ## the same for an hour, with peers: SQLite, LMDB, Redis, NATS, Kafka...
	@$(IN_BENCH_VENV) .bench-full

bench-compare:  ## the limits bench on BASE=<revision> and on this tree, in turn
	@$(IN_BENCH_VENV) .bench-compare BASE=$(BASE)

.bench: $(VENV)/.installed-bench
	$(PY) -m bench

.bench-full: $(VENV)/.installed-bench
	$(PY) -m bench --full

.bench-compare: $(VENV)/.installed-bench
	$(PY) -m bench.compare $(BASE)

clean:  ## remove what was built and cached (not .venv and .venv-bench)
	rm -rf build dist *.egg-info segmentlog-demo-delays.png spark-warehouse .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

# A stamp is older than setup.cfg when the dependencies may have changed, and older than the core when that must be compiled.
# It says nothing about an environment whose Python is gone, nor about a compiled core that is gone or older than its source.
CORE_SOURCES := setup.py segmentlog/speedups/records.py segmentlog/speedups/records.pxd
$(shell [ -x $(PY) ] || rm -f $(VENV)/.installed-*)
$(shell for source in $(CORE_SOURCES); do \
    [ ! -s $(VENV)/.core ] || [ "$$(cat $(VENV)/.core)" -nt "$$source" ] || rm -f $(VENV)/.installed-*; done)
INSTALL_SOURCES := setup.cfg pyproject.toml $(CORE_SOURCES)

$(VENV)/.installed-demo: $(INSTALL_SOURCES) | $(PY)
	$(call install,demo)

$(VENV)/.installed-test: $(INSTALL_SOURCES) | $(PY)
	$(call install,test demo bench)

$(VENV)/.installed-docs: $(INSTALL_SOURCES) | $(PY)
	$(call install,docs)

$(VENV)/.installed-bench: $(INSTALL_SOURCES) | $(PY)
	$(call install,bench)

comma := ,
space := $(subst ,, )
define install
	@echo "installing segmentlog with [$(subst $(space),$(comma),$(1))] into $(VENV); the first time takes a minute"
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[$(subst $(space),$(comma),$(1))]'
	@$(PY) -c 'from segmentlog.speedups import COMPILED, records; print(records.__file__ if COMPILED else "", end="")' > $(VENV)/.core
	@[ -s $(VENV)/.core ] || echo "the core is not compiled: gcc and Python's headers (Debian: gcc, python3-dev) make records of Kafka's clients faster"
	@touch $(foreach extra,$(1),$(VENV)/.installed-$(extra))
endef

# --clear: nothing is kept of one that was half made, or whose Python is gone.
$(PY):
	@$(find_python); \
	echo "making $(VENV) with $$python ($$($$python --version))"; \
	"$$python" -m venv --clear $(VENV)

# The first of these that runs, is new enough and can make a virtual environment. Debian's python3 has venv but
# not ensurepip, without which it fails half way.
CANDIDATES := $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11)
define find_python
	python= bare=; \
	for candidate in $(CANDIDATES); do \
	    "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    bare=$${bare:-$$candidate}; \
	    if "$$candidate" -c 'import ensurepip, venv' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$bare" ]; then \
	    echo "segmentlog needs Python 3.11 or newer, and none of these is one: $(CANDIDATES)" >&2; \
	    echo "install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; \
	elif [ -z "$$python" ]; then \
	    package=$$("$$bare" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	    echo "$$bare cannot make virtual environments: ensurepip is missing" >&2; \
	    echo "on Debian and Ubuntu: sudo apt install $$package" >&2; exit 1; \
	fi
endef
