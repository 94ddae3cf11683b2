# make run         the demo: three real training jobs, resized while they train, on this machine
# make test        what proves the product, in about eight minutes; it ends with what was skipped
# make test-deps   installs the Debian packages without which tests of Slurm, PostgreSQL, Kerberos and systemd are skipped (as root)
# make lint        style, types, import rules
# make references  the references of configuration and commands under docs/, from the code and etc/dl2d.yaml
# make deb         dist/dl2d_<version>_<architecture>.deb, the package for Debian and Ubuntu (needs python3-venv)
# All but test-deps and deb set up their own virtual environment in .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests wait for half of their time, so there are three processes for two CPUs (with four, some that are about leases and
# deaths may fail). One that has nothing left to do takes tests from another one.
SPREAD ?= --numprocesses $$(( ($$(getconf _NPROCESSORS_ONLN) * 3 + 1) / 2 )) --dist worksteal
STAMP := $(VENV)/.installed
DEBIAN_PACKAGES := python3-venv munge slurmctld slurmd slurm-client libslurm-dev postgresql systemd iproute2
DEBIAN_PACKAGES += mariadb-server slurmdbd slurm-wlm-mysql-plugin
DEBIAN_PACKAGES += krb5-kdc krb5-admin-server libkrb5-dev python3-dev gcc openssl debootstrap

.PHONY: run test test-all test-deps lint format references deb clean

$(STAMP): pyproject.toml pslite/pyproject.toml
	@echo "installing dl2d and PyTorch into $(VENV): this takes some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . --group dev
	! command -v krb5-config >/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check 'gssapi>=1.8,<2' || \
		echo "gssapi cannot be built: the tests of Kerberos are skipped"
	touch $@

run: $(STAMP)
	$(BIN)/dl2d demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" $(SPREAD)

test-all: $(STAMP)
	$(BIN)/python -m pytest $(SPREAD)

test-deps:
	dpkg -s $(DEBIAN_PACKAGES) 2>&1 | grep -q "not installed" || exit 0; apt-get update -qq; \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(DEBIAN_PACKAGES)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

references: $(STAMP)
	$(BIN)/python docs/references.py

deb:
	packaging/deb/build

format: $(STAMP)
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
