#!/bin/sh
# test-python.sh: the engine example, rotary embedding, latent attention, the reference backend and the vLLM 0.6 layer
# against PyTorch in float64, live (rotary embedding against the code of transformers too):
# configurations drawn with a new seed each time, through the same tests that read the committed
# golden files. And the headers by cffi, unedited: tests/api/clients/cffi_client.py.
#   FOLIO_SEED   repeat a run          FOLIO_COUNT          how many configurations (360)
#   PYTHON       interpreter (python3) FOLIO_COUNT_VLLM06   how many steps of the layer (200)
set -eu

cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=build/venv-test
torch=2.13.0
transformers=5.19.0
count=${FOLIO_COUNT:-360}
steps=${FOLIO_COUNT_VLLM06:-200}
seed=${FOLIO_SEED:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}
golden=build/live.golden
golden_vllm06=build/live-vllm06.golden
log=build/venv-test.log

fail() {
    echo "test-python: $*" >&2
    exit 1
}

has_packages() {
    [ -x "$venv/bin/python" ] && "$venv/bin/python" - "$torch" "$transformers" 2> /dev/null <<'PYTHON'
import sys, cffi, numpy, torch, transformers
sys.exit([torch.__version__.split("+")[0], transformers.__version__] != sys.argv[1:])
PYTHON
}

make_venv() {
    rm -rf "$venv"
    "$python" -m venv "$venv" > "$log" 2>&1
}

find_tests() {
    for program in build/folio_tests build/tests/folio_tests; do
        if [ -x "$program" ]; then
            echo "$program"
            return
        fi
    done
}

command -v "$python" > /dev/null 2>&1 ||
    fail "$python is missing; install Python 3 (Debian: apt-get install python3 python3-venv)"

sh scripts/build.sh release folio_tests example_engine
tests=$(find_tests)
[ -n "$tests" ] || fail "the build left no folio_tests under build/"

if ! has_packages; then
    if ! make_venv && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null 2>&1; then
        apt-get update -qq && apt-get install -y -qq python3-venv > /dev/null
        make_venv || true
    fi
    [ -x "$venv/bin/pip" ] ||
        fail "$python -m venv failed, see $log; install its venv module" \
            "(Debian: apt-get install python3-venv)"
    echo "test-python: installing torch $torch, transformers $transformers and cffi in $venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "torch==$torch" "transformers==$transformers" numpy cffi ||
        fail "pip could not install torch==$torch, transformers==$transformers, numpy and cffi"
fi

"$venv/bin/python" -B tests/api/clients/cffi_client.py build/folio build/libfolio.so ||
    fail "the client by cffi FAILED"

build/tests/example_engine build/engine.bin && "$venv/bin/python" -B tests/attention/engine_torch.py build/engine.bin ||
    fail "examples/engine.c against PyTorch FAILED"

"$venv/bin/python" -B tests/attention/rotary_torch.py build/libfolio.so "$seed" || fail "rotary embedding FAILED"

"$venv/bin/python" -B tests/attention/latent_torch.py build/libfolio.so "$((seed % 100000))" ||
    fail "latent attention against PyTorch FAILED; repeat with FOLIO_SEED=$seed"

# generate NAME COUNT FILE: random cases of a generator.
generate() {
    "$venv/bin/python" "tests/data/golden/$1.py" --seed "$seed" --count "$2" -o "$3"
}

echo "test-python: $count configurations and $steps steps of the vLLM 0.6 layer, seed $seed"
if ! generate generate "$count" "$golden" || ! FOLIO_GOLDEN="$golden" "$tests" golden ||
    ! generate generate_vllm06 "$steps" "$golden_vllm06" ||
    ! FOLIO_GOLDEN_VLLM06="$golden_vllm06" "$tests" vllm06_torch; then
    echo "test-python: FAILED; repeat with" >&2
    echo "    FOLIO_SEED=$seed FOLIO_COUNT=$count FOLIO_COUNT_VLLM06=$steps make test-python" >&2
    exit 1
fi
echo "test-python: $count configurations and $steps steps agree with PyTorch $torch (seed $seed)"
