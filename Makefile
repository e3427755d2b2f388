# Everything runs from .venv, which the first target that needs it makes from the lock files.
PYTHON ?= python3
PORT ?= 8501
OPEN ?= 1
VENV := .venv
RUN := $(VENV)/bin
PIP := $(RUN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test check browser clean

demo: $(VENV)/.installed
	$(RUN)/python -m probes --ckpt checkpoints/demo-smelt --against checkpoints/demo-baseline
ifneq ($(OPEN),0)
	@echo "dashboard: http://localhost:$(PORT)"
	$(RUN)/streamlit run app/main.py --server.port $(PORT)
endif

test: check browser

check: $(VENV)/.tested
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(RUN)/pytest -m "not browser"

browser: $(VENV)/.tested
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(RUN)/pytest -m browser

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
