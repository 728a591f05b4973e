"""``python -m benchmarks scale``: an 8B model trained on all GPUs of a host, at longer and longer sequences.

Llama-3-8B with random bf16 weights, FSDP2 by layer, activations computed again, fused AdamW, eight sequences a GPU; the
plain model, liger-kernel's patch, ours, and ours with a smaller memory budget. First ours is held against the plain
model, and the ranks against one another; without that nothing is measured.

A mode has a process group of its own, because liger-kernel's patch of one model changes the modules of all, and it goes
through the lengths in one group, the shortest first, until memory is short: longer sequences are then not tried, since
they hold more. What comes next begins in a fresh group. ``scale_rank.py`` says why a length has none of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import record, scale_group, train
from benchmarks.targets import Tally, Target

FILE = "scale.json"
MODES = ("hf", "liger", "ours", "ours-low")
#: Memory caps in GiB; 0 for none.
CAPS = (0.0, 80.0)
STEPS = 4
#: Seconds that a length may take. At 32K a step takes more than half a minute, and there are four at least.
LIMIT_S = 400.0
#: The largest relative difference of losses from the plain model's: of the first step, which only rounding is in; of
#: the steps behind it in bf16, as the training benchmark allows; and of all steps in fp32.
FIRST_OFF, BF16_OFF, FP32_OFF = 0.01, 0.1, 1e-4
#: Ranks with the same weights, tokens and kernels differ at most by a rounding of fp32, where kernels add atomically.
RANKS_OFF = 1e-6
MODEL = train.MODELS["llama-3-8b-8layers"]

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Setup:
    """What is trained.

    Attributes:
        config: the model's sizes.
        batch: sequences a step and GPU.
        lengths: tokens of each.
        judged: the length that the targets are about.
        check_length: tokens of the one sequence in the comparison with the plain model.
    """

    config: dict[str, Any]
    batch: int
    lengths: tuple[int, ...]
    judged: int
    check_length: int

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return int(self.config["num_hidden_layers"])


_EPS = {"rms_norm_eps": 1e-5}
_LLAMA = {**MODEL.config, **_EPS, "num_hidden_layers": 32, "max_position_embeddings": 32768}
FULL = Setup(_LLAMA, 8, (2048, 4096, 8192, 16384, 32768), 8192, 1024)
TINY = Setup({**MODEL.tiny().config, **_EPS, "num_hidden_layers": 2}, 2, (16, 32), 32, 16)
#: Layers of the models that are compared.
CHECK_LAYERS = 2


def setup_of(scale: str, layers: int | None = None, batch: int | None = None, lengths: Sequence[int] = ()) -> Setup:
    """The setup of a scale, full or tiny, with other numbers where they are given."""
    found = FULL if scale == "full" else TINY
    return dataclasses.replace(
        found,
        config={**found.config, "num_hidden_layers": layers or found.layers},
        batch=batch or found.batch,
        lengths=tuple(sorted(set(lengths))) or found.lengths,
    )


def targets(judged: int) -> tuple[Target, ...]:
    """What is asked of a row, with the length at which speed and memory are judged."""
    ours, liger = f"ours@{judged}", f"liger@{judged}"
    return (
        Target(f"{ours}.tokens_s", 1.02, f"{liger}.tokens_s", least=True),
        Target(f"{ours}.peak_gib", 1.08, f"{liger}.peak_gib"),
        Target("ours or ours-low.longest", 1.0, "liger.longest", least=True),
    )


def is_result(cell: dict[str, Any] | None) -> bool:
    """Whether a length has an answer: figures, or that memory was short. A failure is none, and is tried again."""
    return cell is not None and ("tokens_s" in cell or "oom" in cell)


def longest(row: dict[str, Any]) -> dict[str, int]:
    """The longest sequences that fit, by mode; 0 where none did. Modes that lack a length's answer are left out."""
    lengths = {length for cells in row["modes"].values() for length in cells}
    found = {}
    for mode, cells in row["modes"].items():
        if all(is_result(cells.get(length)) for length in lengths):
            found[mode] = max((int(length) for length, cell in cells.items() if "tokens_s" in cell), default=0)
    return found


def figures(row: dict[str, Any]) -> dict[str, float]:
    """A row's numbers by ``mode@length.quantity``, and ``mode.longest``."""
    found = {
        f"{mode}@{length}.{name}": float(cell[name])
        for mode, cells in row["modes"].items()
        for length, cell in cells.items()
        for name in ("tokens_s", "ms", "peak_gib", "reserved_gib")
        if cell.get(name) is not None
    }
    fits = longest(row)
    found |= {f"{mode}.longest": float(length) for mode, length in fits.items()}
    if mine := [length for mode, length in fits.items() if mode in ("ours", "ours-low")]:
        found["ours or ours-low.longest"] = float(max(mine))
    return found


def judge(row: dict[str, Any], judged: int) -> list[dict[str, object]]:
    """The verdicts on a row's targets."""
    return [target.judge(figures(row).get).to_json() for target in targets(judged)]


def environment(mode: str) -> dict[str, str]:
    """What a mode sets in its processes."""
    return {"LIGER_MEMORY_BUDGET": train.LOW_BUDGET} if mode == "ours-low" else {}


# -- the comparison before ---------------------------------------------------------------------------------------------


def compare(setup: Setup, device: str, ranks: int, limit_s: float) -> dict[str, Any]:
    """Ours beside the plain model on some ranks, after a warmup that they share and with a frozen plan.

    Returns:
        ``wrong``: what is not as it should be, empty if all is well; and what was found.
    """
    job = {
        "kind": "check",
        "device": device,
        "config": {**setup.config, "num_hidden_layers": min(CHECK_LAYERS, setup.layers)},
        "length": setup.check_length,
        "small": TINY.config,
        "small_length": TINY.check_length,
    }
    words = list(scale_group.listen(job, ranks, {}, limit_s))
    if [word.kind for word in words] != [scale_group.RESULT]:
        last = words[-1].value if words else {"text": "the ranks said nothing"}
        return {"wrong": [last["text"]], "log": last.get("log", [])}
    found = words[0].value
    return {"wrong": wrong(found), **found}


def wrong(found: dict[str, Any]) -> list[str]:
    """What is wrong with what the ranks found in the comparison, in words."""
    told = []
    if len(set(found["digests"])) != 1:
        told.append(f"ranks froze different plans: {', '.join(digest[:12] for digest in found['digests'])}")
    if not any(found["measured"]):
        told.append("the warmup measured nothing")
    for dtype, limit in (("bfloat16", BF16_OFF), ("float32", FP32_OFF)):
        plain, ours = found[dtype]["hf"], found[dtype]["ours"]
        first = train.loss_off(ours["losses"][:1], plain["losses"][:1])
        if not first <= min(FIRST_OFF, limit):
            told.append(f"{dtype}: the first loss is {ours['losses'][0]:.6f}, not {plain['losses'][0]:.6f}")
        elif not (off := train.loss_off(ours["losses"], plain["losses"])) <= limit:
            told.append(f"{dtype}: losses are off by {off:.1e}, limit {limit:g}")
        for mode, losses in (("hf", plain["same"]), ("ours", ours["same"])):
            if not train.loss_off(losses, losses[:1] * len(losses)) <= RANKS_OFF:
                told.append(f"{dtype}, {mode}: ranks say different losses of the same tokens: {losses}")
        if made := found[dtype]["logits"]:
            told.append(f"{dtype}: logits were computed for {', '.join(made)}")
    return told


# -- the run -----------------------------------------------------------------------------------------------------------


def run(
    device: torch.device,
    out: Path,
    *,
    gpus: int | None = None,
    layers: int | None = None,
    lengths: Sequence[int] = (),
    modes: Sequence[str] = MODES,
    batch: int | None = None,
    caps: Sequence[float] = CAPS,
    steps: int = STEPS,
    scale: str = "full",
    limit_s: float = LIMIT_S,
    say: Say = lambda text: print(text, flush=True),
) -> dict[str, Any]:
    """Train in each mode under each cap, and keep the results in ``out/scale.json`` after each length.

    What an earlier run of the same commit, device and versions found is kept and not measured again, out of memory
    included; failures are tried again. The document's ``checks`` say whether figures mean anything: where one has
    something ``wrong``, nothing was measured.

    Args:
        device: whose kind is used.
        out: the directory of the results.
        gpus: how many ranks; None for all GPUs, two on a CPU.
        layers: of the model; None for the scale's.
        lengths: tokens of a sequence; empty for the scale's.
        modes: of ``MODES``.
        batch: sequences a step and GPU; None for the scale's.
        caps: of the memory, in GiB; 0 for none.
        steps: that are timed, at most.
        scale: full or tiny.
        limit_s: seconds that a length may take.
        say: told of each result.

    Raises:
        ValueError: an unknown mode or scale, or more GPUs than there are.
    """
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(MODES)}")
    if scale not in ("full", "tiny"):
        raise ValueError(f"{scale!r} is none of full, tiny")
    ranks = _ranks(device, gpus)
    setup = setup_of(scale, layers, batch, lengths)
    about = record.about(device, scale=scale)
    rows, checks = _earlier(out / FILE, about)
    document = {"command": "scale", "about": about, "judged": setup.judged, "checks": checks, "rows": rows}
    base = {"kind": "cells", "device": device.type, "config": setup.config, "batch": setup.batch, "steps": steps}
    for cap in _caps(caps, about["device"].get("memory_gib"), say):
        row = _row(rows, {"gpus": ranks, "layers": setup.layers, "batch": setup.batch, "cap_gib": cap})
        for mode in modes:
            if not _missing(row, mode, setup.lengths):
                continue
            if not _checked(document, setup, device.type, ranks, limit_s, out, say):
                return document
            for told in _mode(row, mode, {**base, "mode": mode, "cap_gib": cap}, setup.lengths, limit_s):
                _keep(document, row, out)
                say(f"{title(row)}, {mode}: {told}")
    for row in rows:
        _judged(document, row)
        for verdict in row["targets"]:
            say(f"# {title(row)}: {verdict['target']}: {verdict['text']}")
    record.write(out / FILE, document)
    return document


def _ranks(device: torch.device, gpus: int | None) -> int:
    if device.type != "cuda":
        return gpus or 2
    there = torch.cuda.device_count()
    if gpus is not None and gpus > there:
        raise ValueError(f"--gpus {gpus}: there are {there}")
    return gpus or there


def _caps(caps: Sequence[float], memory_gib: float | None, say: Say) -> Iterator[float]:
    """The caps that take something away from the device; without one, no cap."""
    real = [cap for cap in dict.fromkeys(caps) if memory_gib is not None and 0 < cap < memory_gib]
    for cap in dict.fromkeys(caps):
        if not cap or cap in real:
            yield float(cap)
        else:
            say(
                f"a cap of {cap:g} GiB is left out: " + (f"the device has {memory_gib} GiB" if memory_gib else "no GPU")
            )
    if caps and not real and 0 not in caps:
        yield 0.0


def _row(rows: list[dict[str, Any]], key: dict[str, Any]) -> dict[str, Any]:
    """The row of a model on some GPUs under a cap."""
    for row in rows:
        if all(row[name] == value for name, value in key.items()):
            return row
    rows.append({**key, "modes": {}, "longest": {}, "targets": []})
    return rows[-1]


def _missing(row: dict[str, Any], mode: str, lengths: Sequence[int]) -> list[int]:
    """The lengths without an answer; what is longer than what did not fit has one."""
    cells = row["modes"].setdefault(mode, {})
    short = [int(length) for length, cell in cells.items() if "oom" in cell]
    for length in lengths:
        if short and length > min(short) and not is_result(cells.get(str(length))):
            cells[str(length)] = {"oom": f"{min(short)} did not fit", "implied": True}
    return [length for length in lengths if not is_result(cells.get(str(length)))]


def _mode(row: dict[str, Any], mode: str, job: dict[str, Any], lengths: Sequence[int], limit_s: float) -> Iterator[str]:
    """Run a mode's lengths in as many groups as it takes, put what is found into the row, and say it."""
    cells = row["modes"][mode]
    left = _missing(row, mode, lengths)
    while left:
        done: list[int] = []
        for word in scale_group.listen({**job, "lengths": left}, row["gpus"], environment(mode), limit_s):
            if word.kind == scale_group.RESULT:
                cells[str(word.length)] = word.value
                done.append(word.length or 0)
                yield f"{word.length}: {told(word.value)}"
                continue
            # Before the first length began: the model itself does not fit, or cannot be made at any length.
            at = word.length if word.length is not None else left[0]
            if word.kind == scale_group.OOM:
                cells[str(at)] = {"oom": word.value["text"], "rank": word.value["rank"]}
                done += [length for length in left if length >= at]
            else:
                failed = left if word.length is None else [at]
                cells |= {str(length): {"failed": word.value["text"], "log": word.value["log"]} for length in failed}
                # What takes longer than one that took too long is left to another run, which tries both.
                done += [length for length in left if length > at] if word.late else []
                done += failed
            _missing(row, mode, lengths)
            yield f"{at}: {told(cells[str(at)])}"
        # A group that says nothing at all must not be started for ever.
        left = [length for length in left if length not in done] if done else []


def told(cell: dict[str, Any]) -> str:
    """A cell in one line."""
    if "oom" in cell:
        return "out of memory"
    if "failed" in cell:
        return str(cell["failed"])
    peak = "" if cell["peak_gib"] is None else f", {cell['peak_gib']:.1f} GiB"
    return f"{cell['tokens_s']:,.0f} tok/s{peak}"


def title(row: dict[str, Any]) -> str:
    """A row in words."""
    cap = f", {row['cap_gib']:g} GiB each" if row["cap_gib"] else ""
    return f"ranks {row['gpus']}{cap}, layers {row['layers']}, batch {row['batch']}"


def lengths_of(row: dict[str, Any]) -> list[str]:
    """A row's lengths, the shortest first."""
    return sorted({length for cells in row["modes"].values() for length in cells}, key=int)


def tables(document: dict[str, Any]) -> Iterator[Any]:
    """A table for each row, as rich draws it: modes beside one another, and what was judged below."""
    from rich.console import Group
    from rich.table import Table

    for row in document["rows"]:
        verdicts = [f"{verdict['target']}: {verdict['text']}" for verdict in row["targets"]]
        table = Table()
        table.add_column("tokens", justify="right")
        for mode in row["modes"]:
            table.add_column(mode, justify="right")
        for length in lengths_of(row):
            cells = (cells.get(length) for cells in row["modes"].values())
            table.add_row(f"{int(length):,}", *("" if cell is None else _short(cell) for cell in cells))
        table.add_row("longest", *(f"{row['longest'][m]:,}" if m in row["longest"] else "" for m in row["modes"]))
        yield Group(f"{title(row)}: tok/s a GPU, peak", table, *verdicts)


def _short(cell: dict[str, Any]) -> str:
    return "failed" if "failed" in cell else told(cell).replace(" tok/s", "")


def _checked(
    document: dict[str, Any], setup: Setup, device: str, ranks: int, limit_s: float, out: Path, say: Say
) -> bool:
    """Compare with the plain model, unless these ranks have; whether all is well."""
    checks = document["checks"]
    if str(ranks) not in checks:
        checks[str(ranks)] = compare(setup, device, ranks, limit_s)
        record.write(out / FILE, document)
        wrong = checks[str(ranks)]["wrong"]
        say(f"{ranks} ranks beside the plain model: {'; '.join(wrong) or 'equal, with one plan'}")
    return not checks[str(ranks)]["wrong"]


def _keep(document: dict[str, Any], row: dict[str, Any], out: Path) -> None:
    _judged(document, row)
    record.write(out / FILE, document)


def _judged(document: dict[str, Any], row: dict[str, Any]) -> None:
    row["figures"], row["longest"] = figures(row), longest(row)
    row["targets"] = judge(row, document["judged"])
    words = [str(verdict["verdict"]) for one in document["rows"] for verdict in one["targets"]]
    document["summary"] = {"targets": Tally.of(words).text}


def _earlier(path: Path, about: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of an earlier run in the same circumstances, and its checks in which all was well."""
    if path.exists():
        found = record.read(path)
        if all(found["about"].get(name) == about[name] for name in ("commit", "scale", "device", "versions")):
            return found["rows"], {ranks: check for ranks, check in found["checks"].items() if not check["wrong"]}
    return [], {}
