# `make demo` and `make test` work from a fresh clone: each builds .venv first if it is missing or out of date.

PYTHON ?= python3
# With TORCH=2.15.0 every target runs with that release, in an environment of its own: the lock, but for torch.
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
RUN := $(VENV)/bin/python -m
INSTALLED := $(VENV)/.installed
SITE := .venv-site

# Some machines tell Python to keep no compiled files. Each process that the tests start would then compile torch anew,
# which is about half of its start. They go into the environment, not beside the sources.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/compiled

.DEFAULT_GOAL := help
.PHONY: help demo test faults lint format fuzz models bench bench-overlap bench-compiled docs site site-pictures release-check clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The lock pins the build backend, too; without isolation pip has nothing more to fetch for the package itself.
# Python compiles what it imports; pip would compile everything, which is nearly half of an install.
$(INSTALLED): requirements.lock pyproject.toml
	@echo "Installing requirements.lock$(if $(TORCH), with torch $(TORCH)) into $(VENV): a minute or more."
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@sed 's/^torch==.*/$(if $(TORCH),torch==$(TORCH),&)/' requirements.lock > $(VENV)/requirements.txt
	@$(RUN) pip install --quiet --quiet --disable-pip-version-check --no-compile --requirement $(VENV)/requirements.txt
	@$(RUN) pip install --quiet --quiet --disable-pip-version-check --no-compile --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(INSTALLED)  ## train a digit classifier on two ranks of this machine
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node 2 examples/digits.py

# Three files at a time on two processors: a third of the time of tests is spent waiting for processes and time limits.
# In the order of their paths, which has what takes long (tests/emit/compiled, tests/published_models) before much that
# is quick.
test: $(INSTALLED)  ## the tests; some: ARGS="tests/step -k word"; with another torch: TORCH=2.15.0
	$(RUN) pytest $(or $(ARGS),--numprocesses 3 --dist loadfile --no-loadscope-reorder)

faults: $(INSTALLED)  ## mistakes seeded into the emitter, one at a time: is each one that changes a number caught?
	OMP_NUM_THREADS=1 $(VENV)/bin/python tests/seeded/run_faults.py $(ARGS)

lint: $(INSTALLED)  ## ruff (rules and format) and mypy
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: $(INSTALLED)  ## rewrite the sources as `make lint` wants them
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

models: $(INSTALLED)  ## which published models train: prints the tables of docs/reference/models.md
	OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/oracles $(RUN) published_models.run $(ARGS)

# glibc fills memory with garbage when it is handed out and when it comes back, small pieces as well.
fuzz: POISON := GLIBC_TUNABLES=glibc.malloc.tcache_count=0:glibc.malloc.perturb=128
fuzz: $(INSTALLED)  ## random programs against plain PyTorch: make fuzz ARGS="--seconds 600 --ranks 2"
	OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/oracles $(POISON) $(RUN) fuzz.run $(ARGS)

bench: $(INSTALLED)  ## step time and memory beside DDP and plain PyTorch; without ARGS also a short bench-overlap
	$(VENV)/bin/python benchmarks/run.py $(ARGS)
	$(if $(ARGS),,$(VENV)/bin/python benchmarks/overlap.py --short)

bench-overlap: $(INSTALLED)  ## communication behind computation: a simulated card, and a shaped network
	$(VENV)/bin/python benchmarks/overlap.py $(ARGS)

bench-compiled: $(INSTALLED)  ## compiled steps beside DistributedDataParallel with torch.compile
	$(VENV)/bin/python benchmarks/compiled.py $(ARGS)

docs: $(INSTALLED)  ## run the code in the documents and docstrings, all of it
	FDP_ALL_SAMPLES=1 $(RUN) pytest fdp tests/docs/test_docs.py tests/docs/test_links.py tests/docs/test_public_names.py tests/docs/test_site.py

# An environment of its own, so that nothing else waits for the generator. It finds torch and fdp in the other one.
$(SITE)/.installed: requirements-site.lock $(INSTALLED)
	@echo "Installing requirements-site.lock into $(SITE)."
	@test -x $(SITE)/bin/python || $(VENV)/bin/python -m venv $(SITE)
	@$(SITE)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --requirement requirements-site.lock
	@$(VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	  "$$($(SITE)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/beside.pth"
	@touch $@

site: $(SITE)/.installed  ## the documents as a web site in build/site; a broken link or a gap in a docstring fails
	$(SITE)/bin/python -m sphinx --quiet --fail-on-warning --keep-going -d build/doctrees -b html docs build/site
	@echo "Open build/site/index.html"

site-pictures: site  ## looks at build/site in a browser: is a page too wide? And takes pictures of its sections
	$(SITE)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --requirement .ci/requirements-browser.lock
	$(SITE)/bin/python .ci/site_pictures.py $(ARGS)

release-check: $(INSTALLED)  ## is this a release? builds it, installs that in a clean environment, trains with it
	$(VENV)/bin/python .ci/release_check.py $(ARGS)

clean:  ## remove the environments and everything that tools left behind
	rm -rf .venv .venv-torch-* .venv-site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
