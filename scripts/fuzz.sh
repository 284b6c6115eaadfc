#!/bin/sh
# usage: fuzz.sh [--keep] [target...]
# Runs the fuzz targets of tests/fuzz, all by default, one after another, each for FUZZ_SECONDS (600): from the committed
# inputs and what earlier runs found (build-fuzz/corpus). Prints executions, edges and inputs of each. Fails on a find,
# and says how to repeat it. --keep: afterwards the committed inputs of these targets are made anew, as few and small as
# reach the same edges. Needs clang with its runtime libraries.
set -eu
cd "$(dirname "$0")/.."
keep=
if [ "${1:-}" = --keep ]; then keep=yes && shift; fi
seconds=${FUZZ_SECONDS:-600}
dir=build-fuzz
longest=300 # bytes of an input
if ! echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' |
    clang -fsanitize=fuzzer,address -x c - -o /dev/null 2> /dev/null; then
    echo "fuzzing needs clang and its runtime libraries: on Debian clang and libclang-rt-14-dev" >&2
    exit 1
fi

sh scripts/build.sh fuzz
# shellcheck disable=SC2046 # words
[ $# -gt 0 ] || set -- $(cd $dir/fuzz && ls | sed -n 's/^fuzz_//p' | grep -v '^pack$')

# The inputs of earlier runs and the committed ones.
inputs_of() { # <target>
    mkdir -p $dir/corpus/"$1" $dir/finds
    pack=tests/fuzz/corpus/$1.pack
    [ ! -f "$pack" ] || $dir/fuzz/fuzz_pack --unpack "$pack" $dir/corpus/"$1" > /dev/null
}

# What libFuzzer says last: "#12 DONE cov: 34 ft: 56 corp: 78/90Kb ..."
summary() { # <target> <log>
    awk -v what="$1" '
        /^#[0-9]+/ {
            n = substr($1, 2)
            for (i = 2; i < NF; i++) if ($i == "cov:" || $i == "corp:") last[$i] = $(i + 1)
        }
        END { printf "%-14s %10d executions %7d edges %6d inputs\n", what, n, last["cov:"], last["corp:"] }' "$2"
    grep -a "^fuzz_$1: " "$2" || true
}

run() { # <target>
    log=$dir/finds/$1.log
    inputs_of "$1"
    status=0
    FOLIO_FUZZ_COUNTS=1 $dir/fuzz/fuzz_"$1" -max_total_time="$seconds" -max_len=$longest -len_control=0 -timeout=60 \
        -rss_limit_mb=4096 ${FOLIO_SEED:+-seed="$FOLIO_SEED"} -artifact_prefix=$dir/finds/"$1"- $dir/corpus/"$1" > "$log" 2>&1 || status=$?
    summary "$1" "$log"
    [ $status -ne 0 ] || return 0
    grep -aE 'find of|ERROR: |runtime error: ' "$log" || tail -n 20 "$log"
    find=$(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)
    echo "FOUND by fuzz_$1 (all of it: $log); to repeat it: $dir/fuzz/fuzz_$1 $find"
    return 1
}

minimise() { # <target>
    rm -rf $dir/least/"$1" && mkdir -p $dir/least/"$1"
    $dir/fuzz/fuzz_"$1" -merge=1 -use_counters=0 -max_len=$longest $dir/least/"$1" $dir/corpus/"$1" \
        > $dir/finds/"$1".merge.log 2>&1
    mkdir -p tests/fuzz/corpus
    $dir/fuzz/fuzz_pack --pack $dir/least/"$1" tests/fuzz/corpus/"$1".pack
}

failed=0
for target in "$@"; do
    run "$target" || failed=$((failed + 1))
    [ -z "$keep" ] || minimise "$target"
done
[ $failed -eq 0 ] || { echo "fuzzing: $failed of $# targets have a find" && exit 1; }
echo "fuzzing: no find by $# targets, $seconds s each"
