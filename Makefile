# make demo: see it work.  make test: the tests.  make slow: faults of real deployments.  make check: style and types.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test slow check install clean

demo: .venv/.core
	$(BIN)/fedshift run

test: .venv/.dev
	$(BIN)/python -m pytest -q

slow: .venv/.dev
	$(BIN)/python -m pytest -q -m slow

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: .venv/.dev

.venv/.core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fedshift needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/.dev: .venv/.core
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv
