"""What all plots look like: colours, axes, legends, and SVG that follows the reader's light or dark."""

from __future__ import annotations

import html
import io
import math
import re
from dataclasses import dataclass, field
from typing import Any, Callable

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

# Blue, orange, green, purple, sky, red: 3:1 or more on their grounds, all but sky 4.5:1. To people with any kind of
# colour vision (by the matrices of Machado and others, 2009) any two are 19 or more apart in CIELAB.
LIGHT = {"ground": "#ffffff", "ink": "#1d2228", "soft": "#59626c", "grid": "#e4e8ec", "blue": "#0056b3",
         "orange": "#c44a00", "green": "#33805f", "purple": "#6a1060", "sky": "#4f99d0", "red": "#7a0010"}
DARK = {"ground": "#14181d", "ink": "#e6eaee", "soft": "#a3adb8", "grid": "#2b323a", "blue": "#3f96f5",
        "orange": "#fbd067", "green": "#55d39a", "purple": "#c77fb5", "sky": "#c5eefc", "red": "#f0624d"}
C = LIGHT  # everything is drawn in these
FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'

STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "folio", "text.parse_math": False, "font.size": 13,
    "font.family": "DejaVu Sans", "text.color": C["ink"], "figure.facecolor": C["ground"],
    "axes.facecolor": C["ground"], "axes.edgecolor": C["soft"], "axes.labelcolor": C["soft"],
    "axes.titlecolor": C["soft"], "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y", "axes.axisbelow": True, "axes.titlelocation": "left", "axes.titlesize": 13,
    "axes.labelsize": 13, "grid.color": C["grid"], "xtick.color": C["soft"], "ytick.color": C["soft"],
    "xtick.labelsize": 13, "ytick.labelsize": 13, "ytick.major.size": 0, "legend.frameon": False,
    "legend.borderpad": 0, "legend.borderaxespad": 0, "legend.handletextpad": 0.5, "legend.columnspacing": 1.2,
    "legend.fontsize": 13, "legend.handlelength": 1.4, "lines.linewidth": 2, "lines.solid_joinstyle": "round",
}


def figure(width: int, height: int) -> Figure:
    """A figure of so many px."""
    matplotlib.rcParams.update(STYLE)
    return Figure((width / 72, height / 72), dpi=72)


def number(value: float) -> str:
    """0, 0.25, 1500, 20k, 1.5M"""
    for least, unit, letter in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least * 0.9999995:
            return f"{value / unit:.4g}{letter}"
    return f"{0 if abs(value) < 1e-12 else value:.4g}"


def log_ticks(low: float, high: float, wanted: int) -> list:
    """Of each decade 1, 2 and 5, or 1 and 3, or 1: about as many as wanted."""
    decades = math.log10(high / low)
    parts: tuple = next((p for p in ((1, 2, 5), (1, 3)) if len(p) * decades <= wanted), (1,))
    every = math.ceil(decades / wanted) if parts == (1,) else 1
    powers = [10.0 ** n for n in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1, every)]
    return [part * power for power in powers for part in parts if low <= part * power <= high]


def scale(axis: Any, low: float, high: float, *, log: bool = False, wanted: int = 8,
          label: Callable[[float], str] = number) -> None:
    """The range and the ticks of an axis."""
    axis.axes.set(**{f"{axis.axis_name}lim": (low, high), f"{axis.axis_name}scale": "log" if log else "linear"})
    axis.set_major_locator(FixedLocator(log_ticks(low, high, wanted)) if log
                           else MaxNLocator(nbins=wanted, steps=[1, 2, 5, 10]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))


def place(axes: Any, handles: list, part: tuple, title: str = "") -> None:
    """Puts axes, with a title and a legend above them, into a part of their figure: left, bottom, width, height in
    px."""
    figure, (left, bottom, width, height) = axes.figure, part
    across, up = figure.bbox.width, figure.bbox.height
    top = bottom + height
    if title:
        figure.text(left / across, (top - 16) / up, title, fontweight="bold")
        top -= 28
    for columns in range(len(handles), 0, -1):  # in as few rows as there is room for
        legend = figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(left / across, top / up),
                               ncols=columns)
        extent = legend.get_window_extent()
        if columns == 1 or extent.x1 <= left + width:
            break
        legend.remove()
    low, margin = bottom + 46, max(label.get_window_extent().width for label in axes.get_yticklabels()) + 8
    axes.set_position([(left + margin) / across, low / up, (width - margin - 12) / across, (extent.y0 - 32 - low) / up])


@dataclass
class Picture:
    """A figure, and what it says to those who cannot see it."""

    figure: Figure
    title: str
    words: str = ""
    hints: dict = field(default_factory=dict)  # gid of an element: what a pointer over it shows
    attributes: dict = field(default_factory=dict)  # of its SVG


def _rounded(number: re.Match) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")


def svg(picture: Picture, *, alone: bool = False, name: str = "plot") -> str:
    """A picture as SVG. alone: a file of its own. name: of its element, which is unique in a page."""
    of = picture.figure
    out = io.StringIO()
    matplotlib.rcParams.update(STYLE | {"svg.hashsalt": name})
    of.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    body = out.getvalue()
    width, height = of.bbox.width, of.bbox.height
    body = body[body.index(">", body.index("<svg")) + 1:]
    body = re.sub(r" *<metadata>.*?</metadata>\n", "", body, flags=re.S)
    body = re.sub("<[^>]*>", lambda tag: re.sub(r"-?\d+\.\d{2,}", _rounded, tag[0]), body)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(?<=["(])#', f"#{name}-", body)
    # What the style says, and white space.
    body = re.sub(r" *<defs>\s*<style.*?</style>\s*</defs>\n", "", body, flags=re.S)
    body = re.sub(r' transform="rotate\(-0 [^)]*\)"|font-size: 13px; |font-family: \'DejaVu Sans\'; ', "", body)
    body = re.sub(r"\n +", "\n", re.sub(r" \n([A-Za-z\"])", r"\1", body))
    for gid, text in picture.hints.items():
        body = body.replace(f'<g id="{name}-{gid}">', f'<g id="{name}-{gid}"><title>{html.escape(text)}</title>')
    more = "".join(f' {key}="{html.escape(value)}"' for key, value in picture.attributes.items())
    head = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" class="plot" ' \
        f'id="{name}" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" role="img" ' \
        f'aria-labelledby="{name}-title {name}-desc"{more}>\n<title id="{name}-title">{html.escape(picture.title)}' \
        f'</title>\n<desc id="{name}-desc">{html.escape(picture.words)}</desc>\n'
    return head + (f"<style>\n{style()}</style>\n" if alone else "") + body


def style() -> str:
    """What makes an SVG dark where the reader wants it: colours are drawn in light and replaced."""
    rules = "".join(f'[style*="{what}: {LIGHT[name]}"]{{{what}:{DARK[name]}!important}}\n'
                    for name in LIGHT for what in ("fill", "stroke"))
    return f".plot{{font-family:{FONT};font-size:13px}}\n.plot *{{stroke-linejoin:round}}\n" \
        f"@media (prefers-color-scheme:dark){{\n{rules}}}\n"
