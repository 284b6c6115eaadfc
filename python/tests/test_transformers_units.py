"""Parts of folio.transformers on their own: masks of the plain interface, block tables of continuous batching."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import folio  # noqa: E402
from folio.transformers import paged, plain  # noqa: E402


class Layer(torch.nn.Module):
    """A module as transformers passes it."""

    is_causal = True


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, bias: torch.Tensor = None,
          sinks: torch.Tensor = None, cap: float = None) -> torch.Tensor:
    """Attention in float64. seen: bools that broadcast to [batch, heads, queries, keys]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias.double()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], 3)
    weights = torch.softmax(scores, -1).nan_to_num(0)[..., :k.shape[2]]
    return (weights @ v).transpose(1, 2)


def tensors(device: str, batch: int, queries: int, keys: int, heads: int = 4, kv_heads: int = 2, size: int = 16,
            v_size: int = 8) -> tuple:
    g = torch.Generator().manual_seed(batch * 10000 + queries * 100 + keys)
    shapes = ((batch, heads, queries, size), (batch, kv_heads, keys, size), (batch, kv_heads, keys, v_size))
    return tuple(torch.randn(s, generator=g).to(device) for s in shapes)


def causal(queries: int, keys: int, window: int = None, end: int = None) -> torch.Tensor:
    position = torch.arange(queries)[:, None] + (end or keys) - queries
    distance = position - torch.arange(keys)
    return ((distance >= 0) & (distance < (window or keys + 1)))[None, None]


def padding(batch: int, keys: int, left: bool) -> torch.Tensor:
    lens = torch.tensor([keys - 3 * i for i in range(batch)])[:, None]
    position = torch.arange(keys)
    return ((position >= keys - lens) if left else (position < lens))[:, None, None, :]


def holes(*shape: int) -> torch.Tensor:
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    seen[..., 0] = True
    return seen


MASKS = {
    "causal": (causal(20, 20), None, True, False),
    "chunk": (causal(7, 20), None, True, False),
    "left padding": (causal(20, 20) & padding(3, 20, True), None, True, True),
    "right padding": (causal(20, 20) & padding(3, 20, False), None, True, True),
    "static cache": (causal(7, 40, end=25), None, True, False),
    "window": (causal(20, 20, 6), 6, True, False),
    "window, left padding": (causal(20, 20, 6) & padding(3, 20, True), 6, True, True),
    "window not told": (causal(20, 20, 6), None, False, True),
    "all keys": (torch.ones(1, 1, 20, 20, dtype=torch.bool), None, False, False),
    "encoder": (padding(3, 20, False).expand(3, 1, 11, 20), None, False, True),
    "decode": (padding(3, 33, True), None, True, True),
    "decode, window": (causal(1, 33, 6), 6, True, False),
    "decode, static cache": (causal(1, 40, end=25), None, True, False),
    "any": (holes(3, 1, 12, 20), None, False, True),
    "any, each head": (holes(3, 4, 12, 20), None, False, True),
    "nothing seen": (causal(8, 8) & (torch.arange(8) > 2)[:, None], None, False, True),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, device: str) -> None:
    """Every mask gives what it says; the usual ones without a matrix."""
    mask, window, is_causal, biased = MASKS[name]
    batch, queries, keys = max(mask.shape[0], 3), *mask.shape[2:]
    q, k, v = tensors(device, batch, queries, keys)
    seen = plain.read_mask(mask, queries, keys, True, window)
    assert (seen.causal, seen.bias is not None) == (is_causal, biased)
    out, _ = plain.plain_attention(Layer(), q, k, v, mask.to(device), sliding_window=window)
    torch.testing.assert_close(out.double(), dense(q, k, v, mask.to(device)), atol=2e-5, rtol=0)


def test_float_mask_and_position_bias(device: str) -> None:
    q, k, v = tensors(device, 3, 9, 21)
    added, position_bias = torch.randn(3, 1, 9, 21, device=device), torch.randn(1, 4, 9, 21, device=device)
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    out, _ = plain.plain_attention(Layer(), q, k, v, added, position_bias=position_bias)
    torch.testing.assert_close(out.double(), dense(q, k, v, everything, added + position_bias), atol=2e-5, rtol=0)
    mask = causal(9, 21).to(device)
    out, _ = plain.plain_attention(Layer(), q, k, v, mask, position_bias=position_bias)
    torch.testing.assert_close(out.double(), dense(q, k, v, mask, position_bias), atol=2e-5, rtol=0)


def test_no_mask(device: str) -> None:
    """Causal as module.is_causal or is_causal says; a single row sees all keys."""
    q, k, v = tensors(device, 2, 12, 12)
    all_keys = torch.ones(1, 1, 12, 12, dtype=torch.bool, device=device)
    for is_causal, seen in ((None, causal(12, 12).to(device)), (False, all_keys)):
        out, _ = plain.plain_attention(Layer(), q, k, v, None, is_causal=is_causal)
        torch.testing.assert_close(out.double(), dense(q, k, v, seen), atol=2e-5, rtol=0)
    out, _ = plain.plain_attention(Layer(), q[:, :, :1], k, v, None)
    torch.testing.assert_close(out.double(), dense(q[:, :, :1], k, v, all_keys[:, :, :1]), atol=2e-5, rtol=0)


def test_sinks_soft_cap_scale(device: str) -> None:
    q, k, v = tensors(device, 2, 5, 9)
    sinks, mask = torch.randn(4, device=device), causal(5, 9).to(device)
    out, _ = plain.plain_attention(Layer(), q, k, v, mask, s_aux=sinks.bfloat16(), softcap=0.7)
    expected = dense(q, k, v, mask, sinks=sinks.bfloat16(), cap=0.7)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)
    out, _ = plain.plain_attention(Layer(), q, k, v, mask, scaling=0.5)
    torch.testing.assert_close(out.double(), dense(q * 2, k, v, mask), atol=2e-5, rtol=0)


@pytest.mark.parametrize("batch, keys", [(1, 4104), (1, 4099), (3, 4104), (1, 8192)])
def test_long_sequences(batch: int, keys: int, device: str) -> None:
    """More keys than a block of the library holds."""
    q, k, v = tensors(device, batch, 2, keys)
    mask = (causal(2, keys) & padding(batch, keys, True)).to(device)
    out, _ = plain.plain_attention(Layer(), q, k, v, mask)
    torch.testing.assert_close(out.double(), dense(q, k, v, mask), atol=2e-5, rtol=0)


def test_strides(device: str) -> None:
    """q, K and V as projections, as slices of a fused projection, and with numbers that are not contiguous."""
    fused = torch.randn(2, 10, 4, 3, 16, device=device)
    q, k, v = (fused[..., i, :].transpose(1, 2) for i in range(3))
    mask = causal(10, 10).to(device)
    for a, b, c in ((q, k, v), (q.contiguous(), k.contiguous(), v),
                    tuple(x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v))):
        out, _ = plain.plain_attention(Layer(), a, b, c, mask)
        torch.testing.assert_close(out.double(), dense(q, k, v, mask), atol=2e-5, rtol=0)


def test_mask_changed_in_place(device: str) -> None:
    """What was read from a mask is not used after the mask has changed."""
    q, k, v = tensors(device, 1, 4, 8)
    mask = causal(4, 8).to(device).clone()
    plain.plain_attention(Layer(), q, k, v, mask)
    mask[..., 0] = False
    out, _ = plain.plain_attention(Layer(), q, k, v, mask)
    torch.testing.assert_close(out.double(), dense(q, k, v, mask), atol=2e-5, rtol=0)


def test_training_refused() -> None:
    q, k, v = tensors("cpu", 1, 4, 4)
    with pytest.raises(folio.UnsupportedError, match="dropout is 0.1"):
        plain.plain_attention(Layer(), q, k, v, None, dropout=0.1)
    plain.plain_attention(Layer().eval(), q, k, v, None, dropout=0.1)


class Ring:
    """The pages of one request, and where transformers says that its tokens lie."""

    def __init__(self, pages: list[int], row_stride: int, page: int, window: int = None) -> None:
        self.pages, self.row_stride, self.page, self.window = pages, row_stride, page, window

    def index(self, token: int) -> int:
        slot = token % self.window if self.window else token
        return self.pages[slot // self.page] * self.row_stride + slot % self.page


def _arrangements(page: int, window: int, num_pages: int) -> list[paged.Pages]:
    """The same pages as 5.19 with 3 layers, and as 5.17 (halves), arrange them."""
    size = paged.block_size_of(page, window)
    first = paged.Pages(2 * page * 3, size, 3 * (page // size), np.arange(page // size), window)
    size = paged.block_size_of(page // 2, window)
    half = np.arange(page // 2 // size)
    second = paged.Pages(page, size, half.size, np.concatenate([half, num_pages * half.size + half]), window)
    return [first, second]


@pytest.mark.parametrize("page, window", [(16, None), (16, 32), (16, 24), (8, 20), (32, 16), (256, 128)])
def test_tables(page: int, window: int) -> None:
    """Block tables lead to the places that read_index and write_index name, also where rings have wrapped."""
    rng = np.random.default_rng(page)
    for pages in _arrangements(page, window, 64):
        size, trash = pages.block_size, 63 * pages.row_stride
        for step in range(200):
            query, keys, read, write, rings = [0], [0], [], [], []
            for numbers in rng.permutation(63)[:36].reshape(3, 12).tolist():
                rings.append(Ring(numbers, pages.row_stride, page, window))
                new = int(rng.choice([1, 1, 1, 2, 5, 3 * page]))
                old = int(rng.choice([0, 1, page - 1, page, rng.integers(1, 8 * page)]))
                visible = min(old, window - 1) if window else old
                read += [rings[-1].index(t) for t in range(old - visible, old)]
                fresh = [rings[-1].index(t) for t in range(old, old + new)]
                kept = min(new, window or new)
                write += [trash] * (new - kept) + fresh[new - kept:]
                read += [1] * new if window else fresh  # 1: the sentinel
                query.append(query[-1] + new)
                keys.append(keys[-1] + visible + new)
                rings[-1].old, rings[-1].new, rings[-1].visible = old, new, visible
            got = paged.tables(pages, trash, np.array(query), np.array(keys), np.array(read), np.array(write))
            for i, ring in enumerate(rings):
                blocks = got.blocks[got.indptr[i]:got.indptr[i + 1]]
                lead = int(got.seq_lens[i]) - (ring.visible + ring.new)
                assert 0 <= lead < size and blocks.size == -(-int(got.seq_lens[i]) // size)
                end = ring.visible + (ring.new if got.write_slots is None else 0)
                for j in range(end):
                    index = ring.index(ring.old - ring.visible + j)
                    number, offset = divmod(index, pages.row_stride)
                    block = number * pages.scale + pages.sub[offset // size]
                    assert blocks[(lead + j) // size] == block and (lead + j) % size == offset % size
            overlap = window and any(r.new > 1 and r.visible + r.new > window for r in rings)
            assert (got.write_slots is not None) == bool(overlap)
            if overlap:
                _check_slots(pages, got.write_slots, rings, window)


def _check_slots(pages: paged.Pages, slots: np.ndarray, rings: list[Ring], window: int) -> None:
    """Only the last tokens of a window are stored, each in its own place."""
    assert len(set(slots[slots >= 0].tolist())) == (slots >= 0).sum()
    place = 0
    for ring in rings:
        for t in range(ring.new):
            slot, index = int(slots[place + t]), ring.index(ring.old + t)
            number, offset = divmod(index, pages.row_stride)
            block = number * pages.scale + pages.sub[offset // pages.block_size]
            expected = block * pages.block_size + offset % pages.block_size
            assert slot == (expected if t >= ring.new - window else -1)
        place += ring.new
