#!/bin/sh
# Proves of each CUDA kernel that no register is spilled to memory, and that products of wgmma do not wait for one
# another (C7510 and after): runs the compiler with ptxas -v, and fails where it says so. On cards other than sm_90, head
# sizes above 128 may spill: just their accumulators fill the registers. A head size is the first number among a
# kernel's arguments.
# usage: kernels.sh <nvcc> [argument...]
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
"$@" -Xptxas=-v > "$log" 2>&1
status=$?
grep -v '^ptxas info\|bytes stack frame\|^$' "$log" >&2
[ $status -eq 0 ] || exit $status
awk '/^ptxas info/ { ran = 1 }
     /Potential Performance Loss: wgmma/ { print; bad = 1 }
     /Compiling entry function/ { kernel = $7 " for " $9 }
     /bytes spill stores/ {
         for (i = 2; i <= NF; i++) if ($i == "bytes" && $(i + 1) == "spill" && $(i - 1) > spilled) spilled = $(i - 1)
         size = match(kernel, /Li[0-9]+E/) ? substr(kernel, RSTART + 2, RLENGTH - 3) + 0 : 0
         if (spilled > 0 && (size <= 128 || kernel ~ /sm_90/)) {
             print "registers are spilled (" spilled " bytes) in " kernel
             bad = 1
         }
         spilled = 0
     }
     END { if (!ran) print "no machine code was made (PTX only?): nothing is known of spills"; exit bad }' "$log" >&2
