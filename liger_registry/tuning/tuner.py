"""The tuner: takes problems through candidates, verification, measurement and decision, and persists what it finds."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from liger_registry.device import Device
from liger_registry.errors import SettingError, TuningBusyError
from liger_registry.problem import Problem
from liger_registry.tuning.bench import Bench
from liger_registry.tuning.lock import device_lock
from liger_registry.tuning.measure import protocol_of
from liger_registry.tuning.outcome import Runner
from liger_registry.tuning.report import Progress, Row, TuneReport
from liger_registry.tuning.run import OutOfTime, Run
from liger_registry.tuning.worker import CATALOG, DEFAULT_LIMITS, Limits, Worker, load

if TYPE_CHECKING:
    from liger_registry.catalog import Catalog
    from liger_registry.store import TableStore

__all__ = ["Progress", "Row", "TuneReport", "shard", "tune"]


def tune(
    problems: Iterable[Problem],
    *,
    catalog: Catalog,
    device: Device,
    store: TableStore,
    torch_device: torch.device | str | None = None,
    budget_s: float | None = None,
    force: bool = False,
    progress: Callable[[Progress], None] | None = None,
    catalog_source: str = CATALOG,
    clock_source: str = "",
    isolate: bool = True,
    limits: Limits = DEFAULT_LIMITS,
    lock_timeout_s: float = 60.0,
) -> TuneReport:
    """Measure problems on a present device and persist the choices.

    Nothing is started, locked or measured for problems that an earlier run has answered with the same code.

    Args:
        problems: forward, backward and scheme problems; a problem given twice is tuned once.
        catalog: what is registered.
        device: the device that the decisions are for.
        store: where samples and decisions go, each as soon as it is known.
        torch_device: where tensors lie; by default the present device that ``device`` describes.
        budget_s: seconds after which nothing new is begun; the report says what is untuned. They bound the wait for
            another tuner too.
        force: measure everything anew.
        progress: told before each candidate and after each problem.
        catalog_source: ``module:function`` from which the worker builds the same catalogue.
        clock_source: ``module:function`` in place of the wall clock on the CPU; for tests.
        isolate: run candidates in a worker process. Without one, a candidate that aborts takes this process with it.
        limits: how long the worker may be silent.
        lock_timeout_s: seconds to wait for another tuner on the device; negative waits for as long as it takes, or
            until ``budget_s`` is up, which leaves the problems untuned.

    Raises:
        TuningBusyError: another tuner holds the device.
        MeasurementError: the worker cannot be started.
        SettingError: the device is not one that can be measured here.
    """
    place = _torch_device(device, torch_device)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:

        def start() -> Runner:
            left = math.inf if run.deadline is None else max(0.0, run.deadline - time.monotonic())
            try:
                stack.enter_context(device_lock(place, _wait_s(lock_timeout_s, left)))
            except TuningBusyError:
                if lock_timeout_s < 0:  # it was the time that was up
                    raise OutOfTime from None
                raise
            runner: Runner
            if isolate and os.name == "posix":
                runner = Worker(device, str(place), catalog_source, clock_source, limits)
            else:
                runner = Bench(catalog, device, place, load(clock_source) if clock_source else None)
            stack.callback(runner.close)
            return runner

        run = Run(
            catalog=catalog,
            device=device,
            store=store,
            protocol=protocol_of(place),
            start=start,
            deadline=None if budget_s is None else began + budget_s,
            force=force,
        )
        asked = list(dict.fromkeys(problems))
        rows = []
        for done, problem in enumerate(asked):
            if progress is not None:
                run.telling = functools.partial(_tell, progress, problem, done, len(asked))
            rows.append(run.tune(problem))
            if progress is not None:
                progress(Progress(problem, done + 1, len(asked), "done", rows[-1]))
    return TuneReport(tuple(rows), time.monotonic() - began, device.fingerprint)


def _wait_s(timeout_s: float, left_s: float) -> float:
    """How long to wait for the device: no longer than the time that is left; negative for as long as it takes."""
    if timeout_s < 0:
        return -1.0 if left_s == math.inf else left_s
    return min(timeout_s, left_s)


def _tell(progress: Callable[[Progress], None], problem: Problem, done: int, total: int, text: str) -> None:
    progress(Progress(problem, done, total, text))


def _torch_device(device: Device, given: torch.device | str | None) -> torch.device:
    if given is not None:
        place = torch.device(given)
    else:
        place = (
            torch.device("cpu") if device.vendor in ("cpu", "interpreter") else torch.device("cuda", device.index or 0)
        )
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    here = device.vendor if device.vendor == "interpreter" else Device.of(place).fingerprint
    if here not in (device.fingerprint, "interpreter"):
        raise SettingError(
            f"{device.fingerprint} cannot be measured on {place}",
            why=f"that is {here}",
            fix="name the device that is here",
        )
    return place


def shard(problems: Iterable[Problem], rank: int, world: int) -> list[Problem]:
    """The problems that one of several ranks tunes; every rank computes the same split of the same problems.

    Problems that differ in scheme and phase alone stay together, because a scheme's decision measures its phases too.

    Args:
        problems: all of them, in any order.
        rank: from 0.
        world: how many ranks there are.
    """
    groups: dict[tuple[str, ...], list[Problem]] = {}
    for problem in sorted(set(problems), key=lambda p: p.text):
        groups.setdefault((problem.op, problem.dims.text, problem.dtypes.text), []).append(problem)
    # Dealt out by size, largest first: consecutive problems cost alike, so that each rank gets some of each.
    dealt = sorted(groups.values(), key=lambda group: (-len(group), group[0].text))
    return [problem for group in dealt[rank::world] for problem in group]
