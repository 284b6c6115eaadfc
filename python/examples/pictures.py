"""A picture of the blocks of a pool while requests come and go.

    pictures.py [folder]      writes blocks.png; needs matplotlib
"""
import sys
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


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    block_map(folder / "blocks.png")
