# Each target sets up what it needs in $(VENV), from constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BACKENDS ?= jax torch tensorflow
GPU_PYTHON ?= $(PYTHON)
# Further arguments for pytest: make test ARGS="tests/test_values.py -x"
ARGS ?=

# XLA sizes the thread pool that runs its CPU devices by NPROC, else by the number of
# cores. On two cores the pool can be too small for several logical devices that wait
# for each other: the process then aborts with "rendezvous ... termination timeout".
export NPROC ?= 8
export TF_CPP_MIN_LOG_LEVEL ?= 2
export BACKENDS

STAMP := $(VENV)/.installed

.PHONY: help demo test test-full test-launchers lint ruff format pyright imports private writing docs \
    clean equality conformance peer ports compat bench gpu pages drop-hooks faults pictures \
    gallery notebooks wheel

help:
	@echo "make demo      train on two devices and on one, on every backend"
	@echo "make test      run every behaviour once, quick ones on every backend"
	@echo "make test-full  run the rest: long tables, combinations and rare faults"
	@echo "make lint      ruff, pyright, the import rules, and names in the docs"
	@echo "make docs      build the documentation into site/"
	@echo "make bench     how fast it is beside its peers, on every backend"
	@echo "make pages     write docs/patches.md, errors.md and tf_distribute.md from the code"
	@echo
	@echo "make test-launchers  start programs by torchrun, MPI, Slurm and Ray"
	@echo "make equality  the table of what equals one device, on every backend"
	@echo "make conformance  programs on us and on peers; writes docs/conformance.md"
	@echo "make peer      Keras's own trainer tests inside a scope, on every backend"
	@echo "make ports     programs that others wrote; writes docs/ports.md"
	@echo "make faults    100 faults in workers, at random; writes docs/faults.md"
	@echo "make compat    the test suite on other versions of Python, Keras, backends"
	@echo "make gpu       all that a machine with GPUs can show; GPU_PYTHON has the engines"
	@echo "make drop-hooks  a test must fail without each of the patches"
	@echo "make gallery   run the examples on every backend, and draw what came out"
	@echo "make notebooks  run the notebooks, and record what came out"
	@echo "make pictures  draw what the documentation shows, docs/images"
	@echo "make wheel     build archive and wheel, and try this in an empty environment"
	@echo "make clean     remove the virtual environment and what was built"

demo: $(STAMP)
	@set -e; for backend in $(BACKENDS); do \
	    echo "=== $$backend ==="; \
	    KERAS_BACKEND=$$backend $(VENV)/bin/python examples/fit_digits.py; \
	done

test: $(STAMP)
	@$(VENV)/bin/python tools/run_tests.py $(ARGS)

test-full: $(STAMP)
	@$(VENV)/bin/python tools/run_tests.py --full $(ARGS)

# Half an hour. Installs Open MPI, MPICH and Slurm by apt-get, Ray into build/.
test-launchers: $(STAMP)
	@$(VENV)/bin/python -m tools.install_launchers
	@status=0; for backend in $(BACKENDS); do \
	    KERAS_BACKEND=$$backend $(VENV)/bin/python -m pytest -q tests/launchers $(ARGS) \
	        || status=1; \
	done; exit $$status

equality: $(STAMP)
	@set -e; for backend in $(BACKENDS); do \
	    KERAS_BACKEND=$$backend $(VENV)/bin/python \
	        -m conformance.equality --native; \
	done

# Three quarters of an hour. ARGS="--system accelerate --only batch_norm" runs a part.
conformance: $(STAMP)
	@$(VENV)/bin/python -m conformance $(ARGS)

peer: $(STAMP)
	@$(VENV)/bin/python tools/keras_trainer_tests.py $(ARGS)

# Packages of clients (keras-hub, keras-tuner ...) are tested where they are installed.
ports: $(STAMP)
	@$(VENV)/bin/python tools/ports.py $(ARGS)

# Some ten minutes. BACKENDS=torch, COUNT=20 and SEED=1 in front pick what is planted.
faults: $(STAMP)
	@$(VENV)/bin/python tools/faults.py $(ARGS)

# Some 15 minutes for each version. VERSIONS="keras-nightly python-3.13" picks some.
compat: $(STAMP)
	@$(VENV)/bin/python tools/versions.py $(ARGS)

bench: $(STAMP)
	@$(VENV)/bin/python -m benchmarks --aims --json benchmarks.json $(ARGS)

# $(VENV) has engines for CPUs. ARGS=--rehearse tries it all on these.
gpu:
	@$(GPU_PYTHON) -m benchmarks.gpu --json gpu.json --table gpu.md $(ARGS)

# Six targets, so that make -k runs the others when one fails.
lint: ruff format pyright imports private writing

ruff: $(STAMP)
	$(VENV)/bin/ruff check .

format: $(STAMP)
	$(VENV)/bin/ruff format --check .

pyright: $(STAMP)
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

imports: $(STAMP)
	$(VENV)/bin/lint-imports --no-logo

private: $(STAMP)
	$(VENV)/bin/python tools/private_names.py

writing: $(STAMP)
	KERAS_BACKEND=torch $(VENV)/bin/python tools/check_docs.py

# After a patch or a message was changed. ARGS=errors writes one page; ARGS="record names"
# records the names of another TensorFlow first.
pages: $(STAMP)
	@KERAS_BACKEND=tensorflow $(VENV)/bin/python tools/pages.py $(ARGS)

# Minutes. ARGS="Variable.assign" picks some.
drop-hooks: $(STAMP)
	@$(VENV)/bin/python tools/drop_hooks.py $(ARGS)

# Checks the links and the anchors of all pages, too.
docs: $(STAMP)
	$(VENV)/bin/mkdocs build --strict

# Builds the source archive, and of that the wheel; installs it into an empty environment,
# and has it train there: by `doctor`, and by the program of the quickstart.
wheel:
	rm -rf dist build
	$(PYTHON) -m venv build/tools
	build/tools/bin/python -m pip install -qq build==1.3.0
	build/tools/bin/python -m build -o dist .
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install -qq -c constraints.txt \
	    "$$(ls $(CURDIR)/dist/*.whl)[torch]" scikit-learn
	awk '/^```python/ {on = 1; next} on && /^```/ {exit} on' docs/quickstart.md \
	    > build/train.py
	cd build && KERAS_BACKEND=torch wheel/bin/keras-strategy doctor
	cd build && KERAS_BACKEND=torch wheel/bin/keras-strategy run --workers 2 train.py

# Minutes: every example on every backend. ARGS="vae_digits" picks some.
gallery: $(STAMP)
	@$(VENV)/bin/python tools/gallery.py $(ARGS)
	@$(VENV)/bin/python tools/pictures.py

# Minutes. ARGS="vae_digits" picks some.
notebooks: $(STAMP)
	@$(VENV)/bin/python tools/notebooks.py $(ARGS)

# After tools/pictures.py was changed.
pictures: $(STAMP)
	@$(VENV)/bin/python tools/pictures.py

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (some minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install -qq -c constraints.txt -e '.[dev,docs]'
	@touch $@
