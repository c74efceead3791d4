# Every target works in a fresh clone with nothing installed, and without root. `make help` lists them.
#
#   PYTHON=/path/to/python3.12   the interpreter for .venv (default: the first of several names that is >= 3.11)
#   EXTRA=cpu|cuda|              MLX's build (default: cuda where nvidia-smi finds a GPU, cpu on other Linux, none on macOS)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
comma := ,

ifeq ($(shell uname -s),Linux)
EXTRA ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
endif
EXTRA := $(EXTRA)

RUN := $(VENV)/.run-$(or $(EXTRA),plain)
DEV := $(VENV)/.dev-$(or $(EXTRA),plain)

.PHONY: help install dev demo test test-slow lint format bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

install: $(RUN)  ## make .venv and install mlxd into it

dev: $(DEV)  ## the same, and what tests, linters and benchmarks need

demo: $(RUN)  ## start the daemon, serve two tenants at once, show metrics, drain
	@$(BIN)/python examples/demo.py

test: $(DEV)  ## the test suite, without the slow ones
	$(BIN)/python -m pytest -q

test-slow: $(DEV)  ## the tests that need the built-in model or minutes
	$(BIN)/python -m pytest -q -m slow

lint: $(DEV)  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV)  ## decode of the built-in model against mlx-lm, a table in a minute or two
	@$(BIN)/python benchmarks/decode.py --table --context 128 --steps 8 --blocks 4

clean:  ## remove .venv and every cache of the tools
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14); do \
	  if "$$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    echo "making $(VENV) with $$("$$python" --version)"; \
	    "$$python" -m venv --clear $(VENV) && touch $@; exit; \
	  fi; \
	done; \
	echo "mlxd: no Python >= 3.11 with venv and ensurepip (on Debian: python3-venv);" \
	  "install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1

$(RUN): $(VENV)/.created pyproject.toml
	@echo "installing mlxd into $(VENV) ..."
	@$(PIP) install -e '.$(if $(EXTRA),[$(EXTRA)])'
	@touch $@

$(DEV): $(VENV)/.created pyproject.toml
	@echo "installing mlxd and its tools into $(VENV) ..."
	@$(PIP) install -e '.[$(if $(EXTRA),$(EXTRA)$(comma))dev]'
	@touch $@
