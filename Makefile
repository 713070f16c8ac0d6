# make demo: see it work.  make test: the tests.  make slow: those that take minutes.  make check: style and types.
# make docs: the documentation, into site/.  make screenshots: the README's pictures, from this version.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test slow check docs screenshots install clean

demo: .venv/.core
	$(BIN)/fedshift run

test: .venv/.dev
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

slow: .venv/.dev
	$(BIN)/python -m pytest -q -m slow

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

screenshots: .venv/.dev
	$(BIN)/python docs/screenshots.py

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
