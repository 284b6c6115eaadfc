#!/bin/sh
# usage: engine_size.sh engine.c
# README says how much of an engine is Folio's: at most 40 lines of 250.
awk '/folio_|FOLIO_/ { ours++ }
     END { print NR " lines, " ours " of them Folio'\''s"; exit NR > 250 || ours > 40 }' "$1"
