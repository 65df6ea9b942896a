# Every target does its own set-up; a machine needs Python 3.11 or later and make.
#
#   PYTHON=python3.12     the interpreter that creates .venv
#   TORCH=torch==2.11.0   the torch to install: a version, a URL or a wheel
#   PIP_ARGS=...          options for pip; pip's own variables (PIP_INDEX_URL, ...) work as well
#   ARGS=...              options for the command of `demo`, `compile`, `compiled`, `engine-proof` and pytest
#   WORKERS=2             test processes

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH ?= torch==2.13.0
WORKERS ?= 2
PROOF_PYTHON ?= python3
OUT ?= build/gpu-proof
BIN := .venv/bin
RUN := .venv/.installed-run
DEV := .venv/.installed-dev

# Two test processes with a thread each: torch would otherwise start a thread per core in both.
THREADS ?= 1
# Compiled Python is kept, whatever the environment says: without it every process compiles the tests and the library anew.
TEST_ENV := OMP_NUM_THREADS=$(THREADS) MKL_NUM_THREADS=$(THREADS) PYTHONDONTWRITEBYTECODE=

.DEFAULT_GOAL := help
.PHONY: help install libraries demo test lint format compile compile-matrix compiled docs wheel proof mutate soak newest engine-proof peer-proof gpu-proof clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' Makefile

# What the programs need. torch goes first and by its exact version: with a range pip may prefer a newer build of several gigabytes
# to one at hand.
$(RUN): pyproject.toml tools/pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "memstate needs Python 3.11 or later: install it, or name it with PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt "$(TORCH)"
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e ".[cli]" -e ./tools
	@touch $@

# Libraries whose Triton kernels tests run on slots: without their CUDA extensions, and without what else they require.
PEERS := mamba-ssm causal-conv1d
PEERS_ENV := MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE

# Debian's names of what Mooncake's client links to.
LIBRARIES = $(shell sed -n 's/^LIBRARIES = (\(.*\)).*/\1/p' memstate/tiers/stores/mooncake_client.py | tr -d '",')

# What tests and linters need besides. Mooncake goes last and may fail: not every platform has it, and it links to libraries that
# only a system's packages bring.
$(DEV): $(RUN)
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e ".[cli,test,proof,dev,docs]" -e ./tools
	@$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e ".[mooncake]" || true
	@$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt setuptools wheel && \
		$(PEERS_ENV) $(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt --no-build-isolation --no-deps $(PEERS) || \
		echo "$(PEERS) cannot be installed here, their tests are skipped"
	@touch $@

install: $(DEV) ## create .venv and install memstate, its tools, and what tests and linters need
	@error=$$($(BIN)/python -c "import mooncake.store" 2>&1) || { \
		echo "Mooncake cannot be used here, its tests are skipped: $$(echo "$$error" | tail -n 1)"; \
		missing=$$(for each in $(LIBRARIES); do dpkg -s $$each >/dev/null 2>&1 || printf ' %s' $$each; done); \
		test -z "$$missing" || echo "It links to libraries that are not there. As root: apt-get install$$missing"; }
	@echo "memstate is installed in .venv"

libraries: ## list the Debian packages without which Mooncake's tests are skipped
	@echo $(LIBRARIES)

demo: $(RUN) ## run the decode loop and compare it with an uncached run
	$(BIN)/memstate demo $(ARGS)

# Beside the tests, so that neither waits for the other.
test: $(DEV) ## run the tests and a sample of the long ones; beside them check format, lints, types and spelling
	@mkdir -p build; { $(MAKE) lint; echo $$? > build/lint.status; } > build/lint.log 2>&1 & \
	$(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS); tests=$$?; \
	wait; cat build/lint.log; exit $$((tests + $$(cat build/lint.status)))

lint: $(DEV) ## check format, lints, types and spelling
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/codespell

format: $(DEV) ## format, and fix what the linter can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

compile: $(RUN) ## compile every kernel for every target, without a GPU
	$(BIN)/memstate compile $(ARGS)

compile-matrix: $(DEV) ## compile with the oldest, the installed and the newest Triton, compare with tests/proof/compiled
	$(BIN)/python -m tests.proof.compile_matrix $(ARGS)

compiled: $(DEV) ## run the tests of sweeps and of kernels, and random programs, on what Triton compiles, without a GPU; 8 CPU minutes
	MEMSTATE_PROOF=1 $(TEST_ENV) $(BIN)/python -m pytest -q tests/tuning/test_compiling.py
	$(TEST_ENV) $(BIN)/python -m tests.proof.compiled_run $(or $(ARGS),installed) --workers $(WORKERS)

docs: $(DEV) ## write the pages that are made from the code, build the site in build/site, test site and notebooks; a warning is an error
	$(BIN)/python docs/site/strategies.py > docs/strategies.md.new && mv docs/strategies.md.new docs/strategies.md
	$(BIN)/python docs/site/models.py
	$(BIN)/python -m memstate.metrics.dashboard > docs/grafana.json.new && mv docs/grafana.json.new docs/grafana.json
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	MEMSTATE_PROOF=1 $(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS) tests/test_site.py tests/viz/test_notebooks.py

wheel: $(DEV) ## build sdist and wheels in dist, test them, install the wheel in an empty environment, run the README's example there
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m build --no-isolation --wheel --outdir dist tools
	MEMSTATE_PROOF=1 $(TEST_ENV) $(BIN)/python -m pytest -q tests/test_wheel.py tests/proof/test_installed.py

proof: $(DEV) ## which cases of make test are dear, then every case of every test, 40 schedules for each kernel, exceptions in every call, every mutant, every schedule of calls, three Tritons; 2 hours
	MEMSTATE_DEAR=1 $(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal
	MEMSTATE_PROOF=1 $(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --ignore tests/proof/test_injection.py $(ARGS)
	MEMSTATE_PROOF=1 $(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal tests/proof/test_injection.py
	$(TEST_ENV) $(BIN)/python -m tests.proof.exhaustive --seconds 300 --workers $(WORKERS)
	$(TEST_ENV) $(BIN)/python -m tests.proof.compiled_run --whole --workers $(WORKERS)

mutate: $(DEV) ## let mutmut change the tracking rules and the reference kernels, and list what no test notices; half an hour
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e ".[mutate]"
	rm -rf mutants; $(TEST_ENV) $(BIN)/mutmut run --max-children $(WORKERS)
	$(BIN)/mutmut results

soak: $(DEV) ## a million random operations on the reference, 20 000 on the interpreter; about half an hour
	$(TEST_ENV) $(BIN)/python -m tests.proof.stateful --backend reference --operations 1000000 --workers $(WORKERS) $(ARGS)
	$(TEST_ENV) $(BIN)/python -m tests.proof.stateful --backend interpreter --operations 20000 --workers $(WORKERS) $(ARGS)

engine-proof: ## build environments of vLLM and SGLang in build/engines, serve tiny models on a CPU, compare with runs without a cache; an hour
	@$(PYTHON) -m tests.proof.engines $(ARGS)

newest: $(DEV) ## run the adapters' tests beside the newest releases, in build/newest; 1 if a test is lost that passes on the pinned ones
	@$(TEST_ENV) $(BIN)/python -m tests.proof.newest --workers $(WORKERS) $(ARGS)

peer-proof: $(DEV) ## run tests that others wrote with memstate inside; 1 if other tests are lost than in tests/proof/peers/lost.txt
	@$(BIN)/python -m tests.proof.peers --workers $(WORKERS) $(ARGS)

# Installs nothing: the machine's own Python. Without make: python3 -m tests.proof.gpu_proof --out DIR
gpu-proof: ## prove on a GPU, with the machine's own Python, what only a GPU shows; results in OUT=dir
	@$(PROOF_PYTHON) -m tests.proof.gpu_proof --out "$(OUT)" $(ARGS)

clean: ## remove .venv and everything built
	rm -rf .venv build dist mutants .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
