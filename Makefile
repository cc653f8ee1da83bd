# make demo   hide a model, recover it, show the result
# make test   everything that must hold: lint, types, import contracts, tests
# make lint   the first three alone
# make bench  measure the figures in docs/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# written last: an interrupted installation starts again
READY := $(VENV)/.ready
EXTRAS := test,torch,onnx,convex,distributed,serve
PROCESSES ?= 2

# one thread per process: the tests run side by side
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: demo test lint bench clean browser

demo: $(READY)
	$(BIN)/keyhole demo

test: lint browser
	$(BIN)/python -m pytest -q -n $(PROCESSES) --jaxtyping-packages=keyhole,typechecking.checked

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

browser:
	.ci/browser

bench: $(READY)
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

# torch comes first and by its exact version: a CPU build of that version (torch==2.13.0+cpu), where
# pip can see one, satisfies it, and no CUDA libraries are pulled in
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
