# `make train` and `make test` each work as the first command on a fresh clone: Python >= 3.10 and make are enough.
PYTHON ?= python3
CONFIG ?= configs/breakout.yaml
GAME   ?=
SEED   ?=
RUN    ?= $(basename $(notdir $(CONFIG)))$(if $(GAME),-$(GAME))$(if $(SEED),-seed$(SEED))
ARGS   ?=
VENV   ?= .venv
BIN    := $(VENV)/bin
# CPU-only PyTorch (a quarter of the download): make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

CHOICE := --config $(CONFIG) $(if $(GAME),--env.game $(GAME)) $(if $(SEED),--seed $(SEED))

.PHONY: help setup train test lint format dashboard eval video plan report bench smoke clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20
	@echo '  variables: CONFIG GAME RUN SEED ARGS, for example: make train GAME=pong SEED=2 ARGS="--budget.max_hours 8"'

$(VENV)/.ready: requirements.txt requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install -q --index-url $(TORCH_INDEX) $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.txt))
	$(BIN)/python -m pip install -q -r requirements-dev.txt
	touch $@

setup: $(VENV)/.ready  ## make .venv and install into it

train: setup  ## train into runs/RUN; the same command resumes
	$(BIN)/python -m dqn train $(CHOICE) --run $(RUN) $(ARGS)

smoke: setup  ## both phases, an evaluation and checkpoints on the real game, in two minutes
	$(BIN)/python -m dqn train --config configs/smoke.yaml --run smoke --fresh $(ARGS)

eval: setup  ## play the run's newest weights: table and eval.json
	$(BIN)/python -m dqn eval $(RUN) $(ARGS)

video: setup  ## film a game of the run
	$(BIN)/python -m dqn eval $(RUN) --episodes 1 --video runs/$(RUN)/video.mp4 $(ARGS)

plan: setup  ## memory, disk and time, before the start
	$(BIN)/python -m dqn plan $(CHOICE) $(ARGS)

report: setup  ## report.png and report.md of the run
	$(BIN)/python -m dqn report $(RUN) $(ARGS)

bench: setup  ## speed and bytes, beside Stable-Baselines3
	$(BIN)/python -m dqn bench --peers $(ARGS)

dashboard: setup  ## TensorBoard of all runs, on this machine only
	@echo "http://localhost:6006/"
	$(BIN)/python -m tensorboard.main --logdir runs --host localhost --port 6006 --load_fast=false

test: setup  ## the fast suite
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove caches and .venv; runs stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
