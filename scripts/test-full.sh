#!/bin/sh
# The thorough tier, which continuous integration runs beside the quick one: a part of `folio check --full`, the
# replay's page in a browser, the levels and CPUs that this machine lacks under emulation, then the quick tests under
# AddressSanitizer with UBSan, and under ThreadSanitizer. What is too long for all of it to run is drawn by a seed
# (FOLIO_SEED; else a new one each time). scripts/test-long.sh runs all of that.
set -eu
cd "$(dirname "$0")/.."
FOLIO_SEED=${FOLIO_SEED:-$(od -An -N2 -tu2 /dev/urandom | tr -d ' ')}
export FOLIO_SEED
. scripts/stages.sh

stage "release build, a part of folio check --full, seed $FOLIO_SEED"
sh scripts/build.sh release
./build/folio check --full --one-in 24 --seed "$FOLIO_SEED"

stage "the replay's page in a browser"
sh scripts/test.sh build -C Long -R '^cli\.report_browser$'

stage "other CPUs, by qemu-user"
sh scripts/test-emulated.sh

for preset in asan-ubsan tsan; do
    stage "quick tests, $preset, FOLIO_SEED=$FOLIO_SEED"
    sh scripts/build.sh $preset
    calm sh scripts/test.sh build-$preset $([ $preset = asan-ubsan ] || echo -LE without_threads)
done
finish test-full
