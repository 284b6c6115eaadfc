#!/bin/sh
# Proves that the pages name files and functions that exist: every path in backquotes, and in docs/design.md's tables
# from folio_batch_add to a kernel the function's definition in its file. Lines have at most 120 columns, tables aside.
# usage: design.sh
set -eu
cd "$(dirname "$0")/../.."
bad=0
paths='`(include|src|kit|cli|tests|peers|scripts|cmake|docs|examples|python)/[A-Za-z0-9_./-]*`'
complain() {
    echo "$*"
    bad=1
}
for page in README.md CONTRIBUTING.md docs/*.md docs/decisions/*.md; do
    long=$(LC_ALL=C.UTF-8 grep -nE '^[^|].{120}' "$page" | cut -d: -f1 | tr '\n' ' ')
    [ -z "$long" ] || complain "$page: more than 120 columns in lines $long"
    for path in $(grep -oE "$paths" "$page" | tr -d '`' | sort -u); do
        [ -e "$path" ] || [ "$path" = src/backends/cpu/level_fast.c ] || # the example of docs/add-a-kernel.md
            complain "$page: $path does not exist"
    done
done
pairs=$(sed -n 's/^| [^|]*| `\(src[^`]*\)` | `\([a-z0-9_]*\)` |.*/\1:\2/p' docs/design.md)
[ "$(echo "$pairs" | wc -l)" -gt 20 ] || complain "docs/design.md has no tables from folio_batch_add to a kernel"
for pair in $pairs; do
    file=${pair%%:*} function=${pair#*:}
    # a definition begins in the first column; a CUDA kernel's name is on its second line
    grep -qE "^[A-Za-z_].*[ *]$function\([^;]*$|^    $function\(const " "$file" ||
        complain "docs/design.md: $file does not define $function"
done
[ $bad -eq 0 ] && echo "all paths and functions that the pages name exist"
