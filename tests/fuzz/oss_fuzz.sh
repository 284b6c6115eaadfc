#!/bin/sh
# Builds the fuzz targets as OSS-Fuzz asks for it: with $CC, $CXX, their flags and $LIB_FUZZING_ENGINE into $OUT, each with
# its committed inputs as fuzz_<what>_seed_corpus.zip where there is zip. $WORK is for what is made on the way.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
work=${WORK:-$(mktemp -d)}/folio
out=$(mkdir -p "$OUT" && cd "$OUT" && pwd)
cmake -S "$root" -B "$work" -DCMAKE_BUILD_TYPE=None -DFOLIO_BUILD_CLI=OFF -DFOLIO_BUILD_TESTS=OFF -DFOLIO_INSTALL=OFF \
    -DFOLIO_FUZZ_ENGINE="$LIB_FUZZING_ENGINE" > /dev/null
cmake --build "$work" --parallel "$(nproc)"
for target in "$work"/fuzz/fuzz_*; do
    name=$(basename "$target")
    [ "$name" != fuzz_pack ] || continue
    cp "$target" "$out/"
    inputs=$work/inputs/$name
    rm -rf "$inputs" && mkdir -p "$inputs"
    "$work/fuzz/fuzz_pack" --unpack "$root/tests/fuzz/corpus/${name#fuzz_}.pack" "$inputs" > /dev/null
    if command -v zip > /dev/null; then (cd "$inputs" && zip -q -r "$out/${name}_seed_corpus.zip" .); fi
done
