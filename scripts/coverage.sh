#!/bin/sh
# usage: coverage.sh [ctest option...]
# Which lines and branches of src, without CUDA, the quick suites run, by gcc's gcov, in build-coverage: lines for each
# folder, then the sentences of REQUIRE and FAIL that no test gets. Slow suites of numbers are left out; ctest's options
# choose others. The vector levels are not counted: suite.levels and `folio check` run their kernels one by one.
set -eu
cd "$(dirname "$0")/.."
dir=build-coverage
if [ ! -f $dir/Makefile ]; then
    cmake -S . -B $dir -G "Unix Makefiles" -DCMAKE_C_COMPILER=gcc -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS=-O1 \
        -DFOLIO_COVERAGE=ON > /dev/null
fi
cmake --build $dir --parallel "$(nproc)" --target folio_tests
find $dir -name '*.gcda' -exec rm -f {} +
[ $# -gt 0 ] || set -- -E '^suite\.(golden|invariance|large_scores|levels|numerics|numerics_kv)$'
sh scripts/test.sh $dir -R '^suite\.' "$@" > $dir/tests.log || grep 'Failed' $dir/tests.log || true
tail -n 1 $dir/tests.log

find $dir/CMakeFiles/folio_objects.dir -name '*.gcda' | sort |
    xargs gcov --branch-probabilities --branch-counts --relative-only --source-prefix "$PWD" --stdout |
    awk '
    function end_line() { # the last call of a REQUIRE is the one that fails
        if (call != "") { has[source, number] = 1; if (call == "run") hit[source, number] = 1 }
        call = ""
    }
    / 0:Source:/ { end_line(); source = $0; sub(/.*0:Source:/, "", source); of_ours = source ~ /^src\//; next }
    !of_ours { next }
    /^branch/ { key = source SUBSEP number SUBSEP $2; branches[key] += 0; if ($3 == "taken") branches[key] += $4; next }
    /^call/ { call = $3 == "never" ? "not run" : "run"; next }
    /^ *[-#=0-9*]+: *[0-9]+:/ {
        end_line()
        split($0, part, ":")
        number = part[2] + 0
        code = substr($0, length(part[1]) + length(part[2]) + 3)
        text[source, number] = code
        if (part[1] ~ /-/) next
        lines[source, number] += part[1] ~ /[#=]/ ? 0 : part[1] + 0
    }
    function folder_of(file) { sub(/\/[^\/]*$/, "", file); return file }
    function sentence(file, line,   i, all) {
        for (i = 0; i < 4; i++) all = all " " text[file, line + i]
        return match(all, /"[^"]*"/) ? substr(all, RSTART, RLENGTH) : ""
    }
    END {
        end_line()
        for (k in lines) { split(k, at, SUBSEP); f = folder_of(at[1]); all[f]++; ran[f] += lines[k] > 0 }
        for (k in branches) { split(k, at, SUBSEP); f = folder_of(at[1]); all_b[f]++; ran_b[f] += branches[k] > 0 }
        for (f in all) {
            printf "1 %-26s %6d lines, %5.1f %%  %6d branches, %5.1f %%\n", f, all[f], 100 * ran[f] / all[f],
                all_b[f], all_b[f] ? 100 * ran_b[f] / all_b[f] : 100
            total += all[f]; total_ran += ran[f]; total_b += all_b[f]; total_ran_b += ran_b[f]
        }
        printf "2 %-26s %6d lines, %5.1f %%  %6d branches, %5.1f %%\n", "all", total, 100 * total_ran / total, total_b,
            100 * total_ran_b / total_b
        for (k in lines) {
            split(k, at, SUBSEP)
            if (text[k] !~ /(REQUIRE|REQUIRE_ALIGNED|FAIL|folioi_fail)\(/ || text[k] ~ /#define/) continue
            said++
            if (hit[k] || (lines[k] > 0 && !has[k])) continue
            unsaid++
            printf "4 %s:%d: %s\n", at[1], at[2], sentence(at[1], at[2])
        }
        printf "3 %d of %d sentences are never said:\n", unsaid, said
    }' | sort -k1,1n -k2,2V | cut -c3-
