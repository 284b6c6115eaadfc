#!/bin/sh
# The long tests: suites with their long tests (random calls of KV memory, a writer killed 1,000 times, prompts of 128k
# tokens), every case of `folio check --full`, and the random calls under AddressSanitizer. For changes to what they
# test, and before a release.
set -eu
cd "$(dirname "$0")/.."
. scripts/stages.sh

stage "long tests"
sh scripts/build.sh release
sh scripts/test.sh build -C Long -R '^long\.'

stage "folio check --full"
./build/folio check --full

stage "random calls of KV memory at length, AddressSanitizer and UBSan"
sh scripts/build.sh asan-ubsan
calm build-asan-ubsan/tests/folio_tests --long pool_fuzz
finish test-long
