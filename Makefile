# install      .venv with pretrain and its development tools; redone only when pyproject.toml has changed
# quickstart   the whole path on two CPU ranks: prepare, train, stop, resume, generate
# test         the fast tests, in JOBS processes (2)
# check        format, lint, types, repository rules
# bench        every benchmark, --quick unless BENCH says otherwise
# clean        removes .venv and caches; data/ and runs/ stay
#
# PYTHON=python3.12 make install takes another Python. Packages come from wherever your pip is set up to look.

PYTHON ?= python3
BIN := .venv/bin
BENCH ?= --quick
JOBS ?= 2
# What benchmarks share, and the parts of one. decoder_step needs a clone of nanoGPT: NANOGPT=folder make bench.
# BY_HAND name a case, or need texts besides.
PARTS := common peers recall_data recurrent_figure trainer_% finetune_%
BY_HAND := finetune pretraining recurrent_bleu shakespeare
BENCHMARKS := $(filter-out $(PARTS) $(BY_HAND) decoder_step recurrent,$(basename $(notdir $(wildcard benchmarks/*.py))))

.PHONY: install quickstart test check bench clean

install: .venv/.installed

.venv/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo 'pretrain needs Python 3.11 or newer: make PYTHON=python3.12 ...' >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[dev]'
	@touch $@

quickstart: install
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh configs/run/quickstart.sh

test: install
	$(BIN)/python -m pytest -n $(JOBS) --dist loadscope

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/repo

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
