# make demo   hide a model, recover it, show the result
# make quick  lint, and the tests that need no training, network or browser: 90 seconds
# make test   everything that must hold: lint, types, import contracts, tests
# make lint   the first three alone
# make docs   the documentation as a site, in site/
# make bench  measure the figures in docs/
# make attack damaged files, hostile endpoints, kills and boxes of all kinds, for MINUTES (15)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# written last: an interrupted installation starts again
READY := $(VENV)/.ready
EXTRAS := test,torch,hf,gguf,onnx,convex,distributed,serve,pictures
PROCESSES ?= 2
# MLServer (which brings tritonclient): programs of others that the tests talk to
OTHERS := .venv-interoperation
OTHERS_READY := $(OTHERS)/.ready
# llama.cpp as a server, whose numpy is newer than MLServer's
LLAMA := .venv-language-models
LLAMA_READY := $(LLAMA)/.ready
# `transformers serve`, which tells labels alone, and sentence-transformers behind FastAPI
SERVING := .venv-serving
SERVING_READY := $(SERVING)/.ready

# one thread per process: the tests run side by side
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
# tests with rewritten asserts are compiled once, not at every start
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo quick quick-tests test lint docs bench attack clean browser picture

demo: $(READY)
	$(BIN)/keyhole demo

# side by side: the types take one process, the tests two
quick: $(READY)
	$(MAKE) --no-print-directory -j 2 lint quick-tests

quick-tests: $(READY)
	$(BIN)/python -m pytest -q -n $(PROCESSES) --dist worksteal -m quick

test: lint browser $(OTHERS_READY) $(LLAMA_READY) $(SERVING_READY)
	others="$$(test ! -e $(OTHERS_READY) || echo $(CURDIR)/$(OTHERS)/bin/python)"; \
	llama="$$(test ! -e $(LLAMA_READY) || echo $(CURDIR)/$(LLAMA)/bin/python)"; \
	serving="$$(test ! -e $(SERVING_READY) || echo $(CURDIR)/$(SERVING)/bin/python)"; \
	KEYHOLE_MLSERVER_PYTHON="$$others" KEYHOLE_TRITON_PYTHON="$$others" \
	KEYHOLE_LLAMA_PYTHON="$$llama" KEYHOLE_SERVING_PYTHON="$$serving" KEYHOLE_SENTENCE_PYTHON="$$serving" \
	$(BIN)/python -m pytest -q -n $(PROCESSES) --dist worksteal --jaxtyping-packages=keyhole,typechecking.checked \
		--cov --cov-report=xml --cov-report=term:skip-covered

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the documentation: site/index.html"

# the report of a run as a browser shows it, for the README
picture: $(READY) browser
	$(BIN)/python .ci/picture

browser:
	.ci/browser

# the scripts among benchmarks/*.py; the rest is what they share
MEASURED := single_head low_rank multi_head relu_network labels vocabulary noise examples auto \
	verifier engines http_overhead regression block deployed mlp language_model_server tokens \
	trained_block stack layers mlp_figures journal forecast language_model_verify papers watch doctor \
	history two_boxes calibration templates library_attention map

bench: $(READY)
	$(BIN)/keyhole bench all --out docs/results
	$(BIN)/python .ci/summary
	for name in $(MEASURED); do $(BIN)/python benchmarks/$$name.py || exit 1; done

MINUTES ?= 15
SEED ?= 0

attack: $(READY)
	$(BIN)/python tests/attack/campaign.py --minutes $(MINUTES) --seed $(SEED) --keep --page docs/results/attack.md

# Files are checked against their digests where these are known (Linux, x86-64, Python 3.11), and by
# their versions elsewhere. torch stands apart and by its exact version: a CPU build of that version
# (torch==2.13.0+cpu), where pip can see one, satisfies it, and no CUDA libraries are pulled in
PLATFORM = $(shell $(PYTHON) -c "import sys, platform; print(*sys.version_info[:2], sys.platform, platform.machine(), sep='-')")
DIGESTS = $(if $(filter 3-11-linux-x86_64,$(PLATFORM)),constraints-hashes.txt)

$(READY): pyproject.toml constraints.txt constraints-hashes.txt
	$(PYTHON) -m venv $(VENV)
	test -z "$(DIGESTS)" || $(BIN)/python -m pip install -q --require-hashes -r $(DIGESTS)
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q -e '.[$(EXTRAS)]'
	touch $@

# where this fails (no network), the tests that need it say so and are skipped; the next make tries
# again
$(OTHERS_READY): constraints-interoperation.txt
	-$(PYTHON) -m venv $(OTHERS) \
	&& $(OTHERS)/bin/python -m pip install -q -c $< mlserver 'tritonclient[http]' \
	&& touch $@

# digests first, where they are known; the versions then find everything in place but torch
$(LLAMA_READY): constraints-language-models.txt constraints-language-models-hashes.txt
	-$(PYTHON) -m venv $(LLAMA) \
	&& { test -z "$(DIGESTS)" || $(LLAMA)/bin/python -m pip install -q --only-binary :all: \
		--no-deps --require-hashes -r constraints-language-models-hashes.txt; } \
	&& $(LLAMA)/bin/python -m pip install -q --only-binary :all: -r $< \
	&& touch $@

$(SERVING_READY): constraints-serving.txt constraints-serving-hashes.txt
	-$(PYTHON) -m venv $(SERVING) \
	&& { test -z "$(DIGESTS)" || $(SERVING)/bin/python -m pip install -q --only-binary :all: \
		--no-deps --require-hashes -r constraints-serving-hashes.txt; } \
	&& $(SERVING)/bin/python -m pip install -q --only-binary :all: -r $< \
	&& touch $@

clean:
	rm -rf $(VENV) $(OTHERS) $(LLAMA) $(SERVING) site coverage.xml .coverage .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
