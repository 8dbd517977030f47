# One command per chore; `make` alone lists them. Whatever needs Python runs in .venv/, which one stamp file keeps in
# line with requirements.lock; .venv-*/ are its variants with another Megatron or more packages. ARGS goes to the command, for example: make test ARGS=tests/unit/plan

PYTHON_IN_VENV := .venv/bin/python
STAMP := .venv/.stamp
ARGS ?=

# The older releases under test: each has a lock file that says what its environment has in place of ours.
COMPAT := $(patsubst compat/megatron-core-%.lock,%,$(wildcard compat/megatron-core-*.lock))
COMPAT_STAMPS := $(COMPAT:%=.venv-%/.stamp)

# Without byte code every process would compile Megatron anew: 20 s instead of 8.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv quickstart examples test test-compat test-upstream check bench docs lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

venv: $(STAMP) ## make .venv/, or bring it up to date; PYTHON=... names an interpreter

quickstart: $(STAMP) ## train a small GPT on this machine and watch it rebalance
	$(PYTHON_IN_VENV) examples/quickstart/run.py $(ARGS)

examples: $(STAMP) ## train with each dynamic family on this machine, and draw what it did
	for name in freezing pruning moe; do $(PYTHON_IN_VENV) examples/dynamics/$$name.py $(ARGS) || exit; done

# Tests that start ranks come one at a time, since they time what they run; all others two at a time.
test: $(STAMP) ## run the whole test suite, or what ARGS says
ifeq ($(ARGS),)
	$(PYTHON_IN_VENV) -m pytest -q --durations=5 -n 2 tests --ignore=tests/distributed
	$(PYTHON_IN_VENV) -m pytest -q --durations=10 tests/distributed
else
	$(PYTHON_IN_VENV) -m pytest -q --durations=10 $(ARGS)
endif

test-compat: $(COMPAT_STAMPS) ## run the core of the test matrix and the quickstart on older releases of megatron-core
	set -e; for release in $(COMPAT); do .venv-$$release/bin/python -m compat.release $$release $(ARGS); done

test-upstream: $(if $(MEGATRON_LM),.venv-upstream/.stamp) ## run Megatron-LM's own tests with the plugin; MEGATRON_LM=... names a checkout
	@[ -n "$(MEGATRON_LM)" ] || { echo "test-upstream: error: MEGATRON_LM: expected the path of a Megatron-LM checkout" \
		"(make test-upstream MEGATRON_LM=/path/to/Megatron-LM), actual unset" >&2; exit 2; }
	.venv-upstream/bin/python -m compat.upstream "$(MEGATRON_LM)" $(ARGS)

check: $(STAMP) ## formatting, lint, types, import contracts
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo

bench: $(STAMP) ## run the benchmarks
	$(PYTHON_IN_VENV) -m benchmarks $(ARGS)

docs: $(STAMP) ## rewrite the generated parts of the documentation
	$(PYTHON_IN_VENV) -m docs.generate

lock: ## resolve the lock files anew from pyproject.toml, constraints.txt and compat/upstream.in; ARGS=--upgrade lifts all versions
	uv=$$(scripts/bootstrap --find-uv) && "$$uv" pip compile --quiet --universal --python-version 3.12 --generate-hashes \
		--custom-compile-command "make lock" --constraint constraints.txt --extra dev $(ARGS) \
		--output-file requirements.lock pyproject.toml && "$$uv" pip compile --quiet --universal --python-version 3.12 \
		--generate-hashes --custom-compile-command "make lock" --constraint requirements.lock $(ARGS) \
		--output-file compat/upstream.lock compat/upstream.in

clean: ## remove what make made: environments, builds, caches
	rm -rf .venv .venv-* .uv build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): requirements.lock pyproject.toml scripts/bootstrap
	@scripts/bootstrap
	@touch $@

$(COMPAT_STAMPS): .venv-%/.stamp: compat/megatron-core-%.lock requirements.lock pyproject.toml scripts/bootstrap
	@scripts/bootstrap --beside $< $(@D)
	@touch $@

.venv-upstream/.stamp: compat/upstream.lock requirements.lock pyproject.toml scripts/bootstrap
	@scripts/bootstrap --beside $< $(@D)
	@touch $@
