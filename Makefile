# Each target does all of its own set-up: a machine needs Python 3.11 or later and nothing else.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(VENV)/bin/pip install -q --disable-pip-version-check
DEMO := $(VENV)/.demo
SMALL := $(VENV)/.small
READY := $(VENV)/.ready
SMOLLM2 := $(VENV)/.smollm2
QUANTIZE := $(VENV)/.quantize
DOCS := $(VENV)/.docs
RELEASE := $(VENV)/.release
BOUNDS := build/lower_bounds.txt
LINT := .venv-lint
OLDEST := .venv-oldest
CORE_TESTS := $(wildcard tests/modeling_*) tests/merge_tools tests/test_contract.py tests/test_registration.py tests/test_security.py
# the test files that are named, and the extras that their comment "# needs: ray" names
FILES := $(wildcard $(foreach word,$(filter-out -%,$(ARGS)),$(firstword $(subst ::, ,$(word)))))
NEEDS := $(if $(FILES),$(shell grep -rhs '^# needs: ' $(FILES) | sed 's/^# needs: //' | tr ', ' '\n' | sort -u))
NEEDED := $(if $(filter smollm2,$(NEEDS)),$(SMOLLM2))
comma := ,
EXTRAS := $(subst $() ,$(comma),$(filter-out smollm2,$(NEEDS)))
TORCH := $(shell grep '^torch==' constraints.txt)

export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo demo-smollm2 test test-all test-oldest cuda lint format fix-copies bench tables docs demo-check wheels release-check clean

help:  ## what there is to make
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

demo: $(DEMO)  ## keyphrases of a paragraph, a long document and many texts, and a page that shows them
	$(RUN) examples/demo.py $(ARGS)

demo-smollm2: $(SMOLLM2)  ## definitions, summaries and tags by the models over SmolLM2 (93 MB more to download)
	$(RUN) examples/demo_smollm2.py $(ARGS)

test: $(if $(FILES),$(SMALL) $(NEEDED),$(READY) $(SMOLLM2))  ## the test suite; one file: make test ARGS=tests/keyphrase_tools/test_words.py
	$(if $(EXTRAS),$(PIP) -c constraints.txt -e '.[$(EXTRAS)]')
	$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: $(QUANTIZE) $(SMOLLM2)  ## the tests that take minutes: servers, workers, pages, notebooks, models of SmolLM2, wheels
	$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m nightly $(ARGS)

test-oldest: $(OLDEST)/.ready  ## the tests of models and merging, with the oldest supported versions
	PYTHONPATH=. $(OLDEST)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(CORE_TESTS) $(ARGS)

cuda: $(READY)  ## the tests that need a CUDA device
	TEST_CUDA=1 $(RUN) -m pytest tests/*/test_cuda.py $(ARGS)

lint: $(LINT)  ## style, types, and the lines of each room; installs ruff and mypy only
	$(LINT)/bin/python .ci/rooms.py
	$(LINT)/bin/mypy
	$(LINT)/bin/ruff check .
	$(LINT)/bin/ruff format --check .

format: $(LINT)  ## put the code into its format
	$(LINT)/bin/ruff check --fix .
	$(LINT)/bin/ruff format .

fix-copies:  ## copy the files that travel with every checkpoint into the modeling packages that need them
	for p in exhird hypernet lexicon moesumm; do cp modeling_seke/shared_seke.py modeling_$$p/shared_$$p.py; done
	cp modeling_lexicon/cache_lexicon.py modeling_moesumm/cache_moesumm.py
	cp modeling_seke/pipeline_keyphrase_extraction.py modeling_hypernet/

bench: $(READY)  ## time each system beside its plain version
	$(RUN) benchmarks/speed.py $(ARGS)

tables: $(READY)  ## write the tables of README and docs from benchmarks/results
	$(RUN) benchmarks/tables.py

docs: $(DOCS)  ## the documentation site, in build/site; warnings are errors; needs Node.js and npm
	$(RUN) docs/demo/assemble.py
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict $(ARGS)

demo-check: docs  ## compare the demo's answers in Chromium with those of Python; needs chromium
	$(PIP) -c constraints.txt playwright
	$(RUN) docs/check_demo.py $(ARGS)

wheels:  ## build the wheels of lexperts and its models: pip install --find-links dist "lexperts[keyphrases]"
	$(PYTHON) -m pip wheel -q --disable-pip-version-check --no-deps --wheel-dir dist . ./lite $(sort $(dir $(wildcard ./models/*/pyproject.toml)))

release-check: $(RELEASE)  ## build the distributions and try them in fresh environments
	$(RUN) .ci/release_check.py $(ARGS)

clean:  ## remove the virtual environment and what training left
	rm -rf $(VENV) $(LINT) $(OLDEST) runs build dist *.egg-info

# torch first and alone, at the pinned version: anything that asks for it later finds it there
$(DEMO): setup.cfg pyproject.toml constraints.txt $(wildcard models/*/*.* models/*/lexperts_seke_*/*)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) -c constraints.txt -e ./lite -e .
	$(PIP) --no-deps ./models/seke-minilm ./models/seke-tiny
	touch $(DEMO)

$(SMALL): $(DEMO)
	$(PIP) -c constraints.txt -e '.[train,offline,merge,test]'
	touch $(SMALL)

$(LINT): constraints.txt
	$(PYTHON) -m venv $(LINT)
	$(LINT)/bin/pip install -q --disable-pip-version-check -c constraints.txt ruff mypy types-PyYAML types-regex
	touch $(LINT)

$(READY): $(DEMO)
	$(PIP) -c constraints.txt -e '.[train,offline,onnx,merge,cluster,summaries,definitions,parquet,ray,spacy,serve,app,test,test-all]'
	touch $(READY)

# SmolLM2 once, and what training has added to it
$(SMOLLM2): $(DEMO) $(wildcard models/smollm2/*.* models/*-smollm2/*.* models/*-smollm2/lexperts_*/*)
	$(PIP) -c constraints.txt gguf ./models/smollm2
	$(PIP) --no-deps ./models/lexicon-smollm2 ./models/moesumm-smollm2 ./models/exhird-smollm2
	touch $(SMOLLM2)

$(DOCS): $(DEMO)
	$(PIP) -c constraints.txt -e '.[docs,onnx]'
	touch $(DOCS)

$(QUANTIZE): $(READY)
	$(PIP) -c constraints.txt -e '.[quantize]'
	touch $(QUANTIZE)

$(RELEASE): $(READY)
	$(PIP) -c constraints.txt -e '.[release]'
	touch $(RELEASE)

# TORCH_OLDEST=2.13.0 replaces the oldest supported torch, whose wheel has gigabytes of CUDA libraries on some indexes
$(OLDEST)/.ready: setup.cfg
	rm -rf $(OLDEST)
	$(PYTHON) -m venv $(OLDEST)
	mkdir -p build
	sed -n -e '/^test =/q' -e 's/^    \([A-Za-z0-9_-]*\)>=\([0-9.]*\).*/\1==\2/p' setup.cfg | sort -u > $(BOUNDS)
	$(if $(TORCH_OLDEST),sed -i 's/^torch==.*/torch==$(TORCH_OLDEST)/' $(BOUNDS))
	$(OLDEST)/bin/pip install -q -c $(BOUNDS) torch
	$(OLDEST)/bin/pip install -q -c $(BOUNDS) -e ./lite -e '.[train,merge,serve,offline,test]'
	touch $(OLDEST)/.ready
