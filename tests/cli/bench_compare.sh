#!/bin/sh
# bench_compare.sh: `folio bench --compare`: verdicts on runs written here, files that are wrong, and a live run.
# usage: bench_compare.sh PROGRAM
. "$(dirname "$0")/lib.sh"

# saved CPU ROW...: a run. A row is CASE:SECONDS:SPREAD:SHARE:REPS:THREADS, of which all but two may be missing.
saved() {
    printf '{"version": "0.2.0", "cpu": "%s", "device": "%s", "ceilings": {"read_gbps": 20}, "results": [' "$1" "$1"
    shift
    comma=
    for row in "$@"; do
        (
            IFS=:
            # shellcheck disable=SC2086 # the parts of a row
            set -- $row
            printf '%s\n{"case": "%s", "backend": "cpu", "level": "avx2", "threads": %s, "dtype": "f32", "reps": %s,
 "median_s": %s, "spread": %s, "ceiling": {"name": "read_gbps", "value": 20, "spread": 0.02}, "share": %s}' \
                "$comma" "$1" "${6:-2}" "${5:-10}" "$2" "${3:-0.04}" "${4:-null}"
        )
        comma=,
    done
    printf '\n]}\n'
}

compare() { # BEFORE NOW ARGS...
    before=$1 now=$2
    shift 2
    run bench --compare "$before" --from "$now" "$@"
}

# verdict BEFORE_ROW NOW_ROW WORDS [BEFORE_CPU]: what is said of one case.
verdict() {
    saved "${4:-A}" "$1" >before.json
    saved A "$2" >now.json
    compare before.json now.json
    check "$1, then $2: $3: $(grep '^| q' out)" grep -q "^| q.*| $3 *|\$" out
    check "$1, then $2: exit status $status" test "$status" -eq 0
}

# ---- Verdicts: without a share -----------------------------------------------------------------
verdict q1:1.00 q1:1.03 'within noise'
verdict q1:1.00 q1:1.05 slower
verdict q1:1.05 q1:1.00 faster
verdict q1:1.00:0.2 q1:1.15:0.2 'within noise'
verdict q1:1.00:0.2 q1:1.15:0.0 slower
verdict q1:1.00:0.0 q1:1.15:0.4 'within noise'
verdict q1:1.00:0.0 q1:1.019:0.0 'within noise'
verdict q1:1.00:0.0 q1:1.021:0.0 slower
verdict q1:1.00:0.8 q1:0.56:0.8 'within noise'
verdict q1:1.00:0.8 q1:0.55:0.8 faster
verdict q1:1.00:0.0::4 q1:2.00:0.0 'few reps'
verdict q1:1.00:0.0 q1:2.00:0.0::4 'few reps'
verdict q1:1.00:0.0::5 q1:2.00:0.0::5 slower

# ---- What a file says is not what the terminal does --------------------------------------------
saved '\u001b[31mC\u009b' 'q1|\u001b]0;x\u0007:1' >before.json
saved '\u001b[31mD\u009b' 'q1|\u001b]0;x\u0007:1' 'q2\u007f:1' >now.json
compare before.json now.json
check "no control characters from a saved run" sh -c '! tr -d "\n" <out | grep -q "[[:cntrl:]]" && ! grep -q "$(printf "\302\233")" out'
check "a case's name ends no cell" grep -qF '| q1\|?]0;x? |' out

# ---- With a share, which has to confirm; its noise has the ceilings' spreads too ----------------
verdict q1:1.00::0.80 q1:1.20::0.66 slower
verdict q1:1.20::0.66 q1:1.00::0.80 faster
verdict q1:1.00::0.80 q1:1.20::0.80 'as its ceiling'
verdict q1:1.00::0.80 q1:1.20::0.76 'as its ceiling'
verdict q1:1.00::0.80 q1:1.20::0.75 slower
verdict q1:1.00::0.80 q1:1.20::0.90 'as its ceiling'
verdict q1:1.00::0.80 q1:1.00::0.60 'within noise'
check "it says what that means" grep -q '^- ceiling read_gbps: before 20, now 20 (+0.0 %)$' out
verdict q1:1.00::0.80 q1:1.20 slower
check "a calm one too" sh -c '! grep -q "more than 10 %" out'

# A run since 0.3 has the best of the samples as its ceiling; runs are judged by the median of them.
saved A q1:1.00:0:0.80 | sed 's/"value": 20,/"value": 40, "median": 20,/' >before.json
saved A q1:1.50:0:0.80 | sed 's/"value": 20,/"value": 40, "median": 13.3,/' >now.json
compare before.json now.json
check "a busy machine's median explains its times: $(grep '^| q' out)" \
    grep -q '^| q1 .*| 160 -> 241 % |.*| as its ceiling |$' out
check "such shares are named" grep -q '^| case .*|  *of median |' out

saved A q1:1.00::0.80 >before.json
saved A q1:1.20 >now.json
sed 's/"read_gbps": 20}/"read_gbps": 23}/' before.json >busy.json
compare busy.json now.json
check "a busy machine is told from its ceilings" grep -q '^- a ceiling has changed by more than 10 %' out
sed 's/"ceilings": /"ceilings_median": {"read_gbps": 20}, "ceilings": /' busy.json >calm.json
compare calm.json now.json
check "of which it takes the medians" grep -q '^- ceiling read_gbps: before 20, now 20 (+0.0 %)$' out

# ---- Other machines, other threads --------------------------------------------------------------
verdict q1:1.00::0.80 q1:5.00::0.80 'within noise' B
check "other machines are named" grep -q '^- different machines: before B, now A\.' out
verdict q1:1.00::0.80 q1:5.00::0.90 faster B
verdict q1:1.00::0.80 q1:0.50::0.70 slower B
verdict q1:1.00 q1:0.50 faster B
verdict q1:1.00::0.80::1 q1:0.50::0.80::2 faster
check "other threads are named" \
    grep -q '^- different backend, level or threads: before cpu, avx2, threads 1; now cpu, avx2, threads 2 (1 case)$' out

# ---- Which case is which ------------------------------------------------------------------------
saved A q1:1 q2:1:0:::1 q2:2:0:::2 q3:1 q4:1:0:::1 q4:1:0:::2 >before.json
saved A q2:4:0:::2 q1:1 q2:0.5:0:::1 q5:1 q4:1:0:::3 q4:1:0:::4 >now.json
compare before.json now.json
check "counts: $(grep '^- .* faster' out)" grep -q '^- 1 faster, 1 slower, 1 within noise$' out
check "rows follow their threads" grep -q '^| q2 *| threads 2 | *2.00 s | *4.00 s |.*| slower *|$' out
check "a case that is gone" grep -q '^- only before: q3, threads 2$' out
check "a case that is new" grep -q '^- only now: q5, threads 2$' out
check "places that cannot be told apart are not guessed" test "$(grep -c '^- only [a-z]*: q4, threads [1-4]$' out)" -eq 4
check "the comparison fits 100 columns" test -z "$(awk 'length > 100' out)"
saved A q9:1 >now.json
compare before.json now.json
check "nothing in common" grep -q '^The two runs have no case in common' out

# ---- JSON and exit status -----------------------------------------------------------------------
saved A q1:1.00:0:0.8 q2:1:0 >before.json
saved A q1:1.50:0:0.5 q3:1:0 >now.json
compare before.json now.json -o json
for line in '"file": "before.json"' '"same_machine": true' '"same_place": true' '"slower": 1' '"change": 0.5' '"noise": 0.02' \
    '"share_change": -0.375' '"share_noise": 0.02' '"verdict": "slower"' '"before_s": 1' '"now_s": 1.5' \
    '"only_before": \[' '"only_now": \[' '"before": 20'; do
    check "-o json has $line" grep -q "$line" out
done
"$folio" bench --compare - --from now.json -o json <before.json >again 2>err
check "standard input is a file too" sh -c 'sed "s/\"-\"/\"before.json\"/" again | cmp -s - out'
expect 1 err '^folio bench: --fail-if-slower 49: q1 is 50.0 % slower$' \
    bench --compare before.json --from now.json --fail-if-slower 49
expect 0 out slower bench --compare before.json --from now.json --fail-if-slower 51
for limit in '' x -1 nan 5%; do
    expect 2 err "^folio bench: --fail-if-slower takes percent" \
        bench --compare before.json --from now.json --fail-if-slower "$limit"
done
expect 2 err '^folio bench: --fail-if-slower needs --compare' bench --fail-if-slower 5
expect 2 err '^folio bench: --from needs something to do' bench --from now.json
# What would say how to measure is not ignored.
for option in --threads=2 '--case q3' '--reps 3' --peers --seed=2 --backend=cpu '--section decode' '--level scalar'; do
    name=${option%%[= ]*}
    # shellcheck disable=SC2086 # an option and its value
    expect 2 err "^folio bench: --from measures nothing, so $name has no effect: leave it out" \
        bench --compare before.json --from now.json $option
    check "--from with $name prints nothing" test ! -s out
done
for topic in pool overhead; do
    expect 2 err '^folio bench '$topic': --from measures nothing, so --seconds has no effect: leave it out' \
        bench $topic --seconds 1 --compare before.json --from now.json
done
expect 0 out slower bench --from=now.json --compare before.json -o md
expect 2 err '^folio bench: a comparison has no CSV' bench --compare before.json --from now.json -o csv

# ---- Files that are wrong: said with their place, before anything is measured --------------------
# bad TEXT SENTENCE
bad() {
    printf '%b' "$1" >bad.json
    expect 1 err "^folio bench: bad.json: $2" bench --compare bad.json
    check "bench --compare with a wrong file prints nothing on stdout" test ! -s out
}
expect 1 err '^folio bench: nowhere.json: it cannot be read: No such file' bench --compare nowhere.json
expect 1 err '^folio bench: \.: it cannot be read: ' bench --compare .
bad '' 'line 1, column 1: a value expected, the text ends$'
bad '{"results": [\n  {"case" 3}]}' "line 2, column 11: ':' after a name expected, not '3'\$"
bad '{"results": [{}]' "line 1, column 17: ',' or '}' expected, the text ends\$"
bad '{"results": []}' "line 1, column 1: not a run saved by 'folio bench -o json': it has no results\$"
bad '[1, 2]' 'line 1, column 1: not a run'
bad '{"results": [\n7]}' 'line 2, column 1: a result is an object$'
bad '{"results": [{"median_s": 1}]}' 'line 1, column 14: the result has no case$'
bad '{"results": [{"case": "q1", "median_s": 0}]}' 'line 1, column 14: the result has no median_s and no ns_median'
bad '{"results": [{"case": "q1", "median_s": 1}]}' 'line 1, column 14: the result has no spread$'
bad '{"a": "b\n"}' "line 1, column 9: the end of a string, '\"', expected, the line ends\$"
bad '{"a": 1} x' "line 1, column 10: the end of the text expected, not 'x'\$"
bad '{"a": 01}' "line 1, column 8: ',' or '}' expected, not '1'\$"
bad '{"a": 1\0000}' 'it is not JSON: it contains a zero byte$'
saved A q1:1 >run.json
expect 1 err '^folio bench: run.json is a run of the topic attention, not of pool' bench pool --compare run.json

# ---- Live, on both kinds of topics ---------------------------------------------------------------
small="--heads 2 --head-size 32 --dtype f32 --case q3,2q1s20 --reps 5"
# shellcheck disable=SC2086 # words
expect 0 out '"topic": "attention"' bench $small -o json
mv out old.json
# shellcheck disable=SC2086 # words
expect 0 out '^compared with old.json: folio' bench $small --compare old.json
check "both tables are there" test "$(grep -c '^| q3 ' out)" -eq 2
check "all cases are in both" sh -c '! grep -q "^- only" out'
# shellcheck disable=SC2086 # words
expect 0 out '"same_machine": true' bench $small --compare old.json -o json
check "-o json has the run and the comparison" test "$(grep -c '"case": "q3"' out)" -eq 2
mv out now.json
expect 0 out '"same_machine": true' bench --from now.json --compare old.json -o json
expect 0 out '"topic": "pool"' bench pool --filter evict --seconds 0.001 -o json
mv out old.json
expect 0 out '^compared with old.json: folio' bench pool --filter commit --seconds 0.001 --compare old.json
check "a pool's cases are in both" test "$(grep -c '^| evict ' out)" -eq 2

# ---- A run that is stopped leaves what it measured ---------------------------------------------------
# stop SIGNAL FORMAT [TOPIC]: sends the signal when two cases are there.
stop() {
    options='--case q3-30 --dtype f32,bf16 --heads 2 --head-size 32 --reps 5'
    [ $# -eq 2 ] || options='--seconds 0.2'
    rm -f stopped."$2"
    # shellcheck disable=SC2086 # several words
    "$folio" bench ${3:-} $options -o "$2" >stopped."$2" 2>err &
    job=$!
    until [ "$(grep -s -c -e '^      "spread"' -e '^[a-z_0-9]*,[a-z0-9]*,' stopped."$2")" -ge 3 ] 2>/dev/null; do
        kill -0 $job || break
        sleep 0.05
    done
    kill -"$1" $job
    wait $job 2>/dev/null
    status=$?
}
stop INT json
check "SIGINT: exit status $status" test $status -eq 130
check "it says what runs" grep -q '^folio bench: 2 of 56: q3, bf16 on bf16, heads 2:2 of 32' err
check "its JSON is whole, and says so" grep -q '^  "interrupted": true$' stopped.json
check "it has ceilings" grep -q '^  "ceilings": {' stopped.json
expect 0 out 'within noise *|$' bench --from stopped.json --compare stopped.json
check "nothing is told of that run" test ! -s err
stop KILL json
check "SIGKILL: exit status $status" test $status -eq 137
expect 0 out 'within noise *|$' bench --from stopped.json --compare stopped.json
check "it says that it was killed" grep -q '^folio bench: stopped.json: the run was killed; its cases are read$' err
stop KILL csv
check "SIGKILL: rows are whole" test "$(awk -F, '{ print NF }' stopped.csv | sort -u)" -eq 34
stop TERM json pool
check "SIGTERM: exit status $status" test $status -eq 143
check "pool: it says what runs" grep -q '^folio bench: 1 of [0-9]*: lock_pair$' err
expect 0 out '^| alloc_free ' bench pool --from stopped.json --compare stopped.json
head -c 300 stopped.json >cut.json
expect 1 err '^folio bench: cut.json: line [0-9]*, column [0-9]*: .* expected' bench pool --from stopped.json --compare cut.json

finish
