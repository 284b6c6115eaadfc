"""The functions of FlashAttention, with its arguments and its meaning, on CPUs and GPUs.

    from folio.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

The causal mask is aligned to the bottom right: the last query sees the last key. A row that sees no key gets zeros, and
-inf in lse. Tensors are torch's, on the CPU or on a GPU, or NumPy arrays; index arrays lie where q lies, and on a GPU
they are never copied to the host. There is no backward pass and no dropout. Under torch.compile each function is one
operator of the compiled graph.

The arguments of FlashAttention-2 come in its order, those of FlashAttention-3 by name. docs/python.md lists what is not
here. For all functions:

    alibi_slopes   [heads], or on a CPU [seqs, heads]: then the sequences are computed one by one
    k_descale, v_descale   scales of fp8 caches, [kv_heads] or [seqs, kv_heads] in the same way
    s_aux          sinks [heads]
    qv             for latents: q and k are what rotary turns, qv and v the rest; k and v are slices of one array

Heads whose size is no multiple of 8 are padded in each call, those of a cache are refused. Plans are kept by geometry
and refilled only if lengths or block tables changed. On a GPU, where these are not read, the layers of a step share an
update if they pass the same tensors, which torch has not changed since, with caches of their own; torch does not count
the changes of tensors made in inference mode, so with these each layer updates. On a GPU a sequence whose lengths or
blocks are invalid gets zeros; so does one with more queries than keys, unless max_seqlen_q > max_seqlen_k says that
there may be some. In a CUDA graph, call the function once with the same shapes before the capture.
"""

from __future__ import annotations

from typing import Any, Optional

from ..errors import ArgumentError
from ._calls import _fixed, _kvcache, _varlen, call, options_of

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"]


def flash_attn_varlen_func(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any = None,
                           max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None,
                           dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
                           window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
                           deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
                           *, return_softmax_lse: bool = False, seqused_k: Any = None, s_aux: Any = None,
                           out: Any = None, qv: Any = None, k_descale: Any = None, v_descale: Any = None,
                           **others: Any) -> Any:
    """Sequences of different lengths, one after another.

    q [total_q, heads, size]; k, v [total_k, kv_heads, size], or with block_table int32 [seqs, blocks] the pages
    [num_blocks, page_size, kv_heads, size]. cu_seqlens_q and _k: int32 [seqs + 1], where each sequence begins;
    seqused_k int32 [seqs] gives the lengths of the keys instead. Returns out, or (out, lse [heads, total_q]) with
    return_softmax_lse, or (out, lse, None) with return_attn_probs. Rows behind the last sequence get zeros on a CPU,
    and hold anything on a GPU; in an `out` that was given they stay as they are.
    """
    want = bool(return_attn_probs or return_softmax_lse)
    options = options_of(dropout_p, (q, k, v), others, window_size, softmax_scale, causal, softcap, alibi_slopes, s_aux,
                         k_descale, v_descale, want)
    if cu_seqlens_k is None and seqused_k is None:
        raise ArgumentError("cu_seqlens_k or seqused_k must be given")
    result, lse = call("flash_attn_varlen", _varlen,
                       (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, seqused_k, qv),
                       options, out)
    return (result, lse, None) if return_attn_probs else (result, lse) if want else result


def flash_attn_func(q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: Optional[float] = None,
                    causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
                    deterministic: bool = False, return_attn_probs: bool = False, *, return_softmax_lse: bool = False,
                    s_aux: Any = None, qv: Any = None, k_descale: Any = None, v_descale: Any = None,
                    **others: Any) -> Any:
    """Sequences of one length. q [seqs, queries, heads, size]; k, v [seqs, keys, kv_heads, size]. Returns out, or
    (out, lse [seqs, heads, queries]), or (out, lse, None)."""
    want = bool(return_attn_probs or return_softmax_lse)
    out, lse = call("flash_attn", _fixed, (q, k, v, qv), options_of(
        dropout_p, (q, k, v), others, window_size, softmax_scale, causal, softcap, alibi_slopes, s_aux, k_descale,
        v_descale, want))
    return (out, lse, None) if return_attn_probs else (out, lse) if want else out


def flash_attn_with_kvcache(q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None,
                            rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None,
                            cache_leftpad: Any = None, block_table: Any = None, softmax_scale: Optional[float] = None,
                            causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0,
                            rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0,
                            return_softmax_lse: bool = False, *, s_aux: Any = None, page_table: Any = None,
                            cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None, max_seqlen_q: Optional[int] = None,
                            rotary_seqlens: Any = None, qv: Any = None, k_descale: Any = None, v_descale: Any = None,
                            **others: Any) -> Any:
    """Attention over a cache, after k and v (if given) were stored in it behind the cached tokens.

    q [seqs, queries, heads, size], or with cu_seqlens_q int32 [seqs + 1] [total_q, heads, size]; k_cache, v_cache
    [cache_seqs, max_len, kv_heads, size], or with block_table (or page_table) int32 [seqs, blocks] the pages
    [num_blocks, page_size, kv_heads, size]. k, v [seqs, new, kv_heads, size], or with cu_seqlens_k_new [total_new,
    kv_heads, size]. cache_seqlens: a number or int32 [seqs], the tokens in the cache before k and v; the first
    cache_leftpad[i] of these are not there. cache_batch_idx [seqs]: which row of the cache each sequence has.
    rotary_cos, rotary_sin [positions, rotary_size / 2] turn k and q, whose first rows are at position cache_seqlens, or
    rotary_seqlens; so are all rows of q if neither causal nor with a window. On a GPU, tables made under
    inference_mode() must not change. Returns out, or (out, lse [seqs, heads, queries] or [heads, total_q]).
    """
    options = options_of(0.0, (q, k_cache, v_cache, k, v), others, window_size, softmax_scale, causal, softcap,
                         alibi_slopes, s_aux, k_descale, v_descale, return_softmax_lse)
    if (k is None) != (v is None):
        raise ArgumentError("k is given without v" if v is None else "v is given without k")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ArgumentError("rotary_cos and rotary_sin must both be given, or neither")
    lens, number = (None, cache_seqlens) if isinstance(cache_seqlens, int) else (cache_seqlens, None)
    out, lse = call("flash_attn_kvcache", _kvcache,
                    (q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, rotary_interleaved, lens, number,
                     cache_batch_idx, page_table if block_table is None else block_table, cache_leftpad, cu_seqlens_q,
                     cu_seqlens_k_new, max_seqlen_q, rotary_seqlens, qv), options)
    return (out, lse) if return_softmax_lse else out


# ---- packed tensors; the options are those of the functions above, in the same order ----


def flash_attn_qkvpacked_func(qkv: Any, *options: Any, **named: Any) -> Any:
    """flash_attn_func of qkv [seqs, rows, 3, heads, size]."""
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *options, **named)


def flash_attn_kvpacked_func(q: Any, kv: Any, *options: Any, **named: Any) -> Any:
    """flash_attn_func of kv [seqs, keys, 2, kv_heads, size]."""
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *options, **named)


def flash_attn_varlen_qkvpacked_func(qkv: Any, cu_seqlens: Any, max_seqlen: Optional[int], *options: Any,
                                     **named: Any) -> Any:
    """flash_attn_varlen_func of qkv [total, 3, heads, size]."""
    return flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
                                  *options, **named)


def flash_attn_varlen_kvpacked_func(q: Any, kv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Optional[int],
                                    max_seqlen_k: Optional[int], *options: Any, **named: Any) -> Any:
    """flash_attn_varlen_func of kv [total_k, 2, kv_heads, size]."""
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                  *options, **named)
