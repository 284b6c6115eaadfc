#!/bin/sh
# Proves what examples/README.md says of examples/engine.c: at most 240 lines, of which at most 44 use Folio.
# usage: engine_size.sh engine.c
awk '/folio_|FOLIO_/ { ours++ }
     END { print NR " lines, " ours " use Folio"; exit NR > 240 || ours > 44 }' "$1"
