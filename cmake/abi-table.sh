#!/bin/sh
# usage: abi-table.sh COMPILER INCLUDE_DIR OUTPUT.c
# The table behind `folio info --abi`, from the public headers: what they declare, found by the preprocessor and
# abi-table.awk. Sizes, offsets and values stand in it as C expressions, so the compiler of the library fills them in.
set -eu
compiler=$1 include=$2 output=$3
here=$(cd "$(dirname "$0")" && pwd)
headers="folio.h folio_pool.h folio_vllm06.h"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Declarations of the standard headers would be in the way: empty ones take their place.
: > "$work/stddef.h"
: > "$work/stdint.h"
for header in $headers; do echo "#include <folio/$header>"; done > "$work/all.c"
"$compiler" -E -DFOLIO_STATIC -nostdinc -I "$work" -I "$include" "$work/all.c" > "$work/declared"
for header in $headers; do
    # Constants: a name and a value. Guards have no value, macros with arguments no fixed one.
    sed -n "s/^#define \(FOLIO_[A-Z0-9_]*\) \([^ ].*\)/$header \1 \2/p" "$include/folio/$header"
done | grep -v ' FOLIO_API ' > "$work/constants"

awk -f "$here/abi-table.awk" "$work/constants" "$work/declared" > "$work/table.c"
mv "$work/table.c" "$output"
