#!/bin/sh
# Proves that docs/numerics.md and the tests agree: its statements are numbered without a gap, each names
# at least one test on its "Tests:" lines, and folio_tests lists every test named there; `check.feature` is a feature
# that `folio check` lists.
# usage: numerics.sh <folio_tests> <folio>
set -eu

if [ $# -ne 2 ] || [ ! -x "$1" ] || [ ! -x "$2" ]; then
    echo "usage: numerics.sh <folio_tests> <folio>" >&2
    exit 2
fi
doc=$(dirname "$0")/../../docs/numerics.md
{ "$1" --list && "$2" check --list | sed -n '2,$s/^\([a-z0-9_]*\) .*/check.\1/p'; } | awk -v doc="$doc" '
    function close_statement() {
        if (in_statement && named == 0) complain("statement " number " names no test")
        named = in_tests = in_statement = 0
    }
    function complain(text) {
        print doc ":" line ": " text
        bad++
    }
    { exists[$0] = 1; listed++ }
    END {
        line = number = named = in_tests = bad = total = 0
        while ((status = (getline text < doc)) > 0) {
            line++
            if (text ~ /^#/) {
                close_statement()
            } else if (text ~ /^[0-9]+\. /) {
                close_statement()
                if (text + 0 != number + 1) complain("statement " text + 0 " follows " number)
                number = text + 0
                in_statement = 1
            }
            if (text ~ /^ +Tests: /) in_tests = in_statement
            if (!in_tests) continue
            rest = text
            while (match(rest, /`[a-z0-9_]+\.[a-z0-9_]+`/)) {
                name = substr(rest, RSTART + 1, RLENGTH - 2)
                rest = substr(rest, RSTART + RLENGTH)
                named++
                total++
                if (!(name in exists)) complain("no test is called " name)
            }
        }
        close_statement()
        if (status < 0) complain("cannot be read")
        if (number == 0) complain("holds no statement")
        if (listed == 0) complain("folio_tests lists no test")
        if (bad == 0) print number " statements name " total " tests; all " listed " listed tests looked through"
        exit bad > 0
    }'
