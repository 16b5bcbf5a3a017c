# Two commands: `make demo` (the main job on real data) and `make test` (`make test-all` for every test). Each makes the environment it needs, in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test quick test-all lint check docs test-oldest test-newest mutants test-cuda images dist clean

# Lightning 2.6 with PyTorch 2.13 warns about itself.
demo: $(VENV)/.installed
	$(BIN)/python -W 'ignore:`isinstance(treespec, LeafSpec)` is deprecated:FutureWarning' examples/digits.py

# Programs that tests start find the package compiled, where the environment keeps Python from writing what it compiles.
COMPILED = $(BIN)/python -m compileall -q memcallback

# What says in three minutes on two cores whether a change is right. mypy takes one core: it runs beside the tests.
test: $(VENV)/.installed
	$(MAKE) -j2 lint quick

quick: $(VENV)/.installed
	$(COMPILED)
	$(BIN)/python -m pytest -q -n auto --dist loadfile --quick

# PART=1/3 runs one of three parts of all tests, which take about as long as one another: CI has a machine for each.
ALL_TESTS = -m pytest -q -n auto --dist loadfile $(if $(PART),--part $(PART))

# Every test, and the site.
test-all: $(VENV)/.installed check
	$(COMPILED)
	$(BIN)/python $(ALL_TESTS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint docs

# The site, into site/; a link to nothing is an error (with --quiet it would be none). The variable keeps an announcement away.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The tests with the oldest PyTorch and Lightning that pyproject.toml allows, in an environment of their own; PYTHON=python3.10 takes the oldest Python too.
OLDEST := torch==2.6.0 lightning==2.4.0 pytorch-lightning==2.4.0
test-oldest: $(VENV)-oldest/.installed
	$(VENV)-oldest/bin/python $(ALL_TESTS)

$(VENV)-oldest/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/pip install --quiet --upgrade pip
	$(VENV)-oldest/bin/pip install --quiet $(OLDEST) --editable '.[examples,dev]'
	touch $@

# The tests with the newest PyTorch, Lightning and transformers that pip finds, in an environment of their own: no constraints. PyTorch first, as below.
test-newest: $(VENV)-newest/.installed
	$(VENV)-newest/bin/python $(ALL_TESTS)

$(VENV)-newest/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/pip install --quiet --upgrade pip
	$(VENV)-newest/bin/pip install --quiet --upgrade torch
	$(VENV)-newest/bin/pip install --quiet --upgrade lightning pytorch-lightning transformers --editable '.[examples,dev,docs]'
	touch $@

# Which of some 465 small changes to core, allocator, replay and advice no test notices; MUTANTS="--sample 0" tries all 2,230 of them.
mutants: $(VENV)/.installed
	$(BIN)/python tests/mutants.py $(MUTANTS)

# On a machine with a CUDA device; CUDA_PYTHON is the python of an environment with PyTorch's CUDA build and this package.
CUDA_PYTHON ?= python3
test-cuda:
	$(CUDA_PYTHON) -m pytest -q -m cuda

images: $(VENV)/.installed
	$(BIN)/python docs/render_dashboard.py
	$(BIN)/python docs/render_pages.py
	$(BIN)/python docs/render_real_gpus.py

# Wheel and sdist into dist/, checked as a package index would.
dist: $(VENV)/.installed
	rm -rf dist
	$(BIN)/pip install --quiet twine
	$(BIN)/python -c "from hatchling import build; build.build_wheel('dist'); build.build_sdist('dist')"
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m pytest -q tests/test_distribution.py

# PyTorch's CPU build first: asked for by another package, torch comes with several GB of CUDA libraries.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[examples,dev,docs]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest lightning_logs build dist site .mypy_cache .ruff_cache .pytest_cache
