#!/usr/bin/env python3
"""generate_vllm06.py: random steps of vLLM 0.6's attention backends, and PyTorch's answers.

Each case is one forward of one backend: metadata, a cached context, query, key and value. The
answer is what the backends are described to do, written with PyTorch's scaled_dot_product_attention
in float64, sequence by sequence: prompts over their cached context and the new keys as given,
decodes over the cache as stored, the encoder over itself, the decoder over the encoder; ALiBi and
sliding window for decoders alone. tests/vllm06/test_vllm06_torch.c runs the same through
folio_vllm06.h. Inputs, rounding and format are generate.py's; README.md has what is added.
"""
import argparse
import collections
import math
import random
import sys

import numpy as np
import torch
import torch.nn.functional as F

sys.dont_write_bytecode = True  # nothing is left next to the sources
import generate as g  # noqa: E402

BACKENDS = ("xformers", "torch-sdpa", "ipex")
# One of these for each case of a backend in turn, so that even a short file has them all.
KINDS = ("prompts", "decodes", "mixed", "chunks", "encoder", "cross_prompts", "mixed", "chunks",
         "encoder_only", "cross_decodes", "decodes", "profiling", "cross_mixed", "prompts")
HEAD_SIZES = {"xformers": (32, 64, 80, 96, 112, 120, 128, 192, 256),
              "torch-sdpa": (32, 64, 80, 96, 112, 120, 128, 192, 256),
              "ipex": (32, 64, 80, 96, 112, 128, 256)}
OTHER_HEAD_SIZES = (8, 16, 16, 24, 40, 48, 160)
BLOCK_SIZES = (8, 16, 32)
OTHER_BLOCK_SIZES = (1, 2, 4, 5, 64)
CACHE_DTYPES = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
PREFILL, DECODE = 1, 2


# ---------------------------------------------------------------------------------------------
# What the backends do
# ---------------------------------------------------------------------------------------------

def make_alibi_bias(slopes, seq_len, dtype):
    """[heads][seq_len][seq_len]: slope times (key - query), -inf above the diagonal."""
    place = torch.arange(seq_len, dtype=dtype)
    bias = (place[None, :] - place[:, None]) * torch.tensor(slopes, dtype=dtype)[:, None, None]
    return bias + torch.full((seq_len, seq_len), -math.inf, dtype=dtype).triu(diagonal=1)


def make_sliding_window_bias(seq_len, window, dtype):
    """[seq_len][seq_len]: 0 for the last `window` keys up to the query, else -inf; 0: causal."""
    seen = torch.ones(seq_len, seq_len, dtype=dtype).tril()
    if window:
        seen = seen.triu(diagonal=1 - window)
    return torch.log(seen)


def formula(case, scale, q, k, v, mask):
    """softmax(cap(scale q k) + mask) v, in float64."""
    score = scale * (q @ k.transpose(1, 2))
    if case["cap"]:
        score = case["cap"] * torch.tanh(score / case["cap"])
    return torch.softmax(score if mask is None else score + mask, dim=2) @ v


def plain(case, scale, q, k, v, mask, rounded=False):
    """The same as the error budget's measure: two passes in float32, every sum sequential. Kernels on
    bf16 dot products multiply V in bf16 where q is bf16 and the cache's numbers are exact in it; rounded:
    probabilities, with the scale of V on them, are rounded as there."""
    q, k, v = q.float(), k.float(), v.float()
    score = torch.zeros(q.shape[0], q.shape[1], k.shape[1])
    for d in range(q.shape[2]):
        score += q[:, :, d, None] * k[:, None, :, d]
    score *= scale
    if case["cap"]:
        score = case["cap"] * torch.tanh(score / case["cap"])
    if mask is not None:
        score += mask.float()
    weight = torch.exp(score - score.amax(dim=2, keepdim=True))
    in_product = weight
    if rounded and case["q"] == "bf16" and case["kv"] in ("bf16", *g.FP8):
        v_scale = case["scales"][1] if case["kv"] in g.FP8 else 1.0
        in_product = (weight * v_scale).bfloat16().float() / v_scale
    total, out = torch.zeros(score.shape[:2]), torch.zeros(q.shape)
    for j in range(k.shape[1]):
        total += weight[:, :, j]
        out += in_product[:, :, j, None] * v[:, None, j]
    return (out / total[:, :, None]).double()


def sdpa(case, q, k, v, mask=None, is_causal=False):
    """out [queries][heads][size] of q, k, v in [tokens][heads][size]; rows that see nothing: 0."""
    group, scale = case["heads"] // case["kv_heads"], case["scale"] or case["dk"] ** -0.5
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    explicit = make_sliding_window_bias(q.shape[1], 0, torch.float64) if is_causal else mask
    if explicit is not None:
        explicit = explicit.expand(case["heads"], -1, -1)
    if case["cap"]:  # PyTorch's attention has no soft cap
        out = formula(case, scale, q, k, v, explicit)
    else:
        out = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=None if mask is None else explicit[None],
            is_causal=is_causal, scale=scale)[0]
    in_f32 = plain(case, scale, q, k, v, explicit)
    in_bf16 = plain(case, scale, q, k, v, explicit, rounded=True)
    if explicit is not None:
        blind = (explicit == -math.inf).all(dim=2)[:, :, None]
        out, in_f32, in_bf16 = (torch.where(blind, 0.0, x) for x in (out, in_f32, in_bf16))
    case["plain"] = max(case["plain"], (in_f32 - out).abs().max().item())
    case["plain16"] = max(case["plain16"], (in_bf16 - out).abs().max().item())
    return out.transpose(0, 1)


def decoder_mask(case, queries, keys):
    """What the last `queries` of `keys` tokens add to their scores; None: causal alone."""
    if case["slopes"] is None and not case["window"] and queries == keys:
        return None
    mask = make_sliding_window_bias(keys, case["window"], torch.float64)
    if case["slopes"] is not None:
        mask = mask + make_alibi_bias(case["slopes"], keys, torch.float64)
    return mask[..., keys - queries:, :]


def set_bias(case, first, queries, keys):
    """A bias given by the caller for one prompt, and the number of the next prompt's first."""
    heads = case["bias_heads"]
    index = np.arange(first, first + heads * queries * keys)
    x = g.uniform(g.draws(case["seed"], g.T_BIAS, index), "f32")
    hide = g.draws(case["seed"], g.T_BIAS_HIDE, index) % np.uint64(100)
    x = np.where(hide < np.uint64(case["bias_hide"]), -math.inf, x)
    return torch.from_numpy(x).reshape(heads, queries, keys), first + len(index)


def given(case, first, count):
    """K and V rows of this step."""
    rows = np.arange(first, first + count)
    return [g.rows_of(case, t, rows, case["kv_heads"], case["dk"], case["q"])
            for t in (g.T_K, g.T_V)]


def cached(case, table, count):
    """K and V as the cache gives them back, rows numbered by slot."""
    slots = g.natural_slots(case, table, count)
    return [g.as_stored(g.rows_of(case, t, slots, case["kv_heads"], case["dk"], case["q"]),
                        case["kv"], scale)
            for t, scale in zip((g.T_CACHED_K, g.T_CACHED_V), case["scales"])]


def stored(case, pair):
    """This step's K and V after they went to the cache."""
    return [g.as_stored(x, case["kv"], scale) for x, scale in zip(pair, case["scales"])]


def join(a, b):
    return [torch.cat(pair) for pair in zip(a, b)]


def keys_of(case, seq, new_row):
    """K and V that one sequence attends to."""
    if case["type"] == "encoder":
        return given(case, new_row, seq["enc"])
    if case["type"] == "encoder_decoder":
        if seq["enc_new"]:
            return given(case, new_row, seq["enc"])
        return cached(case, seq["ctable"], seq["enc"])
    new = given(case, new_row, seq["q"])
    if case["type"] == "encoder_only" or not case["cache"]:
        return new
    context = seq["s"] - seq["q"]
    if seq["phase"] == DECODE:
        if seq["slots"][0] == -1:  # not stored: what its slot held before
            return cached(case, seq["table"], seq["s"])
        new = stored(case, new)
    return join(cached(case, seq["table"], context), new)


def forward(case):
    """out [rows][heads][size], float64."""
    outs, row, new_row, bias_at = [], 0, 0, 0
    case["plain"] = case["plain16"] = 0.0
    for seq in case["seqs"]:
        encoder, cross = case["type"] == "encoder", case["type"] == "encoder_decoder"
        queries = seq["enc"] if encoder else seq["q"]
        q = g.rows_of(case, g.T_Q, np.arange(row, row + queries), case["heads"], case["dk"],
                      case["q"])
        k, v = keys_of(case, seq, new_row) if seq["s"] else ([], [])
        mask = None
        if case["bias_heads"] and seq["phase"] == PREFILL:
            mask, bias_at = set_bias(case, bias_at, queries, len(k))
        elif case["type"] == "decoder" and len(k):
            mask = decoder_mask(case, queries, len(k))
        causal = case["type"] == "decoder" and mask is None
        if len(k) == 0:
            outs.append(torch.zeros(queries, case["heads"], case["dk"], dtype=torch.float64))
        else:
            outs.append(sdpa(case, q, k, v, mask, causal))
        row += queries
        new_row += seq["enc_new"] if encoder or cross else seq["q"]
    return torch.cat(outs)


# ---------------------------------------------------------------------------------------------
# Drawing
# ---------------------------------------------------------------------------------------------

def draw_layer(rng, case):
    """Geometry, number types and what changes scores."""
    pick, chance = rng.choice, g.chance
    case["q"] = pick(tuple(g.FLOATS))
    case["vkv"] = pick(tuple(CACHE_DTYPES)) if chance(rng, 35) else "auto"
    case["kv"] = CACHE_DTYPES.get(case["vkv"], case["q"])
    sizes = OTHER_HEAD_SIZES if chance(rng, 65) else HEAD_SIZES[case["backend"]]
    step = 16 if case["kv"] in g.FP8 and case["backend"] != "ipex" else 8
    case["dk"] = pick([size for size in sizes if size % step == 0])
    case["kv_heads"] = pick((1, 1, 2, 2, 3)) if case["dk"] < 64 else 1
    case["heads"] = case["kv_heads"] * (pick((1, 2, 2, 3, 4)) if case["dk"] < 64 else pick((1, 2)))
    case["bs"] = pick(BLOCK_SIZES) if chance(rng, 75) else pick(OTHER_BLOCK_SIZES)
    case["scale"] = g.f32(rng.uniform(0.05, 0.5)) if chance(rng, 30) else 0.0
    case["cap"] = g.f32(pick((0.7, 3.0, 30.0))) if chance(rng, 20) else 0.0
    # Drawn for every type: the encoder and cross attention must ignore both.
    case["slopes"] = None
    if chance(rng, 40):
        case["slopes"] = [g.f32(2.0 ** (-8.0 * (h + 1) / case["heads"]))
                          for h in range(case["heads"])]
    case["window"] = pick((1, 2, 3, 7, 16, 17, 40)) if chance(rng, 40) else 0
    case["scales"] = (1.0, 1.0)
    if case["kv"] in g.FP8 and chance(rng, 75):
        case["scales"] = tuple(g.f32(pick((0.5, 0.037, 1.7, 0.02))) for _ in range(2))


def draw_seq(rng, case, kind, most):
    """Lengths of one sequence; kind: prompt, chunk, decode or padding."""
    seq = {"phase": DECODE if kind in ("decode", "padding") else PREFILL, "q": 1, "enc": 0,
           "enc_new": 0}
    if seq["phase"] == PREFILL:
        seq["q"] = rng.randint(1, min(9, max(1, most)))
    context = 0
    if kind in ("chunk", "decode"):
        longest = rng.randint(100, 300) if g.chance(rng, 6) else 50
        context = g.near_block(rng, case["bs"], 0 if kind == "decode" else 1, longest)
    seq["s"] = 0 if kind == "padding" else seq["q"] + context
    return seq


def draw_encoder(rng, case, seq, most):
    if case["type"] == "encoder":
        seq["enc"] = seq["enc_new"] = rng.randint(1, min(9, max(1, most)))
    elif case["type"] == "encoder_decoder" and seq["s"]:
        seq["enc"] = g.near_block(rng, case["bs"], 0, 40)
        seq["enc_new"] = seq["enc"] if seq["phase"] == PREFILL and case["kv_given"] else 0


def draw_seqs(rng, case, numbers):
    """All sequences, prompts first; `numbers` is how long out may become."""
    kinds = {"prompts": "p", "decodes": "d", "mixed": "pcd", "chunks": "c", "encoder": "p",
             "encoder_only": "p", "profiling": "p", "cross_prompts": "p", "cross_decodes": "d",
             "cross_mixed": "pd"}[case["kind"]]
    letters = list(kinds) + [rng.choice(kinds) for _ in range(rng.randint(0, 3))]
    letters = sorted(letters, key="pcd".index)
    if "d" in kinds and g.chance(rng, 30):
        letters.append("x")
    rows = numbers // (case["heads"] * case["dk"] * len(letters))
    case["seqs"] = seqs = []
    for letter in letters:
        kind = {"p": "prompt", "c": "chunk", "d": "decode", "x": "padding"}[letter]
        seq = draw_seq(rng, case, kind, rows)
        draw_encoder(rng, case, seq, rows)
        seqs.append(seq)
    if case["type"] == "encoder_decoder" and not any(seq["enc"] for seq in seqs):
        seqs[0].update(s=max(seqs[0]["s"], 1), enc=5)
        seqs[0]["enc_new"] = 5 if seqs[0]["phase"] == PREFILL and case["kv_given"] else 0


def draw_blocks(rng, case):
    """Block tables of shuffled blocks, prefixes shared now and then, and slots."""
    size, seqs = case["bs"], case["seqs"]
    blocks = lambda tokens: -(-tokens // size)
    case["num_blocks"] = sum(blocks(s["s"]) + blocks(s["enc"]) for s in seqs) + rng.randint(1, 3)
    free = list(range(case["num_blocks"]))
    rng.shuffle(free)
    for number, seq in enumerate(seqs):
        seq["table"] = [free.pop() for _ in range(blocks(seq["s"]))]
        seq["ctable"] = [free.pop() for _ in range(blocks(seq["enc"]))]
        other = seqs[rng.randrange(number)] if number else None
        if other and other["s"] and seq["s"] and g.chance(rng, 40):
            whole = min((one["s"] - one["q"]) // size for one in (seq, other))
            seq["table"][:whole] = other["table"][:whole]
        natural = g.natural_slots(case, seq["table"], seq["s"])[seq["s"] - seq["q"]:]
        lost = 20 if g.chance(rng, 15) else 0
        seq["slots"] = [-1 if g.chance(rng, lost) else slot for slot in natural] or [-1]
        seq["cslots"] = g.natural_slots(case, seq["ctable"], seq["enc_new"])


def draw_case(seed, number, numbers):
    rng = random.Random(f"folio/vllm06/{seed}/{number}")
    case = {"id": number, "seed": rng.getrandbits(64), "zeros": 0,
            "backend": BACKENDS[number % len(BACKENDS)],
            "kind": KINDS[number // len(BACKENDS) % len(KINDS)]}
    case["type"] = {"encoder": "encoder", "encoder_only": "encoder_only"}.get(
        case["kind"], "encoder_decoder" if case["kind"].startswith("cross") else "decoder")
    # Cross attention of prompts alone may find everything cached; a step of decodes always does.
    case["kv_given"] = int(case["kind"] != "cross_decodes" and not (
        case["kind"].startswith("cross") and g.chance(rng, 15)))
    case["cache"] = case["kind"] != "profiling"
    draw_layer(rng, case)
    draw_seqs(rng, case, numbers)
    draw_blocks(rng, case)
    case["bias_heads"], case["bias_hide"] = 0, rng.choice((0, 20))
    prompts_bring_keys = case["type"] != "encoder_decoder" or case["kv_given"]
    if prompts_bring_keys and g.chance(rng, 15):
        case["bias_heads"] = rng.choice((1, case["heads"]))
    return case


# ---------------------------------------------------------------------------------------------
# The file
# ---------------------------------------------------------------------------------------------

def case_line(case):
    words = [f"case id={case['id']} seed={case['seed']:016x} backend={case['backend']} "
             f"type={case['type']} dv={case['dk']} plain={g.hex32(case['plain'])} "
             f"plain16={g.hex32(case['plain16'])}"]
    for key in ("heads", "kv_heads", "dk", "q", "vkv", "kv", "bs", "num_blocks"):
        words.append(f"{key}={case[key]}")
    for key in ("kv_given", "window"):
        if case[key]:
            words.append(f"{'sliding_window' if key == 'window' else key}={case[key]}")
    if not case["cache"]:
        words.append("profiling=1")
    for key in ("scale", "cap"):
        if case[key]:
            words.append(f"{key}={g.hex32(case[key])}")
    if case["slopes"] is not None:
        words.append(f"slopes={g.hex_list(case['slopes'])}")
    if case["bias_heads"]:
        words.append(f"bias=f32 bias_dims=1,{case['bias_heads']},1,1 bias_hide={case['bias_hide']}")
    if case["kv"] in g.FP8:
        words.append(f"scales={g.hex_list(case['scales'])}")
    return " ".join(words)


def seq_line(seq):
    words = [f"seq q={seq['q']} s={seq['s']} phase={seq['phase']} slots={g.int_list(seq['slots'])}"]
    for key in ("enc", "enc_new"):
        if seq[key]:
            words.append(f"{key}={seq[key]}")
    for key in ("table", "ctable", "cslots"):
        if seq[key]:
            words.append(f"{key}={g.int_list(seq[key])}")
    return " ".join(words)


def write_biases(file, seed, count):
    """Biases in float32 as PyTorch makes them."""
    rng = random.Random(f"folio/vllm06/{seed}/biases")
    for number in range(count):
        seq_len, heads = rng.choice((1, 2, 5, 9, 12)), rng.randint(1, 3)
        if number % 2:
            window = rng.choice((0, 1, 2, 5, 16, 40))
            file.write(f"window len={seq_len} size={window}\n")
            bias = make_sliding_window_bias(seq_len, window, torch.float32)
        else:
            slopes = [g.f32(rng.uniform(-0.2, 1.0)) for _ in range(heads)]
            file.write(f"alibi len={seq_len} heads={heads} slopes={g.hex_list(slopes)}\n")
            bias = make_alibi_bias(slopes, seq_len, torch.float32)
        g.write_numbers(file, "out", bias)


def features(case):
    """Names of what a case exercises, for the count at the end."""
    seqs = case["seqs"]
    phases = {seq["phase"] for seq in seqs}
    decoder = case["type"] == "decoder"
    named = {"alibi": decoder and case["slopes"] and not case["window"],
             "window": decoder and case["window"] and not case["slopes"],
             "alibi and window": decoder and case["slopes"] and case["window"],
             "alibi or window ignored": not decoder and (case["slopes"] or case["window"]),
             "soft cap": case["cap"], "explicit scale": case["scale"],
             "bias given": case["bias_heads"], "no cache": not case["cache"],
             "null key and value": not case["kv_given"],
             "prompts and decodes": len(phases) == 2,
             "padding": any(seq["s"] == 0 for seq in seqs),
             "not stored": any(-1 in seq["slots"] for seq in seqs if seq["s"]),
             "chunk": any(seq["phase"] == PREFILL and seq["s"] > seq["q"] for seq in seqs),
             "group > 1": case["heads"] > case["kv_heads"]}
    return {"backend " + case["backend"], "type " + case["type"], "dtype " + case["q"],
            "kv_cache_dtype " + case["vkv"], f"head size {case['dk']:3d}",
            f"block size {case['bs']:2d}"} | {name for name, there in named.items() if there}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--biases", type=int, default=16)
    parser.add_argument("--numbers", type=int, default=2000, help="size of a case, about")
    parser.add_argument("-o", "--output", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    np.seterr(over="ignore")
    counts = collections.Counter()
    with open(args.output, "w", encoding="ascii") as file:
        version = torch.__version__.split("+")[0]
        file.write(f"folio-golden-vllm06 2 cases={args.count} biases={args.biases} "
                   f"seed={args.seed} torch={version}\n")
        write_biases(file, args.seed, args.biases)
        for number in range(args.count):
            case = draw_case(args.seed, number, args.numbers)
            out = forward(case)
            assert not torch.isnan(out).any(), case["id"]
            counts.update(features(case))
            file.write(case_line(case) + "\n")
            for seq in case["seqs"]:
                file.write(seq_line(seq) + "\n")
            g.write_out(file, case, out)
            file.write("end\n")
    for name, count in sorted(counts.items()):
        print(f"{count:5d}  {name}")
    print(f"{args.count} cases, {args.biases} biases, seed {args.seed}, in {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
