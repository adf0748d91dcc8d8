# Thin: every target calls `python -m harness`, which is where the behaviour and the exit status live.
#   make bench [MODEL= POLICY= ARMS= ENGINE= LAUNCH= IMAGE= URL= TRAFFIC= DATA= LIMIT= CAPTURE= OUT=] [ARGS="any Hydra override"]
SHELL := bash
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# One variable of the command line = one Hydra override of the same name in lower case; unset ones are left to recipes/.
override VARIABLES := MODEL POLICY ENGINE LAUNCH IMAGE URL TRAFFIC DATA LIMIT CAPTURE OUT
# Values reach the shell in single quotes and unexpanded: quotes, spaces and dollars in them are text.
quote = '$(subst ','\'',$(1))'
# ARMS=strict,asd is a list of Hydra's: arms=[strict,asd], with brackets or without.
LISTED = $(if $(value ARMS),$(call quote,arms=[$(subst ],,$(subst [,,$(value ARMS)))]))
OVERRIDES = $(LISTED) $(foreach v,$(VARIABLES),$(if $(value $(v)),$(call quote,$(shell echo $(v) | tr A-Z a-z)=$(value $(v)))))
HARNESS = $(BIN)/python -m harness

.DEFAULT_GOAL := help
.PHONY: help setup bench gate calibrate sweep replay tables tables-check site rejudge doctor images test check bench-reference bench-kernels bench-load lock clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## the virtual environment of this checkout, from requirements.lock

$(STAMP): requirements.lock pyproject.toml setup.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "specaccept: installing into $(VENV) (once; minutes on a first run)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

bench gate calibrate sweep replay tables tables-check site rejudge doctor: $(STAMP)
	@$(HARNESS) task=$(subst -,_,$@) $(OVERRIDES) $(ARGS)

bench: ## strict, asd-b0 and the policy (or ARMS=strict,asd,...) on one engine: TPS, accuracy, identity
gate: ## B=0 (or POLICY=asd-m0) against strict, complete token-id lists; python -m harness task=gate exits 0/1/2
calibrate: ## regret at first rejections -> a frozen quantile policy
sweep: ## a bench per point, resumable: make sweep ARGS="policy.budget=1,2,4 policy.max_mismatches=1,2"
replay: ## every policy on one capture: make replay CAPTURE=folder (recipes/task/replay.yaml)
tables: ## results/README.md, the plots and the page, again, from the records
tables-check: ## fails when a table or the page differs from its records or lacks provenance
site: ## results/site/index.html alone
rejudge: ## a sealed run judged again by today's code: make rejudge ARGS='run=FOLDER why="..."'
doctor: ## what this machine can run, row by row, and why not

images: $(STAMP) ## make images IMAGE=reference-cpu [ARGS="--base-image REFERENCE"]: recipes/docker-images
	@$(BIN)/python -m harness.launch.images build $(call quote,$(value IMAGE)) $(ARGS)

bench-reference: $(STAMP) ## the embedded engine beside transformers' own generate, one run
	@$(BIN)/python -m harness.engines.reference.benchmark $(ARGS)

bench-kernels: $(STAMP) ## acceptance kernels against the memory floor and what engines run today (needs a GPU)
	@$(BIN)/python -m adapters.rules.benchmark $(ARGS)

bench-load: $(STAMP) ## the client beside the truth of a mock engine, 1 to 256 requests in flight
	@$(BIN)/python -m harness.load $(ARGS)

test: $(STAMP) ## every test that needs no GPU
	@$(BIN)/python -m pytest -q -n 2 $(ARGS)

check: $(STAMP) ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

lock: ## requirements.lock again from pyproject.toml (a deliberate act: review the diff)
	@$(BIN)/python -m pip freeze --all --exclude-editable | grep -v '^pip==' | sed 's/+cpu$$//' > requirements.lock

clean: ## the virtual environment and caches; never results/
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
