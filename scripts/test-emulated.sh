#!/bin/sh
# Machines that are not here, by qemu-user: the aarch64 build at its level neon, and this x86-64 build on a CPU
# without AVX and on one with AVX2 only. Part of test-full. With FOLIO_SEED a sample: one in eight of the checks' cases,
# and fewer suites. Elsewhere than on x86-64 there is nothing to do: the ordinary tests run the machine's own levels.
set -eu
cd "$(dirname "$0")/.."
if [ "$(uname -m)" != x86_64 ]; then
    echo "skipped: this emulates from x86-64"
    exit 0
fi

# On this CPU the default level is this one.
expect_level() { # <CPU of qemu> <level>
    qemu-x86_64 -cpu "$1" build/folio info -o json > "$log" 2>&1 || {
        cat "$log"
        echo "folio info does not run on $1"
        exit 1
    }
    if [ "$2" = avx2 ] && grep -q "doesn't support.*\.avx2 " "$log"; then
        echo "skipped: this qemu has no AVX2; since 7.2 it has"
        return
    fi
    level=$(sed -n '/"name": "cpu"/,$s/.*"level": "\([a-z0-9_]*\)".*/\1/p' "$log" | head -n 1)
    echo "$1: level $level"
    [ "$level" = "$2" ] || { echo "expected: $2" && exit 1; }
}

# A check in the background, and what became of it.
check_by() { # <qemu and its options> <program> <option of folio check>...
    echo "folio check under $*"
    "$@" > "$log" 2>&1 &
    job=$!
}
finish() {
    result=0
    wait "$job" || result=$?
    job=
    [ $result -eq 0 ] || { cat "$log" && exit 1; }
    grep ' passed, ' "$log" | tail -n 1
}

drawn=${FOLIO_SEED:+--one-in 8 --seed $FOLIO_SEED}
suites='levels|merge|golden|rounding'
[ -n "$drawn" ] || suites="$suites|numerics.*|invariance"
job=
log=$(mktemp)
trap 'rm -f "$log"; [ -z "$job" ] || kill "$job"' EXIT
sh scripts/build.sh release folio_cli
expect_level Nehalem scalar
expect_level Haswell avx2
# Every kernel of the level; all features would take some minutes more.
# shellcheck disable=SC2086 # words
check_by qemu-x86_64 -cpu Nehalem build/folio check --backend cpu --filter kernels $drawn
sh scripts/build.sh aarch64 folio_cli folio_tests
finish
# shellcheck disable=SC2086 # words
check_by qemu-aarch64 -L /usr/aarch64-linux-gnu build-aarch64/folio check --backend cpu --level neon $drawn
sh scripts/test.sh build-aarch64 -R "^suite\.($suites)\$"
finish
