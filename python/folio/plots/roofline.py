"""A run of `folio bench` as a roofline: GFLOP/s over FLOP per byte of K and V, both logarithmic.

What the machine can do is a roof: memory that slopes up to where arithmetic is the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matplotlib.lines import Line2D

from . import RunError, look

TYPES = {"f32": "blue", "bf16": "orange", "f16": "green"}  # of q
CEILINGS = {"fma_f32_gflops": ("blue", "f32 FMA"), "dot_bf16_gflops": ("orange", "bf16 dot"),
            "dot_int8_gops": ("sky", "int8 dot")}
# What tells cases apart, and what goes without saying.
FIELDS = {"dtype": "{}", "kv_dtype": "kv {}", "heads": "heads {}", "kv_heads": "kv heads {}",
          "head_size": "head size {}", "block_size": "block {}", "layout": "{}", "options": "{}", "cache": "{}",
          "backend": "{}", "level": "{}", "threads": "threads {}"}
USUAL = {"layout": "native", "options": "plain", "cache": "cold"}


@dataclass
class Point:
    case: dict
    x: float  # FLOP per byte
    y: float  # GFLOP/s
    label: str = ""


def points(run: dict) -> list:
    """Cases that have both rates."""
    found = []
    for case in run["results"]:
        flops, bytes_ = case.get("gflops") or 0, case.get("gbps") or 0
        if flops > 0 and bytes_ > 0:
            found.append(Point(case, flops / bytes_, flops))
    varied = [f for f in FIELDS if len({str(c.case.get(f)) for c in found}) > 1]
    for p in found:
        parts = [FIELDS[f].format(p.case.get(f)) for f in varied if p.case.get(f) != USUAL.get(f)
                 and not (f == "kv_dtype" and p.case[f] == p.case.get("dtype"))]
        p.label = ", ".join([p.case["case"], *parts])
    return found


def _match(now: list, before: list) -> list:
    """Pairs of the same work: at the same place, else where there is only one."""
    work = [f for f in ("case", *FIELDS) if f not in ("backend", "level", "threads")]
    pairs = []
    for p in now:
        same = [q for q in before if all(q.case.get(f) == p.case.get(f) for f in work)]
        here = [q for q in same if all(q.case.get(f) == p.case.get(f) for f in ("backend", "level", "threads"))]
        if here or len(same) == 1:
            pairs.append((p, (here or same)[0]))
    return pairs


class _Roofline:
    def __init__(self, run: dict, before: dict | None) -> None:
        self.run, self.points = run, points(run)
        if not self.points:
            raise RunError("no case has both GFLOP/s and GB/s")
        self.pairs = _match(self.points, points(before)) if before else []
        ceilings = run.get("ceilings") or {}
        self.read = ceilings.get("read_gbps") or 0.0
        bounds = {(p.case.get("ceiling") or {}).get("name") for p in self.points}
        self.compute = {key: ceilings[key] for key in CEILINGS if key in bounds and ceilings.get(key)}
        self.top = max(self.compute.values(), default=float("inf"))
        self.titles: dict = {}

    def set_axes(self, axes: Any) -> None:
        xs = [p.x for p in self.points] + [q.x for _, q in self.pairs]
        ys = [p.y for p in self.points] + [q.y for _, q in self.pairs] + list(self.compute.values())
        if self.read:
            xs += [value / self.read for value in self.compute.values()]  # where the roof bends
            ys += [min(self.read * p.x, self.top) for p in self.points]
        self.unit = 1e3 if max(ys) >= 1e4 else 1
        look.scale(axes.xaxis, min(xs) / 2.5, max(xs) * 5, log=True, wanted=10)
        look.scale(axes.yaxis, min(ys) / 2 / self.unit, max(ys) * 1.6 / self.unit, log=True, wanted=8)
        axes.set_xlabel("FLOP per byte of K and V, each byte counted once")
        axes.set_title("TFLOP/s" if self.unit > 1 else "GFLOP/s")
        axes.tick_params("x", length=5)

    def handles(self) -> list:
        entries = []
        if self.read:
            entries.append(Line2D([], [], color=look.C["purple"], label=f"memory read: {self.read:.4g} GB/s"))
        cuda = self.points[0].case.get("backend") == "cuda"
        for key, value in self.compute.items():
            colour, name = CEILINGS[key]
            name = name.replace("dot", "mma") if cuda else name
            rate = f"{value / self.unit:.4g} {'T' if self.unit > 1 else 'G'}FLOP/s"
            entries.append(Line2D([], [], color=look.C[colour], label=f"{name}: {rate}"))
        shown = {p.case.get("dtype") for p in self.points}
        entries += [Line2D([], [], ls="", marker="o", mew=0, ms=8, color=look.C[colour], label=f"{dtype} queries")
                    for dtype, colour in TYPES.items() if dtype in shown]
        if self.pairs:
            entries.append(Line2D([], [], ls="", marker="o", mew=0, ms=8, color=look.C["soft"], label="before"))
        return entries

    def draw_lines(self, axes: Any) -> None:
        low, high = axes.get_xlim()
        if self.read:  # y = read * x, up to the highest arithmetic
            end = min(high, self.top / self.read)
            axes.plot([low, end], [self.read * low / self.unit, self.read * end / self.unit], color=look.C["purple"],
                      gid="memory")
        for key, value in self.compute.items():
            start = max(low, value / self.read) if self.read else low
            axes.plot([start, high], [value / self.unit] * 2, color=look.C[CEILINGS[key][0]], gid=key)
        for now, then in self.pairs:
            axes.plot([then.x, now.x], [then.y / self.unit, now.y / self.unit], color=look.C["soft"], lw=1)
            axes.plot(then.x, then.y / self.unit, "o", ms=8, mew=0, color=look.C["soft"])
        for i, p in enumerate(self.points):
            axes.plot(p.x, p.y / self.unit, "o", ms=10, mew=0, color=look.C[TYPES.get(p.case.get("dtype", ""), "red")],
                      gid=f"case{i}")
            share = p.case.get("share")
            self.titles[f"case{i}"] = f"{p.label}: {p.y / self.unit:.4g} {axes.get_title(loc='left')}, " \
                f"{p.case['gbps']:.4g} GB/s" + (f", {100 * share:.0f} % of its ceiling" if share else "")

    def draw_labels(self, axes: Any) -> None:
        """Each at the first free place near its point: right of it, level with it or ever further below and above;
        else left of it."""
        area, height, beside = axes.bbox, 14, 10
        spots = [axes.transData.transform((p.x, p.y / self.unit)) for p in self.points]
        olds = [axes.transData.transform((q.x, q.y / self.unit)) for _, q in self.pairs]
        taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in (*spots, *olds)]
        for p, (x, y) in zip(self.points, spots):
            text = axes.annotate(p.label, (p.x, p.y / self.unit), (0, 0), textcoords="offset pixels")
            width = text.get_window_extent().width
            text.remove()  # without a free place the pointer still tells it
            for side, step in ((s, t) for s in (1, -1) for t in (0, -1, 1, -2, 2, -3, 3, -4, 4, -5, 5, -6, 6)):
                near, up = side * (beside + (6 if step else 0)), step * height
                left, right = sorted((x + near, x + near + side * width))
                low, high = y + up - 7, y + up + 7
                if left > area.x0 and right < area.x1 and low > area.y0 and high < area.y1 and \
                        not any(a[0] < right and left < a[2] and a[1] < high and low < a[3] for a in taken):
                    taken.append((left, low, right, high))
                    line = {"arrowstyle": "-", "color": look.C["grid"], "shrinkA": 2, "shrinkB": 6,
                            "relpos": (0 if side > 0 else 1, 0.5)} if step else None
                    axes.annotate(p.label, (p.x, p.y / self.unit), (near, up), textcoords="offset points",
                                  va="center_baseline", ha="left" if side > 0 else "right", arrowprops=line)
                    break


def draw(run: dict, before: dict | None = None) -> look.Picture:
    """The roofline of a run; before: an earlier one, whose points are drawn too."""
    r = _Roofline(run, before)
    title = f"folio {run.get('version', '')} bench: {run.get('device') or run.get('cpu') or ''}"
    figure = look.figure(860, 560)
    axes = figure.add_subplot()
    r.set_axes(axes)
    look.place(axes, r.handles(), (12, 0, 848, 556), title)
    r.draw_lines(axes)
    r.draw_labels(axes)
    return look.Picture(figure, title, "A roofline: measured cases as points under the machine's measured ceilings, "
                        "the best of the whole run.", r.titles)
