"""Plots, which need matplotlib.

Of kernels: each candidate's part of the bound's rate, and time against size. Of a model on many GPUs: speed and memory
against the length of its sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display where this runs

import matplotlib.pyplot as plt

from benchmarks.peers import MODULES
from benchmarks.scale import title

#: One colour a candidate in every plot, told apart by people who see few colours too (Okabe and Ito, 2008).
COLOURS = dict(
    zip(
        MODULES,
        ("#0072B2", "#56B4E9", "#CC79A7", "#999999", "#E69F00", "#D55E00", "#009E73", "#F0E442", "#000000"),
        strict=True,
    )
)
#: Of the ways in which a model is run; a mode has its package's colour.
MODE_COLOURS = {"hf": COLOURS["eager"], "liger": COLOURS["liger"], "ours": COLOURS["ours"], "ours-low": "#000000"}


def draw_all(kernels: dict[str, Any] | None, scale: dict[str, Any] | None, out: Path) -> Iterator[tuple[str, Path]]:
    """Draw the results that are there; title and file of each plot."""
    if kernels is not None:
        yield from draw(kernels, out)
    if scale is not None:
        yield from draw_scale(scale, out)


def draw_scale(found: dict[str, Any], out: Path) -> Iterator[tuple[str, Path]]:
    """Draw a model on many GPUs, a plot for each number of GPUs, size and cap; those without a figure are left out."""
    for row in found["rows"]:
        if any("tokens_s" in cell for cells in row["modes"].values() for cell in cells.values()):
            name = f"scale-{row['gpus']}x-{row['layers']}layers-batch{row['batch']}-cap{row['cap_gib']:g}.png"
            yield f"{title(row)}: speed and memory", _against_length(row, out / name)


def _against_length(row: dict[str, Any], path: Path) -> Path:
    figure, grid = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axes, name, said in zip(grid, ("tokens_s", "peak_gib"), ("tokens/s a GPU", "peak GiB a GPU"), strict=True):
        for mode, cells in row["modes"].items():
            points = [(int(n), cells[n][name]) for n in sorted(cells, key=int) if cells[n].get(name) is not None]
            # A line ends with the longest sequence that fits.
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", color=MODE_COLOURS[mode], label=mode)
        if name == "peak_gib" and row["cap_gib"]:
            axes.axhline(row["cap_gib"], color="black", linewidth=0.8, linestyle="--")
        lengths = sorted({int(n) for cells in row["modes"].values() for n in cells})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens of a sequence")
        axes.set_ylabel(said)
    figure.suptitle(title(row))
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    return _save(figure, path)


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
