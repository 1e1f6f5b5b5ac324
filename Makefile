# make demo and make test set up everything themselves, in .venv.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Rounds are compiled where there is a C++ compiler: up to a minute the first time.
COMPILE := $(shell command -v "$${CXX:-g++}" > /dev/null && echo --compile)
INT8 := $(if $(filter x86_64,$(shell uname -m)),--draft-dtype int8)

.PHONY: demo test test-all lint types docs wheels clean

demo: $(VENV)/.installed
	$(RUN) -m specdec.generate --prompt "What are the benefits of regular exercise?" --max-new-tokens 120 --compare \
		--draft demo/mtp --token-map demo/frspec_4096.json --topk 1 --steps 4 --matmul-precision medium $(INT8) $(COMPILE)

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

wheels: $(VENV)/.installed
	$(RUN) scripts/gpu_wheels.py

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

$(VENV)/.tested: $(VENV)/.installed requirements-speculators.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-speculators.txt
	touch $@

$(VENV)/.documented: $(VENV)/.installed
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs,serve]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
