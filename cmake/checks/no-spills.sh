#!/bin/sh
# usage: no-spills.sh NVCC [ARGUMENT]...
# Runs the compiler with ptxas -v and fails where a kernel keeps registers in memory, unless it is for head sizes above 128:
# their accumulators alone fill the registers. Kernels are known by their template arguments.
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
"$@" -Xptxas=-v > "$log" 2>&1
status=$?
grep -v '^ptxas info\|bytes stack frame\|^$' "$log" >&2
[ $status -eq 0 ] || exit $status
awk '/Compiling entry function/ { kernel = $7 " for " $9 }
     /bytes spill stores/ {
         for (i = 2; i <= NF; i++) if ($i == "bytes" && $(i + 1) == "spill") spilled = $(i - 1)
         if (spilled > 0 && kernel !~ /Li256E|Li512E/) {
             print "registers are spilled (" spilled " bytes) in " kernel
             bad = 1
         }
         spilled = 0
     }
     END { exit bad }' "$log" >&2
