#!/bin/sh
# Proves what README says of examples/engine.c: at most 240 lines, of which at most 44 are calls of Folio.
# usage: engine_size.sh engine.c
awk '/folio_|FOLIO_/ { ours++ }
     END { print NR " lines, " ours " of them Folio'\''s"; exit NR > 240 || ours > 44 }' "$1"
