#!/usr/bin/env bash
# usage: mutate.sh [--applies | --sample N] [id...]
# Are the tests able to fail? For each mutant of tests/mutants/mutants.list (all, or those named) one
# line of the library is broken in a copy of the tree; folio_tests, or else `folio check`, must then
# fail, crash or hang. Ends with a count; fails if a mutant survives, does not apply or does not build.
# Two copies work at a time (MUTATE_JOBS). --applies only checks that each mutant finds its line.
# --sample N: N of them, other ones for each commit (or by FOLIO_SEED, where it is set).
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
list=$root/tests/mutants/mutants.list
jobs=${MUTATE_JOBS:-2}
only_applies=no
sample=
case ${1:-} in
    --applies) only_applies=yes && shift ;;
    --sample) sample=${2:?--sample needs a number} && shift 2 ;;
esac
work=$(mktemp -d "${TMPDIR:-/tmp}/folio-mutate.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
unset MAKEFLAGS MFLAGS MAKELEVEL

# Where there is ccache, what is not broken is compiled once: paths are taken as relative to each copy.
if command -v ccache > /dev/null; then
    export CMAKE_C_COMPILER_LAUNCHER=ccache CCACHE_NOHASHDIR=1
fi

# --- The list: "key: value" lines, a blank line between mutants ------------------------------------
ids=() files=() froms=() tos=() breaks=() lines=()
read_list() {
    local line n=-1 number=0
    while IFS= read -r line || [ -n "$line" ]; do
        number=$((number + 1))
        case $line in
            '#'* | '') ;;
            'id: '*) n=$((n + 1)) && ids[n]=${line#id: } && lines[n]=$number ;;
            'file: '*) files[n]=${line#file: } ;;
            'from: '*) froms[n]=${line#from: } ;;
            'to: '*) tos[n]=${line#to: } ;;
            'breaks: '*) breaks[n]=${line#breaks: } ;;
            *) echo "tests/mutants/mutants.list:$number: cannot read \"$line\"" >&2 && exit 2 ;;
        esac
    done < "$list"
    for ((n = 0; n < ${#ids[@]}; n++)); do
        [ -n "${files[n]:-}" ] && [ -n "${froms[n]:-}" ] && [ -n "${tos[n]+x}" ] &&
            [ -n "${breaks[n]:-}" ] || { echo "tests/mutants/mutants.list:${lines[n]}: ${ids[n]} lacks a field" >&2 && exit 2; }
    done
}

# replace <file> <from> <to>: succeeds if <from> was there exactly once.
replace() {
    FROM=$2 TO=$3 awk '
        BEGIN { from = ENVIRON["FROM"]; to = ENVIRON["TO"] }
        {
            at = index($0, from)
            if (at > 0) {
                count++
                if (index(substr($0, at + 1), from) > 0) count++
                $0 = substr($0, 1, at - 1) to substr($0, at + length(from))
            }
            print
        }
        END { exit count != 1 }' "$1" > "$1.mutant" || { rm -f "$1.mutant" && return 1; }
    mv "$1.mutant" "$1"
}

build() { # <tree>
    CCACHE_BASEDIR=$1 cmake --build "$1/build" --target folio_tests folio_cli > "$1/build.log" 2>&1
}

suites_pass() { # <tree> <limit in seconds> [test...]
    (cd "$1" && timeout -k 5 "$2" ./build/tests/folio_tests --fail-fast "${@:3}") > "$1/run.log" 2>&1
}
check_passes() { # <tree> <limit in seconds> [option...]
    (cd "$1" && timeout -k 5 "$2" ./build/folio check "${@:3}") > "$1/check.log" 2>&1
}

killer() { # <tree> <exit status>
    local test
    test=$(sed -n 's/^FAIL \([^ ]*\).*/\1/p' "$1/run.log" | head -n 1)
    if [ -n "$test" ]; then echo "$test"
    elif [ "$2" -eq 124 ] || [ "$2" -eq 137 ]; then echo "time limit"
    elif [ "$2" -gt 128 ]; then echo "signal $(($2 - 128))"
    else echo "folio check"; fi
}

try() { # <tree> <number of the mutant> <limit>
    local tree=$1 n=$2 file=$1/${files[$2]} verdict status=0 begin=$SECONDS
    cp "$file" "$tree/original"
    if ! replace "$file" "${froms[n]}" "${tos[n]}"; then
        verdict="DOES NOT APPLY"
    elif ! build "$tree"; then
        verdict="DOES NOT BUILD"
    else
        # /dev/null is for what bash itself would say of a crash. The check takes a few times as long as the suites.
        {
            suites_pass "$tree" "$3" "${quick[@]}" && suites_pass "$tree" "$3" "${slow[@]}" &&
                check_passes "$tree" $((5 * $3))
        } 2> /dev/null || status=$?
        if [ $status -eq 0 ]; then verdict="SURVIVED"; else verdict="killed by $(killer "$tree" $status)"; fi
    fi
    cp "$tree/original" "$file"
    echo "$verdict" > "$work/verdict.$n"
    printf '%-28s %s (%s) [%d s]\n' "${ids[n]}" "$verdict" "${breaks[n]}" $((SECONDS - begin))
}

read_list
chosen=()
for ((n = 0; n < ${#ids[@]}; n++)); do
    if [ $# -eq 0 ]; then chosen+=("$n"); fi
    for id in "$@"; do if [ "$id" = "${ids[n]}" ]; then chosen+=("$n"); fi; done
done
if [ -n "$sample" ]; then
    seed=${FOLIO_SEED:-$((16#$(git rev-parse --short=7 HEAD)))}
    mapfile -t chosen < <(printf '%s\n' "${chosen[@]}" |
        awk -v seed="$seed" 'BEGIN { srand(seed) } { print rand(), $0 }' | sort | head -n "$sample" | cut -d' ' -f2)
    echo "a sample of $sample of ${#ids[@]} mutants, seed $seed"
fi
[ ${#chosen[@]} -gt 0 ] || { echo "mutate: no mutant is chosen" >&2 && exit 2; }

if [ $only_applies = yes ]; then
    lost=0
    for n in "${chosen[@]}"; do
        cp "$root/${files[n]}" "$work/file" && replace "$work/file" "${froms[n]}" "${tos[n]}" && continue
        echo "FAILED: tests/mutants/mutants.list:${lines[n]}: ${ids[n]}: ${files[n]} has to hold this exactly once: ${froms[n]}"
        lost=$((lost + 1))
    done
    echo "$((${#chosen[@]} - lost)) of ${#chosen[@]} mutants apply"
    exit $((lost > 0))
fi

# --- One tree per worker. Unbroken all tests pass, side by side, and set the time limit -------------
prepare() { # <tree>
    mkdir "$1"
    tar -C "$root" --exclude=./build --exclude='./build-*' --exclude=./.git --exclude='./.venv*' -cf - . |
        tar -C "$1" -xf -
    if ! cmake -G "Unix Makefiles" -S "$1" -B "$1/build" -DCMAKE_BUILD_TYPE=Release > "$1/build.log" 2>&1 ||
        ! build "$1"; then
        tail -n 30 "$1/build.log"
        return 1
    fi
}
prepare_all() {
    local w tasks=()
    for ((w = 0; w < jobs; w++)); do prepare "$work/tree$w" & tasks+=($!); done
    for w in "${tasks[@]}"; do wait "$w" || return 1; done
}
unbroken_passes() {
    local tree=$work/tree$((jobs - 1)) status=0
    # shellcheck disable=SC2086 # words
    check_passes "$tree" 600 ${sample:+--one-in 10} &
    suites_pass "$work/tree0" 600 || { tail -n 30 "$work/tree0/run.log" && status=1; }
    wait $! || { tail -n 30 "$tree/check.log" && status=1; }
    return $status
}
prepare_all || { echo "mutate: the unbroken tree does not build" && exit 1; }
begin=$SECONDS
unbroken_passes || { echo "mutate: the unbroken tree fails" && exit 1; }
limit=$((3 * (SECONDS - begin) + 30))
# The quick tests come first: most mutants die by them.
times=$(sed -n 's/^\(ok\|skip\) *\([^ ]*\) (\(.*\) s)$/\2 \3/p' "$work/tree0/run.log")
mapfile -t quick < <(awk '$2 < 0.1 { print $1 }' <<< "$times")
mapfile -t slow < <(awk '$2 >= 0.1 { print $1 }' <<< "$times")
echo "unbroken: ${#quick[@]} quick and ${#slow[@]} slow tests pass in $((SECONDS - begin)) s; ${#chosen[@]} mutants, at most $limit s of folio_tests each"

worker() { # <number>: takes every jobs-th mutant
    local i
    for ((i = $1; i < ${#chosen[@]}; i += jobs)); do try "$work/tree$1" "${chosen[i]}" "$limit"; done
}
for ((w = 0; w < jobs; w++)); do worker "$w" & done
wait

killed=$(cat "$work"/verdict.* | grep -c '^killed' || true)
echo "$killed of ${#chosen[@]} mutants killed"
for n in "${chosen[@]}"; do
    grep -q '^killed' "$work/verdict.$n" || echo "  ${ids[n]}: $(cat "$work/verdict.$n") (${breaks[n]})"
done
[ "$killed" -eq ${#chosen[@]} ]
