#!/bin/sh
# usage: freeze-header.sh [--check]
# Copies the stable headers, include/folio/<name>.h, to tests/abi/<name>-<major>.<minor>.h, where an old
# client is compiled against them for ever. While CHANGELOG.md calls the version unreleased the copies may
# be made again; after that they never change. --check: are they there and, before the release, up to date?
set -eu
cd "$(dirname "$0")/.."
version=$(sed -n 's/^#define FOLIO_VERSION_STRING "\(.*\)"$/\1/p' include/folio/folio.h)
released=yes
if grep -q "^## $version (unreleased)" CHANGELOG.md && [ "${version##*.}" = 0 ]; then released=no; fi

for name in folio folio_pool; do
    header=include/folio/$name.h
    frozen=tests/abi/$name-${version%.*}.h
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
done
