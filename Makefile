# Every command a developer needs. A system with several Pythons: make test PYTHON=python3.12
# (to change the Python of an existing environment, remove .venv first).
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: .venv run test lint types unit bench clean
.DEFAULT_GOAL := test

# The stamp is newer than both files as long as the environment is what they ask for.
STAMP := .venv/.installed
.venv: $(STAMP)
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--only-binary=:all: -c constraints.txt -e '.[dev,examples]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary=:all: cityhash \
		|| echo "cityhash has no wheel for this Python: its exact fallback is used"
	@touch $@

run: $(STAMP)
	$(BIN)/paradis run --workers 4 --servers 2 --dispatchers 2 --racks 2 $(ARGS) examples/train_lm.py

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy src

# Only these tests: make unit ARGS='tests/unit/test_config.py -x'
unit: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

bench: $(STAMP)
	@set -e; for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python $$file $(ARGS); done

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis paradis-runs
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
