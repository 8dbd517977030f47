# One command per chore; `make` alone lists them. Whatever needs Python runs in .venv/, which one stamp file keeps in
# line with requirements.lock. ARGS goes to the command, for example: make test ARGS=tests/unit/plan

PYTHON_IN_VENV := .venv/bin/python
STAMP := .venv/.stamp
ARGS ?=

# Without byte code every process would compile Megatron anew: 20 s instead of 8.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv quickstart test check bench docs lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

venv: $(STAMP) ## make .venv/, or bring it up to date; PYTHON=... names an interpreter

quickstart: $(STAMP) ## train a small GPT on this machine and watch it rebalance
	$(PYTHON_IN_VENV) examples/quickstart/run.py $(ARGS)

test: $(STAMP) ## run the whole test suite
	$(PYTHON_IN_VENV) -m pytest -q --durations=10 $(ARGS)

check: $(STAMP) ## formatting, lint, types, import contracts
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo

bench: $(STAMP) ## run the benchmarks
	$(PYTHON_IN_VENV) -m benchmarks $(ARGS)

docs: $(STAMP) ## rewrite the generated parts of the documentation
	$(PYTHON_IN_VENV) -m docs.generate

lock: ## resolve requirements.lock anew from pyproject.toml and constraints.txt; ARGS=--upgrade lifts all versions
	uv=$$(scripts/bootstrap --find-uv) && "$$uv" pip compile --quiet --universal --python-version 3.12 --generate-hashes \
		--custom-compile-command "make lock" --constraint constraints.txt --extra dev $(ARGS) \
		--output-file requirements.lock pyproject.toml

clean: ## remove what make made: environments, builds, caches
	rm -rf .venv .uv build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): requirements.lock pyproject.toml scripts/bootstrap
	@scripts/bootstrap
	@touch $@
