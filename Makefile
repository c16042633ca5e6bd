# Two environments, made on first use: .venv to run the project, .venv-dev to test it. CONTRIBUTING.md says more.

# Another Python: make demo PYTHON=python3.12
python = $${PYTHON:-$$(sh requirements/find_python.sh)}
# A process a core; a file's tests stay together, since they share what they train.
PYTEST_PROCESSES ?= -n auto --dist loadfile --no-loadscope-reorder
PYTEST_ARGS ?=
# Without bytecode each start of Python takes three seconds more. Where none is wanted beside the sources it goes to build.
ifdef PYTHONDONTWRITEBYTECODE
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/bytecode
endif
locks := $(wildcard requirements/*.txt)
checked := bert_jax transformer_jax tests requirements launch .ci

.PHONY: help demo demo-zh demo-short translate-demo translate-demo-short test lint types format clean

help:
	@echo "make demo        prepare, pretrain, evaluate and export a small English BERT"
	@echo "make demo-zh     the same in Chinese"
	@echo "make demo-short  the English one for a few steps only, to see that all of it runs"
	@echo "make translate-demo        train a small English-German Transformer, translate, score, and take it to CTranslate2"
	@echo "make translate-demo-short  the same for a few steps only"
	@echo "make test        the tests; PYTEST_ARGS=\"-m 'not slow'\" for the fast ones"
	@echo "make lint        ruff"
	@echo "make types       mypy"
	@echo "make format      let ruff rewrite the files"
	@echo "make clean       remove what the demos and tools made, environments too"

demo: .venv/complete
	@PATH="$(CURDIR)/.venv/bin:$$PATH" sh launch/demo.sh launch/runs/demo_en.toml runs/demo_en

demo-zh: .venv/complete
	@PATH="$(CURDIR)/.venv/bin:$$PATH" sh launch/demo.sh launch/runs/demo_zh.toml runs/demo_zh

demo-short: .venv/complete
	@PATH="$(CURDIR)/.venv/bin:$$PATH" sh launch/demo.sh launch/runs/demo_en.toml runs/demo_short \
		--train.steps 30 --optimizer.warmup_steps 5

translate-demo: .venv/ct2
	@PATH="$(CURDIR)/.venv/bin:$$PATH" sh launch/translate_demo.sh launch/runs/demo_en_de.toml runs/demo_en_de

translate-demo-short: .venv/ct2
	@PATH="$(CURDIR)/.venv/bin:$$PATH" sh launch/translate_demo.sh launch/runs/demo_en_de.toml runs/demo_translate_short \
		--train.steps 30 --optimizer.warmup_steps 5 --train.eval_every 30 --checkpoint.every 6

test: .venv-dev/complete
	@.venv-dev/bin/python -m pytest $(PYTEST_PROCESSES) $(PYTEST_ARGS)

lint: .venv-dev/complete
	.venv-dev/bin/ruff check $(checked)
	.venv-dev/bin/ruff format --check $(checked)

types: .venv-dev/complete
	.venv-dev/bin/mypy
	.venv-dev/bin/mypy requirements/install.py

format: .venv-dev/complete
	.venv-dev/bin/ruff check --fix $(checked)
	.venv-dev/bin/ruff format $(checked)

.venv/complete: $(locks)
	@python=$(python) && "$$python" requirements/install.py .venv users && touch $@

# CTranslate2 runs the exported translation model; nothing else needs it. The interpreter is that of the environment.
.venv/ct2: .venv/complete
	@.venv/bin/python requirements/install.py .venv ct2 && touch $@

.venv-dev/complete: $(locks)
	@python=$(python) && "$$python" requirements/install.py .venv-dev development && touch $@

# The TPU compiler, with which plans are made and tested: 213 MB, for Linux on x86-64 alone. No TPU is needed.
.venv-dev/tpu: .venv-dev/complete
	@.venv-dev/bin/python requirements/install.py .venv-dev tpu && touch $@

clean:
	rm -rf .venv .venv-dev .venv-second .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	rm -rf runs/demo_* prepared/demo_* exports/demo_*
	find $(checked) -name __pycache__ -type d -prune -exec rm -rf {} +
