#!/bin/sh
# report.sh: the page of `folio replay --report` from outside: what is in it, and that it is there whole or not at
# all. How it looks is judged by report_browser.py.
# usage: report.sh PROGRAM
# shellcheck disable=SC2086 # $quick is several words
. "$(dirname "$0")/lib.sh"
talks=$here/../data/traces/talks.jsonl
quick='replay --no-attention --hash-block 16 --block-size 4'

# ---- What is in it -------------------------------------------------------------------------------
mkdir pages
expect 0 out '"requests": 44,' $quick "$talks" --blocks 110 --admit chunk --budget 30 --max-seqs 7 -o json --report pages/a.html
page=pages/a.html
check "nothing but the page is there" test "$(ls pages)" = a.html
check "the page begins and ends" sh -c "head -n 1 $page | grep -q '^<!DOCTYPE html>' && tail -n 1 $page | grep -q '^</html>'"
# has WHAT PATTERN [TIMES]
has() {
    check "the page has $1" test "$(grep -c -e "$2" $page)" -eq "${3:-1}"
}
has "a title" '<title>Replay: talks.jsonl</title>'
has "five plots, each for three widths" '<svg xmlns=[^>]* role="img" aria-labelledby=' 15
has "a title of each" '<title id="[a-z]*-[a-z]*-title">[A-Z]' 15
has "a description of each" '<desc id="[a-z]*-[a-z]*-desc">[A-Z0-9]' 15
has "a table of each, and the summary" '^<table>' 6
has "light and dark" 'prefers-color-scheme:dark'
has "a rule that nothing is fetched" "default-src 'none'"
has "marks where sequences were preempted" '<path class="area c6 full" clip-path' 3
device=$("$folio" info -o json | sed -n '/"name": "cpu"/,$s/^ *"device": "\(.*\)",*$/\1/p' | head -n 1)
has "the CPU, and that nothing attended" "<p class=\"lines\">$device; no attention ran, so no backend\$"
has "the command line" '^<code>folio replay --no-attention --hash-block 16 --block-size 4 .*talks.jsonl --blocks 110 '
has "nothing of attention's speed" 'of attention and its scheduler only' 0
value() {
    sed -n "s/^ *\"$1\": \([^,]*\),*\$/\1/p" out
}
check "some were preempted" test "$(value preemptions)" -gt 5
has "their number" "a sequence was preempted: $(value preemptions) times" 4
has "the requests of the JSON" "<b>$(value requests)</b><span>of 44, in "
has "the summary's rows" '<th scope="row">KV memory wasted</th><td>[0-9.]* % (a contiguous cache'
check "no address but the name of SVG, and no file" sh -c \
    "! sed 's|http://www.w3.org/2000/svg||g' $page | grep -E -q 'https?:|src=|href=|@import|url\\([^#]'"
check "no number went wrong" sh -c "! grep -i -q -E '[^a-z](nan|inf)[^a-z]' $page"
# figures DESCRIPTION: the figures for the page's script are as a program on standard input says; without Python: no check.
figures() {
    {
        cat <<'END'
import json, re, sys
text = open(sys.argv[1], encoding="utf-8").read()
data = json.loads(re.search(r'id="data">\n(.*?)</script>', text, re.S).group(1))
plots = {name: {c["name"]: c["values"] for c in columns} for name, columns in data["plots"].items()}
END
        cat
    } >figures.py
    if command -v python3 >python; then
        check "$1" python3 -B figures.py "$page" "$(value blocks)" "$(value preemptions)"
    fi
}
figures "the figures for the script are whole" <<'END'
assert list(plots) == ["kv", "batch", "sequences", "hits"]
assert all(len(v) == data["count"] for columns in plots.values() for v in columns.values())
assert 256 <= data["count"] <= 512 and (data["count"] - 1) * data["width"] < data["end"] <= data["count"] * data["width"]
for held, cached, free in zip(*(plots["kv"][n] for n in ("held", "cached", "free"))):
    assert abs(held + cached + free - int(sys.argv[2])) <= 1.5 and min(held, cached, free) >= 0
assert sum(plots["kv"]["preemptions"]) == int(sys.argv[3])
assert 3 < max(plots["sequences"]["running"]) <= 7 and max(plots["sequences"]["preempted"]) > 0
END

# With attention: where it ran, and that its rates are not a model's. The command line repeats the run.
expect 0 out '^Tokens a second and latencies are of attention and its scheduler only, on ' replay "$talks" \
    --hash-block 16 --block-size 4 --blocks 2000 --limit 3 --threads 1 --report "pages/with attention.html"
mv "pages/with attention.html" pages/with.html
page=pages/with.html
has "CPU, backend, level, threads" "<p class=\"lines\">$device; backend cpu, level [a-z0-9_]*, 1 thread\$"
has "that its rates are of attention only" '<p class="note">Tokens a second and latencies are of attention and its scheduler only'
has "its command line, quoted" ' --threads 1 --report &#39;pages/with attention.html&#39;</code>'
rm $page

# ---- Text of traces is text -------------------------------------------------------------------------
evil="<img src=x onerror=alert(1)>&\"'$(printf '\377')"
if cp "$talks" "$evil" 2>/dev/null; then
    expect 0 out . $quick "$evil" --blocks 2000 --report pages/evil.html
    page=pages/evil.html
    has "no markup from a trace's name" '<img' 0
    has "the name, escaped, in title, heading and command line" '&lt;img src=x onerror=alert(1)&gt;&amp;&quot;&#39;' 3
    rm pages/evil.html
fi

# ---- Long, short, with a queue ------------------------------------------------------------------------
awk 'BEGIN { print "arrival,prompt,output"; for (i = 0; i < 12000; i++) print i * 0.3 "," 50 + i % 977 "," 1 + i * 31 % 203 }' >long.csv
expect 0 out '| 12000 of 12000 in' replay long.csv --no-attention --blocks 2000 --speed 1 --report pages/long.html
page=pages/long.html
check "12,000 requests make a page below 500,000 bytes: $(wc -c <$page)" test "$(wc -c <$page)" -lt 500000
has "minutes for an hour" '>minutes by the replay&#39;s clock<' 12
has "a queue" '>waiting to be admitted<' 3
printf 'arrival,prompt,output\n0,1,1\n' >one.csv
expect 0 out '| 1 of 1 in 1 steps' replay one.csv --no-attention --report pages/one.html
page=pages/one.html
has "a time for one token" '<b>10 ms</b><span>median' 1
has "no time between tokens" 'none came' 1
check "no number of one token went wrong" sh -c "! grep -i -q -E '[^a-z](nan|inf)[^a-z]' $page"

printf 'arrival,prompt,output\n0,10,20\n0,10,20\n0,10,20\n1000,10,20\n' >queue.csv
expect 0 out '"requests": 4,' replay queue.csv --no-attention --speed 1 --max-seqs 1 --blocks 40 -o json --report pages/queue.html
page=pages/queue.html
figures "nothing runs in a gap" <<'END'
middle = data["count"] // 2
assert all(plots["sequences"][n][middle] == 0 for n in ("running", "decoding", "preempted", "waiting"))
assert plots["kv"]["held"][middle] == 0 and plots["batch"]["prefill tokens a step"][middle] == 0
assert plots["hits"]["rate, %"][middle] is None and plots["hits"]["so far, %"][middle] == 0
assert 0 < plots["sequences"]["running"][0] < 1 and plots["sequences"]["running"][-1] > 0
END
expect 0 out '"requests": 3,' replay queue.csv --no-attention --speed 1 --max-seqs 1 --blocks 40 -o json --limit 3 \
    --report pages/queue.html
figures "a queue becomes shorter" <<'END'
waiting = plots["sequences"]["waiting"]
assert waiting[0] == 2 and waiting[-1] == 0 and 1 in waiting and waiting == sorted(waiting, reverse=True)
assert set(plots["sequences"]["running"]) == {1}
END

# ---- Whole or not at all ----------------------------------------------------------------------------
rm pages/*
expect 1 err '^folio replay: nowhere/a.html: No such file' $quick "$talks" --report nowhere/a.html
check "that is told before anything is served" test ! -s out
expect 1 err '^folio replay: pages: Is a directory' $quick "$talks" --report pages
expect 1 err '^folio replay: pages/: ' $quick "$talks" --report pages/
expect 1 err '^folio replay: : No such file' $quick "$talks" --report ''
expect 2 err "^folio replay: --report needs a value" replay --report
if [ -c /dev/full ]; then
    expect 1 err '^folio replay: /dev/full: No space left' $quick "$talks" --blocks 2000 --report /dev/full
    check "a device stays one" test -c /dev/full
fi
echo old >pages/a.html
(ulimit -f 8 && exec "$folio" $quick "$talks" --blocks 2000 --report pages/a.html) >out 2>err
status=$?
check "a file that may not grow: exit status $status" test $status -eq 1
check "it says why" grep -q '^folio replay: pages/a.html: ' err
check "the old page is as it was" test "$(cat pages/a.html)" = old
check "nothing is left next to it" test "$(ls pages)" = a.html
chmod 640 pages/a.html
ln -s a.html pages/link.html
expect 0 out . $quick "$talks" --blocks 2000 --report pages/link.html
check "a link stays one" test -L pages/link.html
check "what it points to is the page" grep -q '^</html>' pages/a.html
check "the file's mode is as it was" test -n "$(find pages/a.html -perm 640)"
rm pages/*
(umask 022 && "$folio" $quick "$talks" --blocks 2000 --report pages/a.html) >out 2>err
check "others may read a new page" test -n "$(find pages/a.html -perm 644)"
rm pages/*

# ---- Interrupted, killed -------------------------------------------------------------------------------
# start: a run that takes long; it has begun when there are rows.
start() {
    rm -f rows.log
    "$folio" replay --layers 300 --heads 2:1 --head-size 8 --blocks 1000 --budget 64 --rows rows.log \
        --report pages/a.html >out 2>err &
    job=$!
    while [ ! -s rows.log ] && kill -0 $job; do sleep 0.1; done
}
start
kill -INT $job
wait $job
status=$?
check "an interrupted replay ends with 130, not $status" test $status -eq 130
check "its page is whole" grep -q '^</html>' pages/a.html
check "its page says so" grep -q '>Interrupted: these are the figures so far' pages/a.html
check "its page is alone" test "$(ls pages)" = a.html
rm pages/*
start
kill -KILL $job
wait $job 2>/dev/null
check "a killed replay leaves nothing" rmdir pages
mkdir pages
for wait in 0.00 0.01 0.02 0.02 0.03 0.03 0.04 0.04 0.05 0.06; do # about when the page is written
    "$folio" replay --no-attention --report pages/a.html >out 2>err &
    job=$!
    sleep $wait
    kill -KILL $job 2>/dev/null
    wait $job 2>/dev/null
    [ ! -e pages/a.html ] || check "a page is whole" grep -q '^</html>' pages/a.html
    rm -f pages/a.html
done
check "killed at any time it leaves nothing else" rmdir pages

finish
