#!/usr/bin/env python3
"""generate.py: random attention configurations and what PyTorch in float64 says they come to.

Draws configurations over every option of the library, builds each one's masks and biases as
explicit matrices from the words of docs/numerics.md, and writes configuration, sums of out, and lse to a
text file that tests/attention/test_golden.c runs through the library. Inputs are not stored: both sides draw
them from the same counter-based generator (see `draws`). tests/data/golden/README.md has the format.
"""
import argparse
import collections
import math
import random
import struct
import sys

import numpy as np
import torch
import torch.nn.functional as F

TYPES = ("decoder", "encoder", "encoder_only", "encoder_decoder")
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
FP8 = {"fp8_e4m3": (torch.float8_e4m3fn, 448.0), "fp8_e5m2": (torch.float8_e5m2, 57344.0)}
KV_DTYPES = tuple(FLOATS) + tuple(FP8) + ("int8",)
DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
LAYOUTS = ("native", "nhd", "hnd", "interleaved_nhd", "interleaved_hnd", "xpacked", "xpacked_1",
           "strided")
CAUSAL_AUTO, CAUSAL, NOT_CAUSAL = 0, 1, 2
NO_BLOCK = -1
INF = math.inf

# Tensors of the input generator; test_golden.c has the same numbers.
T_Q, T_K, T_V, T_CACHED_K, T_CACHED_V, T_BIAS, T_BIAS_HIDE, T_BIAS_BLIND, T_ZERO = range(1, 10)
T_WEIGHT = 18  # above T_ZERO + T_CACHED_V
# Significant bits drawn, so that every input is exact in its dtype.
BITS = {"f32": 24, "f16": 11, "bf16": 8}
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


# ---------------------------------------------------------------------------------------------
# Inputs, the same bits as in test_golden.c
# ---------------------------------------------------------------------------------------------

def mix(z):
    """The finaliser of splitmix64 on an array of uint64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draws(seed, tensor, index):
    """64 random bits for each number of `index`, from nothing but (seed, tensor, index)."""
    base = mix(np.array([seed], dtype=np.uint64) + np.uint64(tensor) * GOLDEN)
    return mix(base + (np.asarray(index).astype(np.uint64) + np.uint64(1)) * GOLDEN)


def uniform(bits, dtype):
    """Numbers in [-2, 2), exact in dtype."""
    width = BITS[dtype]
    whole = (bits >> np.uint64(64 - width)).astype(np.int64) - (1 << (width - 1))
    return whole.astype(np.float64) * 2.0 ** (2 - width)


def rows_of(case, tensor, rows, heads, size, dtype):
    """Rows `rows` of a tensor [row][heads][size], float64. K and V may have rows of zeros."""
    rows = np.asarray(rows, dtype=np.int64)
    head_index = rows[:, None] * heads + np.arange(heads)
    index = head_index[:, :, None] * size + np.arange(size)
    x = uniform(draws(case["seed"], tensor, index), dtype)
    if case["zeros"] and tensor != T_Q:
        zero = draws(case["seed"], T_ZERO + tensor, head_index) % np.uint64(8) == 0
        x = np.where(zero[:, :, None], 0.0, x)
    return torch.from_numpy(x)


def bias_values(case):
    """The bias tensor in float64, in its own dims."""
    dtype, dims = case["bias"]["dtype"], case["bias"]["dims"]
    count = int(np.prod(dims))
    index = np.arange(count)
    x = uniform(draws(case["seed"], T_BIAS, index), dtype)
    hide = draws(case["seed"], T_BIAS_HIDE, index) % np.uint64(100)
    blind = draws(case["seed"], T_BIAS_BLIND, index // dims[3]) % np.uint64(100)
    hidden = (hide < np.uint64(case["bias"]["hide"])) | (blind < np.uint64(case["bias"]["blind"]))
    return torch.from_numpy(np.where(hidden, -INF, x)).reshape(dims)


# ---------------------------------------------------------------------------------------------
# What attention means
# ---------------------------------------------------------------------------------------------

def as_stored(x, dtype, scale):
    """What a cache of dtype gives back for rows x [n][heads][size] written with `scale`; a list has one per head."""
    x32 = x.to(torch.float32)
    if dtype in FLOATS:
        return x32.to(FLOATS[dtype]).to(torch.float64)
    if dtype in FP8:
        kind, largest = FP8[dtype]
        by = torch.tensor(scale, dtype=torch.float32).reshape(-1, 1).expand(x32.shape[1:])
        return (x32 / by).clamp(-largest, largest).to(kind).to(torch.float64) * by.double()
    largest = x32.abs().amax(dim=-1, keepdim=True)
    by = largest / torch.full_like(largest, 127.0)
    whole = torch.where(by > 0, torch.round(x32 / by), torch.zeros_like(x32))
    return whole.double() * by.double()


def spans(case):
    """Per sequence (query rows, first row of q, keys, first row of k and v) of the case's type."""
    out, row, new_row = [], 0, 0
    for seq in case["seqs"]:
        if case["type"] == "encoder":
            queries = keys = new = seq["enc_new"]
        else:
            queries = seq["q"]
            keys = {"decoder": seq["s"], "encoder_only": seq["q"] if seq["s"] else 0,
                    "encoder_decoder": seq["enc"] if seq["s"] else 0}[case["type"]]
            new = seq["enc_new"] if case["type"] == "encoder_decoder" else seq["q"]
        out.append((queries, row, keys, new_row))
        row += queries
        new_row += new
    return out


def natural_slots(case, table, count):
    """Where keys 0..count-1 lie by the block table; -1 in blocks that were released."""
    size = case["bs"]
    return [table[j // size] * size + j % size if table[j // size] != NO_BLOCK else -1
            for j in range(count)]


def key_values(case, seq, keys, first_new):
    """K and V of one sequence, [keys][kv_heads][size], as the library is told to see them."""
    heads, sizes = case["kv_heads"], (case["dk"], case["dv"])

    def new(which, rows):
        return rows_of(case, (T_K, T_V)[which], rows, heads, sizes[which], case["new"])

    def cached(which, slots):
        x = rows_of(case, (T_CACHED_K, T_CACHED_V)[which], slots, heads, sizes[which], case["ctx"])
        return as_stored(x, case["kv"], case["scales"][which])

    fresh = np.arange(first_new, first_new + keys)
    if case["type"] in ("encoder", "encoder_only") or not case["cache"]:
        return [new(which, fresh) for which in (0, 1)]
    cross = case["type"] == "encoder_decoder"
    count = seq["enc_new"] if cross else seq["q"]
    context = keys - count
    natural = natural_slots(case, seq["ctable"] if cross else seq["table"], keys)
    given = seq["cslots"] if cross else seq["slots"]
    result = []
    for which in (0, 1):
        x = torch.zeros(keys, heads, sizes[which], dtype=torch.float64)
        for j in range(keys):
            row = first_new + j - context
            if j >= context and case["append"]:
                x[j] = new(which, [row])[0]
            elif natural[j] < 0:
                continue  # released: compute() checks that nobody sees it
            elif j >= context and case["kv_given"] and (
                    given is None or given[j - context] == natural[j]):
                x[j] = as_stored(new(which, [row]), case["kv"], case["scales"][which])[0]
            else:
                x[j] = cached(which, [natural[j]])[0]
        result.append(x)
    return result


def positions(case, seq, queries, keys):
    """pos_q as a column and pos_k as a row."""
    first_q, first_k = 0, 0
    if case["type"] == "decoder":
        first_q, first_k = seq["pos"] if seq["pos"] else (seq["s"] - seq["q"], 0)
    return first_q + torch.arange(queries)[:, None], first_k + torch.arange(keys)[None, :]


def visible(case, seq, queries, keys):
    """Who sees whom by causality and window, [queries][keys]."""
    pos_q, pos_k = positions(case, seq, queries, keys)
    left, right = case["window"] if case["window"] else (-1, -1)
    if case["type"] == "decoder" and seq["causal"] != NOT_CAUSAL:
        right = 0
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= pos_k >= pos_q - left
    if right >= 0:
        seen &= pos_k <= pos_q + right
    return seen


def additive(case, number, seq, queries, keys):
    """ALiBi, bias, window and causality as one matrix [heads][queries][keys]."""
    heads = case["heads"]
    pos_q, pos_k = positions(case, seq, queries, keys)
    add = torch.zeros(heads, queries, keys, dtype=torch.float64)
    if case["slopes"]:
        slopes = torch.tensor(case["slopes"], dtype=torch.float64)
        add = add - slopes[:, None, None] * (pos_q - pos_k).abs().double()
    if case["bias"]:
        bias = bias_values(case)
        bias = bias[number if bias.shape[0] > 1 else 0]
        bias = bias.expand(heads if bias.shape[0] == 1 else -1,
                           queries if bias.shape[1] == 1 else -1,
                           keys if bias.shape[2] == 1 else -1)
        add = add + bias[:, :queries, :keys]
    return add.masked_fill(~visible(case, seq, queries, keys), -INF)


def attend(case, q, k, v, add):
    """out [queries][heads][dv] and lse [queries][heads] from q, k, v in [tokens][heads][size]."""
    heads, scale = case["heads"], case["scale"] or 1.0 / math.sqrt(case["dk"])
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k = k.repeat_interleave(heads // case["kv_heads"], dim=0)
    v = v.repeat_interleave(heads // case["kv_heads"], dim=0)
    if case["sinks"]:  # one more key that scores `sink` and brings nothing
        sinks = torch.tensor(case["sinks"], dtype=torch.float64)
        k = torch.cat([k, torch.zeros_like(q[:, :1])], dim=1)
        v = torch.cat([v, torch.zeros(heads, 1, case["dv"], dtype=torch.float64)], dim=1)
        add = torch.cat([add, sinks[:, None, None].expand(-1, q.shape[1], 1)], dim=2)
    score = scale * (q @ k.transpose(1, 2))
    if case["cap"]:
        score = case["cap"] * torch.tanh(score / case["cap"])
    score = score + add
    lse = torch.logsumexp(score, dim=2)
    empty = (lse == -INF)[:, :, None]
    out = torch.softmax(score, dim=2) @ v
    if not case["cap"]:  # PyTorch's own attention has no soft cap
        own = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=add[None],
                                             scale=scale)[0]
        assert torch.where(empty, 0, own - out).abs().max() < 1e-12
        out = own
    return torch.where(empty, 0, out).transpose(0, 1), lse.transpose(0, 1)


def compute(case):
    """out [rows][heads][dv] and lse [rows][heads] of a case, float64."""
    heads = case["heads"]
    outs, lses = [], []
    for number, (seq, span) in enumerate(zip(case["seqs"], spans(case))):
        queries, row, keys, new_row = span
        if queries == 0:
            continue
        if keys == 0:
            none = torch.tensor(case["sinks"] or [-INF] * heads, dtype=torch.float64)
            outs.append(torch.zeros(queries, heads, case["dv"], dtype=torch.float64))
            lses.append(none.expand(queries, heads))
            continue
        q = rows_of(case, T_Q, np.arange(row, row + queries), heads, case["dk"], case["q"])
        k, v = key_values(case, seq, keys, new_row)
        out, lse = attend(case, q, k, v, additive(case, number, seq, queries, keys))
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


# ---------------------------------------------------------------------------------------------
# Drawing configurations
# ---------------------------------------------------------------------------------------------

def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def chance(rng, percent):
    return rng.random() * 100 < percent


def draw_geometry(rng, case):
    """Heads, head sizes and number types."""
    case["type"] = rng.choices(TYPES, (56, 12, 12, 20))[0]
    case["q"] = rng.choice(tuple(FLOATS))
    case["kv"] = rng.choice(KV_DTYPES)
    case["new"] = rng.choice(tuple(FLOATS)) if chance(rng, 30) else case["q"]
    case["ctx"] = rng.choice(tuple(FLOATS))
    case["kv_heads"] = rng.choice((1, 1, 2, 2, 3, 4))
    group = rng.choice((1, 1, 2, 2, 3, 4, 8))
    sizes = (8, 8, 16, 16, 24, 32, 40)
    if chance(rng, 8):
        sizes, group = (64, 128, 256, 512), min(group, 2)
        case["kv_heads"] = 1
    case["heads"] = case["kv_heads"] * min(group, max(1, 8 // case["kv_heads"]))
    case["dk"] = rng.choice(sizes)
    case["dv"] = case["dk"] if chance(rng, 55) else rng.choice(sizes)
    case["zeros"] = int(chance(rng, 12))


def draw_options(rng, case):
    """Everything that changes scores, and the fp8 scales."""
    cross = case["type"] == "encoder_decoder"
    heads = case["heads"]
    case["scale"] = f32(rng.uniform(0.05, 0.6)) if chance(rng, 30) else 0.0
    case["cap"] = f32(rng.choice((0.7, 3.0, 20.0, 50.0))) if chance(rng, 25) else 0.0
    case["window"] = None
    if not cross and chance(rng, 35):
        case["window"] = (rng.choice((-1, 0, 1, 2, 3, 7, 15, 16, 40)),
                          rng.choice((-1, 0, 0, 1, 2, 5)))
    case["slopes"] = None
    if not cross and chance(rng, 30):
        case["slopes"] = [f32(rng.choice((1, 1, 1, -0.2)) * rng.uniform(0, 0.5))
                          for _ in range(heads)]
    case["sinks"] = None
    if chance(rng, 30):
        case["sinks"] = [-INF if chance(rng, 20) else f32(rng.uniform(-3, 3)) for _ in range(heads)]
    case["scales"] = (1.0, 1.0)
    if case["kv"] in FP8 and chance(rng, 75):
        # The small ones make the largest numbers saturate.
        small = {"fp8_e4m3": 0.004, "fp8_e5m2": 3.1e-5}[case["kv"]]
        case["scales"] = tuple(f32(rng.choice((0.5, 0.037, 1.7, small))) for _ in range(2))


def draw_head_scales(rng, case):
    """fp8: scales of each kv head in place of one, of K, of V or of both."""
    if case["kv"] in FP8 and chance(rng, 50):
        each = [f32(rng.choice((0.5, 0.037, 1.7, 1.0))) for _ in range(2 * case["kv_heads"])]
        both = each[::2], each[1::2]
        case["scales"] = tuple(both[i] if chance(rng, 70) else case["scales"][i] for i in (0, 1))


def near_block(rng, size, low, high):
    """A length in [low, high], often at the edge of a block."""
    if chance(rng, 50) and high >= size - 1:
        length = size * rng.randint(0, max(1, high // size)) + rng.choice((-1, 0, 1))
        return min(max(length, low), high)
    return rng.randint(low, high)


def draw_lengths(rng, case):
    """query_len, seq_len and encoder lengths of each sequence, in any order."""
    type_, size = case["type"], case["bs"] or 16
    rows_left = max(3, 440 // (case["heads"] * case["dv"]))
    case["seqs"] = seqs = []
    for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5, 6))):
        kind = rng.choices(("prompt", "chunk", "decode", "padding", "idle"), (30, 25, 30, 12, 3))[0]
        if rows_left <= 0:
            break
        q = {"prompt": rng.randint(1, 7), "chunk": rng.randint(2, 6), "decode": 1,
             "padding": rng.randint(0, 2), "idle": 0}[kind]
        q = min(q, 3 if type_ == "encoder" else rows_left)
        context = 0
        if case["cache"] and kind in ("chunk", "decode", "idle"):
            longest = rng.randint(200, 900) if chance(rng, 8) else 60
            context = near_block(rng, size, 1, longest)
            if chance(rng, 40):  # let the end, not the start, meet the block's edge
                context = max(1, near_block(rng, size, 1, longest) - q)
        seq = {"q": q, "s": 0 if kind == "padding" else q + context, "enc": 0, "enc_new": 0}
        if seq["s"] and (type_ in ("encoder", "encoder_decoder") or chance(rng, 8)):
            seq["enc"] = near_block(rng, size, 0, min(rows_left, 12) if type_ == "encoder" else 40)
            fresh = chance(rng, 80 if type_ == "encoder" else 50)
            seq["enc_new"] = seq["enc"] if fresh or not case["cache"] else 0
        elif case["cache"] and type_ == "encoder_decoder" and chance(rng, 40):
            seq["enc"] = rng.randint(1, 9)  # padding sees no key, whatever its encoder_len
        rows_left -= seq["enc_new"] if type_ == "encoder" else q
        seqs.append(seq)
    rng.shuffle(seqs)
    if not any(queries and keys for queries, _, keys, _ in spans(case)):
        # Padding alone says little: give the first sequence a row and keys.
        seqs[0].update(q=1, s=max(seqs[0]["s"], 1))
        if type_ in ("encoder", "encoder_decoder"):
            seqs[0].update(enc=5, enc_new=5)


def draw_labels(rng, case):
    """Phases, causality and first positions: per sequence, or in arrays for all or none."""
    phases, causal, given = (chance(rng, p) for p in (25, 30, 25))
    for seq in case["seqs"]:
        seq["phase"] = rng.randint(0, 2) if phases else 0
        seq["causal"] = rng.choice((CAUSAL_AUTO, CAUSAL, NOT_CAUSAL)) if causal else CAUSAL_AUTO
        seq["pos"] = None
        if given and (case["form"] != "builder" or chance(rng, 60)):
            natural = max(seq["s"] - seq["q"], 0)
            seq["pos"] = rng.choice(((natural, 0), (natural + 100, 100), (natural + 3, 0),
                                     (natural - 2, 0), (natural, 2), (natural - 50, -50),
                                     (natural + 5, 1000)))


def draw_more_queries(rng, case):
    """Decoders with a cache: sequences with more queries than keys, before, among and after them; k and v are absent."""
    long = [seq for seq in case["seqs"] if seq["q"] > 1 and seq["s"]]
    case["only_reads"] = bool(case["type"] == "decoder" and case["cache"] and long and chance(rng, 20))
    if not case["only_reads"]:
        return
    for number, seq in enumerate(long):
        if number == 0 or chance(rng, 60):
            seq["s"] = rng.randint(1, seq["q"] - 1)
            seq["pos"] = rng.choice(((0, 0), (seq["s"], 0), (-2, 0), (seq["s"] + 30, 0), (7, 9), (100, 99)))
    for seq in case["seqs"]:  # arrays have positions of all or of none
        if case["form"] != "builder" and seq["pos"] is None:
            seq["pos"] = (max(seq["s"] - seq["q"], 0), 0)


def draw_tables(rng, case):
    """Block tables from shuffled blocks; prefixes and encoders are shared now and then."""
    size, seqs = case["bs"], case["seqs"]
    need = sum(-(-seq["s"] // size) + -(-seq["enc"] // size) for seq in seqs)
    spare = 1 + -(-sum(seq["q"] + seq["enc_new"] for seq in seqs) // size)
    case["num_blocks"] = need + spare + rng.randint(0, 3)
    free = list(range(case["num_blocks"]))
    rng.shuffle(free)
    for number, seq in enumerate(seqs):
        seq["table"] = [free.pop() for _ in range(-(-seq["s"] // size))]
        seq["ctable"] = [free.pop() for _ in range(-(-seq["enc"] // size))]
        other = seqs[rng.randrange(number)] if number else None
        if other and chance(rng, 35):
            whole = min((one["s"] - one["q"]) // size for one in (seq, other))
            if whole > 0:
                seq["table"][:whole] = other["table"][:whole]
                case["tags"].add("shared prefix")
        if other and not seq["enc_new"] and not other["enc_new"] and chance(rng, 35):
            whole = min(one["enc"] // size for one in (seq, other))
            seq["ctable"][:whole] = other["ctable"][:whole]
    case["free_slots"] = [block * size + i for block in free for i in range(size)]
    rng.shuffle(case["free_slots"])


def draw_slots(rng, case, length, table):
    """Explicit slots for the last keys of a sequence: by the table, none, or somewhere else."""
    slots = []
    odd = rng.choice((0, 0, 25))
    total, new = length
    for slot in natural_slots(case, table, total)[total - new:]:
        if chance(rng, odd):
            elsewhere = chance(rng, 40) and case["free_slots"]
            slots.append(case["free_slots"].pop() if elsewhere else -1)
            case["tags"].add("slot elsewhere" if elsewhere else "slot -1")
        else:
            slots.append(slot)
    return slots


def draw_cache_use(rng, case):
    """Which slots are written, what is read directly, and which window blocks were released."""
    explicit, cross_explicit = chance(rng, 35), chance(rng, 35)
    arrays = case["form"] != "builder"
    mode = rng.choices(("write", "append", "null"), (72, 16, 12))[0]
    uses_cache = case["cache"] and case["type"] in ("decoder", "encoder_decoder")
    if case["only_reads"]:
        mode = "null"
    case["append"] = int(bool(uses_cache) and mode == "append")
    case["kv_given"] = int(not (uses_cache and mode == "null"))
    for seq in case["seqs"]:
        seq["slots"] = seq["cslots"] = seq["seen"] = None
        if not case["cache"]:
            seq["table"] = seq["ctable"] = None
            continue
        if explicit and (arrays or chance(rng, 70)):
            seq["slots"] = [-1] * seq["q"] if seq["s"] < seq["q"] else draw_slots(
                rng, case, (seq["s"], seq["q"]), seq["table"])
        if cross_explicit and (arrays or chance(rng, 70)):
            seq["cslots"] = draw_slots(rng, case, (seq["enc"], seq["enc_new"]), seq["ctable"])
    if case["cache"] and case["type"] == "decoder":
        hide_unseen(case, chance(rng, 70))


def hide_unseen(case, release):
    """Tell the test which keys some row sees, so that it leaves NaN in all others.

    release: FOLIO_NO_BLOCK for whole blocks of the context that no row of their sequence sees.
    """
    for seq, (queries, _, keys, _) in zip(case["seqs"], spans(case)):
        seen = visible(case, seq, queries, keys).any(dim=0)
        numbers = seen.nonzero().flatten().tolist()
        seq["seen"] = (numbers[0], numbers[-1] + 1) if numbers else (0, 0)
        assert len(numbers) == seq["seen"][1] - seq["seen"][0]
        for block in range((seq["s"] - seq["q"]) // case["bs"] if seq["s"] and release else 0):
            if not seen[block * case["bs"]:(block + 1) * case["bs"]].any():
                seq["table"][block] = NO_BLOCK
                case["tags"].add("released block")


def draw_bias(rng, case):
    case["bias"] = None
    if not chance(rng, 30):
        return
    contexts = any(seq["s"] > seq["q"] for seq in case["seqs"])
    if case["type"] == "encoder_only" and contexts:
        return  # the keys are this step's alone: what their numbers are is not for this file to say
    full = (len(case["seqs"]), case["heads"], max(span[0] for span in spans(case)),
            max(1, max(span[2] for span in spans(case))))
    dims = [n if chance(rng, 60) else 1 for n in full]
    strides, step = [0] * 4, 1
    order = [3, 2, 1, 0]
    if chance(rng, 40):
        rng.shuffle(order)
    for dim in order:
        strides[dim] = step if dims[dim] > 1 else 98765
        step = step * dims[dim] + rng.choice((0, 0, 3))
    case["bias"] = {"dtype": rng.choice(tuple(FLOATS)), "dims": dims, "strides": strides,
                    "hide": rng.choice((0, 10, 40)), "blind": rng.choice((0, 0, 25))}


def draw_layout(rng, case):
    """The cache's layout and whose memory it is."""
    same, packs = case["dk"] == case["dv"], case["dk"] % (16 // DTYPE_BYTES[case["kv"]]) == 0
    layouts = [name for name in LAYOUTS
               if (same or not name.startswith("interleaved")) and (packs or name != "xpacked")]
    case["layout"] = rng.choice(layouts)
    case["layers"] = rng.randint(1, 3)
    case["layer"] = rng.randrange(case["layers"])
    case["mem"] = "strided" if case["layout"] == "strided" else "create"
    case["kv_strides"], case["block_pad"] = None, 0
    if case["mem"] == "create" and chance(rng, 30):
        whole = case["layout"] == "native" or case["layout"].startswith("interleaved")
        case["mem"] = "one" if whole or chance(rng, 50) else "two"
        if case["mem"] == "two" and chance(rng, 50):
            case["block_pad"] = 8 * rng.randint(1, 4)
    if case["layout"] == "strided":
        case["kv_strides"] = [draw_strides(rng, case, size) for size in (case["dk"], case["dv"])]
        case["kv_strides"] += [draw_strides(rng, case, 1) for _ in range(2)]


def draw_strides(rng, case, size):
    """Strides of (block, token, head) for rows of `size` numbers, in any nesting, with gaps."""
    dims = (case["num_blocks"], case["bs"], case["kv_heads"])
    strides, step = [0] * 3, size + rng.choice((0, 0, 8))
    for dim in rng.choice(((2, 1, 0), (1, 2, 0), (0, 1, 2), (2, 0, 1))):
        strides[dim] = step
        step = step * dims[dim] + rng.choice((0, 0, 3))
    return strides


def draw_tensor(rng, rows, heads, size):
    """Token and head strides of a tensor: dense, padded, or head by head."""
    kind = rng.choice(("dense", "dense", "token", "head", "turned"))
    if kind == "dense":
        return (0, 0)
    if kind == "token":
        return (heads * size + rng.randint(1, 9), 0)
    if kind == "head":
        head = size + rng.randint(1, 9)
        return (heads * head, head)
    return (size, max(rows, 1) * size + rng.randint(0, 5))


def draw_case(seed, number):
    rng = random.Random(f"folio/{seed}/{number}")
    case = {"id": number, "seed": rng.getrandbits(64), "tags": set()}
    draw_geometry(rng, case)
    draw_options(rng, case)
    more = random.Random(f"folio/{seed}/{number}/more")  # what came later leaves the other cases as they were
    draw_head_scales(more, case)
    share = {"decoder": 88, "encoder_decoder": 85, "encoder": 50, "encoder_only": 50}
    case["cache"] = chance(rng, share[case["type"]])
    case["bs"] = rng.choice((1, 1, 2, 3, 5, 8, 16, 16, 17, 32, 48, 64)) if case["cache"] else 0
    case["form"] = rng.choice(("builder", "table", "csr") + (("slots",) * 8 if case["bs"] == 1
                                                             else ())) if case["cache"] \
        else rng.choice(("builder", "table"))
    draw_lengths(rng, case)
    draw_labels(rng, case)
    draw_more_queries(more, case)
    if case["cache"]:
        draw_tables(rng, case)
        draw_layout(rng, case)
    draw_cache_use(rng, case)
    draw_bias(rng, case)
    # Lengths that the page table itself tells, or one token each, need not be given.
    case["no_lens"] = int(case["form"] in ("csr", "slots") and chance(rng, 40))
    ones = all(seq["q"] == 1 for seq in case["seqs"])
    case["no_starts"] = int(case["form"] != "builder" and ones and chance(rng, 60))
    case["graph"] = rng.randint(1, 4) if chance(rng, 12) else 0
    case["lse"] = int(chance(rng, 85))
    rows = sum(span[0] for span in spans(case)) + case["graph"]
    new_rows = rows if case["type"] != "encoder_decoder" else case["graph"] + sum(
        seq["enc_new"] for seq in case["seqs"])
    case["strides"] = {"q_strides": draw_tensor(rng, rows, case["heads"], case["dk"]),
                       "k_strides": draw_tensor(rng, new_rows, case["kv_heads"], case["dk"]),
                       "v_strides": draw_tensor(rng, new_rows, case["kv_heads"], case["dv"]),
                       "out_strides": draw_tensor(rng, rows, case["heads"], case["dv"]),
                       "lse_strides": draw_tensor(rng, rows, case["heads"], 1)}
    return case


# ---------------------------------------------------------------------------------------------
# The file
# ---------------------------------------------------------------------------------------------

def hex32(x):
    return struct.pack(">f", x).hex()


def hex_list(xs):
    return ",".join(hex32(x) for x in xs)


def int_list(xs):
    return ",".join(str(x) for x in xs)


def case_line(case):
    words = [f"case id={case['id']} seed={case['seed']:016x} type={case['type']}"]
    for key in ("heads", "kv_heads", "dk", "dv", "q", "new", "ctx", "kv", "form"):
        words.append(f"{key}={case[key]}")
    for key in ("zeros", "append", "no_lens", "no_starts", "graph", "lse", "kv_given"):
        if case[key]:
            words.append(f"{key}={case[key]}")
    for key in ("scale", "cap"):
        if case[key]:
            words.append(f"{key}={hex32(case[key])}")
    if case["window"]:
        words.append(f"window={int_list(case['window'])}")
    for key in ("slopes", "sinks"):
        if case[key]:
            words.append(f"{key}={hex_list(case[key])}")
    if case["bias"]:
        bias = case["bias"]
        words.append(f"bias={bias['dtype']} bias_dims={int_list(bias['dims'])} "
                     f"bias_strides={int_list(bias['strides'])} "
                     f"bias_hide={bias['hide']} bias_blind={bias['blind']}")
    for key, strides in case["strides"].items():
        if strides != (0, 0):
            words.append(f"{key}={int_list(strides)}")
    if case["cache"]:
        for key in ("layout", "mem", "num_blocks", "bs", "layers", "layer"):
            words.append(f"{key}={case[key]}")
        if case["block_pad"]:
            words.append(f"block_pad={case['block_pad']}")
        if case["kv_strides"]:
            words.append(f"kv_strides={int_list(sum(case['kv_strides'], []))}")
        if case["kv"] in FP8:
            one = [0.0 if isinstance(scale, list) else scale for scale in case["scales"]]
            words.append(f"scales={hex_list(one)}")
            for key, scale in zip(("k_head_scales", "v_head_scales"), case["scales"]):
                if isinstance(scale, list):
                    words.append(f"{key}={hex_list(scale)}")
    return " ".join(words)


def seq_line(seq):
    words = [f"seq q={seq['q']} s={seq['s']}"]
    for key in ("phase", "causal", "enc", "enc_new"):
        if seq[key]:
            words.append(f"{key}={seq[key]}")
    if seq["pos"]:
        words.append(f"pos={int_list(seq['pos'])}")
    if seq["seen"] and seq["seen"] != (0, seq["s"]):
        words.append(f"seen={int_list(seq['seen'])}")
    for key in ("table", "slots", "ctable", "cslots"):
        if seq[key] is not None and not (key[0] == "c" and seq["enc"] == 0):
            words.append(f"{key}={int_list(seq[key])}")
    return " ".join(words)


def write_numbers(file, word, x, more=""):
    text = x.to(torch.float32).numpy().astype(">f4").tobytes().hex()
    file.write(f"{word} {x.numel()}{more}\n")
    for i in range(0, len(text), 128):
        file.write(text[i:i + 128] + "\n")


def write_out(file, case, out):
    """The largest number of out [rows][heads][size], and each row and head as one sum with random weights."""
    weights = uniform(draws(case["seed"], T_WEIGHT, np.arange(out.numel())), "f32")
    sums = (out * torch.from_numpy(weights).reshape(out.shape)).sum(dim=2)
    largest = out.abs().max().item() if out.numel() else 0.0
    write_numbers(file, "out", sums, f" largest={hex32(largest)}")


def features(case):
    """Names of what a case exercises, for the count at the end."""
    seqs = case["seqs"]
    tags = {"type " + case["type"], "q " + case["q"], "kv " + case["kv"], "form " + case["form"]}
    tags |= case["tags"]
    if case["cache"]:
        tags |= {"layout " + case["layout"], "memory " + case["mem"]}
        if case["type"] == "encoder_decoder" and any(s["enc_new"] for s in seqs) and any(
                s["enc"] > s["enc_new"] for s in seqs):
            tags.add("cross, some new and some cached")
    named = {"no cache": not case["cache"], "append": case["append"], "graph": case["graph"],
             "null k and v": not case["kv_given"], "window": case["window"],
             "alibi": case["slopes"], "alibi and window": case["slopes"] and case["window"],
             "soft cap": case["cap"], "sinks": case["sinks"], "bias": case["bias"],
             "bias with blind rows": case["bias"] and case["bias"]["blind"],
             "scales per kv head": any(isinstance(scale, list) for scale in case["scales"]),
             "explicit scale": case["scale"], "zero rows": case["zeros"],
             "group > 1": case["heads"] > case["kv_heads"], "dk != dv": case["dk"] != case["dv"],
             "k and v of another dtype": case["new"] != case["q"],
             "head size >= 64": max(case["dk"], case["dv"]) >= 64,
             "padding": any(s["s"] == 0 and s["q"] for s in seqs),
             "positions": any(s["pos"] for s in seqs),
             "more queries than keys": case["only_reads"],
             "not causal": any(s["causal"] == NOT_CAUSAL for s in seqs),
             "decode": any(s["q"] == 1 and s["s"] > 1 for s in seqs),
             "chunk": any(1 < s["q"] < s["s"] for s in seqs),
             "seq_len >= 200": any(s["s"] >= 200 for s in seqs),
             "sink of -inf": case["sinks"] and -INF in case["sinks"]}
    return tags | {name for name, there in named.items() if there}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=360)
    parser.add_argument("-o", "--output", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    np.seterr(over="ignore")
    counts = collections.Counter()
    with open(args.output, "w", encoding="ascii") as file:
        version = torch.__version__.split("+")[0]
        file.write(f"folio-golden 2 cases={args.count} seed={args.seed} torch={version}\n")
        for number in range(args.count):
            case = draw_case(args.seed, number)
            out, lse = compute(case)
            assert not torch.isnan(out).any() and not torch.isnan(lse).any(), case["id"]
            counts.update(features(case))
            counts["rows that see no key"] += bool((out == 0).flatten(1).all(dim=1).any())
            file.write(case_line(case) + "\n")
            for seq in case["seqs"]:
                file.write(seq_line(seq) + "\n")
            write_out(file, case, out)
            if case["lse"]:
                write_numbers(file, "lse", lse)
            file.write("end\n")
    for name, count in sorted(counts.items()):
        print(f"{count:5d}  {name}")
    print(f"{args.count} cases, seed {args.seed}, in {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
