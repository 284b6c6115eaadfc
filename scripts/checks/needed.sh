#!/bin/sh
# Proves that the shared library needs nothing but the C library, and that its tables of addresses cannot be written to
# once it is loaded (full RELRO).
# usage: needed.sh <readelf> <libfolio.so>
set -eu
needed=$("$1" -d "$2" | sed -n 's/.*(NEEDED).*\[\(.*\)\].*/\1/p')
status=0
[ -n "$needed" ] || { echo "no NEEDED entry was read from $2"; status=1; }
for name in $needed; do
    case $name in
        libc.so* | libm.so* | libpthread.so* | ld-linux* | libc.musl-*) ;;
        *) echo "libfolio.so needs $name"; status=1 ;;
    esac
done
"$1" -lW "$2" | grep -q GNU_RELRO && "$1" -dW "$2" | grep -q BIND_NOW || { echo "$2 has no full RELRO"; status=1; }
# shellcheck disable=SC2086 # one line each
[ $status -ne 0 ] || printf 'needs %s\n' $needed
exit $status
