#!/bin/sh
# usage: test.sh <build dir> [ctest option...]
# Runs the ctest entries and closes with one count, of entries and of the tests inside them. A run of
# nothing is a failure.
set -eu
cd "$(dirname "$0")/.."
dir=$1
shift
unset MAKEFLAGS MFLAGS MAKELEVEL
jobs=$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)
begin=$(date +%s)
status=0
ctest --test-dir "$dir" --output-on-failure --no-tests=error --no-label-summary -j "$jobs" "$@" || status=$?

awk -v status=$status -v seconds=$(($(date +%s) - begin)) '
    /^[0-9]+\/[0-9]+ Testing: / { entries++ }
    /^Test Passed\.$/ { good++ }
    /^Skip regular expression found/ { skipped++ }
    /^[0-9]+ passed, [0-9]+ failed$/ { passed += $1; failed += $3 }
    END {
        printf "%s: %d entries, %d passed, %d failed, %d skipped; in them %d tests passed, %d failed; %d s\n",
            status == 0 ? "PASSED" : "FAILED", entries, good, entries - good - skipped, skipped,
            passed, failed, seconds
    }' "$dir/Testing/Temporary/LastTest.log"
exit $status
