#!/bin/sh
# Proves that includes point one way. Each line of includes.list: a folder, and the folders that its files may include
# from besides itself. The longest folder that matches counts; a folder that is not in the list fails. A line
# "order folder: names" lists all files of a folder: of it, each may include those before it only.
# usage: includes.sh [folder of the repository]
set -eu
list=$(cd "$(dirname "$0")" && pwd)/includes.list
cd "${1:-$(dirname "$0")/../..}"
grep -rnE '^[[:space:]]*#[[:space:]]*include "' src kit cli python --include='*.c' --include='*.h' --include='*.cu' \
    --include='*.def' | awk -F: -v list="$list" '
    function room(path,    r) { # the longest folder of the table that holds this path
        for (r = path; r != ""; r = substr(r, 1, length(r) - 1))
            if (r in may && (path == r || substr(path, length(r) + 1, 1) == "/")) return r
        return ""
    }
    function place(path) { # in the order of its folder
        sub(/[.][^.]*$/, "", path)
        return rank[path]
    }
    BEGIN {
        while ((getline line < list) > 0)
            if (line ~ /^order /) {
                n = split(line, at, "[ :]+")
                ordered[at[2]] = 1
                for (k = 3; k <= n; k++) rank[at[2] "/" at[k]] = k
            } else if (line !~ /^#/) { split(line, at, " *-> *"); may[at[1]] = " " at[1] " " at[2] " " }
    }
    {
        split($3, quoted, "\"")
        target = quoted[2]
        if (target !~ /\//) target = substr($1, 1, match($1, /[^\/]*$/) - 1) target
        else if ($1 ~ /^src/) target = "src/" target
        else if ($1 ~ /^cli/ && target !~ /^kit/) target = "cli/" target
        from = room($1); to = room(target); count++
        if (from == "" || to == "" || index(may[from], " " to " ") == 0) {
            printf "%s:%s: %s may not include %s\n", $1, $2, from == "" ? "this folder" : from, target
            bad++
        } else if (from == to && from in ordered && (!place(target) || place($1) < place(target))) {
            printf "%s:%s: in the order of %s, %s does not come before it\n", $1, $2, from, target
            bad++
        }
    }
    END {
        if (count == 0) { print "no include was found"; exit 1 }
        if (bad) exit 1
        printf "%d includes point the right way\n", count
    }'
