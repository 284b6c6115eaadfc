#!/bin/sh
# Proves what README says of examples/engine.c: at most 250 lines, of which at most 40 are calls of Folio.
# usage: engine_size.sh engine.c
awk '/folio_|FOLIO_/ { ours++ }
     END { print NR " lines, " ours " of them Folio'\''s"; exit NR > 250 || ours > 40 }' "$1"
