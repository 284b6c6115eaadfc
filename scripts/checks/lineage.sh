#!/bin/sh
# Proves that docs/lineage.md and the code agree: every row of its tables names at least one symbol in its column
# "Folio"; every symbol, and every field written `struct.field`, is declared in the headers; every test in a column
# "Test" is one that folio_tests lists; no function of folio_vllm06.h is left out.
# usage: lineage.sh <folio_tests> <header>...
set -eu

if [ $# -lt 2 ] || [ ! -x "$1" ]; then
    echo "usage: lineage.sh <folio_tests> <header>..." >&2
    exit 2
fi
doc=$(dirname "$0")/../../docs/lineage.md
tests=$1
shift
for header; do
    if [ ! -r "$header" ]; then
        echo "lineage.sh: $header cannot be read" >&2
        exit 2
    fi
done
# The headers, a line "TESTS", the list.
{
    cat "$@"
    echo TESTS
    "$tests" --list
} | awk -v doc="$doc" '
    function complain(text) {
        print doc ":" line ": " text
        bad++
    }
    # A line of C without its comments, which may go on from line to line.
    function code_of(text,    code) {
        code = ""
        while (text != "") {
            if (in_comment) {
                if (!index(text, "*/")) return code
                text = substr(text, index(text, "*/") + 2)
                in_comment = 0
            }
            if (!index(text, "/*")) return code text
            code = code substr(text, 1, index(text, "/*") - 1) " "
            text = substr(text, index(text, "/*") + 2)
            in_comment = 1
        }
        return code
    }
    # All names of a line of C: known everywhere, and in the struct that is open.
    function learn(text,    word) {
        text = code_of(text)
        if (match(text, /struct [a-z0-9_]+ \{/)) {
            open_struct = substr(text, RSTART + 7, RLENGTH - 9)
            text = substr(text, RSTART + RLENGTH)
        }
        if (text ~ /^}/) open_struct = ""
        if (match(text, /folio_vllm06_[a-z0-9_]+\(/)) function_of_vllm06[substr(text, RSTART, RLENGTH - 1)] = 1
        while (match(text, /[A-Za-z_][A-Za-z0-9_]*/)) {
            word = substr(text, RSTART, RLENGTH)
            text = substr(text, RSTART + RLENGTH)
            known[word] = 1
            if (word ~ /^ERR_/ || word == "OK") known["FOLIO_" word] = 1
            if (open_struct != "") known[open_struct "." word] = 1
        }
    }
    # Names in backquotes that match `shape`, left in found[1..].
    function quoted(text, shape,    n) {
        n = 0
        while (match(text, /`[^`]*`/)) {
            if (substr(text, RSTART + 1, RLENGTH - 2) ~ shape) {
                found[++n] = substr(text, RSTART + 1, RLENGTH - 2)
            }
            text = substr(text, RSTART + RLENGTH)
        }
        return n
    }
    # The columns of the table that begins with this row.
    function read_header(text,    cells, n, i) {
        n = split(text, cells, "|")
        folio = test = 0
        for (i = 2; i < n; i++) {
            gsub(/^ +| +$/, "", cells[i])
            if (cells[i] == "Folio") folio = i
            if (cells[i] == "Test") test = i
        }
        columns = n
        if (folio == 0) complain("the table has no column \"Folio\"")
    }
    function check_row(text,    cells, n, i, name) {
        if (split(text, cells, "|") != columns) complain("the row has another number of columns than its table")
        if (cells[2] ~ /^ [*][*].*[*][*] $/) return # the name of a group
        rows++
        n = quoted(text, "^(folio|FOLIO)_")
        for (i = 1; i <= n; i++) {
            symbols++
            name = found[i]
            sub(/[ (].*/, "", name)
            named[name] = 1
            if (!(name in known)) complain("no header declares " name)
        }
        if (quoted(cells[folio], "^(folio|FOLIO)_") == 0) complain("the row names no symbol")
        if (test == 0) return
        n = quoted(cells[test], "^[a-z0-9_]+[.][a-z0-9_]+$")
        for (i = 1; i <= n; i++) if (!(found[i] in listed)) complain("no test is called " found[i])
    }
    $0 == "TESTS" && !in_tests { in_tests = 1; next }
    !in_tests { learn($0); next }
    { listed[$0] = 1; num_listed++ }
    END {
        while ((status = (getline text < doc)) > 0) {
            line++
            if (text ~ /^\|/ && before !~ /^\|/) read_header(text)
            else if (text ~ /^\|/ && text !~ /^\|[- |]+$/) check_row(text)
            before = text
        }
        if (status < 0) complain("cannot be read")
        if (num_listed == 0) complain("folio_tests lists no test")
        if (rows == 0) complain("holds no row")
        for (name in function_of_vllm06) if (!(name in named)) complain("no row names " name)
        if (bad == 0) print rows " rows name " symbols " symbols; all are declared"
        exit bad > 0
    }'
