# Everything that a fresh machine needs: `make demo` and `make test` set themselves up in a virtual environment of their own.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2

# A bare `torch` pulls gigabytes of CUDA packages on a machine that cannot use them; the pinned release has a CPU build where
# the index offers one. So torch comes first and by itself, and nothing after it may change it.
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
TORCH := $(if $(HAS_GPU),torch>=2.11,torch==2.13.0)

.PHONY: setup test lint demo clean

setup: $(STAMP)

# Made once; made again when what is installed changes.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	if [ -n "$(HAS_GPU)" ]; then \
	  $(BIN)/python -c 'import torch, triton; print(f"torch=={torch.__version__}\ntriton=={triton.__version__}")' > $(VENV)/constraints.txt; \
	  grep -v -E '^(torch|triton)==' constraints.txt >> $(VENV)/constraints.txt; \
	else cp constraints.txt $(VENV)/constraints.txt; fi
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt -e '.[test,zoo]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# What the example epilogues fuse, on whatever hardware is there, checked against float64.
demo: setup
	$(BIN)/codetta demo

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
