"""A walk with pictures: the blocks of a pool while requests come and go, and attention kernels under a roofline.

    pictures.py [folder]      writes blocks.png and roofline.png; needs matplotlib
"""
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib
import numpy as np

import folio

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.colors import ListedColormap  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

COLORS = {"free": "#eef1f4", "used": "#3b7dd8", "shared": "#e07b39", "cached": "#9aa7b4"}


def block_map(path):
    """A small engine: prompts with a common prefix arrive, decode, end. One column of the picture per step."""
    rng = np.random.default_rng(0)
    cache = folio.KVCache(num_blocks=48, block_size=16, num_kv_heads=1, head_size=8, dtype="f32")
    pool = folio.Pool(cache)
    running, columns = [], []
    for step in range(120):
        if step % 5 == 0 and len(running) < 8:
            common = list(range(64)) if rng.random() < 0.6 else []
            ids = common + rng.integers(100, 200, int(rng.integers(10, 60))).tolist()
            sequence = pool.sequence()
            sequence.match(ids[:-1])
            running.append([sequence, ids, step + int(rng.integers(10, 40))])
        for entry in list(running):
            sequence, ids, end = entry
            try:
                sequence.reserve(len(ids) - len(sequence))
            except folio.FullError:  # wait until another one ends
                continue
            sequence.commit(ids)  # the forwards would be here
            ids.append(int(rng.integers(100, 200)))
            if step >= end:
                sequence.close()
                running.remove(entry)
        columns.append(pool.block_states())
    figure, axis = plt.subplots(figsize=(10, 4.2), layout="constrained")
    axis.imshow(np.array(columns).T, cmap=ListedColormap(COLORS.values()), vmin=0, vmax=3, aspect="auto",
                interpolation="nearest", origin="lower")
    axis.set(xlabel="step", ylabel="block", title="Blocks of a pool while requests with a common prefix come and go")
    axis.legend(handles=[Patch(color=color, label=name) for name, color in COLORS.items()], ncols=4,
                loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
    figure.savefig(path, dpi=120)
    stats = pool.stats()
    print(f"{path}: {stats['hit_rate']:.0%} of prompt tokens were cached, {stats['evictions']} blocks evicted")


def best_time(call, seconds=0.2):
    """The shortest of several runs: what else the machine does only makes them longer."""
    call()
    times = []
    while len(times) < 3 or sum(times) < seconds:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure(context, queries, keys, heads=16, kv_heads=4, size=128, block=16):
    """(flop per byte, flop/s) of one sequence with this many new tokens over this many keys, in f32."""
    layers = max(1, 2**28 // (2 * keys * kv_heads * size * 4))  # together larger than the processor's caches
    attention = folio.Attention(context, num_heads=heads, num_kv_heads=kv_heads, head_size=size)
    cache = folio.KVCache(context, num_layers=layers, num_blocks=keys // block, block_size=block,
                          num_kv_heads=kv_heads, head_size=size, dtype="f32")
    plan = folio.Plan(attention, cache=cache, max_seqs=1, max_query_tokens=queries, max_seq_len=keys)
    batch = folio.Batch(cache=cache)
    batch.add(queries, keys, np.arange(keys // block))
    plan.update(batch)
    rows = np.ones((keys, kv_heads, size), np.float32)
    for layer in range(layers):
        cache.write(layer, rows, rows, np.arange(keys))
    q = np.ones((queries, heads, size), np.float32)
    out = np.empty_like(q)

    def all_layers():
        for layer in range(layers):
            plan.forward(q, cache=cache, layer=layer, out=out)

    seconds = best_time(all_layers) / layers
    seen = queries * keys - queries * (queries - 1) // 2  # (query, key) pairs that causality leaves
    flop = 4 * seen * heads * size
    moved = 4 * (2 * keys * kv_heads * size + 2 * queries * heads * size)
    return flop / moved, flop / seconds


def ceilings(threads):
    """Bytes/s that so many threads read, and flop/s of NumPy's matrix product."""
    parts = np.ones((threads, 2**25), np.float32)
    with ThreadPoolExecutor(threads) as pool:
        bandwidth = parts.nbytes / best_time(lambda: list(pool.map(np.max, parts)))
    a = np.ones((2048, 2048), np.float32)
    return bandwidth, 2 * 2048**3 / best_time(lambda: a @ a)


def roofline(path):
    context = folio.Context("cpu")
    shapes = [(1, 4096), (4, 4096), (16, 4096), (64, 4096), (512, 4096)]
    bandwidth, peak = ceilings(context.num_threads)
    points = [measure(context, *shape) for shape in shapes]
    figure, axis = plt.subplots(figsize=(7.5, 5), layout="constrained")
    x = np.logspace(-0.3, 3.2, 200)
    axis.loglog(x, np.minimum(x * bandwidth, peak) / 1e9, color="#56616d",
                label=f"NumPy: reads {bandwidth / 1e9:.0f} GB/s, matrix product {peak / 1e9:.0f} Gflop/s")
    for (queries, keys), (intensity, speed) in zip(shapes, points):
        axis.plot(intensity, speed / 1e9, "o", color="#e07b39", markersize=8)
        axis.annotate(f"{queries} × {keys}", (intensity, speed / 1e9), textcoords="offset points", xytext=(6, -14))
    axis.plot([], [], "o", color="#e07b39", label="folio: new tokens × keys of one sequence, f32")
    axis.set(xlabel="flop per byte of q, K, V and out", ylabel="Gflop/s",
             title=f"Attention on {context.num_threads} threads of {context.device_name}, level {context.level}")
    axis.grid(True, which="major", color="#eef1f4")
    axis.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=120)
    print(f"{path}: " + ", ".join(f"{q} × {k}: {s / 1e9:.0f} Gflop/s" for (q, k), (_, s) in zip(shapes, points)))


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    block_map(folder / "blocks.png")
    roofline(folder / "roofline.png")
