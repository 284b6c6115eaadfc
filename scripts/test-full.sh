#!/bin/sh
# The long tier: every test of the release build, `folio check --full` on every level of this machine, the levels
# and CPUs it lacks under emulation, then the quick tests under AddressSanitizer with UBSan, and under
# ThreadSanitizer.
set -eu
cd "$(dirname "$0")/.."

stage() {
    printf '\n== %s\n' "$1"
}

# ThreadSanitizer of older compilers cannot start where the kernel randomises addresses widely.
calm() {
    if setarch "$(uname -m)" -R true 2> /dev/null; then setarch "$(uname -m)" -R "$@"; else "$@"; fi
}

begin=$(date +%s)
stage "release build, all tests"
sh scripts/build.sh release
sh scripts/test.sh build -C Long -LE superseded

stage "folio check --full"
./build/folio check --full

stage "other CPUs, by qemu-user"
sh scripts/test-emulated.sh

export ASAN_OPTIONS="${ASAN_OPTIONS:-detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1}"
export UBSAN_OPTIONS="${UBSAN_OPTIONS:-print_stacktrace=1}"
export TSAN_OPTIONS="${TSAN_OPTIONS:-halt_on_error=1}"
for preset in asan-ubsan tsan; do
    stage "quick tests, $preset"
    sh scripts/build.sh $preset
    calm sh scripts/test.sh build-$preset $([ $preset = asan-ubsan ] || echo -LE without_threads)
done
stage "random calls of KV memory at length, asan-ubsan"
calm build-asan-ubsan/tests/folio_tests --long pool_model pool_fuzz
printf '\ntest-full: all stages passed in %d s\n' $(($(date +%s) - begin))
