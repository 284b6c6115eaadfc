#!/bin/sh
# Proves that a CPU without AVX can run the library: on x86-64 AVX is in the level files only, and there not in what
# finds out whether the level can run; or in functions named for it (_avx2), which ask the processor first.
# usage: baseline.sh <objdump> <libfolio.a>
set -eu
"$1" -d --no-show-raw-insn "$2" | awk '
    / file format / { object = $1 }
    /^[0-9a-f]+ <.*>:$/ { name = $2 }
    /%[yz]mm|\tv[a-z0-9]+ .*%xmm/ {
        if (name ~ /_avx2[.>]/) next
        if (object ~ /^level_/ && name !~ /folioi_cpu_(has|wants)_/) { fine++; next }
        if (!seen[object name]++) { print "AVX in " object " " name; bad++ }
    }
    END {
        if (fine == 0) print "no AVX anywhere: nothing was checked"
        exit bad > 0 || fine == 0
    }'
