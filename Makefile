# Two commands for a newcomer: `make run` and `make test`. Each installs what it needs first.
PYTHON ?= python3
ARGS ?=
BENCHMARKS ?= attention model step loss generate train_step memory_estimate tokenize incremental scale requests loader stored_loader
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CHROMIUM ?= chromium
WORKERS := --numprocesses 2 --dist loadfile --no-loadscope-reorder
export CHROMIUM

.PHONY: help install run test chromium e2e fuzz lint serve bench gpu clean lock

help:
	@echo "make run      train a small Infini-Llama on Python's own sources, with progress and a report"
	@echo "make test     run the tests, but for those that take longest: make e2e"
	@echo "make e2e      kill, stop and resume trainings at any moment; use the pages of Prefect and MLflow in a browser"
	@echo "make fuzz     compare the GPU tokenizer with tokenizers on far more text, in Triton's interpreter"
	@echo "make lint     formatting, linting and types, as in CI"
	@echo "make serve    keep the Prefect UI, MLflow and a worker up until Ctrl-C"
	@echo "make bench    run the benchmarks, or some of them: make bench BENCHMARKS=loader"
	@echo "make gpu      test and measure on this machine's GPU, with its own Python; REHEARSE=1 needs none"
	@echo "make install  make $(VENV) from requirements.lock (the others do it by themselves)"
	@echo "make clean    remove $(VENV) and caches; outputs/ stays"
	@echo "Options go into ARGS: make run ARGS='--preset debug training.max_steps=20'"

install: $(STAMP)

# The stamp is made last, so that an interrupted installation is gone through again.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else "$(PYTHON) is Python %d.%d; Python 3.11 to 3.13 is needed (make PYTHON=python3.11 ...)" % sys.version_info[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

run: install
	$(BIN)/infini run $(ARGS)

# A CUDA build of PyTorch pins the Triton that fits it, so the lock has none; with a CPU build the
# tests run the kernels in Triton's interpreter, on Linux, the only system that it is made for.
test: install
	@test "$$(uname -s)" != Linux || $(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check 'triton>=3.5'
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

# Debian's Chromium, or the program that CHROMIUM names; Playwright brings no browser of its own.
chromium:
	@command -v "$(CHROMIUM)" >/dev/null || test "$$(id -u)" != 0 || { apt-get update && apt-get install -y --no-install-recommends chromium; }
	@command -v "$(CHROMIUM)" >/dev/null || { echo "$(CHROMIUM) is missing: sudo apt-get install chromium, or make e2e CHROMIUM=PROGRAM" >&2; exit 1; }

e2e: install chromium
	@command -v slurmctld >/dev/null || echo "skipping the tests of slurm.sh; they need: sudo apt-get install slurm-wlm munge"
	$(BIN)/python -m pytest $(WORKERS) --every-story -m story $(ARGS)

fuzz: install
	TRITON_INTERPRET=1 $(BIN)/python -m pytest --every-story -m "cuda and story" tests/infini_model/data/tokenizers/gpu $(ARGS)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

serve: install
	$(BIN)/infini serve $(ARGS)

bench: install
	@for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name || exit 1; done

# Installs nothing: a GPU machine may have no network, and its own torch.
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu $(if $(REHEARSE),--rehearse) $(ARGS)

# Write requirements.lock anew from an environment that satisfies the requirements files.
lock:
	$(BIN)/python -m pip install --quiet --upgrade -r requirements.txt -r requirements-dev.txt
	{ echo "# The exact set that the tests ran with; made by 'make lock'."; \
	  $(BIN)/python -m pip freeze --exclude-editable --exclude triton | sed 's/^\(torch==[0-9.]*\)+.*/\1/'; } > requirements.lock.new
	mv requirements.lock.new requirements.lock

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
