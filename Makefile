# Needs Python 3.11 or later, pip and make; everything else goes into .venv the first time.
PYTHON ?= python3
VENV := .venv
CLIENTS := .venv-clients
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check install -q -c constraints.txt
# MACHINES=0/1 is the part of the entries that this machine takes: 0/2 and 1/2 are halves.
MACHINES ?= 0/1

.PHONY: report whole replayed jitted looped leaks matrix device gpu demo test check static doctest limitations bench clients coverage fuzz
.PHONY: format clean docs tutorials
.DEFAULT_GOAL := test

demo: $(VENV)/.installed
	$(RUN) examples/digits.py

# A process for each core, so one thread of torch's for each. Of the longest sweeps a sample, always the same.
test: $(VENV)/.installed
	FORALL_SAMPLED=1 OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto --dist worksteal

# All cases of all sweeps.
whole: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto --dist worksteal

# All tests, each replayed call compared with the call itself: an hour on two cores.
replayed: $(VENV)/.installed
	FORALL_REPLAY=check OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto --dist worksteal

# All tests, each transformed call made by jit too, and compared: an hour and a half on two cores. FORALL_TESTS=fastmath: with fastmath.
jitted: $(VENV)/.installed
	FORALL_TESTS=$(or $(FORALL_TESTS),jit) OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto --dist worksteal

# All tests, examples that diverge run as the plain loop where they may: half an hour on two cores.
looped: $(VENV)/.installed
	FORALL_STRATEGY=loop OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto --dist worksteal

# What calls leave behind, in a quarter of an hour or more.
leaks: $(VENV)/.installed
	FORALL_CALLS=10000 $(RUN) -m pytest -q tests/laws/test_thousands_of_calls.py
	FORALL_CALLS=100000 $(RUN) -m pytest -q tests/jit/test_nothing_is_kept.py

# A sample of the tests on each release of torch and each Python that is found here, an environment each in build/matrix
# (1.5 GB each, 0.5 to 0.9 GB to download). MATRIX takes the options of tests/matrix/run.py, as in
# `make matrix MATRIX='--torch 2.10 --python 3.11 --delete'`.
matrix:
	$(PYTHON) tests/matrix/run.py $(MATRIX)

check: static test doctest docs

static: $(VENV)/.installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright

# README.md and the pages of docs are doctests too, so that what they show stays true.
doctest: $(VENV)/.installed
	$(RUN) -m pytest -q --doctest-modules --doctest-glob='*.md' --ignore=docs/_site --ignore=docs/tutorials src/forall README.md docs

# The site, in build/site. TUTORIALS=fast runs the tutorials with smaller numbers, in a minute or two.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 FORALL_TUTORIALS=$(TUTORIALS) $(RUN) -m mkdocs build
	$(RUN) docs/_site/check_links.py

# All tutorials with their full numbers, or those in NAMES.
tutorials: $(VENV)/.installed
	$(RUN) docs/_site/tutorials.py $(NAMES)

# Counts of names, docstrings, imports and sizes. COUNTS=rings lists what is counted; see tests/counts.py.
report: $(VENV)/.installed
	$(RUN) tests/counts.py $(COUNTS)

# The table of docs/reference/limitations.md, from running each of them under torch.func and under forall.
limitations: $(VENV)/.installed
	$(RUN) tests/limits/limitations.py

# benchmarks/results.md and results.png: for a quiet machine. BENCH takes the options of benchmarks/run.py, as in
# `make bench BENCH='--sections peers --quick'`.
bench: $(VENV)/.installed
	$(RUN) benchmarks/run.py $(BENCH)

# The suites on a device of CPU memory under another name, which g++ builds: an hour and a half on one core.
# DEVICE takes the options of tests/device/run.py, as in `make device DEVICE='--suites control jit --sampled'`.
device: $(VENV)/.installed
	$(RUN) tests/device/run.py $(DEVICE)

# On this machine's GPU, in under 8 minutes: whether all is right, then ratios to torch.func and to programs by hand.
# GPU takes the options of tests/gpu/run.py, as in `make gpu GPU='--quick --device cuda:1'`.
gpu: $(VENV)/.installed
	$(RUN) tests/gpu/run.py $(GPU)

# docs/reference/clients.md, from running programs of released libraries with torch.func and with forall installed: ten minutes.
clients: $(CLIENTS)/.installed
	$(CLIENTS)/bin/python tests/clients/run.py

# Every operator in torch's own database, under every transform: long, so not part of `test`. It takes all cores,
# and goes on where it was cut short; `make clean` makes it begin anew.
coverage: $(VENV)/.installed
	$(RUN) tests/sweep/run.py --shard $(MACHINES) --json sweep.jsonl --resume --out docs/reference/coverage.md

# Random programs, others at each run: about an hour on one core, and half an hour for those that are recorded.
# PROGRAMS is for each transform, RECORDED for all calls of recorded programs, NAMED for programs of named axes.
PROGRAMS ?= 40000
RECORDED ?= 5000
NAMED ?= 1000
fuzz: $(VENV)/.installed
	FORALL_PROGRAMS=$(PROGRAMS) FORALL_SEED=$$(date +%s) $(RUN) -m pytest -q tests/limits/test_random_programs.py
	FORALL_PROGRAMS=$(RECORDED) FORALL_SEED=$$(date +%s) $(RUN) -m pytest -q tests/jit/test_random_programs.py
	FORALL_PROGRAMS=$(RECORDED) FORALL_SEED=$$(date +%s) $(RUN) -m pytest -q tests/replay/test_random_code.py
	FORALL_PROGRAMS=$(NAMED) FORALL_SEED=$$(date +%s) $(RUN) -m pytest -q tests/mesh/test_random_programs_*.py

format: $(VENV)/.installed
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# .venv stays: making it again takes minutes.
clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis digits.png sweep.jsonl
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# torch goes first, alone: the version in constraints.txt is settled before anything that depends on it is resolved.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[demo,bench,docs,dev]'
	touch $@

# The index has torchvision for CUDA builds of torch alone, which does not load beside another; libraries do without.
$(CLIENTS)/.installed: pyproject.toml constraints.txt tests/clients/requirements.txt
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(PIP:$(RUN)%=$(CLIENTS)/bin/python%) torch
	$(PIP:$(RUN)%=$(CLIENTS)/bin/python%) -r tests/clients/requirements.txt
	$(PIP:$(RUN)%=$(CLIENTS)/bin/python%) -e .
	$(CLIENTS)/bin/python -m pip uninstall -q -y torchvision
	touch $@
