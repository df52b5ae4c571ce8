# VeRL. 'make quickstart' trains a real language model; 'make test' passes the tests. Both set up .venv by themselves.
#
# PIP_ARGS is handed to every 'pip install', e.g. to choose another package index or a mirror.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_ARGS ?=
TEST_PROCESSES ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SITE_STAMP := $(VENV)/.installed-docs
PIP := $(BIN)/python -m pip --disable-pip-version-check -q -q
PYTEST := $(BIN)/python -m pytest -q

# The main job: two-term sums, GRPO on SmolLM2-135M.
MODEL := smollm2-135m
QUICKSTART := examples/quickstart.yaml
DATA := data/chain_sum.parquet
DATA_ARGS := --task chain_sum --size 2000 --val-size 100 --seed 1 \
	--option min_terms=2 --option max_terms=2 --option min_digits=1 --option max_digits=2
TRAIN_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup quickstart check test drills docs site size clean
.DELETE_ON_ERROR:

help:
	@echo "make quickstart  train SmolLM2-135M on two-term sums and report (5 to 10 minutes on 2 cores)"
	@echo "make test        lint, types, layers and all tests"
	@echo "make check       lint, types and layers only"
	@echo "make drills      long runs and failure drills"
	@echo "make docs        write docs/configuration.md and docs/metrics.md again, from the code"
	@echo "make site        build the documentation site, strictly, into site/"
	@echo "make size        lines of Python by package"
	@echo "make setup       only the environment, $(VENV)"
	@echo "make clean       remove caches and build leftovers (not $(VENV), runs/ or data/)"

setup: $(STAMP)

# torch comes first and alone: with its pin met, nothing after it can pull another build of it.
# A .venv without a working pip is what an interrupted set-up leaves; it is made again.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or set PYTHON=" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "setting up $(VENV): torch"
	@$(PIP) install $(PIP_ARGS) -c constraints.txt torch setuptools
	@echo "setting up $(VENV): everything else"
	@$(PIP) install $(PIP_ARGS) -c constraints.txt --no-build-isolation -e '.[data,dev]'
	@touch $@

quickstart: $(STAMP) $(DATA)
	@$(BIN)/verl model get $(MODEL)
	@$(BIN)/verl train $(QUICKSTART) $(TRAIN_ARGS)

$(DATA): | $(STAMP)
	@$(BIN)/verl data reasoning-gym $(DATA_ARGS) --out $@

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(PYTEST) tests/test_layers.py tests/test_imports.py

# Files are handed to two processes in the order of their names: the long ones, over Ray, come early.
test: check
	@$(PYTEST) -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m "not drill"

drills: $(STAMP)
	@$(PYTEST) -m drill --timeout 1800

docs: $(STAMP)
	@$(BIN)/verl config reference --out docs/configuration.md
	@$(BIN)/verl metrics reference --out docs/metrics.md

# The site's tools come at its first build: nothing else needs them.
$(SITE_STAMP): $(STAMP)
	@echo "setting up $(VENV): the documentation site"
	@$(PIP) install $(PIP_ARGS) -c constraints.txt --no-build-isolation -e '.[docs]'
	@touch $@

site: $(SITE_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo site/index.html

size:
	@find verl -name '*.py' -exec wc -l {} + | awk '$$2 != "total" { split($$2, part, "/"); \
		package = part[2] ~ /[.]py$$/ ? "verl" : "verl/" part[2]; lines[package] += $$1; all += $$1 } \
		END { for (name in lines) printf "%7d %s\n", lines[name], name; printf "%7d all\n", all }' | sort -n

clean:
	rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find verl tests -name __pycache__ -type d -prune -exec rm -rf {} +
