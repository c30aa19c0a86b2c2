#!/bin/sh
# Runs the tests of the verifiers adapter in an environment of their own, .venv-verifiers in the
# repository's root: verifiers brings some eighty packages that nothing else here needs.
# PYTHON chooses the interpreter; further arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
venv=.venv-verifiers
if [ ! -x "$venv/bin/python" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
fi
"$venv/bin/pip" install --quiet --only-binary=:all: -c constraints.txt --editable ".[verifiers,dev]"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
# Warnings are no errors here: verifiers' own dependencies give some.
exec "$venv/bin/python" -m pytest -W default -m verifiers tests/adapters/test_verifiers_adapter.py "$@"
