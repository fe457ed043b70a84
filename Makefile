# Two commands for a newcomer: `make run` and `make test`. Each installs what it needs first.
PYTHON ?= python3
ARGS ?=
BENCHMARKS ?= attention generate train_step utilization objectives memory_estimate tokenize incremental scale loader
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TRITON := $(VENV)/.triton
# Debian's, for the stories: a browser for the pages of Prefect and MLflow, Slurm, PostgreSQL.
PACKAGES := chromium slurm-wlm munge postgresql
# One more than CI has cores: stories wait for much that they start.
WORKERS := --numprocesses 3 --dist loadfile --no-loadscope-reorder
# Tests start hundreds of Pythons, each of which would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install run test stories check packages lint docs serve bench gpu pictures clean lock

help:
	@echo "make run      train a small Infini-Llama on Python's own sources, with progress and a report"
	@echo "make test     run the tests that need nothing but Python"
	@echo "make stories  run those that take longest: whole programs killed, stopped and resumed, real pages in a browser"
	@echo "make lint     formatting, linting and types, as in CI"
	@echo "make docs     build the documentation as a site, with the API of the library, in site/html"
	@echo "make serve    keep the Prefect UI, MLflow and a worker up until Ctrl-C"
	@echo "make bench    run the benchmarks, or some of them: make bench BENCHMARKS=loader"
	@echo "make gpu      test and measure on this machine's GPU, with its own Python; REHEARSE=1 needs none"
	@echo "make pictures redraw the pictures of docs/images, by a training that is killed and retried"
	@echo "make install  make $(VENV) from requirements.lock (the others do it by themselves)"
	@echo "make clean    remove $(VENV) and caches; outputs/ stays"
	@echo "Options go into ARGS: make run ARGS='--preset debug training.max_steps=20'"

install: $(STAMP)

# The stamp is made last, so that an interrupted installation is gone through again. Python compiles a
# module when it first imports it; all of them at once would take as long as all the rest.
$(STAMP): requirements.lock pyproject.toml infini_model/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else "$(PYTHON) is Python %d.%d; Python 3.11 to 3.13 is needed (make PYTHON=python3.11 ...)" % sys.version_info[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable infini_model --editable .
	@touch $@

run: install
	$(BIN)/infini run $(ARGS)

# A CUDA build of PyTorch brings this Triton; a build for the CPU, which is in the lock, brings none.
# Tests for a GPU run in Triton's interpreter, on Linux, the only system that Triton is made for;
# make gpu runs them compiled.
$(TRITON): $(STAMP)
	@test "$$(uname -s)" != Linux || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile triton==3.7.1
	@touch $@

test: $(TRITON)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(WORKERS) -m "not story" $(ARGS)

stories: $(TRITON) packages
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(WORKERS) -m story $(ARGS)

# What CI runs: lint, then all tests at once, so that what they share starts once.
check: lint $(TRITON) packages
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(WORKERS) --durations=40 -rsx $(ARGS)

packages:
	@dpkg --status $(PACKAGES) >/dev/null 2>&1 || { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $(PACKAGES); } || { echo "needed: sudo apt-get install $(PACKAGES)" >&2; exit 1; }

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# A warning, such as that of a broken link, is an error.
docs: install
	$(BIN)/sphinx-build -M html docs site --fail-on-warning --keep-going --quiet
	@echo "site/html/index.html"

serve: install
	$(BIN)/infini serve $(ARGS)

bench: install
	@for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name || exit 1; done

# Installs nothing: a GPU machine may have no network, and its own torch.
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu $(if $(REHEARSE),--rehearse) $(ARGS)

# Not passkey.png, which takes a long benchmark: docs/memory.md has its command. The SVGs are hand-written.
pictures: PACKAGES := chromium
pictures: install packages
	PYTHONPATH=.:tests $(BIN)/python tests/browser/screenshots.py
	$(BIN)/python -m benchmarks.memory_gain --show --times 4 --plot docs/images/memory.png

# Write requirements.lock anew from an environment that has both distributions, their extras and the tools.
lock:
	$(BIN)/python -m pip install --quiet --upgrade --editable infini_model \
	  --editable '.[api,eval,hf,ray,screen,trackio,wandb]' -r requirements-dev.txt
	{ echo "# The exact set that the tests ran with; made by 'make lock'."; \
	  $(BIN)/python -m pip freeze --exclude-editable --exclude triton | sed 's/^\(torch==[0-9.]*\)+.*/\1/'; } > requirements.lock.new
	mv requirements.lock.new requirements.lock

clean:
	rm -rf $(VENV) site .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
