#!/bin/sh
# usage: format.sh [--check]
# clang-format over all C sources. --check: names what it would change, and changes nothing.
set -eu
cd "$(dirname "$0")/.."
command -v clang-format > /dev/null || {
    echo "clang-format is not here; on Debian or Ubuntu: sudo apt-get install clang-format" >&2
    exit 1
}
how=-i
[ "${1:-}" != --check ] || how="--dry-run --Werror"
# The public header's columns of comments are set by hand; frozen headers stay as released.
# shellcheck disable=SC2086 # words
find src kit cli tests examples \( -name '*.c' -o -name '*.h' -o -name '*.cu' \) \
    ! -path 'tests/api/abi/folio*' -exec clang-format --style=file $how {} +
