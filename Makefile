# Two commands are enough to use the project: make demo, make test. Each sets up what it needs.
#
# Variables, given on the command line:
#   VENV          folder of the environment
#   CONSTRAINTS   exact versions to install; use a VENV of its own for each file
#   EXTRA         more of pyproject.toml's extras: EXTRA=cuda13 for an NVIDIA GPU
#   PYTHON        interpreter that makes the environment (default: .ci/find_python.sh looks)
#   DEMO_ARGS     flags of the demonstration
#   CHAT_ARGS     flags of the chat, instead of the question about France
#   CACHE         folder of models that are not in the repository
#   PYTEST_ARGS   arguments of pytest
VENV := .venv
CONSTRAINTS := constraints/jax-0.11.2.txt
EXTRA :=
PYTHON :=
DEMO_ARGS :=
CHAT_ARGS := --prompt "What is the capital of France?" --temperature 0 --num_samples 1
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/codec_jax
PYTEST_ARGS := -n 2 --dist loadfile

IN_VENV := $(VENV)/bin/python
comma := ,
CHAT_MODEL := $(CACHE)/SmolLM2-135M-Instruct.Q4_1.gguf
PINS := $(notdir $(basename $(CONSTRAINTS)))$(addprefix -,$(subst $(comma),-,$(EXTRA)))
# A stamp stands only in a finished environment and names the pins that it holds.
CORE := $(VENV)/core-$(PINS).stamp
DEV := $(VENV)/dev-$(PINS).stamp
# Decoders that others wrote, and nothing of this project depends on, have an environment apart.
DOORS_VENV := .venv-doors
DOORS := $(DOORS_VENV)/doors.stamp

.DEFAULT_GOAL := help
.PHONY: help setup demo chat test test-model test-doors format-check lint format types check clean

# An environment whose interpreter has gone is made again.
ifneq ($(shell $(IN_VENV) -c 'print("runs")' 2>/dev/null),runs)
.PHONY: $(CORE)
endif
ifneq ($(shell $(DOORS_VENV)/bin/python -c 'print("runs")' 2>/dev/null),runs)
.PHONY: $(DOORS)
endif

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile | awk -F': ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(DEV)  ## make the environment, with the tools of a developer

demo: $(CORE)  ## generate text with a small model, several samples of one prompt
	@$(IN_VENV) -m experiments.generate $(DEMO_ARGS)

chat: $(DEV) $(CHAT_MODEL)  ## fetch SmolLM2-135M-Instruct (93 MB, once) and ask it a question
	@$(IN_VENV) -m experiments.generate --model "$(CHAT_MODEL)" --chat $(CHAT_ARGS)

test: $(DEV)  ## run the tests
	$(IN_VENV) -m pytest $(PYTEST_ARGS)

test-model: $(DEV) $(CHAT_MODEL)  ## run the tests of the model that chat fetches
	CODEC_JAX_CHAT_MODEL="$(CHAT_MODEL)" $(IN_VENV) -m pytest -m model

test-doors: $(DOORS)  ## run the tests inside decoders of other packages, in an environment apart
	$(DOORS_VENV)/bin/python -m pytest $(PYTEST_ARGS) tests/doors

format-check: $(DEV)  ## fail if a file is not formatted
	$(IN_VENV) -m ruff format --check .

lint: $(DEV)  ## look for mistakes
	$(IN_VENV) -m ruff check .

format: $(DEV)  ## format the files and repair what the linter can
	$(IN_VENV) -m ruff format .
	$(IN_VENV) -m ruff check --fix .

types: $(DEV)  ## check the types
	$(IN_VENV) -m basedpyright --pythonpath $(IN_VENV)

check: format-check lint types test  ## all that CI runs

$(CHAT_MODEL): | $(DEV)
	@sh .ci/fetch_chat_model.sh $(IN_VENV) "$@"

clean:  ## remove the environment and what tools left behind
	rm -rf $(VENV) $(DOORS_VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call install,REQUIREMENT): the stamps are away while pip works, so an interrupted run shows.
define install
	@rm -f $(VENV)/*.stamp
	@echo "Installing $(1) with $(CONSTRAINTS) into $(VENV); the first time takes a minute or two."
	@$(IN_VENV) -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) -e '$(1)'
endef

$(CORE): pyproject.toml $(CONSTRAINTS)
	@if ! ls $(VENV)/*.stamp >/dev/null 2>&1 || ! $(IN_VENV) -m pip --version >/dev/null 2>&1; then \
		python=$$(sh .ci/find_python.sh $(if $(PYTHON),"$(PYTHON)")) && "$$python" -m venv --clear $(VENV); \
	fi
	$(call install,.$(addsuffix ],$(addprefix [,$(EXTRA))))
	@touch $@

$(DEV): $(CORE)
	$(call install,.[dev$(addprefix $(comma),$(EXTRA))])
	@touch $(CORE) $@

$(DOORS): pyproject.toml constraints-doors.txt
	@echo "Installing constraints-doors.txt into $(DOORS_VENV); the first time takes some minutes."
	@python=$$(sh .ci/find_python.sh $(if $(PYTHON),"$(PYTHON)")) && "$$python" -m venv --clear $(DOORS_VENV)
	@$(DOORS_VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps \
		-r constraints-doors.txt -e .
	@touch $@
