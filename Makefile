# Everything a fresh machine needs: `make run` (set up and train) and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Jericho, of the extra text, is compiled when it is installed; without gcc its tests are skipped.
TEXT := $(if $(shell command -v gcc),$(shell echo text,))
EXTRAS ?= box2d,minatar,tensorboard,ray,colorlines,marl,llm,gguf,$(TEXT)dev

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# pip is silent for up to a minute while it unpacks: a dot every few seconds shows that it goes on.
DOTS_EVERY_S ?= 2
step = printf '%s ' "$(1)"; (while sleep $(DOTS_EVERY_S); do printf .; done) & dots=$$!; \
	trap 'kill $$dots; echo' EXIT

PYTEST := $(BIN)/python -m pytest -n 2
# The commit that `make net-record` makes a reference of.
REF ?= HEAD~1

.PHONY: run test test-all quick unit net-record lint format bench install docs clean

run: install
	$(BIN)/offbeat train cartpole-ppo
	@echo "To use the command in this shell: . $(BIN)/activate"

test: lint
	$(PYTEST) -m "not slow"

test-all: lint
	$(PYTEST)

quick: install
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint unit

unit: install
	$(PYTEST) -m "not slow" tests/unit

net-record: install
	$(BIN)/python -m tests.net.record --ref $(REF)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python benchmarks/pipeline_limit.py --json
	$(BIN)/python benchmarks/data_path.py --json
	$(BIN)/python benchmarks/startup.py --json
	$(BIN)/python benchmarks/cartpole.py --peers stable-baselines3 --seeds 3 --json

docs: install
	$(BIN)/python -m offbeat.config.reference

install: $(VENV)/.installed

# torch comes first and by itself: its pinned CPU build keeps pip from choosing one with CUDA packages.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(call step,1 of 3: a virtual environment in $(VENV)); test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(call step,2 of 3: torch); $(PIP) "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	@$(call step,3 of 3: offbeat and $(EXTRAS)); $(PIP) -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .numba_cache .net
