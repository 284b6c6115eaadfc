#!/bin/sh
# Proves, with --check, that what is generated of README.md and docs/features.md is up to date: the tables of figures
# (from the saved runs in docs/figures), the feature table (`folio info --features`). Without it, writes them and prints
# the figures. The roofline is made by `python -m folio plot`; test-python.sh checks it.
# usage: readme.sh <folio> [--check]
set -eu
folio=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT

# Cases of a run saved by `folio bench -o json` as a table: Folio's rate, and each peer's with the ratio of the times. The
# fastest is bold.
figures() { # <run.json> <cases> <peer=its name>...
    file=$1
    cases=$2
    shift 2
    awk -v cases=" $cases " -v names="$*" '
        function number(text) { return text ~ /k$/ ? text * 1024 : text + 0 }
        function words(name,   n, i, part, count, out, q, s) { # 2q2k_32q1s4k: 2 prompts of 2048 ... and 32 ...
            n = split(name, part, "_")
            for (i = 1; i <= n; i++) {
                count = part[i] ~ /^q/ ? 1 : part[i] + 0
                q = part[i]; sub(/^[0-9]*q/, "", q); s = q
                sub(/s.*/, "", q); sub(/^[^s]*s?/, "", s)
                out = out (i > 1 ? " and " : "") count " "
                if (number(q) == 1) out = out (count > 1 ? "decodes" : "decode") " over " number(s) " keys"
                else out = out (count > 1 ? "prompts" : "prompt") " of " number(q) " tokens"
            }
            return out
        }
        function rate(times,   r) { # the rate of something that takes `times` as long as Folio
            if (phase == "mixed") return sprintf("%.0f ms", median * times * 1e3)
            r = (phase == "decode" ? gbps : gflops) / times
            if (phase == "decode") return r < 1000 ? sprintf("%.1f GB/s", r) : sprintf("%.2f TB/s", r / 1e3)
            return r < 10000 ? sprintf("%.0f GFLOP/s", r) : sprintf("%.0f TFLOP/s", r / 1e3)
        }
        function print_row() { # once for each case and type, and its plain form only
            if (index(cases, " " name " ") && cache == "cold" && dtype == kv_dtype && !done[name, dtype]++) add_row()
            split("", seconds)
        }
        function cell(times, least) { return times == least ? "**" rate(times) "**" : rate(times) }
        function add_row(   i, times, least) {
            least = 1
            for (i = 1; i <= n; i++)
                if (peer[i] in seconds && seconds[peer[i]] / median < least) least = seconds[peer[i]] / median
            line = line "| " words(name) ", " dtype " | " cell(1, least) " |"
            for (i = 1; i <= n; i++) {
                times = peer[i] in seconds ? seconds[peer[i]] / median : 0
                line = line (times > 0 ? sprintf(" %s (%.2f) |", cell(times, least), times) : " – |")
            }
            line = line "\n"
        }
        BEGIN {
            n = split(names, peer, " ")
            for (i = 1; i <= n; i++) {
                title[i] = peer[i]
                sub(/.*=/, "", title[i])
                sub(/=.*/, "", peer[i])
            }
        }
        { key = $1; gsub(/[":]/, "", key); value = $2; gsub(/[",]/, "", value) }
        /^  "device"/ { device = $0; sub(/^[^:]*: "/, "", device); sub(/",?$/, "", device) }
        /^      "case"/ { name = value }
        /^      "phase"/ { phase = value }
        /^      "dtype"/ { dtype = value }
        /^      "kv_dtype"/ { kv_dtype = value }
        /^      "cache"/ { cache = value }
        /^      "threads"/ { threads = value }
        /^      "median_s"/ { median = value }
        /^      "gflops"/ { gflops = value }
        /^      "gbps"/ { gbps = value }
        /^        "[a-z_0-9]+": \{/ { at = key }
        /^          "median_s"/ { seconds[at] = value }
        /^          "version"/ { version[at] = value }
        /^    \}/ { print_row() }
        END {
            head = "| " device (threads > 1 ? ", " threads " cores" : "") " | Folio |"
            rule = "|---|---:|"
            for (i = 1; i <= n; i++) {
                gsub(/_/, " ", title[i])
                v = version[peer[i]]; sub(/^[^\/]*\//, "", v); sub(/[+].*/, "", v)
                head = head " " title[i] " " v " |"
                rule = rule "---:|"
            }
            printf "%s\n%s\n%s", head, rule, line
        }' "$root/docs/figures/$file"
}

"$folio" info --features > "$new/features"
{
    figures cpu.json "q512 q2k 16q1s4k 1q1s32k" vllm_cpu=vLLM openvino_pa=OpenVINO torch_sdpa=PyTorch
    echo
    figures gpu.json "32q512 8q2k 1q16k 1q1s8k 64q1s1k 64q1s8k 256q1s8k" \
        torch_cudnn=cuDNN torch_flash=FlashAttention-2_of_PyTorch
} > "$new/figures"
for file in README.md docs/features.md; do
    awk -v dir="$new" '
        /^<!-- [a-z]+: end -->/ { skip = 0 }
        !skip { print }
        /^<!-- [a-z]+: begin/ {
            file = dir "/" substr($2, 1, length($2) - 1); skip = 1
            while ((getline line < file) > 0) print line
        }' "$root/$file" > "$new/${file##*/}"
done

for file in README.md docs/features.md; do
    made=$new/${file##*/}
    if [ "${2:-}" != --check ]; then
        cat "$made" > "$root/$file"
    elif ! diff "$root/$file" "$made"; then
        echo "$file is stale; run: sh scripts/checks/readme.sh $folio"
        exit 1
    fi
done
[ "${2:-}" = --check ] || cat "$new/figures"
echo "generated tables are up to date"
