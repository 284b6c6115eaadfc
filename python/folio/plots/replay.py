"""A replay's curves: what `folio replay -o json` saved, over the replay's clock, and its latencies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from . import look
from .look import C

LEVELS = ("used_blocks", "cached_blocks", "running", "decoding", "preempted", "waiting")  # a mean in each interval
COUNTS = ("steps", "prefill_tokens", "decode_tokens", "preemptions", "prompt_tokens", "hit_tokens")  # a sum
UNITS: tuple[tuple[float, float, str, str], ...] = (  # seconds, up to which clock, name
    (1e-3, 0.5, "ms", "milliseconds"), (1, 180, "s", "seconds"), (60, 10800, "min", "minutes"),
    (3600, math.inf, "h", "hours"))


def time_text(ms: float) -> str:
    """456 us, 12.3 ms, 4.56 s, 17.2 min"""
    for size, up_to, name in ((1e-3, 0.9995, "us"), (1, 999.5, "ms"), (1e3, 599.5e3, "s"), (60e3, math.inf, "min")):
        if ms < up_to:
            break
    return f"{ms / size:.0f} {name}" if ms / size >= 99.95 else f"{ms / size:.3g} {name}"


class Times:
    """Latencies in ms, as buckets."""

    def __init__(self, of: dict) -> None:
        self.ms = np.array(of["ms"], float)
        self.seen = np.cumsum(of["counts"]).astype(float)
        self.count = int(self.seen[-1]) if len(self.seen) else 0

    def at(self, share: Any) -> Any:
        """The time within which this share came."""
        rank = np.clip(np.ceil(np.asarray(share) * self.count - 1e-9), 1, None)
        return self.ms[np.searchsorted(self.seen, rank)]


class Replay:
    """A saved replay. Its intervals are equally wide, but for the last."""

    def __init__(self, run: dict) -> None:
        self.run, self.options, self.kv = run, run["options"], run["kv"]
        series = run["series"]
        self.values = {key: np.array(series[key], float) for key in (*LEVELS, *COUNTS)}
        self.count = len(self.values["steps"])
        self.clock = run["clock_seconds"]
        starts = series["interval_seconds"] * np.arange(self.count)
        self.seconds = np.clip(self.clock - starts, 0, series["interval_seconds"])
        self.width = series["interval_seconds"]
        self.unit, _, self.unit_name, self.unit_names = next(u for u in UNITS if self.clock < u[1])
        self.first, self.next = Times(run["ttft_ms"]), Times(run["itl_ms"])

    def bins(self, group: int = 1) -> dict:
        """Figures of every `group` intervals as one: levels and counts, and what follows from them. NaN: none."""
        at = np.arange(0, self.count, group)
        seconds = np.add.reduceat(self.seconds, at)
        b = {key: np.add.reduceat(self.values[key], at) for key in COUNTS}
        for key in LEVELS:
            b[key] = np.add.reduceat(self.values[key] * self.seconds, at) / np.maximum(seconds, 1e-300)
        b["edges"] = np.append(at * self.width, self.clock) / self.unit
        b["free_blocks"] = np.maximum(0, self.kv["blocks"] - b["used_blocks"] - b["cached_blocks"])
        steps = np.maximum(b["steps"], 1e-300)
        b["prefill_of_step"], b["decode_of_step"] = b["prefill_tokens"] / steps, b["decode_tokens"] / steps
        with np.errstate(invalid="ignore"):
            b["hit_rate"] = 100 * b["hit_tokens"] / b["prompt_tokens"]
            b["hit_rate_so_far"] = 100 * np.cumsum(b["hit_tokens"]) / np.cumsum(b["prompt_tokens"])
        return b

    def mean(self, level: str) -> float:
        return float(np.sum(self.values[level] * self.seconds) / max(self.clock, 1e-300))


# ---- Drawing

def _area(axes: Any, b: dict, low: Any, high: Any, colour: str, alpha: float) -> None:
    axes.stairs(high, b["edges"], baseline=low, fill=True, color=C[colour], alpha=alpha, lw=0)


def _patch(label: str, colour: str, alpha: float) -> Patch:
    return Patch(facecolor=C[colour], alpha=alpha, lw=0, label=label)


def _over_time(axes: Any, r: Replay, high: float, top: float | None = None, unit: str = "") -> None:
    """Both axes; ticks of y end at `high`, room at `top`."""
    px = axes.figure.bbox
    look.scale(axes.xaxis, 0, r.clock / r.unit if r.clock else 1, wanted=int(min(px.width / 56, 10)))
    look.scale(axes.yaxis, 0, high, wanted=5, label=lambda value: look.number(value) + unit)
    if top:
        axes.set_yticks([tick for tick in axes.get_yticks() if tick <= high])
        axes.set_ylim(0, top)
    axes.set_xlabel(f"{r.unit_names} by the replay's clock")


def _draw_kv(axes: Any, r: Replay, b: dict) -> list:
    used, stored, blocks = b["used_blocks"], b["used_blocks"] + b["cached_blocks"], r.kv["blocks"]
    far = stored.max() < 0.4 * blocks  # a pool that is far too large would hide what is used of it
    high = max(stored.max(), 1) * 1.2 if far else blocks * 1.02
    preempted = r.run["preemptions"] > 0
    _over_time(axes, r, high, high * 1.1 if preempted else None)
    _area(axes, b, used, stored, "sky", 0.4)
    _area(axes, b, 0, used, "blue", 0.8)
    axes.plot([0, b["edges"][-1]], [blocks] * 2, color=C["soft"], ls=(0, (3, 2)))
    handles = [_patch("held by sequences", "blue", 0.8), _patch("cached, reusable", "sky", 0.4),
               Line2D([], [], color=C["soft"], ls=(0, (3, 2)), label="capacity, far above" if far else "capacity")]
    if preempted:  # bars above the area, wide enough to be seen
        coarse = r.bins(math.ceil(r.count / 150))
        counts = coarse["preemptions"]
        bars = np.where(counts > 0, high * (1.03 + 0.07 * counts / counts.max()), np.nan)
        axes.stairs(bars, coarse["edges"], baseline=high * 1.01, fill=True, color=C["red"], lw=0)
        handles.append(_patch("preemptions", "red", 1))
    return handles


def _draw_batch(axes: Any, r: Replay, b: dict) -> list:
    decode, budget = b["decode_of_step"], r.options["budget"]
    _over_time(axes, r, budget * 1.02)
    _area(axes, b, decode, decode + b["prefill_of_step"], "orange", 0.4)
    _area(axes, b, 0, decode, "green", 0.8)
    axes.plot([0, b["edges"][-1]], [budget] * 2, color=C["soft"], ls=(0, (3, 2)))
    return [_patch("decode", "green", 0.8), _patch("prefill", "orange", 0.4),
            Line2D([], [], color=C["soft"], ls=(0, (3, 2)), label="budget")]


def _draw_sequences(axes: Any, r: Replay, b: dict) -> list:
    lines = [("running", "running", "blue", "-", True),
             ("preempted", "preempted", "red", (0, (3, 2)), r.run["preemptions"] > 0),
             ("waiting", "waiting to be admitted", "orange", "-", r.options["speed"] > 0)]
    lines = [line for line in lines if line[4]]
    _over_time(axes, r, 1.05 * max(1, *(b[key].max() for key, *_ in lines)))
    _area(axes, b, 0, b["decoding"], "green", 0.4)
    for key, _, colour, style, _ in reversed(lines):
        axes.stairs(b[key], b["edges"], baseline=None, color=C[colour], lw=2, ls=style)
    return [Line2D([], [], color=C[colour], ls=style, label=label) for _, label, colour, style, _ in lines] + \
        [_patch("decoding", "green", 0.4)]


def _draw_hits(axes: Any, r: Replay, b: dict) -> list:
    window = r.bins(math.ceil(r.count / 64))  # an interval often has no more than one request
    rates = [rate for rate in (*window["hit_rate"], *b["hit_rate_so_far"]) if rate == rate]
    _over_time(axes, r, min(100, max(10, 1.15 * max(rates, default=0))), unit=" %")
    _area(axes, window, 0, window["hit_rate"], "sky", 0.4)
    axes.stairs(b["hit_rate_so_far"], b["edges"], baseline=None, color=C["green"], lw=2)
    return [Line2D([], [], color=C["green"], label="so far"), _patch("in the interval", "sky", 0.4)]


def _draw_latency(axes: Any, r: Replay, _: dict) -> list:
    """Percentiles from left to right, each nine of them (90, 99, 99.9 %) as far from the next, so that the slow few are
    seen next to the many. x is 1 / (1 - share): 2 for half of them, 10 for 90 %."""
    both = [(times, colour) for times, colour in ((r.first, "blue"), (r.next, "orange")) if times.count]
    low = min((float(times.at(0.01)) for times, _ in both), default=1)
    high = max((float(times.at(1)) for times, _ in both), default=1000)
    low = max(low, 2 ** -10)
    room = max(high / low, 1) ** (1 / 6) * 1.2  # for labels
    most = max((times.count for times, _ in both), default=0)
    nines = [(1, "0 %"), (2, "50 %"), (10, "90 %"), (100, "99 %"), (1000, "99.9 %"), (10000, "99.99 %")]
    nines = nines[:6 if most > 3000 else 5 if most > 300 else 4]
    if axes.figure.bbox.width < 500:
        nines = [nine for i, nine in enumerate(nines) if i not in (1, 4) or nine is nines[-1]]
    look.scale(axes.yaxis, low / room, max(high, low * 2) * room, log=True, wanted=5, label=time_text)
    look.scale(axes.xaxis, 1, nines[-1][0], log=True)
    axes.set_xticks([x for x, _ in nines], [label for _, label in nines])
    axes.get_xticklabels()[-1].set_ha("right")
    axes.set_xlabel("share that came within the time")
    slower = max((times for times, _ in both), key=lambda times: times.at(0.9), default=None)
    for times, colour in both:
        end = min(times.count, nines[-1][0])
        x = end ** np.linspace(0, 1, 160)
        axes.plot(x, np.maximum(times.at(1 - 1 / x), low / room), color=C[colour])
        above = times is slower
        for mark in (x for x, _ in nines if 1 < x <= min(end, 100)):
            ms = max(float(times.at(1 - 1 / mark)), low / room)
            axes.plot(mark, ms, "o", ms=8, mew=0, color=C[colour])
            # Curves rise: left above and right below a point there is room.
            axes.annotate(time_text(ms), (mark, ms), (-2, 9) if above else (2, -19), textcoords="offset points",
                          ha="right" if above else "left", color=C[colour])
    return [Line2D([], [], color=C["blue"], label="time to first token"),
            Line2D([], [], color=C["orange"], label="time between tokens")]


# ---- What came out, in words

def _tell_kv(r: Replay) -> str:
    kv, times = r.kv, r.run["preemptions"]
    held = f"At most {kv['peak_used']:,} of {kv['blocks']:,} blocks were held at once " \
        f"({100 * kv['peak_used'] / kv['blocks']:.0f} %). "
    return held + (f"If blocks ran out, a sequence was preempted: {times:,} time{'' if times == 1 else 's'}." if times
                   else "No sequence was preempted.")


def _tell_batch(r: Replay) -> str:
    steps = r.run["steps"]
    prefill, decode = (r.run[f"{key}_tokens"] / max(steps, 1) for key in ("prefill", "decode"))
    return f"{steps:,} steps; the mean one had {prefill:.0f} tokens of prompts and {decode:.0f} of answers, of a " \
        f"budget of {r.options['budget']}."


def _tell_sequences(r: Replay) -> str:
    queue = f"Requests arrived at their timestamps; {r.mean('waiting'):.1f} waited to be admitted, on average." \
        if r.options["speed"] > 0 else "A request arrived whenever it could be admitted."
    return f"{r.mean('running'):.1f} sequences ran at a time, on average; the limit is {r.options['max_seqs']}. {queue}"


def _tell_hits(r: Replay) -> str:
    run = r.run
    return f"{run['hit_tokens']:,} of {run['prompt_tokens']:,} prompt tokens ({100 * run['prefix_hit_rate']:.1f} %) " \
        "were in the cache when their request was admitted, and were not computed."


def _tell_latency(r: Replay) -> str:
    if not r.first.count:
        return "No request came to its first token."
    told = f"Half of the requests had their first token within {time_text(r.first.at(0.5))}, 99 % within " \
        f"{time_text(r.first.at(0.99))}."
    return told + (f" Half of the next tokens came within {time_text(r.next.at(0.5))}, 99 % within "
                   f"{time_text(r.next.at(0.99))}." if r.next.count else "")


# ---- The list

@dataclass
class Plot:
    id: str
    title: str
    y_label: str
    tell: Callable[[Replay], str]
    draw: Callable[[Any, Replay, dict], list]
    columns: dict  # name: key of bins(), and digits behind the point; none: not over time


PLOTS = (
    Plot("kv", "KV blocks", "blocks", _tell_kv, _draw_kv,
         {"held": ("used_blocks", 0), "cached": ("cached_blocks", 0), "free": ("free_blocks", 0),
          "preemptions": ("preemptions", 0)}),
    Plot("batch", "What a step computes", "tokens a step", _tell_batch, _draw_batch,
         {"prefill tokens a step": ("prefill_of_step", 1), "decode tokens a step": ("decode_of_step", 1),
          "steps": ("steps", 0)}),
    Plot("sequences", "Sequences", "sequences", _tell_sequences, _draw_sequences,
         {key: (key, 1) for key in ("running", "decoding", "preempted", "waiting")}),
    Plot("hits", "Prefix hits", "share of prompt tokens found in the cache", _tell_hits, _draw_hits,
         {"prompt tokens": ("prompt_tokens", 0), "found": ("hit_tokens", 0), "rate, %": ("hit_rate", 1),
          "so far, %": ("hit_rate_so_far", 1)}),
    Plot("latency", "Latencies", "time, logarithmic", _tell_latency, _draw_latency, {}),
)


def _fill(plot: Plot, figure: Figure, r: Replay, part: tuple, title: str = "") -> Any:
    """Draws into a part of a figure, in px; returns the axes."""
    axes = figure.add_subplot()
    handles = plot.draw(axes, r, r.bins(math.ceil(r.count / (part[2] - 80) * 2)))  # an interval is 2 px wide
    axes.set_title(plot.y_label)
    axes.tick_params("x", length=5)
    look.place(axes, handles, part, title)
    return axes


def draw(plot: Plot, r: Replay, width: int, height: int) -> look.Picture:
    """One plot, at a size in px. In its SVG, `data-area` says where the axes are: left, top, width, height."""
    figure = look.figure(width, height)
    box = _fill(plot, figure, r, (0, 0, width, height - 4)).bbox
    area = f"{box.x0:.1f} {height - box.y1:.1f} {box.width:.1f} {box.height:.1f}"
    return look.Picture(figure, plot.title, plot.tell(r), attributes={"data-area": area})


def draw_all(r: Replay) -> look.Picture:
    """All of them, one below the other."""
    height = 300
    figure = look.figure(860, height * len(PLOTS) + 12)
    for i, plot in enumerate(PLOTS):
        _fill(plot, figure, r, (12, height * (len(PLOTS) - 1 - i), 848, height - 4), plot.title)
    return look.Picture(figure, f"Replay: {r.run['trace']['name']}", " ".join(plot.tell(r) for plot in PLOTS))
