# Everything runs from .venv, which the first target that needs it makes from the lock files.
PYTHON ?= python3
PORT ?= 8501
OPEN ?= 1
VENV := .venv
RUN := $(VENV)/bin
PIP := $(RUN)/python -m pip install --quiet --disable-pip-version-check
TESTS := $(RUN)/pytest --numprocesses logical --maxprocesses 8 --dist worksteal

# What an x86 processor without AVX-512, and one without AVX2, would compute with.
AVX2 := OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
SSE4 := OPENBLAS_CORETYPE=Nehalem ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 NPY_DISABLE_CPU_FEATURES=X86_V3

.PHONY: demo test check browser portable clean

demo: $(VENV)/.installed
	$(RUN)/python -m probes --ckpt checkpoints/demo-smelt --against checkpoints/demo-baseline
ifneq ($(OPEN),0)
	@echo "dashboard: http://localhost:$(PORT)"
	$(RUN)/streamlit run app/main.py --server.port $(PORT)
endif

test: check portable browser

check: $(VENV)/.tested
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports
	$(TESTS) -m "not browser" --torch without
	$(TESTS) -m "not browser" --torch with

portable: $(VENV)/.tested
ifeq ($(shell uname -m),x86_64)
	$(AVX2) $(TESTS) -m portable
	$(SSE4) $(TESTS) -m portable
endif

browser: $(VENV)/.tested
	$(RUN)/pytest -m browser

$(VENV)/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements.lock
	$(PIP) --no-deps --editable .
	@touch $@

$(VENV)/.tested: requirements-test.lock $(VENV)/.installed
	$(PIP) -r requirements-test.lock
	@touch $@

clean:
	rm -rf $(VENV) captures
