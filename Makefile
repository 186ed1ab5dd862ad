# Everything a developer does, with nothing but Python 3.11+ and a shell to start from.
#   make test    all tests            make check   lint, types and the tests without Ray: under a minute
#   make ray     the tests on real Ray clusters on this machine
#   make soak    what is repeated for minutes: SOAK_MINUTES=60 make soak goes on for an hour
#   make test-ray-floor   the same with the oldest Ray that Roost works with
#   make demo    watch a training run  make golden  rewrite the golden files; then look at the change
#   make bench   measure              make format  let ruff format the code
#   make docs    the docs as a site   make docs-serve   the same, shown while you write

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
# Another Ray than the newest, such as ray==2.47.1; and the oldest that there is a target for.
RAY    ?=
FLOOR_RAY ?= 2.47.1
SOAK_MINUTES ?= 10
# A build for CPUs: the others are several GB. Only one example needs it.
TORCH  ?= torch==2.13.0+cpu

# Also a virtual environment that was only half made, as without python3-venv: the next try makes it anew.
.DELETE_ON_ERROR:

.PHONY: demo test check lint tests ray soak test-ray-floor golden bench format clean docs docs-serve

demo: $(VENV)/.installed
	@$(BIN)/roost demo

test: check ray

check: lint tests

lint: $(VENV)/.installed-dev
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "== mypy"
	@$(BIN)/mypy

tests: $(VENV)/.installed-dev
	@echo "== tests"
	@$(BIN)/pytest -n 2 --ignore=tests/ray --ignore=tests/alone

# First the tests that need a machine without a Ray cluster, then those that start clusters.
ray: $(VENV)/.installed-dev
	@echo "== tests on Ray"
	@$(BIN)/pytest tests/alone
	@$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=20 tests/ray

soak: $(VENV)/.installed-dev
	@echo "== soak tests, about $(SOAK_MINUTES) minutes"
	@SOAK_MINUTES=$(SOAK_MINUTES) $(BIN)/pytest -m soak -s tests/ray

test-ray-floor:
	@$(MAKE) VENV=$(VENV)-floor RAY='ray==$(FLOOR_RAY)' ray

golden: $(VENV)/.installed-dev
	@$(BIN)/pytest tests/golden tests/errors tests/docs --refresh-golden

bench: $(VENV)/.installed-dev
	@$(BIN)/python bench/planning.py
	@$(BIN)/python bench/startup.py
	@$(BIN)/python bench/cluster.py
	@$(BIN)/python bench/groups.py
	@$(BIN)/python bench/reserve.py

docs: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open file://$(abspath site)/index.html"

docs-serve: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8000

format: $(VENV)/.installed-dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-floor build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Roost needs Python 3.11 or newer, and this is %d.%d: say PYTHON=python3.11 or so" % v[:2])'
	@echo "== making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	@echo "== installing Roost into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo]' $(RAY)
	@$(BIN)/python -m compileall -q src
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "== installing the tools for tests into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,docs]' $(RAY) 2>/dev/null || { \
		echo "   no mkdocs to be had: the tests do not build the site of the docs"; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' $(RAY); }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' 2>/dev/null || \
		echo "   no $(TORCH) to be had: the example with torch.distributed is not tested (make TORCH=torch test takes any)"
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "== installing what makes the site of the docs into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]' $(RAY)
	@touch $@
