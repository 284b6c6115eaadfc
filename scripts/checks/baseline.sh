#!/bin/sh
# usage: baseline.sh <objdump> <libfolio.a>
# x86-64: AVX is used by the level files alone, and there not by what runs to find out whether the level is here; or by
# functions named for it (_avx2), which ask the processor first.
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
