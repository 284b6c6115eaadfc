"""A replay as one page of HTML: figures, plots and tables; page.html is its template."""

from __future__ import annotations

import math
from typing import Any

import jinja2

from . import look
from .replay import PLOTS, Plot, Replay, Times, draw, time_text

SIZES = {"wide": 1040, "middle": 700, "narrow": 358}  # px: each screen has a drawing of its own, so text keeps its size
ROWS = 24  # of a table, at most: intervals are taken together
SHARES = {"p10": 0.1, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999,
          "slowest": 1}


def _bytes(count: float) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(count) / 10), 4) if count >= 1 else 0
    return f"{count / 1024 ** power:.{1 if power else 0}f} {units[power]}"


def _times(times: Times) -> tuple:
    if not times.count:
        return "–", "none came"
    p50, p90, p99 = (time_text(times.at(share)).replace(" ", "\u00a0") for share in (0.5, 0.9, 0.99))
    return p50, f"median; p90\u00a0{p90}, p99\u00a0{p99}"


def _tiles(run: dict, r: Replay) -> list:
    """The figures at the top: name, value, more."""
    kv, swaps = run["kv"], run["swaps"]
    rates = []
    for key in ("prefill", "decode"):
        tokens, seconds = run[f"{key}_tokens"], run[f"{key}_seconds"]
        rates.append((key.capitalize(), f"{tokens / seconds if seconds > 0 else 0:,.0f}",
                      f"tokens a second; {tokens:,} in all"))
    how = f"{swaps:,} by swap" if swaps else "all by recompute" if run["preemptions"] else "no sequence was preempted"
    return [
        ("Requests served", f"{run['requests']:,}", f"of {run['trace']['total_requests']:,}, in "
         f"{time_text(1e3 * run['seconds'])}; {time_text(1e3 * r.clock)} by the replay’s clock"),
        *rates,
        ("Prefix hits", f"{100 * run['prefix_hit_rate']:.1f} %", "of prompt tokens were in the cache"),
        ("Time to first token", *_times(r.first)), ("Time between tokens", *_times(r.next)),
        ("KV memory wasted", f"{100 * kv['waste_share']:.2f} %",
         f"of held blocks; a contiguous cache: {100 * kv['contiguous_waste_share']:.1f} %"),
        ("Preemptions", f"{run['preemptions']:,}", how)]


def _settings(run: dict) -> list:
    """Pool, model and engine in two lines."""
    o, kv = run["options"], run["kv"]
    pool = f"{kv['blocks']} blocks of {o['block_size']} tokens"
    if o["no_attention"]:
        pool += ", no attention"
    else:
        pool += f" ({_bytes(kv['bytes'])} of {o['kv_dtype']}), {o['layers']} layer{'' if o['layers'] == 1 else 's'}, " \
            f"heads {o['heads']}:{o['kv_heads']} of {o['head_size']}"
    pool += f", window {o['window']}" if o["window"] else ""
    speed = f"arrivals at speed {o['speed']:g}" if o["speed"] else "as fast as possible"
    return [pool, f"up to {o['max_seqs']} sequences, {o['budget']} tokens a step, {o['policy'].replace('-', ' ')}, "
            f"admission by {o['admit']}, preemption by {o['preempt']}, {speed}"]


def _summary(run: dict, r: Replay) -> list:
    """What no tile has."""
    kv = run["kv"]
    rows = [("steps", f"{run['steps']:,}"), ("KV blocks at most", f"{kv['peak_used']:,} of {kv['blocks']:,}"),
            ("slowest first token", time_text(r.first.at(1)) if r.first.count else "–"),
            ("slowest next token", time_text(r.next.at(1)) if r.next.count else "–"),
            ("cached blocks evicted", f"{run['evictions']:,}")]
    if run["attention_share"] is not None:
        rows.append(("attention's share of time", f"{100 * run['attention_share']:.1f} %"))
    if run["options"]["verify"]:
        rows.append(("rows verified", f"{run['verified_rows']:,}, {run['mismatched_rows']:,} mismatched"))
    return [("measure", "value"), *rows]


def _table(plot: Plot, r: Replay) -> list:
    """A plot's figures, the heads first."""
    if not plot.columns:
        return [("share", "first token", "between tokens")] + [
            (name, *(time_text(times.at(share)) if times.count else "–" for times in (r.first, r.next)))
            for name, share in SHARES.items()]
    b = r.bins(math.ceil(r.count / ROWS))
    rows = zip(*(b[key] for key, _ in plot.columns.values()))
    return [(f"from, {r.unit_name}", *plot.columns)] + [
        (f"{start:.4g}", *("–" if math.isnan(value) else f"{value:,.{digits}f}"
                           for value, (_, digits) in zip(row, plot.columns.values())))
        for start, row in zip(b["edges"], rows)]


def _figures(r: Replay) -> dict:
    """What the page's script shows under the pointer."""
    b, plots = r.bins(), {}
    for p in PLOTS:
        if p.columns:
            plots[p.id] = [
                {"name": name, "values": [None if math.isnan(v) else round(float(v), digits) for v in b[key]]}
                for name, (key, digits) in p.columns.items()]
    return {"unit": r.unit_name, "width": r.width / r.unit, "end": r.clock / r.unit, "count": r.count,
            "plots": plots}


def _drawing(plot: Plot, r: Replay, size: str) -> str:
    picture = draw(plot, r, SIZES[size], 300)
    picture.attributes |= {"data-size": size} | ({"data-time": plot.id} if plot.columns else {})
    return look.svg(picture, name=f"{plot.id}-{size}")


def render(run: dict) -> str:
    """The page of a replay."""
    r = Replay(run)
    environment = jinja2.Environment(loader=jinja2.PackageLoader("folio.plots", "."), autoescape=True, trim_blocks=True,
                                     lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    plots: list[dict[str, Any]] = [{"id": p.id, "title": p.title, "words": p.tell(r), "table": _table(p, r),
                                    "drawings": [_drawing(p, r, size) for size in SIZES]} for p in PLOTS]
    return environment.get_template("page.html").render(
        run=run, tiles=_tiles(run, r), settings=_settings(run), plots=plots, summary=_summary(run, r),
        style=look.style(), light=look.LIGHT, dark=look.DARK, data=_figures(r))
