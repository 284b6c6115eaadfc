#!/bin/sh
# replay.sh: `folio replay` from outside: traces read and refused, hits, preemption, bits, formats.
# usage: replay.sh PROGRAM
. "$(dirname "$0")/lib.sh"
talks=$here/../data/traces/talks.jsonl

# ---- Command line ------------------------------------------------------------------------------
expect 2 err "^folio replay: unknown option '--report'; save the run with -o json and make its page with 'python -m folio report" \
    replay --report x
expect 2 err "^folio replay: unexpected argument 'second'" replay first second
for heads in '' 0 4:0 4:3 2:4 4: :2 4:2x x -4 2048; do
    expect 2 err '^folio replay: --heads takes HEADS:KV_HEADS' replay --heads "$heads"
done
for size in '' 0 x 1X 1GB -1; do
    expect 2 err '^folio replay: --kv-memory takes a size such as' replay --kv-memory "$size"
done
for share in '' x -1 101 nan; do
    expect 2 err '^folio replay: --verify takes a number from 0 to 100' replay --verify "$share"
done
expect 2 err '^folio replay: --blocks and --kv-memory both size the pool' replay --blocks 9 --kv-memory 1G
expect 2 err '^folio replay: --speed takes a number from 0' replay --speed fast
expect 2 err 'takes a multiple of 8, not 12' replay --head-size 12
expect 2 err 'one of decode-first|prefill-first' replay --policy fair
expect 2 err 'one of prompt|chunk' replay --admit never
expect 2 err 'one of recompute|swap' replay --preempt drop
expect 2 err 'one of md|csv|json' replay -o text
expect 2 err "unknown backend 'nonsense'" replay --backend nonsense
for option in '--verify 1' '--rows x' '--preempt swap'; do
    # shellcheck disable=SC2086 # two words
    expect 2 err '^folio replay: --no-attention has no K, V and rows' replay --no-attention $option
done

# ---- Traces that are wrong: one sentence, line and column -----------------------------------------
expect 1 err '^folio replay: nowhere: No such file' replay nowhere
# wrong TEXT WHERE SENTENCE: a trace of that text is refused there.
wrong() {
    printf '%b' "$1" >trace
    expect 1 err "^folio replay: trace: $2: $3" replay trace --no-attention
    check "a wrong trace gives one line" test "$(wc -l <err)" -eq 1
    check "a wrong trace prints nothing on stdout" test ! -s out
}
fine='{"timestamp": 1, "input_length": 5, "output_length": 2, "hash_ids": [7]}'
: >trace
expect 1 err '^folio replay: trace: there is no request in it$' replay trace
wrong '\n\n{' 'line 3, column 2' 'a name in quotes expected, the line ends'
wrong "$fine\n[" 'line 2, column 1' "'{' expected, not '\['"
wrong '{"timestamp": 1, "input_length": 5}' 'line 1, column 35' 'the request has no output_length'
wrong '{"input_length": 5, "output_length": 1}' 'line 1, column 39' 'the request has no timestamp'
wrong '{"timestamp": 1 "input_length": 5}' 'line 1, column 17' "',' or '}' expected, not '\"'"
wrong '{"timestamp": 1,}' 'line 1, column 17' "a name in quotes expected, not '}'"
wrong '{\033[2J' 'line 1, column 2' 'a name in quotes expected, not the byte 0x1b$'
wrong '{"timestamp" 1}' 'line 1, column 14' "':' after a name expected, not '1'"
wrong '{"timestamp": 01}' 'line 1, column 16' "',' or '}' expected"
wrong '{"timestamp": x}' 'line 1, column 15' "a number expected, not 'x'"
wrong '{"timestamp": 1e999}' 'line 1, column 15' 'a timestamp is milliseconds'
wrong '{"timestamp": "1"}' 'line 1, column 15' 'a number expected'
wrong '{"timestamp": 1, "input_length": 0}' 'line 1, column 34' 'input_length is a whole number from 1 to'
wrong '{"timestamp": 1, "input_length": 2.5}' 'line 1, column 34' 'input_length is a whole number'
wrong '{"timestamp": 1, "output_length": -1}' 'line 1, column 35' 'output_length is a whole number from 0'
wrong '{"timestamp": 1, "output_length": 99999999}' 'line 1, column 35' 'output_length is a whole number'
wrong "$fine x" 'line 1, column 74' "the end of the line expected, not 'x'"
wrong '{"timestamp": 1, "hash_ids": [1.5]}' 'line 1, column 31' 'a hash id is a whole number of 64 bits'
wrong '{"timestamp": 1, "hash_ids": [1 2]}' 'line 1, column 33' "',' or '\]' after a hash id"
wrong '{"timestamp": 1, "hash_ids": [1,' 'line 1, column 33' 'a hash id expected, the line ends'
wrong '{"more": [{"a": tru}]}' 'line 1, column 17' 'a value expected'
wrong '{"more' 'line 1, column 7' "the end of a string, '\"', expected"
wrong '{"timestamp": 1, "input_length": 513, "output_length": 2, "hash_ids": [7]}' 'line 1, column 71' \
    '1 hash ids for 513 tokens; with 512 tokens per id (--hash-block), 2 are needed$'
wrong 'a\0b' 'line 1, column 2' 'a zero byte'
wrong 'prompt,output\n1,2' 'line 1, column 1' 'neither JSON nor the header of a CSV file: there is no column arrival'
wrong 'arrival,prompt,prompt\n' 'line 1, column 16' 'duplicate column'
wrong 'arrival,prompt,output\n1,2\n' 'line 2, column 1' '2 fields, but the header has 3'
wrong 'arrival,prompt,output\n1,x,2\n' 'line 2, column 3' 'prompt is a whole number from 1'
wrong 'arrival,prompt,output\n1,2,\n' 'line 2, column 5' 'output is a whole number from 0'
wrong 'arrival,prompt,output\n1,2,3\nnoon,2,3\n' 'line 3, column 1' 'an arrival is seconds, or a date'
for time in '2023-11-16 18:15:46x' '2023-11-16 25:15:46' '2023-13-16 18:15:46' '2023-11-16 18:15:nan' \
    '2023-11-16 18:15:46+1' '2023-11-16'; do
    wrong "arrival,prompt,output\n$time,2,3\n" 'line 2, column 1' 'an arrival is seconds, or a date'
done
printf '%s\n' "$fine" >trace
expect 1 err '^folio replay: the longest request (7 tokens) needs 4 blocks of 2, the pool has 3; --blocks' \
    replay trace --blocks 3 --block-size 2

# As many blocks as fit: one of 16 tokens, 2 kv heads of 64, bf16, K and V is 8 KiB.
expect 0 out '"blocks": 128,' replay trace --kv-memory 1M -o json
expect 0 out '"blocks": 127,' replay trace --kv-memory 1048575 -o json
expect 0 out '"blocks": 32,' replay trace --kv-memory 1M --layers 4 -o json
expect 0 out '"blocks": 1,' replay trace --kv-memory 8K --no-attention -o json
expect 1 err 'needs 1 block of 16, the pool has 0; --blocks or --kv-memory gives it more$' replay trace --kv-memory 8191

# ---- Traces that are right -----------------------------------------------------------------------
# value NAME: of the JSON in out.
value() {
    sed -n "s/^ *\"$1\": \([^,]*\),*\$/\1/p" out
}
printf '\357\273\277\n  %s\r\n{"more": {"a": [1, "\\"]", null, {}]}, "output_length":0,"input_length":3,"timestamp":-2.5e3}\n' \
    "$fine" >trace
expect 0 out '"requests": 2,' replay trace --no-attention -o json
check "an answer of no tokens still has its prompt's" test "$(value prefill_tokens) $(value decode_tokens)" = "8 1"
expect 0 out '"requests": 1,' replay trace --no-attention -o json --limit 1
"$folio" replay - --no-attention -o json <trace >out 2>err
check "a trace from standard input" test "$(value requests)" = 2
printf 'id, "Prompt" ,output,ARRIVAL\nx,5,2,0\n"y,z",7,1,2.5\n' >trace
expect 0 out '"prefill_tokens": 12,' replay trace --no-attention -o json
printf '%s\n' TIMESTAMP,ContextTokens,GeneratedTokens '2023-11-16 18:15:46.6805900,374,44' \
    '2023-11-16 18:16:00.9951690,396,109' '2024-05-10 00:00:00.009930+00:00,3,1' >trace
expect 0 out '"prefill_tokens": 773,' replay trace --no-attention -o json --speed 1000
check "Azure's columns" test "$(value decode_tokens)" = 151
printf '%s\n' arrival,prompt,output 2023-11-16T18:15:46Z,3,1 '2023-11-16 18:15:56+00:00,3,1' \
    '2023-11-16 17:16:06-01:00,3,1' >zones
expect 0 out '(20\.[0-9]* s by the replay.s clock)' replay zones --no-attention --speed 1
expect 0 out '(15[0-9]*\.[0-9]* s by the replay.s clock)' replay trace --no-attention --speed 1000

# ---- Prefix hits: those that a script computes from hash_ids ---------------------------------------
small='--hash-block 16 --heads 2:1 --head-size 16'
# shellcheck disable=SC2086 # several words
for pair in 16:0.688308261 4:0.706254949 24:0.649247823; do
    size=${pair%:*}
    expect 0 out '"preemptions": 0,' replay "$talks" $small --block-size "$size" --max-seqs 1 -o json
    check "prefix hits, blocks of $size: $(value prefix_hit_rate)" test "$(value prefix_hit_rate)" = "${pair#*:}"
    expect 0 out "\"prefix_hit_rate\": ${pair#*:}," \
        replay "$talks" $small --block-size "$size" --max-seqs 1 --no-attention --budget 7 -o json
    if command -v python3 >python; then
        check "prefix hits by the script, blocks of $size" test "${pair#*:}" = \
            "$(python3 -B "$here/../pool/prefix_hits.py" "$talks" --hash-block 16 --block-size "$size")"
    fi
done
# All 13 of the same 14 tokens that full blocks of 4 hold but the last; nothing of others' answers.
for i in 1 2 3; do
    printf '{"timestamp": %d, "input_length": 14, "output_length": 9, "hash_ids": [5]}\n' $i
done >trace
expect 0 out '"prefix_hit_rate": 0.571428571,' replay trace --max-seqs 1 --block-size 4 --no-attention -o json

# ---- A quarter of the pool: preemption and eviction, and the same bits ------------------------------
awk 'BEGIN { print "arrival,prompt,output"; for (i = 0; i < 14; i++) print i ",9," 100 + 3 * i }' >long.csv
# same A B: rows that both files have, and those that one has twice, are equal; prints how many.
same() {
    awk '{ key = $1 " " $2 " " $3 }
         key in hash { both++; if (hash[key] != $4) { wrong = 1; exit } }
         { hash[key] = $4 }
         END { if (wrong || both == 0) exit 1; print both }' "$1" "$2"
}
# shellcheck disable=SC2086 # several words
for trace in "$talks" long.csv; do
    size='--block-size 4 --layers 2'
    expect 0 out '"mismatched_rows": 0' replay "$trace" $small $size -o json --rows whole --verify 5
    check "a pool that holds everything preempts nobody" test "$(value preemptions)" = 0
    [ "$trace" = long.csv ] && blocks=$(($(value peak_used) / 4)) || blocks=110
    for with in '' '--preempt swap' '--policy prefill-first' '--preempt swap --host-blocks 40 --max-seqs 7' \
        '--budget 9' '--admit chunk --budget 30' '--admit chunk --budget 30 --preempt swap' '--policy prefill-first --preempt swap --speed 1000000 --budget 20'; do
        expect 0 out '"mismatched_rows": 0' \
            replay "$trace" $small $size -o json --blocks $blocks --rows quarter --verify 30 $with
        check "replay $with: all requests" test "$(value requests)" -ge 14
        check "replay $with: some are preempted ($(value preemptions))" test "$(value preemptions)" -gt 0
        check "replay $with: rows verified" test "$(value verified_rows)" -gt 100
        check "replay $with: within its blocks" test "$(value peak_used)" -le $blocks
        check "replay $with: the same bits" same whole quarter
        check "replay $with: every row is counted" test $(($(value prefill_tokens) + $(value decode_tokens))) -eq \
            $(($(wc -l <quarter) / 2))
    done
done
expect 0 out '| preemptions  *| 3[0-9] (3[0-9] by swap) *|' \
    replay long.csv --hash-block 16 --heads 2:1 --head-size 16 --block-size 4 --blocks 60 --preempt swap
# Windows: a long answer needs no more blocks than its window and a step. Types: all are verified.
for type in f32 f16 bf16 fp8_e4m3 fp8_e5m2 int8; do
    # shellcheck disable=SC2086 # several words
    expect 0 out '"mismatched_rows": 0' replay long.csv $small --block-size 4 --window 20 --budget 8 --blocks 12 \
        --verify 20 --kv-dtype $type -o json
    check "$type: rows verified" test "$(value verified_rows)" -gt 100
    for dtype in f16 bf16; do
        # shellcheck disable=SC2086 # several words
        expect 0 out '"mismatched_rows": 0' replay "$talks" $small --verify 50 --dtype $dtype --kv-dtype $type -o json
        check "$dtype on $type: rows verified" test "$(value verified_rows)" -gt 1000
    done
done
expect 0 out '| rows verified  *| [1-9][0-9]*, 0 mismatched *|' replay "$talks" --hash-block 16 --verify 1

# ---- Figures: without attention the clock is exact, and so is what follows from it --------------------
# Steps of 10 ms and 20 us a token; requests one after another; percentiles are within 0.5 %.
printf '%s\n' arrival,prompt,output 0,100,5 0,200,10 0,1500,33 0,7,1 0,513,2 >five.csv
near() { # NAME WANTED...: the values of that name in the JSON, in their order
    what=$1
    shift
    check "$what: $(value "$what" | tr '\n' ' ') are $*" awk -v got="$(value "$what" | tr '\n' ' ')" -v want="$*" 'BEGIN {
        n = split(got, g); if (n != split(want, w)) exit 1
        for (i = 1; i <= n; i++) if ((g[i] - w[i]) ^ 2 > (0.005 * w[i]) ^ 2) exit 1 }'
}
expect 0 out '"prefill_tokens": 2320,' replay five.csv --max-seqs 1 --no-attention --blocks 500 -o json
near decode_tokens 46
near p50 14 10.02
near p90 60 10.02
near p99 60 10.02
near peak_used 96
near waste_share 0.00683342849
# Four at once with 256 tokens a step: prompts first make answers wait, answers first make prompts wait.
expect 0 out '"requests": 5,' replay five.csv --max-seqs 4 --budget 256 --no-attention --blocks 500 -o json
near p90 105.6 15.12
expect 0 out '"requests": 5,' replay five.csv --max-seqs 4 --budget 256 --no-attention --blocks 500 -o json --policy prefill-first
near p90 101.1 40.28
expect 0 out '(a contiguous cache: 32.8 %)' replay five.csv --max-seqs 1 --no-attention --blocks 500

# ---- Seeds, formats, the built-in trace ----------------------------------------------------------
names='version command interrupted trace name total_requests total_prompt_tokens total_output_tokens machine device'\
' backend level threads options no_attention layers heads kv_heads head_size dtype kv_dtype window block_size max_seqs'\
' budget policy admit preempt speed verify requests steps prefill_tokens decode_tokens seconds clock_seconds'\
' prefill_seconds decode_seconds attention_share ttft_ms p50 p90 p99 ms counts itl_ms p50 p90 p99 ms counts kv blocks'\
' peak_used bytes waste_share contiguous_waste_share prompt_tokens hit_tokens prefix_hit_rate preemptions swaps'\
' evictions verified_rows mismatched_rows series interval_seconds used_blocks cached_blocks running decoding preempted'\
' waiting steps prefill_tokens decode_tokens preemptions prompt_tokens hit_tokens'
expect 0 out '^{$' replay --limit 20 -o json --heads 2 --head-size 16 --verify 3 --rows a
check "the JSON has these names and no others" \
    test "$(sed -n 's/^ *"\([a-z0-9_]*\)": .*/\1/p' out | tr '\n' ' ')" = "$names "
check "20 of the built-in requests" test "$(value requests)" = 20
check "they share prefixes" test "$(value prefix_hit_rate)" != 0
check "waste is a share" sh -c "echo $(value waste_share) | grep -q '^0\.0'"
run replay --limit 20 --heads 2 --head-size 16 --rows b
check "one seed, one result" cmp -s a b
run replay --limit 20 --heads 2 --head-size 16 --rows b --seed 2
check "another seed, another" sh -c '! cmp -s a b'
expect 0 out '^requests,prefill_tokens,decode_tokens,seconds,ttft_ms_p50,.*,mismatched_rows$' \
    replay --limit 5 --heads 2 --head-size 16 -o csv
check "rows of the CSV have equal columns" test "$(awk -F, '{ print NF }' out | sort -u)" = 17
expect 0 out '^| KV memory wasted .* % (a contiguous cache: [0-9.]* %)' replay --limit 20 --heads 2 --head-size 16
check "replay fits 100 columns" test -z "$(awk 'length > 100' out)"
check "replay has no colour codes without a terminal" sh -c '! grep -q "$(printf "\\033")" out'
expect 0 out '^| requests  *| 128 of 128 in ' replay --no-attention
check "without attention the clock's cost is told" grep -q '^Without attention a step takes 10 ms and 20 us' out

# ---- The interrupt ---------------------------------------------------------------------------------
for pair in INT:130 TERM:143; do
    signal=${pair%:*}
    rm -f rows.log
    mkdir empty && cd empty || exit 1
    "$folio" replay --layers 300 --heads 2:1 --head-size 8 --blocks 1000 --budget 64 --rows ../rows.log >../out 2>../err &
    job=$!
    while [ ! -s ../rows.log ] && kill -0 $job; do sleep 0.1; done
    kill -"$signal" $job
    wait $job
    status=$?
    cd .. || exit 1
    check "SIG$signal: the exit status is ${pair#*:}, not $status" test $status -eq "${pair#*:}"
    check "SIG$signal: the summary so far" grep -q '^| requests  *| [0-9]* of 128 in ' out
    check "SIG$signal: it says so" grep -q '^interrupted: the summary so far$' out
    check "SIG$signal: whole rows" sh -c '! grep -qv "^[0-9]* [0-9]* [0-9]* [0-9a-f]\{16\}$" rows.log'
    check "SIG$signal: it leaves nothing behind" rmdir empty
done

# ---- Rows that cannot be written --------------------------------------------------------------------
expect 1 err '^folio replay: nowhere/rows cannot be written: No such file' replay --limit 1 --rows nowhere/rows
if [ -c /dev/full ]; then
    printf '%s\n' "$fine" >trace # few rows: seen when the file is closed
    expect 1 err '^folio replay: /dev/full cannot be written: No space' replay trace --rows /dev/full
    check "one sentence" test "$(wc -l <err)" -eq 1
    expect 1 err '^folio replay: /dev/full cannot be written: No space' replay --limit 9 --rows /dev/full
    check "one sentence" test "$(wc -l <err)" -eq 1
fi

finish
