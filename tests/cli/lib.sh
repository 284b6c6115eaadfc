# lib.sh: what the tests of the program share; the script that reads it was given PROGRAM as its argument.
# Works in a folder of its own, which is removed at the end.
# shellcheck shell=sh disable=SC2034 # `here` is for them
set -u

[ $# -eq 1 ] || { echo "usage: ${0##*/} PROGRAM" >&2; exit 2; }
folio=$1
case $folio in /*) ;; *) folio=$PWD/$folio ;; esac
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
here=$(cd "$(dirname "$0")" && pwd) || exit 1
cd "$dir" || exit 1
passed=0
failed=0

fail() {
    failed=$((failed + 1))
    echo "FAIL: $*"
}

# run ARGS...: sets $status; what it said is in the files out and err.
run() {
    "$folio" "$@" >out 2>err </dev/null
    status=$?
}

# expect STATUS FILE PATTERN ARGS...: exit status, and a line in out or err that matches.
expect() {
    want=$1 file=$2 pattern=$3
    shift 3
    run "$@"
    if [ "$status" -ne "$want" ]; then
        fail "folio $*: exit status $status, expected $want: $(head -c 300 err)"
    elif ! grep -q -e "$pattern" "$file"; then
        fail "folio $*: no line in $file matches '$pattern': $(head -c 300 "$file")"
    else
        passed=$((passed + 1))
    fi
}

# check DESCRIPTION COMMAND...: the command succeeds.
check() {
    what=$1
    shift
    if "$@" >/dev/null 2>&1; then passed=$((passed + 1)); else fail "$what"; fi
}

# The count, and whether all is well.
finish() {
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
}
