/* replay_help.c: what `folio replay --help` says. */
#include "replay.h"

#include <stdio.h>

static const char what[] =
    "usage: folio replay [TRACE] [OPTION]...\n\n"
    "Serves a trace of requests as an inference engine would, on the library's own pool, prefix cache,\n"
    "sequences and attention: requests come in while there are seats and blocks, prompts are computed in\n"
    "chunks beside the answers of others, and where blocks run out the youngest sequence makes way. K, V\n"
    "and q are made up from what each token is, so that prompts which share a prefix share blocks.\n\n"
    "TRACE is a file of JSON lines, a request each:\n"
    "    {\"timestamp\": 27000, \"input_length\": 600, \"output_length\": 52, \"hash_ids\": [46, 47]}\n"
    "with the timestamp in ms and a hash id per 512 tokens of the prompt, or a CSV with the columns\n"
    "arrival (seconds, or a date and time), prompt and output (or TIMESTAMP, ContextTokens,\n"
    "GeneratedTokens). '-' is standard input. Without TRACE a built-in one of some seconds is served.\n\n"
    "the traffic\n"
    "      --limit N         the first N requests alone\n"
    "      --speed X         requests come at their timestamps, X times as fast as in the trace;\n"
    "                        default: as fast as possible, one comes whenever a seat is free\n"
    "      --hash-block N    tokens of the prompt that a hash id stands for; default 512\n\n"
    "the model\n"
    "      --layers N        default 1\n"
    "      --heads H[:KV]    query heads and kv heads; default 8:2\n"
    "      --head-size N     default 64\n"
    "      --dtype TYPE      of q and out: f32 (default), f16, bf16\n"
    "      --kv-dtype TYPE   of the KV cache: f32, f16, bf16 (default), fp8_e4m3, fp8_e5m2, int8\n"
    "      --window N        each token sees the last N; default 0: all\n\n"
    "the engine\n"
    "      --blocks N        of the pool; or\n"
    "      --kv-memory SIZE  such as 512M or 2G: as many blocks as fit; default 1G, but room for\n"
    "                        32768 tokens with the built-in trace, so that it is tight\n"
    "      --block-size N    tokens; default 16\n"
    "      --max-seqs N      sequences at once; default 32\n"
    "      --budget N        tokens computed in one step; default 512\n"
    "      --policy P        decode-first (default): answers go on, prompts get what is left of the\n"
    "                        budget; prefill-first: the other way round\n"
    "      --admit WHEN      prompt (default): when there is room for the whole prompt; chunk: for its\n"
    "                        first chunk, which fills the pool sooner and preempts more\n"
    "      --preempt HOW     recompute (default), or swap to host memory and back\n"
    "      --host-blocks N   of host memory for --preempt swap; default: as many as the pool has\n"
    "      --no-attention    pool, prefix cache and scheduler alone; a step then takes 10 ms and\n"
    "                        20 us a token by the replay's clock\n"
    "      --backend NAME    auto (default), or a name 'folio info' lists\n"
    "      --threads N       default: one per processor\n"
    "      --seed N          other numbers in K, V and q; default 1\n\n";

static const char result[] =
    "the result\n"
    "      --verify P        check P percent of all (token, head) rows against the double-precision\n"
    "                        reference, over K and V made anew\n"
    "      --rows FILE       a line per row: request, position, layer, a hash of its bits\n"
    "  -o, --output FORMAT   md (default), csv, json\n"
    "  -h, --help            this text\n\n"
    "what the figures mean\n"
    "  The clock of latencies and rates runs while the engine schedules and attends; making up numbers\n"
    "  and verifying do not count, and times with nothing to do are skipped, not waited for.\n"
    "  time to first token   from a request's arrival to the end of the step that ends its prompt\n"
    "  KV memory wasted      1 - stored tokens / slots of the blocks held; beside it, what a cache would\n"
    "                        waste that reserves the trace's longest request for each running one\n"
    "  prefix hits           prompt tokens found in the cache when a request is admitted\n"
    "  prefill               tokens computed in chunks, once more after a preemption\n\n"
    "examples\n"
    "  folio replay\n"
    "  folio replay trace.jsonl --limit 200 --heads 4:1 --verify 0.1\n"
    "  folio replay trace.jsonl --no-attention --blocks 100000 --speed 1 -o json\n"
    "  folio replay --blocks 600 --preempt swap        # what a small pool does\n\n"
    "On a terminal a map of the blocks, counters and a progress bar are shown meanwhile (docs/replay.md);\n"
    "NO_COLOR is honoured. An interrupt (Ctrl-C) or SIGTERM ends it after the step under way, with the\n"
    "summary so far.\n\n"
    "exit status\n"
    "  0  served, no row mismatched    1  a row mismatched, or it could not run or write\n"
    "  2  the command line is wrong    130, 143  interrupted, terminated\n";

void replay_help(void)
{
    fputs(what, stdout);
    fputs(result, stdout);
}
