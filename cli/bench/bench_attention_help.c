/* bench_attention_help.c: `folio bench --help`. */
#include "base/commands.h"
#include "bench/bench_attention.h"

#include <stdio.h>

static const char help[] =
    "usage: folio bench [OPTION]...\n"
    "       folio bench TOPIC [OPTION]...\n\n"
    "Measures the speed of this build on this machine. Without a topic: attention, one forward of one\n"
    "layer. K and V are in a paged cache whose blocks are in random order. Between the repetitions of a\n"
    "case, the ceilings are sampled with the same number of threads: loops that only multiply and add,\n"
    "or only read memory. The best sample is the ceiling: memory for decodes, arithmetic for prefills\n"
    "(bf16 dot products if the kernel uses them, else f32 multiply-adds). If the case was faster than\n"
    "every sample, its fastest run is the ceiling, marked '>='. share is the median divided by the\n"
    "ceiling, at most 100 %. Spreads above 20 % are marked noisy.\n\n"
    "topics\n";

static const char options_help[] =
    "\noptions\n"
    "      --backend NAME     cpu (default) or cuda, see below\n"
    "      --section LIST     see below; default on a GPU: all. On the CPU: only 'kernels'\n"
    "      --case LIST        batches, see below; default q512,q2k,16q1s4k,1q1s32k\n"
    "      --dtype LIST       type of q and out: f32, f16, bf16; default f32,bf16\n"
    "      --kv-dtype LIST    type of the cache: f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8; default: dtype\n"
    "      --heads LIST       query heads:kv heads; default 32:8\n"
    "      --head-size LIST   of K, and of V unless an option says otherwise: multiples of 8 up to\n"
    "                         576; default 128\n"
    "      --block-size LIST  tokens per block; default 16\n"
    "      --layout LIST      of the cache: native (default), nhd, hnd, interleaved_nhd,\n"
    "                         interleaved_hnd, xpacked, xpacked_1\n"
    "      --threads LIST     default: one per processor\n"
    "      --level LIST       highest instruction-set level to use; default: the best of this CPU, at\n"
    "                         most FOLIO_CPU\n"
    "      --options LIST     plain (default), or alibi, sinks, window:TOKENS, soft_cap:X, full (not\n"
    "                         causal), latent:SIZE (V is the first SIZE numbers of K), v_size:SIZE (V's\n"
    "                         head size), invariant (batch-invariant), graph:LAYERS (a captured CUDA\n"
    "                         graph), rotary (k and v are stored too; on the CPU also compared with a\n"
    "                         separate pass over q and k), joined by +; such a case alternates with its\n"
    "                         plain form\n"
    "      --cache LIST       cold (default): 256 MiB are read before each repetition, so that K and V\n"
    "                         come from memory; warm: the same forward runs just before; dirty, on a\n"
    "                         GPU: 256 MiB are written, and written back during the repetition\n"
    "      --peers            also run other libraries, alternating with Folio (peers/README.md)\n"
    "      --peers-script PATH  peers.py, if not in the source tree of this program\n"
    "      --reps N           repetitions of each case; default 10, on a GPU 30\n"
    "      --seed N           seed of the random numbers and the block order; default 1\n"
    "      --compare FILE.json  compare with a run saved by -o json, see below\n"
    "      --from FILE.json   compare or plot that saved run; measure nothing. Options for measuring\n"
    "                         are rejected\n"
    "      --fail-if-slower PERCENT  exit with 1 if --compare finds a case that much slower\n"
    "      --plot FILE.svg    a roofline: the cases as points under the measured ceilings, GFLOP/s over\n"
    "                         FLOP per byte of K and V; with --compare also the saved run. Hovering\n"
    "                         over a point shows its figures; light and dark mode\n"
    "  -o, --output FORMAT    md (default), csv or json\n"
    "  -h, --help             this text; 'folio bench TOPIC --help' explains a topic\n\n"
    "Every combination of the lists runs: each case with each type, shape and layout. A number may be a\n"
    "range: FIRST-LAST, FIRST-LAST+STEP, FIRST-LAST*FACTOR; one range per list entry. k is 1024.\n"
    "Combinations that are not supported are named on stderr; the others are printed, and the exit\n"
    "status is 1.\n\n";

static const char cuda_help[] =
    "on a GPU\n"
    "  --backend cuda, with a build of 'make cuda'. q, out and the cache are in GPU memory. Only the\n"
    "  forward is timed, with CUDA events; before it the larger of 256 MiB and four times the L2 cache is\n"
    "  read (--cache cold) or written (dirty). Ceilings: reads of 16 bytes, and bf16 mma.sync on\n"
    "  registers. Decodes have one more: 'its read', a plain read of as many bytes as their K and V, from\n"
    "  a cold cache (read_s). A case that would take half a minute has fewer repetitions. --threads and\n"
    "  --level are not supported. Without any list all sections run, each with its own lists. --section\n"
    "  NAME,... runs some, and a list replaces that of each section. With a list and without --section,\n"
    "  the other lists have their defaults: --case 2q8k,64q1s8k --dtype bf16. The sections:\n";

/* Compilers need not take more than 4095 characters at once. */
static const char more_help[] =
    "cases\n"
    "  A case is one batch: groups joined by _, each [COUNT]qQUERY_LEN[sSEQ_LEN[:UP_TO]]: COUNT sequences\n"
    "  (default 1) with QUERY_LEN new tokens and SEQ_LEN keys in total (default QUERY_LEN), or from\n"
    "  SEQ_LEN to UP_TO keys, log-uniform, the same in every run. At most 16 groups, 65536 sequences per\n"
    "  group and 16384k tokens per sequence.\n"
    "  q2k            one prompt of 2048 tokens\n"
    "  q16-8k*2       ten cases: one prompt of 16 tokens, of 32, and so on\n"
    "  q512s8k        512 new tokens after 7680 cached ones\n"
    "  16q1s4k        16 decodes over 4096 keys\n"
    "  64q1s128:32k   64 sequences of 128 to 32768 keys\n"
    "  2q2k_32q1s4k   two prompts and 32 decodes in one batch. Mixed batches have no share; they\n"
    "                 alternate with their prefills alone and their decodes alone\n\n"
    "examples\n"
    "  folio bench                  # the default: about 15 s\n"
    "  folio bench --case 32q1s2k --dtype bf16 --kv-dtype bf16,fp8_e4m3,int8\n"
    "  folio bench --case q1k --level scalar,avx2 --threads 1-4 --reps 30\n"
    "  folio bench --case 16q1s4k --layout native,nhd,xpacked --block-size 16-128*2\n"
    "  folio bench --case q8k --options alibi,sinks,window:1k,soft_cap:30\n"
    "  FOLIO_PYTHON=venv/bin/python folio bench --case q16-2k*2 --cache cold,warm --peers\n"
    "  folio bench -o json > attention.json\n"
    "  folio bench --compare attention.json                # after a change\n"
    "  folio bench --plot roofline.svg\n"
    "  folio bench --from new.json --compare old.json      # two saved runs\n"
    "  folio bench --backend cuda --peers                  # all sections, against PyTorch\n"
    "  folio bench --backend cuda --section decode,prefill --reps 50\n"
    "  folio bench --backend cuda --case q1k-8k*2 --head-size 64,128 --block-size 16,64\n"
    "  folio bench pool --filter match -o csv\n\n"
    "comparing\n"
    "  A case is faster or slower if its medians differ by more than the noise: half the sum of the\n"
    "  two spreads, at least 2 %. If it has a ceiling, the share of the ceiling's median ('of median',\n"
    "  may exceed 100 %) must confirm this, with the ceilings' spreads added to the noise. Otherwise the\n"
    "  verdict is 'as its ceiling': the machine changed, not the program. Runs of different machines are\n"
    "  compared by their shares, and the report names machines, backends, levels and ceilings. At\n"
    "  another level or with other threads on the same machine, times are compared. Cases with\n"
    "  fewer than 5 repetitions get no verdict. Cases that only one run has are listed. The exit status\n"
    "  is 0, except with --fail-if-slower.\n\n"
    "GFLOP/s counts 2 * heads * (head size of K + of V) for each key that a query row sees; GB/s the\n"
    "bytes of K and V of all sequences, once. The ceiling of a latent decode is memory or\n"
    "arithmetic, whichever would take longer. spread is the interquartile range of the times divided\n"
    "by their median.\n\n";

static const char json_help[] =
    "The JSON is one object: {\"version\", \"cpu\", \"device\", \"topic\", \"clock_mhz\", \"ceilings\": the best\n"
    "of the run {\"fma_f32_gflops\", \"dot_bf16_gflops\", \"dot_int8_gops\", \"read_gbps\"}, \"ceilings_median\":\n"
    "of the samples {the same}, \"peers_run\": [names of the peers that have a result],\n"
    "\"results\": [{\"case\", \"phase\", \"backend\", \"device\", \"level\",\n"
    "\"threads\", \"dtype\", \"kv_dtype\", \"heads\", \"kv_heads\", \"head_size\", \"block_size\", \"layout\",\n"
    "\"options\", \"cache\", \"section\", \"kernel\", \"reps\", \"median_s\", \"min_s\", \"spread\", \"noisy\",\n"
    "\"gflops\", \"gbps\", \"ceiling\": {\"name\", \"value\", \"by\": \"sample\" or \"case\", \"median\" and \"spread\" of\n"
    "the samples}, \"share\", \"prefill_s\", \"decode_s\", \"plain_s\", \"pass_s\" and\n"
    "\"pass_bytes_s\" (rotary: with a separate pass, and the time of its bytes at read_gbps), \"read_s\",\n"
    "\"peers\": {name: {\"median_s\", \"min_s\", \"version\"}}}]}; null if a number does not apply.\n"
    "--compare adds \"compare\": {\"file\", \"before\", \"now\": {\"version\", \"cpu\", \"device\"}, \"same_machine\",\n"
    "\"same_place\", \"noise\", \"faster\", \"slower\", \"ceiling\", \"few_reps\": number of cases with that\n"
    "verdict, \"ceilings\": {name: {\"before\", \"now\"}}, \"cases\": [{\"case\" and its options as above,\n"
    "\"before_s\", \"now_s\", \"change\", \"noise\", \"share_before\", \"share_now\", \"share_change\",\n"
    "\"share_noise\", \"verdict\": one of noise, faster, slower, ceiling, few_reps}], \"only_before\",\n"
    "\"only_now\": [cases of one run only]}. change is now / before - 1. Keys are added in later\n"
    "versions, never renamed or removed.\n\n"
    "environment\n"
    "  FOLIO_CPU     the highest level, if --level is not given\n"
    "  FOLIO_PYTHON  the Python that runs the peers; default python3\n\n"
    "exit status\n"
    "  0  success    1  a call failed, a file is invalid, nothing ran, or --fail-if-slower found a case\n"
    "  2  invalid command line\n";

void bench_attention_help(void)
{
    fputs(help, stdout);
    for (const subcommand *t = bench_topics; t->name; t++)
        printf("  %-8s  %s\n", t->name, t->summary);
    printf("%s%s", options_help, cuda_help);
    bench_print_sections();
    printf("\n%s%s", more_help, json_help);
}
