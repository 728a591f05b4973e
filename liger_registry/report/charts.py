"""Charts as SVG that takes its colours and font from the page, so that it reads in the dark and in the light."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from liger_registry.errors import ExtraMissingError
from liger_registry.report.data import Entry

# Colours that no one would choose stand for the page's own.
_COLOURS = {"#010101": "var(--ink)", "#020202": "var(--faint)", "#030303": "var(--line)", "#040404": "var(--accent)"}
_INK, _FAINT, _LINE, _ACCENT = _COLOURS
# About the width of a phone, so that its letters stay as large as the page's there.
_WIDTH, _ROW, _FRAME = 4.6, 0.34, 0.66

TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart.

    Attributes:
        device: the fingerprint of the device that it is about.
        title: what it shows.
        note: how to read it.
        svg: the drawing.
    """

    device: str
    title: str
    note: str
    svg: str


def charts(entries: Sequence[Entry]) -> list[Chart]:
    """The gains of each device, and its shares of the bound where that is known.

    Raises:
        ExtraMissingError: matplotlib is not installed.
    """
    found = []
    for device in sorted({e.device for e in entries}):
        mine = [e for e in entries if e.device == device]
        for value, title, note, line in (
            (
                lambda e: e.gain,
                "Time of the default over the chosen one's",
                "One dot a problem, a bar at the median. At 1 the default is as fast.",
                1.0,
            ),
            (
                lambda e: e.share,
                "Share of the memory's rate",
                "The bound over the time. Small problems are launches more than memory; a cache can lift one over 1.",
                1.0,
            ),
        ):
            rows = _rows(mine, value)
            # Where nothing beat a default there is nothing to see.
            if any(abs(number - line) > 0.005 for _, numbers in rows for number in numbers):
                found.append(Chart(device, title, note, _drawn(rows, line, f"{title}, {device}")))
    return found


def _rows(entries: Iterable[Entry], value: Callable[[Entry], float | None]) -> list[tuple[str, list[float]]]:
    groups: dict[str, list[float]] = {}
    for entry in entries:
        if (number := value(entry)) is not None:
            groups.setdefault(f"{entry.op} {entry.phase}", []).append(number)
    return sorted(groups.items())


def _drawn(rows: Sequence[tuple[str, list[float]]], line: float, label: str) -> str:
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator
    except ImportError as error:
        raise ExtraMissingError(
            "a report needs matplotlib, which is not installed",
            why=str(error),
            fix="pip install 'liger-registry[report]'",
        ) from error
    settings: Any = {
        "svg.fonttype": "none",
        # The names of its parts follow from it, and have to differ from those of the page's other drawings.
        "svg.hashsalt": label,
        "font.size": 11.5,
        "text.parse_math": False,
    }
    with matplotlib.rc_context(settings):
        # No pyplot: it would look for a screen, and keep every figure.
        figure = Figure(figsize=(_WIDTH, _FRAME + _ROW * len(rows)))
        axes = figure.add_subplot()
        axes.axvline(line, color=_FAINT, linewidth=1, linestyle=(0, (3, 3)))
        for place, (_, values) in enumerate(rows):
            axes.plot([line, median(values)], [place, place], color=_LINE, linewidth=7, solid_capstyle="butt", zorder=1)
            axes.plot(values, [place] * len(values), "o", color=_ACCENT, markersize=5, alpha=0.6, markeredgewidth=0)
            axes.plot([median(values)] * 2, [place - 0.3, place + 0.3], color=_INK, linewidth=2)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        values = [value for _, found in rows for value in found]
        low, high = min(*values, line), max(*values, line)
        margin = max((high - low) * 0.05, 0.02)
        axes.set_xlim(low - margin, high + margin)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}{TIMES}"))
        axes.tick_params(colors=_INK, length=0, labelsize=11.5)
        axes.grid(axis="x", color=_LINE, linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.patch.set_visible(False)
        figure.patch.set_visible(False)
        out = io.StringIO()
        figure.savefig(out, format="svg", bbox_inches="tight", pad_inches=0.03, metadata={"Date": None})
    return _inlined(out.getvalue(), label)


def _inlined(text: str, label: str) -> str:
    """The drawing as an element of a page: no prolog, no size of its own, the page's colours and font."""
    from html import escape

    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head, _, body = text.partition(">")
    view = re.search(r'viewBox="([^"]*)"', head)
    assert view is not None
    for colour, variable in _COLOURS.items():
        body = body.replace(colour, variable)
    # The style of a drawing would hold for the whole page.
    body = re.sub(r"<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"font-family: [^;\"]*; ", "", body)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    width = float(view[1].split()[2])
    return (
        f'<svg class="chart" role="img" aria-label="{escape(label)}" viewBox="{view[1]}" '
        f'style="max-width: {width * 1.35:.0f}px">{body}'
    )
