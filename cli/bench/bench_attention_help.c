/* bench_attention_help.c: `folio bench --help`. */
#include "base/commands.h"
#include "bench/bench_attention.h"

#include <stdio.h>

static const char help[] =
    "usage: folio bench [OPTION]...\n"
    "       folio bench TOPIC [OPTION]...\n\n"
    "How fast this build is on this machine. Without a topic: attention, the forward of one layer on a\n"
    "paged cache whose blocks lie in random order; K and V are in the cache already. Between the\n"
    "repetitions of a case the ceilings are sampled with as many threads: loops that only multiply and\n"
    "add, or only read memory. The best sample is the ceiling: of reading for decodes, of arithmetic for\n"
    "prefills (bf16 dot products where the kernel uses them, else f32 multiply-adds). Where the case\n"
    "itself ran faster than every sample, its fastest run is the ceiling, written with '>='. share is\n"
    "what the median reached of it, at most 100 %. A spread above 20 % is called noisy.\n\n"
    "topics\n";

static const char options_help[] =
    "\noptions\n"
    "      --backend NAME     cpu (default) or cuda, see below\n"
    "      --section LIST     of a GPU's cases: all, or some of those below\n"
    "      --case LIST        batches, see below; default q512,q2k,16q1s4k,1q1s32k\n"
    "      --dtype LIST       of q and out: f32, f16, bf16; default f32,bf16\n"
    "      --kv-dtype LIST    of the cache: f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8; default: as dtype\n"
    "      --heads LIST       query heads:kv heads; default 32:8\n"
    "      --head-size LIST   multiples of 8 up to 512; default 128\n"
    "      --block-size LIST  tokens of a block; default 16\n"
    "      --layout LIST      of the cache: native (default), nhd, hnd, interleaved_nhd,\n"
    "                         interleaved_hnd, xpacked, xpacked_1\n"
    "      --threads LIST     default: one per processor\n"
    "      --level LIST       highest instruction-set level, the best up to it runs; default: the best\n"
    "                         for this CPU, up to FOLIO_CPU\n"
    "      --options LIST     plain (default), or alibi, sinks, window:TOKENS, soft_cap:X, full (rows see\n"
    "                         later keys too), invariant (to the batch), graph:LAYERS (a captured CUDA\n"
    "                         graph) joined by +; such a case and its plain form run in turns\n"
    "      --cache LIST       cold (default): 256 MiB were read before each repetition, so that K and V\n"
    "                         come from memory; warm: the same forward ran just before; dirty, on a\n"
    "                         GPU: 256 MB were written, which it still has to bring to memory\n"
    "      --peers            also run other programs' attention, in turns, by peers/peers.py\n"
    "      --peers-script PATH  where that script is, if not in the tree of this program\n"
    "      --reps N           repetitions of each case; default 10, on a GPU 30\n"
    "      --seed N           other numbers and orders; default 1\n"
    "      --compare FILE.json  this run beside one that -o json saved, see below\n"
    "      --from FILE.json   measure nothing: compare or plot that saved run instead; no option for\n"
    "                         measuring goes with it\n"
    "      --fail-if-slower PERCENT  exit with 1 if --compare finds a case that much slower\n"
    "      --plot FILE.svg    a roofline: the cases as points under the measured ceilings, GFLOP/s over\n"
    "                         FLOP per byte of K and V; with --compare where each was before. A pointer\n"
    "                         over a point shows its figures; it follows the reader's light or dark\n"
    "  -o, --output FORMAT    md (default), csv or json\n"
    "  -h, --help             this text; 'folio bench TOPIC --help' tells more of a topic\n\n"
    "All lists are crossed: each case runs with each type, each shape, each layout. A number of a list\n"
    "may be a range: FIRST-LAST, FIRST-LAST+STEP, FIRST-LAST*FACTOR; one range per word. k is 1024. What\n"
    "is refused of the crossed lists is named on stderr; the rest is still printed, the exit status 1.\n\n";

static const char cuda_help[] =
    "on a GPU\n"
    "  --backend cuda, in a build by 'make cuda'. q, out and the cache lie in the GPU's memory. Timed is\n"
    "  the forward alone, by events of the stream; 256 MB or four times the L2 cache are read before\n"
    "  (--cache cold) or written (dirty). Ceilings: memory read 16 bytes at a time, and mma.sync of bf16\n"
    "  from registers. Decodes have one more: 'its read', a plain read of as many bytes as their K and V\n"
    "  have, from a cache emptied in the same way (read_s). A case that would take half a minute has\n"
    "  fewer repetitions. No --threads, no --level. Without any list all sections run, each with lists of\n"
    "  its own; --section NAME,... runs some, and a list given replaces that of each. Without --section,\n"
    "  lists are crossed as on the CPU: default 2q8k,64q1s8k in bf16. The sections:\n";

/* Compilers need not take more than 4095 characters at once. */
static const char more_help[] =
    "cases\n"
    "  A case is one batch: groups joined by _, each [COUNT]qQUERY_LEN[sSEQ_LEN[:UP_TO]]. COUNT\n"
    "  sequences (1) bring QUERY_LEN new tokens and have SEQ_LEN keys with them (QUERY_LEN), or from\n"
    "  SEQ_LEN to UP_TO, log-uniform, always the same. Up to 16 groups, each of up to 65536 sequences of\n"
    "  up to 16384k tokens.\n"
    "  q2k            one prompt of 2048 tokens\n"
    "  q16-8k*2       ten cases: one prompt of 16 tokens, of 32, and so on\n"
    "  q512s8k        512 more tokens of a prompt, 7680 before them\n"
    "  16q1s4k        16 sequences decode a token each at 4096 keys\n"
    "  64q1s128:32k   64 sequences of 128 to 32768 keys\n"
    "  2q2k_32q1s4k   two prompts and 32 decodes in one batch; such a mix has no share, and the\n"
    "                 prefills alone and the decodes alone run in turns with it\n\n"
    "examples\n"
    "  folio bench                  # the default: about 15 s\n"
    "  folio bench --case 32q1s2k --dtype bf16 --kv-dtype bf16,fp8_e4m3,int8\n"
    "  folio bench --case q1k --level scalar,avx2 --threads 1-4 --reps 30\n"
    "  folio bench --case 16q1s4k --layout native,nhd,xpacked --block-size 16-128*2\n"
    "  folio bench --case q8k --options alibi,sinks,window:1k,soft_cap:30\n"
    "  FOLIO_PYTHON=venv/bin/python folio bench --case q16-2k*2 --cache cold,warm --peers\n"
    "  folio bench -o json > attention.json\n"
    "  folio bench --compare attention.json                # after a change: what became faster?\n"
    "  folio bench --plot roofline.svg\n"
    "  folio bench --from new.json --compare old.json      # two saved runs, of a GPU for instance\n"
    "  folio bench --backend cuda --peers                  # all sections, beside PyTorch\n"
    "  folio bench --backend cuda --section decode,prefill --reps 50\n"
    "  folio bench --backend cuda --case q1k-8k*2 --head-size 64,128 --block-size 16,64\n"
    "  folio bench pool --filter match -o csv\n\n"
    "comparing\n"
    "  A case is faster or slower where its medians differ by more than noise: half of the spreads of\n"
    "  both runs together, at least 2 %. Where it has a ceiling, what it reached of the median of the\n"
    "  ceiling's samples ('of median', which may pass 100 %) must confirm it, beyond a noise with the\n"
    "  ceilings' spreads too: on a machine that others use, a time that changed 'as its ceiling' says\n"
    "  nothing of the program. Runs of different machines are judged by the shares, and machines,\n"
    "  backends, levels and ceilings are named; at another level or with other threads of the same\n"
    "  machine the time decides. Fewer than 5 repetitions have no verdict. Cases of one run alone are\n"
    "  listed. Whatever is found, the exit status is 0, but with --fail-if-slower.\n\n"
    "GFLOP/s counts 4 * heads * head size for each key that a query row sees; GB/s the bytes of K and V\n"
    "of all sequences, once. spread is the range of the middle half of the times over their median.\n\n";

static const char json_help[] =
    "The JSON is one object: {\"version\", \"cpu\", \"device\", \"topic\", \"clock_mhz\", \"ceilings\": the best\n"
    "of the run {\"fma_f32_gflops\", \"dot_bf16_gflops\", \"dot_int8_gops\", \"read_gbps\"}, \"ceilings_median\":\n"
    "of the samples {the same}, \"peers_run\": [names of the peers that have a result],\n"
    "\"results\": [{\"case\", \"phase\", \"backend\", \"device\", \"level\",\n"
    "\"threads\", \"dtype\", \"kv_dtype\", \"heads\", \"kv_heads\", \"head_size\", \"block_size\", \"layout\",\n"
    "\"options\", \"cache\", \"section\", \"kernel\", \"reps\", \"median_s\", \"min_s\", \"spread\", \"noisy\",\n"
    "\"gflops\", \"gbps\", \"ceiling\": {\"name\", \"value\", \"by\": \"sample\" or \"case\", \"median\" and \"spread\" of\n"
    "the samples}, \"share\", \"prefill_s\", \"decode_s\", \"plain_s\", \"read_s\",\n"
    "\"peers\": {name: {\"median_s\", \"min_s\", \"version\"}}}]}; null where a number does not apply.\n"
    "--compare adds \"compare\": {\"file\", \"before\", \"now\": {\"version\", \"cpu\", \"device\"}, \"same_machine\",\n"
    "\"same_place\", \"noise\", \"faster\", \"slower\", \"ceiling\", \"few_reps\": how many cases are, \"ceilings\":\n"
    "{name: {\"before\", \"now\"}}, \"cases\": [{what it is as above, \"before_s\", \"now_s\", \"change\", \"noise\",\n"
    "\"share_before\", \"share_now\", \"share_change\", \"share_noise\", \"verdict\": one of the words counted}],\n"
    "\"only_before\", \"only_now\": [what they are]}. change is now / before - 1. Keys are added in later\n"
    "versions, never renamed or removed.\n\n"
    "environment\n"
    "  FOLIO_CPU     the highest level where --level names none\n"
    "  FOLIO_PYTHON  the Python that runs the peers; default python3\n\n"
    "exit status\n"
    "  0  done    1  a call failed, a file is wrong, nothing ran, or --fail-if-slower found a case\n"
    "  2  the command line is wrong\n";

void bench_attention_help(void)
{
    fputs(help, stdout);
    for (const subcommand *t = bench_topics; t->name; t++)
        printf("  %-8s  %s\n", t->name, t->summary);
    printf("%s%s", options_help, cuda_help);
    bench_print_sections();
    printf("\n%s%s", more_help, json_help);
}
