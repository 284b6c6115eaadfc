"""Attention on NumPy arrays: a prompt of 20 tokens, 8 query heads on 2 kv heads, through blocks 2 and 0 of a cache."""
import numpy as np

import folio

q = np.zeros((20, 8, 64), np.float32)  # [tokens, heads, head_size], from your model
k = np.zeros((20, 2, 64), np.float32)
v = np.ones((20, 2, 64), np.float32) * np.arange(20, dtype=np.float32)[:, None, None]
cache = folio.KVCache(num_blocks=4, block_size=16, num_kv_heads=2, head_size=64, dtype="f32")
out = folio.attend(q, k, v, cache=cache, block_tables=[[2, 0]], seq_lens=[20])
print(f"token 19 averages v = 0 ... 19 through blocks 2 and 0: {out[19, 0, 0]:g} (expected 9.5)")
assert abs(out[19, 0, 0] - 9.5) < 1e-5
