"""Plots of kernels: each candidate's part of the bound's rate, and time against size. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display where this runs

import matplotlib.pyplot as plt

from benchmarks.peers import MODULES

#: One colour a candidate in every plot, told apart by people who see few colours too (Okabe and Ito, 2008).
COLOURS = dict(
    zip(
        MODULES,
        ("#0072B2", "#56B4E9", "#CC79A7", "#999999", "#E69F00", "#D55E00", "#009E73", "#F0E442", "#000000"),
        strict=True,
    )
)


def draw(found: dict[str, Any], out: Path) -> Iterator[tuple[str, Path]]:
    """Draw what the results have; title and file of each plot."""
    rows = [row for row in found["rows"] if row["figures"].get("bound.ms")]
    for op in dict.fromkeys(row["op"] for row in rows):
        mine = [row for row in rows if row["op"] == op]
        if (path := _shares(op, mine, out)) is not None:
            yield f"{op}: part of the bound's rate", path
        if (path := _times(op, mine, out)) is not None:
            yield f"{op}: time against size", path


def _candidates(rows: list[dict[str, Any]]) -> list[str]:
    return [name for name in MODULES if any(_ms(row, name) for row in rows)]


def _ms(row: dict[str, Any], name: str) -> float | None:
    ms = row["figures"].get(f"{name}.ms")
    return ms if ms is not None and ms > 0 else None


def _shares(op: str, rows: list[dict[str, Any]], out: Path) -> Path | None:
    names = _candidates(rows)
    if not names:
        return None
    figure, axes = plt.subplots(figsize=(8, 1.4 + 0.16 * len(rows) * (len(names) + 1)), layout="constrained")
    height = 0.9 / len(names)
    for number, name in enumerate(names):
        places = [place + number * height for place, row in enumerate(rows) if _ms(row, name)]
        shares = [row["figures"]["bound.ms"] / ms for row in rows if (ms := _ms(row, name))]
        axes.barh(places, shares, height, color=COLOURS[name], label=name)
    axes.axvline(1.0, color="black", linewidth=0.8)
    labels = [row["key"].removeprefix(f"{op} ") for row in rows]
    axes.set_yticks([place + 0.45 - height / 2 for place in range(len(rows))], labels)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("bound / time")
    axes.set_title(op)
    figure.legend(loc="outside lower center", ncols=5, fontsize="small")
    return _save(figure, out / f"{op}-share.png")


def _times(op: str, rows: list[dict[str, Any]], out: Path) -> Path | None:
    phases = [p for p in dict.fromkeys(row["phase"] for row in rows) if len(_sized(rows, p)) > 1]
    names = _candidates(rows)
    if not phases or not names:
        return None
    figure, grid = plt.subplots(1, len(phases), figsize=(5.5 * len(phases), 4), layout="constrained", squeeze=False)
    for axes, phase in zip(grid[0], phases, strict=True):
        mine = _sized(rows, phase)
        for name in (*names, "bound"):
            points = [(_work(row), ms) for row in mine if (ms := _ms(row, name))]
            # Points alone: sizes of equal work and other widths would make a line jump.
            style = {"linestyle": "--"} if name == "bound" else {"linestyle": "", "marker": "."}
            axes.plot(
                [x for x, _ in points], [y for _, y in points], color=COLOURS.get(name, "black"), label=name, **style
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("TFLOP" if mine[0]["flops"] else "GB moved at least")
        axes.set_ylabel("ms")
        axes.set_title(f"{op} {phase}")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    return _save(figure, out / f"{op}-time.png")


def _work(row: dict[str, Any]) -> float:
    return float(row["flops"]) / 1e12 if row["flops"] else float(row["bytes"]) / 1e9


def _sized(rows: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    """The plain rows of a phase by size, without what is special."""
    return sorted((row for row in rows if row["phase"] == phase and not row["variant"]), key=_work)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
