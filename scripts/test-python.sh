#!/bin/sh
# test-python.sh: the reference backend against PyTorch in float64, live: configurations drawn with
# a new seed each time, through the same test that reads the committed golden file.
#   FOLIO_SEED   repeat a run          FOLIO_COUNT   how many configurations (360)
#   PYTHON       interpreter (python3)
set -eu

cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=build/venv-test
torch=2.13.0
count=${FOLIO_COUNT:-360}
seed=${FOLIO_SEED:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}
golden=build/live.golden
log=build/venv-test.log

fail() {
    echo "test-python: $*" >&2
    exit 1
}

has_torch() {
    [ -x "$venv/bin/python" ] && "$venv/bin/python" - "$torch" 2> /dev/null <<'PYTHON'
import sys, numpy, torch
sys.exit(torch.__version__.split("+")[0] != sys.argv[1])
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

sh scripts/build.sh release folio_tests
tests=$(find_tests)
[ -n "$tests" ] || fail "the build left no folio_tests under build/"

if ! has_torch; then
    if ! make_venv && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null 2>&1; then
        apt-get update -qq && apt-get install -y -qq python3-venv > /dev/null
        make_venv || true
    fi
    [ -x "$venv/bin/pip" ] ||
        fail "$python -m venv failed, see $log; install its venv module" \
            "(Debian: apt-get install python3-venv)"
    echo "test-python: installing torch $torch in $venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "torch==$torch" numpy ||
        fail "pip could not install torch==$torch and numpy"
fi

echo "test-python: $count configurations, seed $seed"
if ! "$venv/bin/python" tests/golden/generate.py --seed "$seed" --count "$count" -o "$golden" ||
    ! FOLIO_GOLDEN="$golden" "$tests" golden; then
    echo "test-python: FAILED; repeat with" >&2
    echo "    FOLIO_SEED=$seed FOLIO_COUNT=$count make test-python" >&2
    exit 1
fi
echo "test-python: $count configurations agree with PyTorch $torch in float64 (seed $seed)"
