PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready

# Modules are compiled once, when they are first imported, rather than all of torch while it is installed.
unexport PYTHONDONTWRITEBYTECODE
COMPILED := torch.distributed.checkpoint.state_dict, torch.distributed.fsdp, torch.distributed.pipelining, torch._dynamo
PIP    := $(PY) -m pip install --quiet --no-compile --constraint constraints.txt

.PHONY: train test test-full pytest pytest-full bench lint types setup format clean

setup: $(READY)

# torch goes in first and pinned: without the pin, resolving a later package could pull another build of it. The largest
# package that does not depend on it is unpacked beside it, and what tests import of torch is compiled beside the rest.
# What that package needs comes in the second round: pip is not to complain that it is not there in the first.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps transformers & $(PIP) --no-warn-conflicts torch numpy && wait $$!
	$(PY) -c 'import $(COMPILED)' & $(PIP) --editable '.[dev]' && wait $$!
	touch $@

train: $(READY)
	$(PY) -m flatshard.cli train --checkpoint runs/train

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)
	$(PY) -m mypy

# Ranks wait for each other much of the time: two tests at once finish sooner, also on two cores.
PYTEST := $(PY) -m pytest -q -n 2 --dist loadgroup

pytest: $(READY)
	$(PYTEST)

pytest-full: $(READY)
	$(PYTEST) --full

# mypy has one process: the other core begins with the tests.
test: lint
	@$(MAKE) --no-print-directory --jobs 2 types pytest

test-full: lint
	@$(MAKE) --no-print-directory --jobs 2 types pytest-full

# two real processes over Gloo; the GPU table is `python -m benchmarks.table --case all`
bench: $(READY)
	$(PY) -m benchmarks.cpu

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
