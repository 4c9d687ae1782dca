# Everything lives in .venv at the root; each target makes it first where it is missing or older than the lock.
PYTHON ?= python3
BIN := .venv/bin
export STOKER_CACHE ?= $(CURDIR)/.venv/stoker-cache

.PHONY: demo test test-slow fuzz check lock bench clean

demo: .venv/ready  ## simulate, train, evaluate, print a result table
	$(BIN)/stoker train icecube:demo
	$(BIN)/stoker runs
	$(BIN)/stoker evaluate "$$(ls -td runs/icecube-demo-* | head -1)" >/dev/null
	$(BIN)/stoker report "$$(ls -td runs/icecube-demo-* | head -1)"

# Two processes with a thread each: with two each they wait for one another on two cores.
test: check  ## formatting, lint, types, import contract, and every test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
		echo "pages in a browser were not tested: install one (Debian: apt-get install chromium) and run it again"

test-slow: .venv/ready  ## the cases that the gate has only a few of: twenty faults in a row, fifty seeds, a million lines
	STOKER_SLOW=1 $(BIN)/python -m pytest tests/e2e tests/storage tests/pages

fuzz: .venv/ready  ## thousands of mutated files of every format, and what became of them
	$(BIN)/python tests/faults/fuzz.py --cases 3000

check: .venv/ready  ## everything but the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: .venv/ready  ## every benchmark that this machine can run, one JSON line each, and what got slower than the stored ones
	for program in $$(ls benchmarks/*.py | grep -v -e measure.py -e seed_way.py -e regress.py -e rivals.py -e doctor_recipes.py \
		-e turns.py -e cifar_faults.py -e remote.py -e start.py -e tune.py -e shuffled.py); do \
		$(BIN)/python $$program || exit 1; done | $(BIN)/python benchmarks/regress.py

lock: .venv/ready  ## resolve the newest versions into requirements.lock
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --universal --generate-hashes --no-emit-index-url --no-header --upgrade \
		--group dev pyproject.toml --output-file requirements.lock --quiet

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@
