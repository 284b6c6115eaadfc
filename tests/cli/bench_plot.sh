#!/bin/sh
# bench_plot.sh: `folio bench --plot`: points and ceilings are where the numbers say, and nothing partial is left.
# usage: bench_plot.sh PROGRAM
. "$(dirname "$0")/lib.sh"

# A point on the memory ceiling, one at a hundredth of it, one at the f32 ceiling, a mixed batch without a share.
cat >run.json <<'END'
{"version": "0.2.0", "cpu": "A <CPU> & more", "device": "A <CPU> & more",
 "ceilings": {"fma_f32_gflops": 1000, "dot_bf16_gflops": 2000, "dot_int8_gops": 4000, "read_gbps": 10}, "results": [
{"case": "high", "backend": "cpu", "dtype": "f32", "reps": 9, "median_s": 1, "spread": 0, "gflops": 20, "gbps": 10,
 "ceiling": {"name": "read_gbps", "value": 10}, "share": 1},
{"case": "low", "backend": "cpu", "dtype": "bf16", "reps": 9, "median_s": 1, "spread": 0, "gflops": 0.2, "gbps": 0.1,
 "ceiling": {"name": "read_gbps", "value": 10}, "share": 0.01},
{"case": "full", "backend": "cpu", "dtype": "f32", "reps": 9, "median_s": 1, "spread": 0, "gflops": 1000, "gbps": 1,
 "ceiling": {"name": "fma_f32_gflops", "value": 1000}, "share": 1},
{"case": "mixed", "backend": "cpu", "dtype": "f32", "reps": 9, "median_s": 1, "spread": 0, "gflops": 100, "gbps": 1,
 "ceiling": null, "share": null}]}
END
run bench --from run.json --plot plot.svg
check "a plot of a saved run: exit status $status: $(cat err)" test "$status" -eq 0
check "four points" test "$(grep -c '<circle' plot.svg)" -eq 4
check "two ceilings, none that bounds no case" test "$(grep -c '<path class="line [^>]*clip' plot.svg)" -eq 2
check "each case has its label" test "$(grep -c -e '>high, f32</text>' -e '>low, bf16</text>' -e '>full, f32</text>' -e '>mixed, f32</text>' plot.svg)" -eq 4
check "the legend has the ceilings" grep -q 'memory read: 10 GB/s</text>' plot.svg
check "of arithmetic too" grep -q 'f32 FMA: 1000 GFLOP/s</text>' plot.svg
check "more is shown by a pointer" grep -q '<title>low, bf16: 0.2 GFLOP/s, 0.1 GB/s, 1 % of its ceiling</title>' plot.svg
check "names are escaped" grep -q 'A &lt;CPU&gt; &amp; more' plot.svg
check "light and dark" grep -q 'prefers-color-scheme' plot.svg
check "nothing is fetched" sh -c '! grep -q "href\|@import\|url(http" plot.svg'
if command -v xmllint >/dev/null; then check "it is XML" xmllint --noout plot.svg; fi

# Where a point is: the line of memory passes through "high", the f32 ceiling through "full".
circle() { # CASE: "x y"
    sed -n "/<title>$1, /s/.*cx=\"\([0-9.]*\)\" cy=\"\([0-9.]*\)\".*/\1 \2/p" plot.svg
}
lines=$(sed -n 's/.*<path class="line [^>]*clip[^>]* d="M\([0-9.]*\) \([0-9.]*\)L\([0-9.]*\) \([0-9.]*\)".*/\1 \2 \3 \4/p' plot.svg)
near() { # POINT LINE: are they within 0.3 px?
    echo "$1 $2" | awk '{ y = $4 + ($1 - $3) * ($6 - $4) / ($5 - $3); d = y - $2; exit !(d < 0.3 && d > -0.3) }'
}
check "memory passes through 'high'" near "$(circle high)" "$(echo "$lines" | sed -n 1p)"
check "f32 passes through 'full'" near "$(circle full)" "$(echo "$lines" | sed -n 2p)"
check "the roof bends where both meet" test "$(echo "$lines" | sed -n '1s/.* \([0-9.]* [0-9.]*\)$/\1/p')" = \
    "$(echo "$lines" | sed -n '2s/^\([0-9.]* [0-9.]*\) .*/\1/p')"

# ---- With an earlier run: a point each, and a line from there to here ---------------------------
sed 's/"gflops": 20,/"gflops": 10,/; s/"gbps": 10,/"gbps": 5,/' run.json >before.json
expect 0 out '^compared with before.json' bench --from run.json --compare before.json --plot plot.svg
check "four points and four before" test "$(grep -c '<circle' plot.svg)" -eq 8
check "the legend names them" grep -q '>before</text>' plot.svg

# ---- What cannot be done leaves nothing, and measures nothing -------------------------------------
rm -f plot.svg
expect 1 err '^folio bench: --plot: nowhere/plot.svg: No such file or directory$' bench --plot nowhere/plot.svg
check "nothing was measured" test ! -s out
expect 1 err '^folio bench: --plot: \.: Is a directory$' bench --plot .
sed 's/"gbps": [0-9.]*,//' run.json >none.json
expect 1 err '^folio bench: --plot: no case has both GFLOP/s and GB/s$' bench --from none.json --plot plot.svg
check "no file is left" test "$(echo plot*)" = 'plot*'
expect 2 err "^folio bench pool: unknown option '--plot'" bench pool --plot plot.svg

# ---- Live -----------------------------------------------------------------------------------------
expect 0 out '^| q3 ' bench --heads 2 --head-size 32 --dtype f32,bf16 --case q3,2q1s20,q3_q1s9 --reps 1 --plot plot.svg
check "six points" test "$(grep -c '<circle' plot.svg)" -eq 6

finish
