#!/bin/sh
# The long tier: all of what test-full draws a part of. Suites with their long tests (random calls of KV memory, a
# writer killed 300 times, prompts of 128k tokens), `folio check --full`, and under emulation and sanitizers every case
# of `folio check`, and the random calls at length. For changes to what they test, and before a release.
set -eu
cd "$(dirname "$0")/.."
. scripts/stages.sh

stage "release build, long tests"
sh scripts/build.sh release
sh scripts/test.sh build -C Long -R '^long\.'

stage "folio check --full"
./build/folio check --full

stage "other CPUs, by qemu-user, every case"
unset FOLIO_SEED
sh scripts/test-emulated.sh

stage "every case of folio check, and random calls at length, asan-ubsan"
sh scripts/build.sh asan-ubsan
calm build-asan-ubsan/folio check
calm build-asan-ubsan/folio check --lineage
calm build-asan-ubsan/tests/folio_tests --long pool_model pool_fuzz

stage "every case of folio check, tsan"
sh scripts/build.sh tsan
calm build-tsan/folio check --backend cpu --level scalar
calm build-tsan/folio check --lineage
finish test-long
