"""Tuning over the ranks of a ``torch.distributed`` job: each measurement once, every rank's table with all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from liger_registry.errors import MeasurementError
from liger_registry.problem import Problem
from liger_registry.table import Sample, Stored
from liger_registry.tuning.alive import SILENT_S, Alive
from liger_registry.tuning.report import TuneReport
from liger_registry.tuning.tuner import shard, tune

if TYPE_CHECKING:
    from liger_registry.device import Device
    from liger_registry.store import TableStore


# Ranks meet for exchanges that all of them are ready for; what takes longer than this is a rank that is gone.
_EXCHANGE = timedelta(minutes=10)
# Every rank counts alike, since every rank makes the same calls.
_runs = itertools.count()


def tune_sharded(
    problems: Iterable[Problem],
    *,
    device: Device,
    store: TableStore,
    group: Any = None,  # noqa: ANN401
    silent_s: float = SILENT_S,
    **options: Any,
) -> TuneReport:
    """Tune a rank's share of the problems, and give every rank of the same device the results of all.

    Every rank calls this with the same problems. Ranks whose devices have the same fingerprint share the work; ranks of
    another device share among themselves. Ranks that have directories of their own get the others' results at the end.

    Args:
        problems: all of them.
        device: this rank's device.
        store: this rank's tables.
        group: the process group; None for the default one.
        silent_s: how long a rank may show no life before the others give it up. One that measures shows it, however
            long that takes.
        options: those of ``tune``. Ranks on one device wait for one another.

    Returns:
        This rank's report: the rows of its share.

    Raises:
        MeasurementError: a rank has died; it names that rank. What the others measured is in their tables.
        Exception: whatever ``tune`` raised on this rank, after the exchange, so that no other rank waits for it.
    """
    asked = list(dict.fromkeys(problems))
    world = dist.get_world_size(group)
    ranks = list(range(world)) if group is None else dist.get_process_group_ranks(group)
    # A group of its own: gloo whatever the job's backend is, so that waiting takes no GPU.
    own = dist.new_group(ranks, timeout=_EXCHANGE, backend="gloo")
    rank = dist.get_rank(group)
    try:
        with Alive(_store(ranks), rank, world, silent_s) as alive:
            fingerprints = _gathered(device.fingerprint, world, own)
            alike = [n for n, fingerprint in enumerate(fingerprints) if fingerprint == device.fingerprint]
            mine = shard(asked, alike.index(rank), len(alike))
            report: TuneReport | None = None
            error: BaseException | None = None
            try:
                report = tune(mine, device=device, store=store, **{"lock_timeout_s": -1.0, **options})
            except Exception as caught:
                error = caught
            alive.wait("measured")
            found = _gathered((device.fingerprint, _results(mine, device, store)), world, own)
    finally:
        dist.destroy_process_group(own)
    for other, (fingerprint, results) in enumerate(found):
        if other != rank and fingerprint == device.fingerprint:
            for op, (decisions, samples) in results.items():
                store.record(device, op, decisions=decisions, samples=samples)
    if error is not None:
        raise error
    assert report is not None
    return report


def _store(ranks: list[int]) -> Any:  # noqa: ANN401
    """Keys in the store through which the job met, of this run of these ranks alone."""
    name = f"liger_registry/warmup/{','.join(map(str, ranks))}/{next(_runs)}"
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]


def _gathered(value: object, world: int, group: Any) -> list[Any]:  # noqa: ANN401
    """What every rank gave, by rank."""
    values: list[Any] = [None] * world
    try:
        dist.all_gather_object(values, value, group)
    except RuntimeError as error:
        raise MeasurementError(
            "a rank stopped during warmup",
            why=str(error),
            fix="run warmup again: what the other ranks measured is kept, and is not measured again",
        ) from error
    return values


def _results(
    problems: Iterable[Problem], device: Device, store: TableStore
) -> dict[str, tuple[list[Stored], list[Sample]]]:
    """What a rank's tables hold of its share, schemes' phases included."""
    shares = {_share(problem) for problem in problems}
    results = {}
    for op in sorted({problem.op for problem in problems}):
        table = store.load(device, op)
        decisions = [stored for stored in table.decisions.values() if _share(stored.problem) in shares]
        samples = [sample for sample in table.samples.values() if _share(sample.problem) in shares]
        results[op] = decisions, samples
    return results


def _share(problem: Problem) -> tuple[str, str, str]:
    return problem.op, problem.dims.text, problem.dtypes.text
