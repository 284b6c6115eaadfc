#!/bin/sh
# usage: test-full.sh [--sample]
# The quick tests again where they can find more: CPUs that this machine is not, by emulation, AddressSanitizer with
# UBSan, ThreadSanitizer, and where they are installed MemorySanitizer (clang) and valgrind. --sample is continuous
# integration's part of it: without the last two and the tests labelled full_only, and with cases of `folio check` drawn
# by a seed (FOLIO_SEED; else a new one each time).
set -eu
cd "$(dirname "$0")/.."
. scripts/stages.sh
left_out="^$"
of=
if [ "${1:-}" = --sample ]; then
    FOLIO_SEED=${FOLIO_SEED:-$(od -An -N2 -tu2 /dev/urandom | tr -d ' ')}
    export FOLIO_SEED
    left_out=full_only
    of=", a sample by FOLIO_SEED=$FOLIO_SEED"
else
    unset FOLIO_SEED
fi

stage "other CPUs, by qemu-user$of"
sh scripts/test-emulated.sh

stage "quick tests, AddressSanitizer and UBSan$of"
sh scripts/build.sh asan-ubsan
calm sh scripts/test.sh build-asan-ubsan -LE "$left_out"

stage "quick tests, ThreadSanitizer$of"
sh scripts/build.sh tsan
calm sh scripts/test.sh build-tsan -LE "without_threads|$left_out"

# Neither knows the instructions of all levels.
if [ "$left_out" = "^$" ] && command -v clang > /dev/null; then
    stage "suites, MemorySanitizer"
    sh scripts/build.sh msan folio_tests
    FOLIO_CPU=scalar sh scripts/test.sh build-msan -R '^(suite|poison)\.' -E '^suite\.(setuid|loader)$'
fi
if [ "$left_out" = "^$" ] && [ "$(uname -m)" = x86_64 ] && command -v valgrind > /dev/null; then
    stage "quick suites, valgrind"
    for suite in batch attend errors_forward errors_plan merge pool sequence prefix store store_key rotary; do
        echo "$suite"
        FOLIO_CPU=avx2 valgrind -q --error-exitcode=9 build/tests/folio_tests "$suite" > /dev/null
    done
fi
finish test-full
