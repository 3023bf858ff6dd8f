# Everything needs only Python ≥ 3.11, make and a package index: the first target that runs makes the venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo docs paper-smoke test test-slow test-crash test-flower test-nvflare test-kernels test-track gpu test-data lint coverage package bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Fairwind needs Python 3.11 or newer"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup  ## the comparison on Synthetic: five algorithms, three seeds, 1000 rounds
	$(BIN)/fairwind compare synthetic

SMOKE := runs/paper-smoke

paper-smoke: setup  ## every study of the paper, a few rounds each, on made-up files in the layouts of the real ones
	rm -rf $(SMOKE)
	$(BIN)/python tests/layouts.py $(SMOKE)/files
	$(BIN)/fairwind paper all --scale smoke --device cpu --data-dir $(SMOKE)/files --cache $(SMOKE)/cache --out $(SMOKE)

$(VENV)/.flower: $(VENV)/.ready  # on top, so that the demo does not pay for it
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[flower,privacy,onnx]'
	touch $@

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

docs: $(VENV)/.docs  ## the documentation site, into site/: open site/index.html
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs site

test: setup $(VENV)/.flower $(VENV)/.docs
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

test-slow: setup
	$(BIN)/python -m pytest -q -m slow

test-crash: setup  ## kills at every operation on the file system, damage to every file of a run directory, a study and compiled code
	$(BIN)/python -m pytest -q -n 2 -m crash

test-flower: setup $(VENV)/.flower  ## a real federation: SuperLink and SuperNodes with TLS and authentication, kills
	$(BIN)/python -m pytest -q -m flower

$(VENV)/.track: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[track]'
	touch $@

test-track: setup $(VENV)/.track  ## MLflow and Weights & Biases, offline, read back
	$(BIN)/python -m pytest -q -m track tests/tracking/test_tracking.py

NVFLARE := .venvs/nvflare

$(NVFLARE)/.ready: pyproject.toml constraints.txt  # of its own: NVFLARE pins exact versions of what it needs
	$(PYTHON) -m venv $(NVFLARE)
	$(NVFLARE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(NVFLARE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[nvflare,privacy]' pytest
	touch $@

test-nvflare: $(NVFLARE)/.ready  ## the algorithms on NVFLARE, in its simulator
	$(NVFLARE)/bin/python -m pytest -q -m nvflare tests/exchange/test_nvflare.py

TRITON := .venvs/triton

$(TRITON): $(VENV)/.ready  # with a NumPy that Triton's interpreter runs on
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TRITON) triton==3.6.0 numpy==2.2.6

test-kernels: setup $(TRITON)  ## the GPU's kernels, interpreted on a CPU
	PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -W ignore::DeprecationWarning tests/layers/test_kernels.py

gpu: $(if $(GPU_PYTHON),,setup)  ## on a machine with a GPU: the engine's tests there, and timings beside the recorded ones
	$(or $(GPU_PYTHON),$(BIN)/python) benchmarks/gpu.py

test-data: setup  ## further tests on real files: make test-data DATA=folder with femnist/, cifar10/, sent140/, glove/
	FAIRWIND_DATA=$(abspath $(DATA)) $(BIN)/python -m pytest -q -rA tests/data/test_real_data.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

coverage: setup $(VENV)/.flower  ## which lines of src the tests run, commands and worker processes included
	rm -rf htmlcov .coverage .coverage.*
	$(BIN)/python -m coverage run -m pytest -q
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet
	$(BIN)/python -m coverage report --skip-covered --sort=cover

package: setup  ## dist/: the wheel and the source distribution
	rm -rf dist
	$(BIN)/python -m build --quiet

bench: setup  ## the engine beside a bare loop; benchmarks/ has more: busy, peers, scale, precision
	$(BIN)/python benchmarks/engine.py

clean:
	rm -rf $(VENV) $(NVFLARE) site .mypy_cache .ruff_cache .pytest_cache
