"""The three headers by cffi, unedited: after `cc -E -P -DFOLIO_STATIC` with empty standard headers ffi.cdef takes
them. Then what cffi works out of them is held against `folio info --abi`, and a step of attention runs in ABI mode.

usage: cffi_client.py PROGRAM LIBRARY [INCLUDE_DIR]
"""

import json
import math
import os
import subprocess
import sys
import tempfile

import cffi

HEADERS = ("folio.h", "folio_pool.h", "folio_vllm06.h")


def declarations(include):
    """What the headers declare, as the preprocessor leaves it."""
    with tempfile.TemporaryDirectory() as empty:
        for name in ("stddef.h", "stdint.h"):
            open(os.path.join(empty, name), "w").close()
        source = "".join(f"#include <folio/{h}>\n" for h in HEADERS)
        command = [os.environ.get("CC", "cc"), "-E", "-P", "-DFOLIO_STATIC", "-nostdinc", "-I", empty, "-I", include,
                   "-x", "c", "-"]
        return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def load(library, include):
    """The library in ABI mode, with all that its headers declare."""
    ffi = cffi.FFI()
    ffi.cdef(declarations(include))
    return ffi, ffi.dlopen(library)


def compare_layout(ffi, lib, abi):
    """Sizes, offsets, values and parameters: cffi's own compared with the program's. Returns how many were compared."""
    compared = 0

    def equal(what, mine, its):
        nonlocal compared
        compared += 1
        if mine != its:
            sys.exit(f"{what}: cffi says {mine}, folio info --abi says {its}")

    for s in abi["structs"]:
        kind = ffi.typeof(s["name"])
        equal(s["name"] + " size", ffi.sizeof(kind), s["size"])
        equal(s["name"] + " align", ffi.alignof(kind), s["align"])
        equal(s["name"] + " fields", [name for name, _ in kind.fields], [f["name"] for f in s["fields"]])
        for (name, field), f in zip(kind.fields, s["fields"]):
            equal(f"{s['name']}.{name} offset", field.offset, f["offset"])
            equal(f"{s['name']}.{name} size", ffi.sizeof(field.type), f["size"])
            if "(*" not in f["type"]:  # cffi spells functions in its own way
                equal(f"{s['name']}.{name} type", field.type, ffi.typeof(f["type"]))
    for e in abi["enums"]:
        kind = ffi.typeof(e["name"])
        equal(e["name"] + " size", ffi.sizeof(kind), e["size"])
        equal(e["name"] + " values", kind.relements, {v["name"]: v["value"] for v in e["values"]})
    for f in abi["functions"]:
        kind = ffi.typeof(getattr(lib, f["name"]))
        equal(f["name"] + " parameters", len(kind.args), len(f["parameters"]))
        if f["returns"] != "void":
            equal(f["name"] + " returns", kind.result, ffi.typeof(f["returns"]))
    known = {name for name in dir(lib) if callable(getattr(lib, name, None))}
    equal("functions", known, {f["name"] for f in abi["functions"]})
    structs = {name for name in ffi.list_types()[0] if ffi.typeof(name).kind == "struct" and ffi.typeof(name).fields}
    equal("structs", structs, {s["name"] for s in abi["structs"]})
    return compared


class Folio:
    """Calls that fail raise; structs know their size."""

    def __init__(self, ffi, lib):
        self.ffi, self.lib = ffi, lib

    def must(self, status):
        if status != self.lib.FOLIO_OK:
            sys.exit(f"{self.text(self.lib.folio_status_name(status))}: {self.text(self.lib.folio_last_error())}")

    def text(self, chars):
        return self.ffi.string(chars).decode()

    def struct(self, name, **fields):
        return self.ffi.new(name + " *", dict(fields, struct_size=self.ffi.sizeof(name)))

    def create(self, kind, *arguments):
        out = self.ffi.new(f"folio_{kind} **")
        self.must(getattr(self.lib, f"folio_{kind}_create")(*arguments, out))
        return out[0]


HEADS, KV_HEADS, SIZE, TOKENS, BLOCK = 2, 1, 8, 5, 2


def number(i):
    """Numbers that f32 has exactly, in [-1, 1)."""
    return ((i * 37 + 11) % 128 - 64) / 64


def by_hand(q, k, v):
    """Causal attention of TOKENS rows, in double precision."""
    out = []
    for t in range(TOKENS):
        for h in range(HEADS):
            row = q[(t * HEADS + h) * SIZE:][:SIZE]
            scores = [sum(a * b for a, b in zip(row, k[s * SIZE:][:SIZE])) / math.sqrt(SIZE) for s in range(t + 1)]
            weights = [math.exp(x - max(scores)) for x in scores]
            out += [sum(w * v[s * SIZE + d] for s, w in enumerate(weights)) / sum(weights) for d in range(SIZE)]
    return out


def run_attention(f):
    """One prompt through scattered blocks of a paged cache; returns the largest error."""
    ffi, lib = f.ffi, f.lib
    ctx = f.create("context", f.struct("folio_context_desc", num_threads=1))
    attention = f.create("attention", ctx, f.struct(
        "folio_attention_desc", num_heads=HEADS, num_kv_heads=KV_HEADS, k_head_size=SIZE, dtype=lib.FOLIO_F32))
    cache = f.create("kv_cache", ctx, f.struct(
        "folio_kv_cache_desc", num_layers=1, num_blocks=4, block_size=BLOCK, num_kv_heads=KV_HEADS, k_head_size=SIZE,
        dtype=lib.FOLIO_F32))
    batch = f.create("batch", ctx, f.struct("folio_batch_desc", block_size=BLOCK))
    attentions = ffi.new("folio_attention *[]", [attention])
    plan = f.create("plan", ctx, f.struct(
        "folio_plan_desc", attentions=attentions, num_attentions=1, block_size=BLOCK, num_blocks=4, max_seqs=1,
        max_query_tokens=TOKENS, max_seq_len=8))
    table = ffi.new("int32_t[]", [3, 0, 2])
    f.must(lib.folio_batch_add(batch, f.struct(
        "folio_batch_seq", query_len=TOKENS, seq_len=TOKENS, block_table=table, num_blocks=3)))
    f.must(lib.folio_plan_update(plan, batch, ffi.NULL))

    q = [number(i) for i in range(TOKENS * HEADS * SIZE)]
    k = [number(i + 1000) for i in range(TOKENS * KV_HEADS * SIZE)]
    v = [number(i + 2000) for i in range(TOKENS * KV_HEADS * SIZE)]
    arrays = {name: ffi.new("float[]", values) for name, values in (("q", q), ("k", k), ("v", v))}
    arrays["out"] = ffi.new("float[]", len(q))
    tensors = f.struct("folio_tensors", **{name: {"data": a, "dtype": lib.FOLIO_F32, "tokens": TOKENS}
                                           for name, a in arrays.items()})
    f.must(lib.folio_attention_forward(plan, 0, lib.FOLIO_ATTENTION_DECODER, cache, 0, tensors, ffi.NULL))
    error = max(abs(a - b) for a, b in zip(arrays["out"], by_hand(q, k, v)))
    for kind, what in (("plan", plan), ("batch", batch), ("kv_cache", cache), ("attention", attention),
                       ("context", ctx)):
        getattr(lib, f"folio_{kind}_destroy")(what)
    return error


def main():
    program, library = sys.argv[1:3]
    include = sys.argv[3] if len(sys.argv) > 3 else "include"
    ffi, lib = load(library, include)
    abi = json.loads(subprocess.run([program, "info", "--abi", "-o", "json"], capture_output=True, check=True).stdout)
    compared = compare_layout(ffi, lib, abi)
    f = Folio(ffi, lib)
    error = run_attention(f)
    if not error < 1e-6:
        sys.exit(f"attention by cffi is off by {error}")
    out = ffi.new("folio_context **")
    wrong = f.struct("folio_context_desc", backend=ffi.new("char[]", b"nonsense"))
    if lib.folio_context_create(wrong, out) != lib.FOLIO_ERR_ARGUMENT or b"nonsense" not in ffi.string(
            lib.folio_last_error()):
        sys.exit("a wrong backend is not refused with its name")
    print(f"cffi {cffi.__version__}: {compared} sizes, offsets and values agree; attention is off by {error:.1e}")


if __name__ == "__main__":
    main()
