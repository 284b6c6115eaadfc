#!/bin/sh
# Proves that the shared library exports exactly the FOLIO_API functions of the headers, and that no global name of the
# static one can clash with the caller's (folio_ is public, folioi_ internal).
# usage: symbols.sh <nm> <libfolio.so> <libfolio.a> <header>...
set -eu
nm=$1 shared=$2 static=$3
shift 3

exported=$("$nm" -D --defined-only "$shared" | awk '{ print $NF }' | sort -u)
declared=$(sed -n 's/^FOLIO_API .*[ *]\(folio_[a-z0-9_]*\)(.*/\1/p' "$@" | sort -u)
marked=$(cat "$@" | grep -c '^FOLIO_API ')
status=0

count=$(printf '%s\n' "$declared" | grep -c .)
if [ "$count" -ne "$marked" ] || [ "$count" -lt 40 ]; then
    echo "$marked lines of the header begin with FOLIO_API, but $count functions were read from them"
    status=1
fi
for name in $exported; do
    case $name in
        folio_*) ;;
        *) echo "exported, but not folio_: $name"; status=1 ;;
    esac
    printf '%s\n' "$declared" | grep -qx "$name" || {
        echo "exported, but not in the header: $name"
        status=1
    }
done
for name in $declared; do
    printf '%s\n' "$exported" | grep -qx "$name" || {
        echo "in the header, but not exported: $name"
        status=1
    }
done
for name in $("$nm" -g --defined-only "$static" | awk 'NF == 3 { print $3 }' | sort -u); do
    case $name in
        folio_* | folioi_*) ;;
        *) echo "global in the static library, but neither folio_ nor folioi_: $name"; status=1 ;;
    esac
done
[ $status -ne 0 ] || echo "$count functions in the header, the same $count exported"
exit $status
