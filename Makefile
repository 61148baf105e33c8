# install      .venv with pretrain and its development tools; redone only when pyproject.toml or the lock has changed
# quickstart   the whole path on two CPU ranks: prepare, train, stop, resume, generate; installs what a run needs alone
# chat         a model that answers questions, from nothing, on two CPU ranks: MINUTES=10, else half an hour
# smoke        the first fast test of each file of tests/unit, and the commands that run several: 90 s of CPU
# test         the fast tests, in JOBS processes (3: one more than a small machine has cores, as many tests wait)
# check        format, lint, types, repository rules
# drills       the long tests: all groups, ONLY=kills,slurm, CHANGED=origin/main, or LAST_FAILED=1 (see CONTRIBUTING.md)
# docs         the documentation site in build/site, links checked
# lock         renews .ci/constraints.txt, the exact versions that all of these install
# bench        every benchmark, --quick unless BENCH says otherwise
# clean        removes .venv and caches; data/ and runs/ stay
#
# PYTHON=python3.12 make install takes another Python. Packages come from wherever your pip is set up to look.
# LOCK= make install takes the newest versions that pyproject.toml allows.

PYTHON ?= python3
BIN := .venv/bin
LOCK ?= .ci/constraints.txt
BENCH ?= --quick
JOBS ?= 3
# What benchmarks share, and the parts of one. decoder_step needs a clone of nanoGPT: NANOGPT=folder make bench.
# BY_HAND name a case, or need texts or a GPU besides.
PARTS := common peers recall_data recurrent_figure trainer_% finetune_% gpu_%
BY_HAND := docstrings finetune gallery gpu pretraining recurrent_bleu shakespeare
BENCHMARKS := $(filter-out $(PARTS) $(BY_HAND) decoder_step recurrent,$(basename $(notdir $(wildcard benchmarks/*.py))))
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(if $(LOCK),--constraint $(LOCK)) --editable

.PHONY: install quickstart chat smoke test check drills docs lock bench clean

install: .venv/.dev

# One rule an extra: what a run needs, what the tests, the drills and the documentation need besides.
.venv/.run: pyproject.toml $(LOCK) | .venv/bin
	$(PIP_INSTALL) '.[deepspeed]'
	@touch $@

.venv/.dev: pyproject.toml $(LOCK) | .venv/bin
	$(PIP_INSTALL) '.[deepspeed,dev]'
	@touch .venv/.run $@

.venv/.drills: pyproject.toml $(LOCK) | .venv/bin
	$(PIP_INSTALL) '.[deepspeed,dev,drills]'
	@touch .venv/.run .venv/.dev $@

.venv/.docs: pyproject.toml $(LOCK) | .venv/bin
	$(PIP_INSTALL) '.[deepspeed,docs]'
	@touch .venv/.run $@

.venv/bin:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo 'pretrain needs Python 3.11 or newer: make PYTHON=python3.12 ...' >&2; exit 1; }
	$(PYTHON) -m venv .venv

quickstart: .venv/.run
	@trap 'exit 0' INT; $(BIN)/pretrain quickstart  # else make adds an error to a Ctrl-C

chat: .venv/.run
	@trap 'exit 0' INT; $(BIN)/pretrain quickstart --chat $(if $(MINUTES),--minutes $(MINUTES))

smoke: .venv/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadscope --smoke tests/unit tests/integration/test_finetune_command.py \
	    tests/integration/test_wishes.py

test: .venv/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadscope --ignore tests/repo

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/repo

# Its tests start ranks of their own. JOBS=4 on the command line goes before.
drills: JOBS = 2
drills: .venv/.drills
	$(BIN)/python -m tests.drills --jobs $(JOBS) $(if $(ONLY),--only $(ONLY)) $(if $(CHANGED),--changed $(CHANGED)) \
	    $(if $(LAST_FAILED),--last-failed)

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# For every platform and Python that pyproject.toml admits; the extra `bench` has an environment of its own.
lock: .venv/bin
	$(BIN)/python -m pip install --disable-pip-version-check --quiet uv
	$(BIN)/uv pip compile --universal --upgrade --no-annotate --custom-compile-command 'make lock' \
	    --python-version 3.11 --extra deepspeed --extra cloud --extra parquet --extra web --extra eval --extra dev --extra drills \
	    --extra docs \
	    --output-file .ci/constraints.txt pyproject.toml

bench: install
	@failed=; for name in $(BENCHMARKS); do \
	    echo; echo "$$ python -m benchmarks.$$name $(BENCH)"; \
	    $(BIN)/python -m benchmarks.$$name $(BENCH) || failed="$$failed $$name"; \
	done; \
	$(BIN)/python -m benchmarks.recurrent speed $(BENCH) || failed="$$failed recurrent"; \
	$(if $(NANOGPT),$(BIN)/python -m benchmarks.decoder_step --nanogpt '$(NANOGPT)' $(BENCH) || failed="$$failed decoder_step";) \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
