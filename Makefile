# Every target is one command; the set-up below it is a .venv from the lock file.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# compiled once and kept: without bytecode every process that imports vLLM spends 20 s on compiling it again
unexport PYTHONDONTWRITEBYTECODE

# mypy takes one core, and is made of no bytecode: it runs beside what compiles the packages
MAKEFLAGS += --jobs=2

.PHONY: demo test test-all soak fuzz lint clean
demo: $(VENV)/.compiled
	$(BIN)/qerl demo

# one worker more than there are cores: tests wait for servers and other processes
WORKERS := $(shell echo $$(( $$(nproc) + 1 )))

test: lint $(VENV)/.compiled
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=20

# those too that the tests above have no time for: marker slow. slipcover prints the coverage and takes a tenth more time;
# on Python 3.11 a tracer such as coverage.py's slows all of vLLM down by a half
test-all: lint $(VENV)/.compiled
	$(BIN)/python -m slipcover -m pytest -m '' -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=20

# ten minutes of load on a server whose policy is swapped every second, each answer checked afterwards
soak: $(VENV)/.compiled
	$(BIN)/python tests/soak --minutes 10 --output runs/soak.json

# the readers of what strangers send, with fifty times the examples that they have in the suite
fuzz: $(VENV)/.compiled
	$(BIN)/python -m pytest tests/plugin/test_fuzz.py --hypothesis-profile=fuzz --timeout=0

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# --no-deps: the lock file is complete; torchvision, torchaudio and torchcodec would break a CPU torch and are left out.
# torch comes from where pip finds this build, else from PyTorch's own CPU index; beside it uv installs the rest, or pip
# where there is no uv. What all cores compile here, no first command has to compile. NOT_COMPILED is what no command
# imports, or few files of: half of all. torch keeps one file for a newer Python, so that a file which does not compile
# is no fault.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile
# uv trusts the certificates of this machine, as pip does: behind a proxy that signs anew it would fall back on pip, which
# takes two minutes more
export UV_SYSTEM_CERTS := 1
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps
NOT_COMPILED := /(tests|testing/_internal|benchmarks|cli|_cli|lexers|distutils)/|/torch/_vendor/|/trl/experimental/
NOT_COMPILED := $(NOT_COMPILED)|/(transformers|vllm|vllm/model_executor)/(models|pipelines)/|/lighteval/(models|tasks/tasks)/
NOT_COMPILED := $(NOT_COMPILED)|/sympy/(combinatorics|crypto|parsing|physics|stats|vector)/|/sklearn/(cluster|ensemble)/
NOT_COMPILED := $(NOT_COMPILED)|-packages/(anthropic|debugpy|dns|fontTools|git|mypyc?|numba|pip|reasoning_gym)/
NOT_COMPILED := $(NOT_COMPILED)|-packages/(sentry_sdk|supervisor|tensorboard|werkzeug)/
TORCH := $(shell grep '^torch==' requirements-cpu.lock)

$(VENV)/.ready: requirements-cpu.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	grep -v '^torch==' requirements-cpu.lock > $(VENV)/others.lock
	{ $(PIP) '$(TORCH)' 2>/dev/null || $(PIP) --index-url $(TORCH_INDEX) '$(TORCH)'; } & torch=$$!; \
	{ { $(PIP) uv && $(UV) -r $(VENV)/others.lock; } || $(PIP) -r $(VENV)/others.lock; } && wait $$torch
	$(UV) --no-build-isolation -e . || $(PIP) --no-build-isolation -e .
	touch $@

$(VENV)/.compiled: $(VENV)/.ready
	$(BIN)/python -W ignore -m compileall -qq -j 0 -x '$(NOT_COMPILED)' $(VENV)/lib || true
	touch $@

clean:
	rm -rf $(VENV) runs
