#!/bin/sh
# usage: freeze-header.sh [--check]
# At a release: copies the stable headers, include/folio/<name>.h, to tests/api/abi/<name>-<major>.<minor>.h, where a
# client of that version is compiled against them for ever. CHANGELOG.md says which version is unreleased; such a
# version has no copy. --check: does every released version have one?
set -eu
cd "$(dirname "$0")/.."
version=$(sed -n 's/^#define FOLIO_VERSION_STRING "\(.*\)"$/\1/p' include/folio/folio.h)
released=yes
if grep -q "^## $version (unreleased)" CHANGELOG.md; then released=no; fi

for name in folio folio_pool; do
    frozen=tests/api/abi/$name-${version%.*}.h
    if [ $released = no ]; then
        if [ -f "$frozen" ]; then
            echo "$frozen: version $version is unreleased and has no copy yet" >&2
            exit 1
        fi
        echo "$frozen: made at the release of $version"
    elif [ -f "$frozen" ]; then
        echo "$frozen: there"
    elif [ "${1:-}" = --check ]; then
        echo "$frozen is missing: run scripts/freeze-header.sh" >&2
        exit 1
    else
        cp include/folio/$name.h "$frozen"
        echo "$frozen"
    fi
done
