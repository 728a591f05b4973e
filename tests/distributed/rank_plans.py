"""What ranks run of freezing and warming up."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planted
import torch
import torch.distributed as dist

from liger_registry import Device, Registry
from liger_registry.config import Config, Fields
from liger_registry.errors import MeasurementError, PlanError
from liger_registry.implementation import source_hash
from liger_registry.problem import Problem
from liger_registry.settings import Settings
from liger_registry.store import TableStore
from liger_registry.table import Choice, Provenance, Stored
from liger_registry.tuning.distributed import tune_sharded

CPU = Device.parse("cpu")


def norm_problem(rows: int) -> Problem:
    return Problem(
        "rms_norm",
        "default",
        "forward",
        Fields(rows=rows, hidden=64),
        Fields(x="float32", weight="float32"),
        Fields(casting="llama"),
    )


def fill(root: Path, implementation: str, rows: tuple[int, ...], device: Device = CPU) -> Path:
    """A table in which an implementation is chosen for some numbers of rows."""
    provenance = Provenance("none", source_hash("liger_registry.portable.rms_norm:forward"))
    choice = Choice(implementation, Config())
    made = [Stored(norm_problem(n), choice, 1.0, choice, 2.0, 0.01, device.protocol, provenance) for n in rows]
    store = TableStore(root)
    store.record(device, "rms_norm", made)
    return store.path(device, "rms_norm")


class Elsewhere(Registry):
    """A registry on a device that is not here."""

    there: Device = CPU

    @property
    def device(self) -> Device:
        return self.there


def frozen(registry: Registry) -> dict[str, Any]:
    plan = registry.freeze()
    mine = [problem for place, problem in plan if place == registry.device.fingerprint]
    decided = [registry.decide(problem, registry.device) for problem in mine if problem.op == "rms_norm"]
    return {
        "digest": plan.digest,
        "decisions": len(plan),
        "devices": sorted({place for place, _ in plan}),
        "sources": sorted({d.source for d in decided}),
        "choices": sorted(f"{d.problem.dims.get('rows')} {d.choice}" for d in decided if d.problem.scheme),
    }


def freeze(rank: int, world: int, root: str, tables: list[str]) -> dict[str, Any]:
    """Freeze with the table that a rank has in a directory of its own: one's name, none, or corrupt."""
    mine = tables[rank]
    place = Path(root) / str(rank)
    if mine != "none":
        path = fill(place, "any:functional" if mine == "functional" else "any:eager", (4, 16 * (1 + rank)))
        if mine == "corrupt":
            path.write_text('{"schema": 1, "op')
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return frozen(Registry(Settings(cache_dir=place)))


def freeze_on_two_kinds(rank: int, world: int, root: str) -> dict[str, Any]:
    """Half of the ranks on one kind of device and half on another, each kind with tables of its own."""
    registry = Elsewhere(Settings(cache_dir=Path(root) / str(rank)))
    registry.there = Device.parse("h200" if rank % 2 else "h100-sxm")
    fill(Path(root) / str(rank), "any:functional" if rank % 2 else "any:eager", (4,), registry.there)
    return frozen(registry)


def freeze_while_one_dies(rank: int, world: int, root: str) -> dict[str, Any]:
    """One rank is killed instead of taking part."""
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        Registry(Settings(cache_dir=Path(root) / str(rank))).freeze()
    except PlanError as error:
        return {"error": str(error), "seconds": time.monotonic() - started}
    return {"error": "", "seconds": time.monotonic() - started}


# -- warmup ------------------------------------------------------------------------------------------------------------

PROBLEMS = [planted.problem(rows=rows, hidden=40) for rows in (16, 32, 64, 128, 256, 512, 1024, 2048)]


def tune(rank: int, root: str, **options: Any) -> Any:
    planted.reset()
    return tune_sharded(
        PROBLEMS,
        catalog=planted.sized(),
        device=CPU,
        store=TableStore(Path(root) / str(rank)),
        isolate=False,
        clock_source="planted:clock",
        **options,
    )


def warm(rank: int, world: int, root: str) -> dict[str, Any]:
    """What a rank measured, and what its tables hold then; and once more, when all is there."""
    first = tune(rank, root)
    table = TableStore(Path(root) / str(rank)).load(CPU, "affine")
    again = tune(rank, root)
    return {
        "measured": first.measured,
        "problems": sorted(row.problem.text for row in first.rows),
        "decisions": len(table.decisions),
        "samples": len(table.samples),
        "again": again.measured,
    }


def warm_while_one_dies(rank: int, world: int, root: str, dies: bool, silent_s: float) -> dict[str, Any]:
    """One rank is killed in its first measurement, or only takes its time."""
    spend = planted.spend

    def disturbed(*arguments: Any) -> None:
        if rank == 1 and dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and not planted.CALLS:
            time.sleep(3 * silent_s)
        spend(*arguments)

    planted.spend = disturbed
    started = time.monotonic()
    try:
        report = tune(rank, root, silent_s=silent_s)
        return {"error": "", "measured": report.measured, "seconds": time.monotonic() - started}
    except MeasurementError as error:
        return {"error": str(error), "seconds": time.monotonic() - started}
    finally:
        planted.spend = spend


# -- collectives -------------------------------------------------------------------------------------------------------

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "new_group",
    "recv", "irecv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    "isend",
)  # fmt: skip


@contextlib.contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Every call of a function of ``torch.distributed`` that others take part in."""
    counts: Counter[str] = Counter()
    modules = (dist, dist.distributed_c10d)
    before = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return before[name](*args, **kwargs)

        return call

    for module in modules:
        for name in COLLECTIVES:
            setattr(module, name, counting(name))
    try:
        yield counts
    finally:
        for module in modules:
            for name in COLLECTIVES:
                setattr(module, name, before[name])


def collectives(rank: int, world: int, root: str) -> dict[str, dict[str, int]]:
    """How many collectives there are in dispatch, in timing, in freezing and in a warmup that is shared."""
    found = {}
    registry = Registry(Settings(cache_dir=Path(root) / str(rank)))
    with counted_collectives() as counts:
        for rows in (3, 300):
            x, weight = torch.randn(rows, 64, requires_grad=True), torch.randn(64, requires_grad=True)
            for _ in range(2):  # a miss of the memo, and a hit
                registry.get("rms_norm")(x, weight).sum().backward()
    found["dispatch"] = dict(counts)
    with counted_collectives() as counts:
        if rank == 0:  # alone: in a collective it would wait for ever
            _time_alone(root)
    found["timing"] = dict(counts)
    dist.barrier()
    with counted_collectives() as counts:
        registry.freeze()
    found["freeze"] = dict(counts)
    with counted_collectives() as counts:
        registry.get("rms_norm")(torch.randn(5, 64), torch.randn(64))
    found["after"] = dict(counts)
    with counted_collectives() as counts:
        tune(rank, root)
    found["warmup"] = dict(counts)
    return found


def _time_alone(root: str) -> None:
    from liger_registry.tuning.tuner import tune as tune_here

    tune_here(
        PROBLEMS[:2],
        catalog=planted.sized(),
        device=CPU,
        store=TableStore(Path(root) / "alone"),
        isolate=False,
        clock_source="planted:clock",
    )
