#!/bin/sh
# The README's feature table is what `folio info --features` prints. Usage: features.sh FOLIO [--check]
set -eu
folio=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
new=$(mktemp)
trap 'rm -f "$new" "$new.table"' EXIT
"$folio" info --features >"$new.table"
awk -v table="$new.table" '
    /<!-- features: begin -->/ { print; while ((getline line < table) > 0) print line; skip = 1; next }
    /<!-- features: end -->/ { skip = 0 }
    !skip { print }' "$root/README.md" >"$new"
if [ "${2:-}" = --check ]; then
    if ! diff "$root/README.md" "$new"; then
        echo "README.md: the feature table is not what folio info --features prints; run scripts/checks/features.sh $folio"
        exit 1
    fi
    echo "the README's feature table is up to date"
else
    cat "$new" >"$root/README.md"
fi
