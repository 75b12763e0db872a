# make reproduce   set up, run the suites of config/config.yaml, print which claims hold
# make test        set up, run the tests
# make test-all    as test, with the cases that it leaves out, 1,300 random programs, 200 faults and fuzzing: hours;
#                  goes on where it was cut (build/all)
# make campaign    the shipped measurements of this machine again, at one commit: hours, in as many parts as one likes;
#                  each part that ended is committed (docs/testing.md); OPTIONS=--list says what is left
# make figures     redraw every table, figure and claim, and the page, from the shipped measurements; no torch
# make smoke       as reproduce, on nine small runs (what it costs: docs/benchmarks.md)
# make faults      200 faults of all kinds in real runs: build/faults (docs/reliability.md); faults of disks and
#                  links need root
# make gpu         on a machine with a GPU, in a copy of this tree: all that needs one, in build/gpu (docs/kernels.md)
# make check       lint, format, types, the order of imports
# make install     only the set-up
# make dist        sdist and wheel of what is committed, checked as for PyPI: build/dist
# make lock        envs/lock.txt anew, after a change of envs/constraints.txt
# make site        documents and reference of the library as pages to read without a network: build/site/index.html
# make box         a Slurm cluster in a box that stays up until `lowband box down` (root)
# make box-deps    Debian's packages for a box (root; installs outside this folder) and for further tests:
#                  a C compiler (an ordinary user's box), SimGrid (collectives), SIMDe (AVX-512 without a processor
#                  that has it)
# make page-deps   a browser, in which a test opens the page, and LaTeX, with which one sets the appendices (root;
#                  installs outside this folder)
#
# PYTHON=python3.12 make install   another interpreter (3.11 or later)
# CORES=8 make reproduce, make test   more cores for the workflow's light jobs, and for the tests

PYTHON ?= python3
CORES ?= 2
VENV := .venv
BIN := $(VENV)/bin
REPORT := .venv-report
POLICY := /usr/sbin/policy-rc.d
APT_INSTALL := DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends
# A bar with the time left; what Snakemake prints is in logs/<results>/snakemake.log.
WATCHED = $(BIN)/lowband watch --results $(1) --
SNAKEMAKE := $(BIN)/snakemake --cores $(CORES) --rerun-incomplete --rerun-triggers mtime input params

# What pip did not compile (.ci/run) Python compiles once, and keeps: some hundred interpreters import it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install reproduce figures smoke test test-all campaign faults gpu check dist lock site format clean box box-deps page-deps

install: $(VENV)/.installed

# Set up again only when the packages to be installed have changed.
$(VENV)/.installed: pyproject.toml envs/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: PYTHON=... make install")'
	$(PYTHON) -m venv $(VENV)
	# torch first, by its exact version, so that pip keeps a build made for the machine (CPU, CUDA, ROCm)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0 -c envs/constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c envs/constraints.txt -e '.[train,peers,report,workflow,completion,site,dev]'
	touch $@

reproduce: install
	$(call WATCHED,local) $(SNAKEMAKE) --config scope=all
	@$(BIN)/lowband summary --tables results/local/tables --figures figures/local

# A separate environment: without torch it takes a fraction of the time and space.
$(REPORT)/.installed: pyproject.toml envs/constraints.txt
	$(PYTHON) -m venv $(REPORT)
	$(REPORT)/bin/pip install --quiet --disable-pip-version-check -c envs/constraints.txt -e '.[report,workflow]'
	touch $@

figures: $(REPORT)/.installed
	$(REPORT)/bin/lowband watch --results shipped -- $(REPORT)/bin/snakemake --cores $(CORES) \
		--config measurements=shipped results=shipped
	@$(REPORT)/bin/lowband summary --tables results/shipped/tables --figures figures/shipped

smoke: install
	$(call WATCHED,smoke) $(SNAKEMAKE) --config 'suites=[smoke]' results=smoke
	@$(BIN)/lowband summary --tables results/smoke/tables --figures figures/smoke

# Three parts, by the tests' marks (docs/testing.md): what waits for Slurm or Snakemake most of its time in processes
# beside those that compute; then, beside nothing else, what times real messages: its computation is paced, so that
# its three files share the cores, and a test that fails is tried once more, alone.
PYTEST := $(BIN)/python -m pytest -p no:cacheprovider $(OPTIONS)
MARKED = $$(grep -rl --include='test_*.py' 'mark\.$(1)\b' tests)

test: install
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "waits and not timed" $(call MARKED,waits) & waits=$$!; \
	$(PYTEST) -n $(CORES) --dist loadfile --no-loadscope-reorder -m "not waits and not timed"; others=$$?; \
	wait $$waits && exit $$others
	$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder -m timed $(call MARKED,timed)

test-all: install
	$(BIN)/python -m tests.all --out build/all

campaign: install
	$(BIN)/python -m tests.campaign $(OPTIONS)

faults: install
	$(BIN)/python -m tests.faults --cases 200 --out build/faults

gpu: # without a set-up: the machine's own torch and Triton are what is measured
	PYTHONPATH=src $(PYTHON) -m lowband gpu --out build/gpu $(OPTIONS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint
	$(BIN)/mypy
	$(BIN)/lint-imports

# From the commit and not from here: setuptools would take along what an earlier build left behind.
dist:
	rm -rf build/dist && mkdir -p build/dist/tree
	$(PYTHON) -m venv build/dist/venv
	build/dist/venv/bin/pip install --quiet --disable-pip-version-check build==1.6.1 twine==7.0.0
	git archive HEAD pyproject.toml README.md LICENSE src config slurm | tar -x -C build/dist/tree
	build/dist/venv/bin/python -m build --outdir build/dist build/dist/tree > build/dist/build.log
	build/dist/venv/bin/twine check --strict build/dist/lowband-*
	rm -rf build/dist/tree build/dist/venv

site: install
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html --conf-dir docs/site . build/site
	@echo build/site/index.html

box: install
	$(BIN)/lowband box up

box-deps: # packages must not start their daemons, because the box starts its own
	apt-get update -qq
	if ! test -e $(POLICY); then trap 'rm -f $(POLICY)' EXIT; printf '#!/bin/sh\nexit 101\n' > $(POLICY); chmod +x $(POLICY); fi; \
	$(APT_INSTALL) slurmctld slurmd slurm-client munge iproute2
	$(APT_INSTALL) gcc libc6-dev python3-simgrid libsimde-dev || echo "some packages for further tests are not available"

page-deps: # for the tests of the page and of the appendices (Debian's packages, root)
	apt-get update -qq
	$(APT_INSTALL) chromium texlive-latex-recommended lmodern poppler-utils

lock: # envs/lock.txt: the versions of constraints.txt with hashes, of all but torch (pip install uv==0.13.9)
	mkdir -p build && echo "torch; python_version < '3'" > build/no-torch.txt
	uv pip compile pyproject.toml --extra train --extra report --extra workflow --constraints envs/constraints.txt \
	  --overrides build/no-torch.txt --generate-hashes --python-version 3.11 --python-platform x86_64-unknown-linux-gnu \
	  --no-annotate --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
	  --output-file envs/lock.txt --quiet

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile workflow

clean: # removes files that the workflow wrote; the set-up and the shipped files stay
	rm -rf .snakemake logs results/local results/smoke results/shipped figures/local figures/smoke figures/shipped
