"""Rotary embedding against PyTorch: attention with it in every form against the formula in float64, and rotated keys
against the rotary code of transformers for Llama 3, Qwen, GPT-NeoX and DeepSeek.

usage: rotary_torch.py LIBRARY [SEED]
"""
import math
import os
import sys

import torch

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "api", "clients"))
from cffi_client import Folio, load  # noqa: E402

SCALINGS = ("none", "linear", "ntk", "yarn", "llama3")


class Rotary:
    """One context and what the tests do with it."""

    def __init__(self, f, backend):
        self.f, self.backend = f, backend
        name = f.ffi.new("char[]", backend.encode())
        self.ctx = f.create("context", f.struct("folio_context_desc", num_threads=2, backend=name))

    def make(self, keep, **desc):
        """A folio_rotary; arrays are tensors, which `keep` holds until the call has copied them."""
        for name, kind in (("cos", "float *"), ("sin", "float *"), ("frequencies", "double *")):
            if name in desc:
                desc[name] = self.pointer(keep, desc[name], kind)
        return self.f.create("rotary", self.ctx, self.f.struct("folio_rotary_desc", **desc))

    def pointer(self, keep, tensor, kind):
        keep.append(tensor.contiguous())
        return self.f.ffi.cast(kind, keep[-1].data_ptr())

    def tensor(self, keep, x):
        return {"data": self.pointer(keep, x, "void *"), "dtype": self.f.lib.FOLIO_F32, "tokens": len(x)}

    def attend(self, rotary, q, k, v, positions):
        """Causal attention of one sequence without a cache."""
        keep, out = [], torch.empty(q.shape[0], q.shape[1], v.shape[2])
        f = self.f
        attention = f.struct("folio_attention_desc", num_heads=q.shape[1], num_kv_heads=k.shape[1],
                             k_head_size=q.shape[2], v_head_size=v.shape[2])
        step = f.struct("folio_step", num_seqs=1)
        tensors = f.struct("folio_tensors", rotary=rotary, q=self.tensor(keep, q), k=self.tensor(keep, k),
                           v=self.tensor(keep, v), out=self.tensor(keep, out))
        if positions is not None:
            tensors.positions = self.pointer(keep, positions, "int64_t *")
        f.must(f.lib.folio_attend(self.ctx, attention, f.lib.FOLIO_ATTENTION_DECODER, step, f.ffi.NULL, 0, tensors,
                                  f.ffi.NULL))
        return keep[3]  # out is contiguous, so it is the tensor itself

    def rotate(self, rotary, x, positions):
        """Rows [tokens, heads, size] as a cache has them after a write."""
        f, keep, (n, heads, size) = self.f, [], x.shape
        cache = f.create("kv_cache", self.ctx, f.struct(
            "folio_kv_cache_desc", num_layers=1, num_blocks=n, block_size=1, num_kv_heads=heads, k_head_size=size,
            dtype=f.lib.FOLIO_F32))
        slots, out = torch.arange(n).flip(0), torch.empty(n, heads, size)
        f.must(f.lib.folio_kv_cache_write(cache, 0, f.struct(
            "folio_kv_write", k=self.tensor(keep, x), v=self.tensor(keep, x), slots=self.pointer(keep, slots, "int64_t *"),
            rotary=rotary, positions=self.pointer(keep, positions, "int64_t *")), f.ffi.NULL))
        f.must(f.lib.folio_kv_cache_gather(cache, 0, f.struct(
            "folio_kv_gather", k=self.tensor(keep, out), slots=self.pointer(keep, slots, "int64_t *"), num_slots=n),
            f.ffi.NULL))
        f.lib.folio_kv_cache_destroy(cache)
        return out


# ---------------------------------------------------------------------------------- the formula

def frequencies(n, scaling, theta, s, length, low, high, fast, slow, exact):
    """[n / 2] in float64, as the papers have them."""
    i = torch.arange(n // 2, dtype=torch.float64)
    if scaling == "ntk":
        theta = theta * s ** (n / (n - 2))
    f = theta ** (-2 * i / n)
    if scaling == "linear":
        return f / s
    if scaling == "llama3":
        kept = ((length * f / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    elif scaling == "yarn":
        ends = [n * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow)]
        if not exact:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        ends = max(ends[0], 0), min(ends[1], n - 1)
        kept = 1 - ((i - ends[0]) / (ends[1] - ends[0] or 0.001)).clamp(0, 1)
    else:
        return f
    return kept * f + (1 - kept) * f / s


def rotated(x, positions, cos, sin, first, pairs):
    """x [tokens, heads, size] in float64; cos and sin [positions, n / 2]."""
    n, out = 2 * cos.shape[1], x.clone()
    c, s = cos[positions][:, None], sin[positions][:, None]
    part = out[..., first : first + n]  # a view
    a, b = (part[..., 0::2], part[..., 1::2]) if pairs else (part[..., : n // 2], part[..., n // 2 :])
    a0, b0 = a.clone(), b.clone()
    a.copy_(a0 * c - b0 * s)
    b.copy_(b0 * c + a0 * s)
    return out


def attention(q, k, v):
    """Causal, in float64."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    scores = scores + torch.triu(torch.full(scores.shape[1:], -math.inf, dtype=torch.float64), 1)
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v)


def check_forms(r):
    """Every scaling, pairing and choice of dims; tables and frequencies; positions given or not. Returns the number."""
    lib, count, length = r.f.lib, 0, 300
    for scaling in SCALINGS + ("frequencies", "tables"):
        for pairs in (0, 1):
            for size, first, n in ((64, 0, 64), (64, 16, 32), (96, 64, 32), (40, 3, 34)):
                theta = (1e4, 5e5)[count % 2]
                s, low, high, fast, slow = 4.0, 1.0, 4.0, 32.0, 1.0
                exact = count // 2 % 2
                f = frequencies(n, scaling, theta, s, 64, low, high, fast, slow, exact)
                magnitude = (0.1 * math.log(s) + 1 if scaling == "yarn" else 1.0) if count % 3 else 0.7
                angle = torch.arange(length, dtype=torch.float64)[:, None] * f
                cos, sin = magnitude * angle.cos(), magnitude * angle.sin()
                desc = dict(num_dims=n, first_dim=first, pairing=pairs, num_positions=length)
                if scaling == "tables":
                    desc.update(cos=cos.float(), sin=sin.float())
                elif scaling == "frequencies":
                    desc.update(frequencies=f, magnitude=magnitude)
                else:
                    name = "FOLIO_ROTARY_SCALE_" + scaling.upper()
                    desc.update(scaling=getattr(lib, name), theta=theta, factor=s, original_len=64, low_freq_factor=low,
                                high_freq_factor=high, beta_fast=fast, beta_slow=slow, exact_bounds=exact,
                                magnitude=0 if count % 3 else magnitude)
                rotary = r.make([], **desc)
                tokens = 33
                q, k, v = (torch.rand(tokens, h, d) * 4 - 2 for h, d in ((4, size), (2, size), (2, 24)))
                given = torch.randint(0, length, (tokens,)) if count % 2 else None
                out = r.attend(rotary, q, k, v, given)
                p = given if given is not None else torch.arange(tokens)
                q, k = (rotated(x.double(), p, cos, sin, first, pairs) for x in (q, k))
                want = attention(q, k, v.double())
                error = (out.double() - want).abs().max().item()
                if not error <= 2e-5:
                    sys.exit(f"rotary, {r.backend}, {scaling}, pairing {pairs}, dims [{first}, {first + n}) of {size}: "
                             f"out is off by {error:.1e}")
                lib.folio_rotary_destroy(rotary)
                count += 1
    return count


# --------------------------------------------------------------------------------- transformers

def models():
    """(name, config, its rotary class, its function on q and k, folio's description, pairs, dims)."""
    from transformers.models.deepseek_v3 import configuration_deepseek_v3 as cd, modeling_deepseek_v3 as md
    from transformers.models.gpt_neox import configuration_gpt_neox as cg, modeling_gpt_neox as mg
    from transformers.models.llama import configuration_llama as cl, modeling_llama as ml
    from transformers.models.qwen2 import configuration_qwen2 as cq, modeling_qwen2 as mq
    from transformers.models.qwen3 import configuration_qwen3 as cq3, modeling_qwen3 as mq3

    heads = dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=2)
    llama = cl.LlamaConfig(**heads, max_position_embeddings=131072, rope_parameters=dict(
        rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192))
    yield ("Llama 3.1", llama, ml.LlamaRotaryEmbedding, ml.apply_rotary_pos_emb,
           dict(num_dims=128, theta=5e5, scaling="llama3", factor=8, original_len=8192), False, 128)
    plain = cl.LlamaConfig(**heads, rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))
    yield ("Llama, linear", plain, ml.LlamaRotaryEmbedding, ml.apply_rotary_pos_emb,
           dict(num_dims=128, scaling="linear", factor=4), False, 128)
    qwen = cq.Qwen2Config(**heads, max_position_embeddings=131072, rope_parameters=dict(
        rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768))
    yield ("Qwen 2.5, YaRN", qwen, mq.Qwen2RotaryEmbedding, mq.apply_rotary_pos_emb,
           dict(num_dims=128, theta=1e6, scaling="yarn", factor=4, original_len=32768), False, 128)
    qwen3 = cq3.Qwen3Config(**heads, head_dim=64, rope_parameters=dict(rope_type="default", rope_theta=1e6))
    yield ("Qwen 3", qwen3, mq3.Qwen3RotaryEmbedding, mq3.apply_rotary_pos_emb, dict(num_dims=64, theta=1e6), False, 64)
    neox = cg.GPTNeoXConfig(hidden_size=384, num_attention_heads=4, rope_parameters=dict(
        rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25))
    yield ("GPT-NeoX", neox, mg.GPTNeoXRotaryEmbedding, mg.apply_rotary_pos_emb, dict(num_dims=24), False, 96)
    yarn = dict(rope_type="yarn", rope_theta=1e4, factor=40.0, original_max_position_embeddings=4096, beta_fast=32.0,
                beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
    deepseek = cd.DeepseekV3Config(max_position_embeddings=163840, qk_rope_head_dim=64, rope_parameters=yarn)
    yield ("DeepSeek V3", deepseek, md.DeepseekV3RotaryEmbedding, md.apply_rotary_pos_emb_interleave,
           dict(num_dims=64, pairing=1, scaling="yarn", factor=40, original_len=4096, magnitude=1), True, 64)


def check_models(r):
    """Rows of q and k, rotated by transformers and by a cache write. Returns the number of models."""
    count, tokens, last = 0, 48, 1023
    for name, config, embedding, apply, desc, pairs, size in models():
        positions = torch.randint(0, last + 1, (tokens,))
        q, k = (torch.rand(1, h, tokens, size) * 4 - 2 for h in (4, 2))
        cos, sin = embedding(config)(q, positions[None])
        theirs = apply(q, k, cos, sin)
        if "scaling" in desc:
            desc["scaling"] = getattr(r.f.lib, "FOLIO_ROTARY_SCALE_" + desc["scaling"].upper())
        rotary = r.make([], num_positions=last + 1, **desc)
        for x, want in zip((q, k), theirs):
            ours = r.rotate(rotary, x[0].transpose(0, 1), positions)
            if pairs:  # theirs leaves the even dims first, then the odd ones: scores are the same
                ours = torch.cat((ours[..., 0::2], ours[..., 1::2]), -1)
            error = (ours.transpose(0, 1) - want[0]).abs().max().item()
            if not error <= 5e-4:  # theirs has angles in f32, up to 1023 of them
                sys.exit(f"rotary, {name}: rotated rows are off by {error:.1e} from transformers'")
        r.f.lib.folio_rotary_destroy(rotary)
        count += 1
    return count


def main():
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    torch.manual_seed(seed)
    f = Folio(*load(sys.argv[1], "include"))
    forms = sum(check_forms(Rotary(f, backend)) for backend in ("reference", "cpu"))
    count = check_models(Rotary(f, "cpu"))
    import transformers
    print(f"rotary: {forms} forms agree with float64, {count} models with transformers {transformers.__version__} "
          f"(seed {seed})")


if __name__ == "__main__":
    main()
