#!/bin/sh
# usage: freeze-header.sh [--check]
# Copies include/folio/folio.h to tests/abi/folio-<major>.<minor>.h, where an old client is compiled
# against it for ever. While CHANGELOG.md calls the version unreleased the copy may be made again;
# after that it never changes. --check: is the copy there and, before the release, up to date?
set -eu
cd "$(dirname "$0")/.."
header=include/folio/folio.h
version=$(sed -n 's/^#define FOLIO_VERSION_STRING "\(.*\)"$/\1/p' $header)
frozen=tests/abi/folio-${version%.*}.h
released=yes
if grep -q "^## $version (unreleased)" CHANGELOG.md && [ "${version##*.}" = 0 ]; then released=no; fi

if [ "${1:-}" = --check ]; then
    if [ ! -f "$frozen" ] || { [ $released = no ] && ! cmp -s $header "$frozen"; }; then
        echo "$frozen is not today's header: run scripts/freeze-header.sh"
        exit 1
    fi
    echo "$frozen: released: $released"
elif [ $released = yes ] && [ -f "$frozen" ]; then
    echo "$frozen is frozen: CHANGELOG.md does not call $version unreleased" >&2
    exit 1
else
    cp $header "$frozen"
    echo "$frozen"
fi
