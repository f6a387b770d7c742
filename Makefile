# SPDX-License-Identifier: Apache-2.0
# The habits of this repository. Each one first makes .venv when it is missing or older than pyproject.toml.
.DEFAULT_GOAL := help
.PHONY: help setup demo chat serve test test-gpu check format bench bench-runtime load clean

TOKENROUTER := .venv/bin/tokenrouter

help: ## list these habits
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo; echo "  ARGS=... is handed on: make demo ARGS='--question \"Write a binary search\"'"

setup: ## make .venv with the tokenrouter command in it (PYTHON=... names the interpreter of a new one)
	@scripts/setup

demo: setup ## fetch the models, serve them, watch two of them write one answer
	@$(TOKENROUTER) demo $(ARGS)

chat: setup ## talk with the models
	@$(TOKENROUTER) chat $(ARGS)

serve: setup ## serve a deployment: make serve ARGS=deployment.yaml
	@$(TOKENROUTER) serve $(ARGS)

test: ## all checks and all tests, as CI runs them
	@scripts/test

test-gpu: $(if $(TEST_PYTHON),,setup) ## conformance on a real TensorRT-LLM: make test-gpu DEPLOYMENT=deployment.yaml (docs/tensorrt_llm.md)
	@test -f "$(DEPLOYMENT)" || { echo "DEPLOYMENT: got '$(DEPLOYMENT)'; must be a deployment file with two stock models"; exit 2; }
	@TOKENROUTER_STOCK_DEPLOYMENT="$(abspath $(DEPLOYMENT))" $(or $(TEST_PYTHON),.venv/bin/python) -m pytest -W default \
	  tests/triton/test_tensorrtllm.py $(ARGS)

check: ## style and types only
	@scripts/check

format: setup ## put the code in order
	@.venv/bin/ruff check --fix --quiet . && .venv/bin/ruff format .

bench: setup ## measure what the runtime costs beside the engine
	@.venv/bin/python perf/bench.py $(ARGS)

bench-runtime: setup ## measure the runtime on a real Triton against the Markov model (under 10 minutes)
	@.venv/bin/python -m perf.runtime $(ARGS)

load: setup ## put load on a running server with Locust: make load ARGS='-u 8 -t 60s --prompts chat'
	@.venv/bin/locust -f perf/locustfile.py GrpcUser --headless $(ARGS)

clean: ## remove .venv and the caches of the tools (fetched weights stay in the user's cache)
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
