"""``python -m benchmarks kernels``: every kernel with a target, and the sizes of models, beside peers, in one run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.ceilings import Ceilings, measure
from benchmarks.measure import DIFFERS, Bench, Result
from benchmarks.models import rows as model_rows
from benchmarks.peers import MODULES, peers, present
from benchmarks.table import TABLE, Row, chosen
from benchmarks.targets import Lookup, Tally
from benchmarks.timing import clock_of

FILE = "kernels.json"
#: All peers but the one that takes a compiler's time for every case.
USUAL = tuple(name for name in MODULES if name != "compile")
#: Ours over liger's time from which a row is slower than liger: the noise of equal kernels.
SLOWER = 1.01

Say = Callable[[str], object]


def figures(row: Row, result: Result, ceilings: Ceilings, scaled: Row | None = None) -> dict[str, float]:
    """The figures of one row of a case, its bound among them."""
    case = (scaled or row).case
    found = dict(result.figures.get(row.phase, {}))
    if row.phase != "error":
        found["bound.ms"] = case.bound_ms(row.phase, ceilings.copy_tb_s, ceilings.product_tflop_s)
    return found


def entry(row: Row, measured: Row, result: Result, ceilings: Ceilings) -> dict[str, Any]:
    """One row of the results."""
    case = measured.case
    timed = row.phase != "error"
    return {
        "key": row.key,
        "op": case.op,
        "phase": row.phase,
        "shape": case.shape,
        "variant": case.variant,
        "sizes": dict(zip(case.names, case.sizes, strict=True)),
        "group": row.group,
        "bytes": case.bytes(row.phase) if timed else 0,
        "flops": case.flops() if timed else 0,
        "figures": figures(row, result, ceilings, measured),
        "spread": result.spread.get(row.phase, {}),
        "method": result.method,
        "sets": result.sets,
        "writes": result.writes,
        "uncaptured": sorted(set(result.uncaptured)),
        "failed": result.failed,
        "decisions": result.decisions,
    }


def lookup(entries: Sequence[dict[str, Any]], here: dict[str, Any]) -> Lookup:
    """Where a target of a row finds its figures: in the row, or in the row that it names."""
    by_key = {found["key"]: found for found in entries}

    def figure(name: str) -> float | None:
        key, colon, own = name.rpartition(":")
        source = by_key.get(key) if colon else here
        value = None if source is None else source["figures"].get(own)
        return None if value is None or not math.isfinite(value) else float(value)

    return figure


def judge(entries: Sequence[dict[str, Any]], table: Iterable[Row]) -> None:
    """Write the verdicts of all targets into the rows' entries; a target may name a row that comes later."""
    by_key = {row.key: row for row in table}
    for here in entries:
        figure = lookup(entries, here)
        here["targets"] = [target.judge(figure).to_json() for target in by_key[here["key"]].targets]


def summary(entries: Sequence[dict[str, Any]], missing: Sequence[str]) -> dict[str, Any]:
    """How many targets were met, where liger is faster, and what tuning is worth, operation by operation."""
    words = [verdict["verdict"] for row in entries for verdict in row["targets"]]
    slower = {}
    for row in entries:
        ours, liger = row["figures"].get("ours.ms"), row["figures"].get("liger.ms")
        if ours and liger and ours > SLOWER * liger:
            slower[row["key"]] = ours / liger
    tally = Tally.of(words)
    return {
        "targets": tally.text,
        # A part of the rows proves nothing of the rest.
        "passed": tally.passed and not slower and not missing,
        "slower_than_liger": slower,
        "gain_over_default": gains(entries, "default"),
        "gain_over_other": gains(entries, "other"),
        "differs": sorted(
            f"{row['key']}: {name.removesuffix('.error')}"
            for row in entries
            for name, value in row["figures"].items()
            if name.endswith(".error") and not value <= DIFFERS
        ),
        "left": list(missing),
    }


def gains(entries: Sequence[dict[str, Any]], state: str) -> dict[str, float]:
    """The geometric mean over an operation's rows of another state's time over that of the tables' choice."""
    found: dict[str, list[float]] = {}
    for row in entries:
        ours, other = row["figures"].get("ours.ms"), row["figures"].get(f"{state}.ms")
        if ours and other and ours > 0 and other > 0:
            found.setdefault(row["op"], []).append(math.log(other / ours))
    return {op: math.exp(sum(logs) / len(logs)) for op, logs in found.items()}


def line(row: dict[str, Any]) -> str:
    """A row for the log: bound, then each candidate's time and its part of the bound's rate."""
    values, bound = row["figures"], row["figures"].get("bound.ms")
    told = []
    for name in MODULES:
        if (ms := values.get(f"{name}.ms")) is not None:
            told.append(f"{name} {ms:.4f}" + (f" ({bound / ms:.0%})" if bound and ms > 0 else ""))
        elif (off := values.get(f"{name}.weight_error")) is not None:
            told.append(f"{name} {off:.2e}")
    verdicts = "; ".join(f"{v['target']}: {v['text']}" for v in row["targets"])
    least = f"bound {bound:.4f} | " if bound else ""
    return f"{row['key']}: {least}{'  '.join(told)}" + (f" | {verdicts}" if verdicts else "")


def run(
    device: torch.device,
    out: Path,
    *,
    only: Sequence[str] = (),
    names: Sequence[str] = USUAL,
    scale: str = "full",
    models: bool = True,
    rounds: int | None = None,
    budget_s: float = math.inf,
    say: Say = lambda text: print(text, flush=True),
) -> dict[str, Any]:
    """Measure, say each row, and keep the results in ``out/kernels.json`` after each case.

    Args:
        device: where.
        out: the directory of the results.
        only: operations, or parts of rows' names; all rows if empty.
        names: the peers.
        scale: full, or tiny for a CPU.
        models: whether the sizes of models are measured too.
        rounds: samples of each candidate; None for the usual number.
        budget_s: seconds after which no case is begun.
        say: told each line.

    Raises:
        ValueError: an unknown peer or scale, or a word that chooses no row.
    """
    began = time.monotonic()
    if scale not in ("full", "tiny"):
        raise ValueError(f"no scale is called {scale!r}; they are full and tiny")
    rows = chosen([*TABLE, *(model_rows() if models else ())], only)
    there, absent = present(peers(tuple(names)), device)
    clock = clock_of(device)
    ceilings = measure(clock, device)
    about = record.about(device, scale=scale, peers=list(there), absent=absent)
    say(f"# {about['device']['name']}, torch {about['versions']['torch']}, {about['commit'][:12]}")
    say(f"# copy {ceilings.copy_tb_s:.2f} TB/s, product {ceilings.product_tflop_s:.0f} TFLOP/s")
    say(f"# absent: {', '.join(f'{name} ({why})' for name, why in absent.items()) or 'nobody'}")
    bench, entries = Bench(device, there, clock, rounds), list[dict[str, Any]]()
    document = {"command": "kernels", "about": about, "ceilings": ceilings.to_json(), "rows": entries}
    cases = list(dict.fromkeys(row.case for row in rows))

    def keep(left: Sequence[str]) -> None:
        judge(entries, rows)
        document["summary"] = summary(entries, left)
        record.write(out / FILE, document)

    for number, case in enumerate(cases):
        waiting = [row.key for row in rows if row.case in cases[number:]]
        if time.monotonic() - began > budget_s:
            say(f"# the time is up: {len(waiting)} rows are left")
            keep(waiting)
            return document
        mine = [row for row in rows if row.case == case]
        small = case.tiny() if scale == "tiny" else case
        result = bench.measure(small, [row.phase for row in mine])
        entries += [entry(row, Row(small, row.phase), result, ceilings) for row in mine]
        keep([key for key in waiting if key not in {row.key for row in mine}])
        for row in entries[-len(mine) :]:
            say(f"[{time.monotonic() - began:5.0f} s, {number + 1}/{len(cases)}] {line(row)}")
    again = measure(clock, device)
    document["ceilings_after"] = again.to_json()
    keep(())
    _close(document, say)
    return document


def _close(document: dict[str, Any], say: Say) -> None:
    told = document["summary"]
    after = document["ceilings_after"]
    say(f"# after: copy {after['copy_tb_s']:.2f} TB/s, product {after['product_tflop_s']:.0f} TFLOP/s")
    say(f"# targets: {told['targets']}")
    for key, ratio in told["slower_than_liger"].items():
        say(f"# slower than liger: {key}, {ratio:.2f}")
    for state in ("default", "other"):
        gained = ", ".join(f"{op} {ratio:.2f}" for op, ratio in told[f"gain_over_{state}"].items())
        say(f"# {state} over tuned: {gained or 'not measured'}")
