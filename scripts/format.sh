#!/bin/sh
# usage: format.sh [--check]
# clang-format 14 over all C sources: other versions break some lines elsewhere. --check names what it would change,
# and changes nothing. Lines of the Python package that are longer than 120 columns are named in both cases: shorten
# them by hand.
set -eu
cd "$(dirname "$0")/.."
format=
for name in clang-format-14 clang-format; do
    if $name --version 2> /dev/null | grep -q ' version 14\.'; then format=$name && break; fi
done
if [ -z "$format" ]; then
    echo "clang-format 14 is not here; on Debian or Ubuntu: sudo apt-get install clang-format-14" >&2
    exit 1
fi
how=-i
[ "${1:-}" != --check ] || how="--dry-run --Werror"
# The public header's columns of comments are set by hand; frozen headers stay as released.
# shellcheck disable=SC2086 # words
find src kit cli tests examples python \( -name '*.c' -o -name '*.h' -o -name '*.cu' \) \
    ! -path 'tests/api/abi/folio*' ! -path 'src/vendor/*' -exec $format --style=file $how {} +
long=$(find python/folio python/examples python/tools python/cuda -name '*.py' ! -name _abi.py \
    -exec awk 'length > 120 { print FILENAME ":" FNR ": " length " columns, 120 allowed" }' {} +)
[ -z "$long" ] || { echo "$long" >&2 && exit 1; }
