"""``python -m benchmarks report``: the results of a directory as tables in markdown, with plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import host, kernels, preference, record, scale, train
from benchmarks.peers import MODULES

FILE = "report.md"
#: Where reports go that are kept with the code.
RESULTS = Path(__file__).parent / "results"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """A table in markdown."""
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *rows]


def verdicts(found: Sequence[dict[str, Any]]) -> str:
    """The verdicts of a row in one cell."""
    told = []
    for verdict in found:
        value = "" if verdict["value"] is None else f" ({verdict['value']:.3g})"
        told.append(f"{verdict['target']}: {verdict['text']}{value}")
    return "; ".join(told)


def origin(about: dict[str, Any]) -> list[str]:
    """What the results come from."""
    device = about["device"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [f"{device['name']}, {about['date']}, commit {about['commit']}. {versions}."]
    if about.get("absent"):
        lines.append("Absent: " + ", ".join(f"{name} ({why})" for name, why in about["absent"].items()) + ".")
    if about.get("scale") == "tiny":
        lines.append("Tiny sizes: these figures show that the suite runs, and nothing else.")
    return lines


def _kernels(found: dict[str, Any]) -> list[str]:
    ceilings, told = found["ceilings"], found["summary"]
    lines = [
        "## Kernels",
        "",
        *origin(found["about"]),
        f"Copy {ceilings['copy_tb_s']:.2f} TB/s, product {ceilings['product_tflop_s']:.0f} TFLOP/s.",
        f"Targets: {told['targets']}.",
        "",
    ]
    names = [n for n in MODULES if any(_shown(row, n) for row in found["rows"])]
    cells = (
        [row["key"], _number(row["figures"].get("bound.ms")), *(_cell(row, n) for n in names), verdicts(row["targets"])]
        for row in found["rows"]
    )
    lines += table(["row", "bound ms", *names, "targets"], cells)
    if told["slower_than_liger"]:
        lines += ["", "Slower than liger-kernel: " + _ratios(told["slower_than_liger"]) + "."]
    for state, said in (("default", "without tables"), ("other", "with another GPU's choices")):
        if told[f"gain_over_{state}"]:
            lines += ["", f"Times {said} over those from the tables: {_ratios(told[f'gain_over_{state}'])}."]
    if told["differs"]:
        lines += ["", "Off from PyTorch's result: " + ", ".join(told["differs"]) + "."]
    if told["left"]:
        lines += ["", f"Not measured: {len(told['left'])} rows."]
    return lines


def _ratios(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {ratio:.2f}" for name, ratio in found.items())


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _shown(row: dict[str, Any], name: str) -> bool:
    return any(row["figures"].get(f"{name}.{quantity}") is not None for quantity in ("ms", "weight_error"))


def _cell(row: dict[str, Any], name: str) -> str:
    figures = row["figures"]
    ms, bound, memory = (figures.get(key) for key in (f"{name}.ms", "bound.ms", f"{name}.extra_gib"))
    if ms is None:
        return _number(figures.get(f"{name}.weight_error")) or ("failed" if name in row["failed"] else "")
    share = f" ({bound / ms:.0%})" if bound and ms > 0 else ""
    # Of norms and rotations every candidate takes the same, so that memory says something of losses alone.
    told = f", {memory:.2f} GiB" if memory is not None and row["flops"] else ""
    return f"{ms:.4g}{share}{told}"


def _host(found: dict[str, Any]) -> list[str]:
    times = found["us"]
    names = list(times["grad"])
    cells = ([state, *(f"{times[state].get(name, float('nan')):.2f}" for name in names)] for state in times)
    problem = found["problem"]
    return [
        f"## Host time of one call, {problem['rows']} x {problem['width']}, us",
        "",
        *origin(found["about"]),
        f"Importing the package after torch: {found['import_ms']:.1f} ms. {verdicts(found['targets'])}.",
        "",
        *table(["", *names], cells),
    ]


def _preference(found: dict[str, Any]) -> list[str]:
    sizes = ", ".join(f"{name} {size}" for name, size in found["sizes"].items())
    lines = ["## Losses over an output head", "", *origin(found["about"]), f"Sizes: {sizes}.", "", preference.HEAD]
    lines += [preference.line(row) for row in found["rows"]]
    judged = [f"- {row['loss']}, {row['ignored']:.0%} ignored: {verdicts(row['targets'])}" for row in found["rows"]]
    return [*lines, "", *(text for text, row in zip(judged, found["rows"], strict=True) if row["targets"])]


def _train(found: dict[str, Any]) -> list[str]:
    lines = ["## Training steps", "", *origin(found["about"])]
    for row in found["rows"]:
        modes, plain = row["modes"], row["modes"].get("hf", {}).get("tokens_s")
        cells = []
        for mode, run in modes.items():
            if "failed" in run:
                cells.append([mode, run["failed"], "", "", "", ""])
                continue
            ratio = f"{run['tokens_s'] / plain:.2f}" if plain else ""
            peak = "" if run["peak_gib"] is None else f"{run['peak_gib']:.1f}"
            cells.append([mode, f"{run['tokens_s']:,.0f}", ratio, f"{run['ms']:.1f}", peak, f"{run['first_s']:.1f}"])
        lines += ["", f"### {row['model']}, batch {row['batch']} x {row['length']}", ""]
        lines += table(["mode", "tok/s", "over hf", "ms a step", "peak GiB", "first step s"], cells)
        lines += ["", f"{verdicts(row['targets'])}."]
    return lines


def _scale(found: dict[str, Any]) -> list[str]:
    lines = ["## An 8B model on all GPUs", "", *origin(found["about"])]
    lines += ["FSDP2 by layer, bf16, fused AdamW, activations computed again; speed is that of one GPU."]
    for ranks, check in found["checks"].items():
        said = "; ".join(check["wrong"]) or "the plain model's losses, one plan"
        lines.append(f"Checked on {ranks} ranks: {said}.")
    for row in found["rows"]:
        cells = [
            [f"{int(length):,}", mode, *_scaled(row["modes"][mode][length], row["modes"].get("liger", {}).get(length))]
            for length in scale.lengths_of(row)
            for mode in row["modes"]
            if length in row["modes"][mode]
        ]
        fits = ", ".join(f"{mode} {length:,}" for mode, length in row["longest"].items())
        lines += ["", f"### {scale.title(row)[0].upper()}{scale.title(row)[1:]}", ""]
        lines += table(["tokens", "mode", "tok/s", "over liger", "ms a step", "peak GiB", "reserved GiB"], cells)
        lines += ["", f"Longest that fits: {fits or 'not known'}. {verdicts(row['targets'])}."]
    return lines


def _scaled(cell: dict[str, Any], liger: dict[str, Any] | None) -> list[str]:
    """A length in a mode, from its speed on."""
    if "tokens_s" not in cell:
        return [scale.told(cell), "", "", "", ""]
    ratio = f"{cell['tokens_s'] / liger['tokens_s']:.3f}" if liger and "tokens_s" in liger else ""
    memory = ("" if cell[name] is None else f"{cell[name]:.1f}" for name in ("peak_gib", "reserved_gib"))
    return [f"{cell['tokens_s']:,.0f}", ratio, f"{cell['ms']:.1f}", *memory]


PARTS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    kernels.FILE: _kernels,
    host.FILE: _host,
    preference.FILE: _preference,
    train.FILE: _train,
    scale.FILE: _scale,
}


def run(source: Path, out: Path, plots: bool = True) -> list[Path]:
    """Write the report of a directory of results; the files that were written.

    Args:
        source: the directory that the other commands wrote into.
        out: where the report goes.
        plots: whether plots are drawn too.

    Raises:
        ValueError: the directory holds no results.
    """
    found = {name: record.read(source / name) for name in PARTS if (source / name).exists()}
    if not found:
        raise ValueError(f"{source} holds none of {', '.join(PARTS)}")
    out.mkdir(parents=True, exist_ok=True)
    written = []
    lines = ["# Measurements", ""]
    for name, document in found.items():
        lines += [*PARTS[name](document), ""]
    drawn = {name: content for name, content in found.items() if name in (kernels.FILE, scale.FILE)}
    if plots and drawn:
        from benchmarks import plots as drawing

        for title, path in drawing.draw_all(drawn.get(kernels.FILE), drawn.get(scale.FILE), out):
            lines += [f"![{title}]({path.name})", ""]
            written.append(path)
    (out / FILE).write_text("\n".join(lines))
    return [out / FILE, *written]
