"""Recorded launches of implementations for devices that need not be there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from liger_registry.config import Config
from liger_registry.problem import Problem

if TYPE_CHECKING:
    from liger_registry.catalog import Catalog
    from liger_registry.device import Device
    from liger_registry.implementation import Implementation
    from liger_registry.op import Op
    from liger_registry.records import LaunchRecord


@dataclass(frozen=True, slots=True)
class Job:
    """One config of one implementation, to be compiled for one device.

    Attributes:
        device: the device.
        problem: the problem.
        implementation: the implementation.
        config: the config.
        aligned: whether tensors lie at addresses divisible by 16.
    """

    device: Device
    problem: Problem
    implementation: Implementation
    config: Config
    aligned: bool

    @property
    def text(self) -> str:
        """One line that names it."""
        where = "" if self.aligned else " unaligned"
        return f"{self.device.sku} {self.implementation.id}({self.config.text}) {self.problem.text}{where}"


def jobs(catalog: Catalog, problems: Sequence[Problem], devices: Sequence[Device]) -> Iterator[Job]:
    """Every legal config of every Triton implementation for the problems, aligned and unaligned.

    Plain PyTorch compiles nothing of its own and is left out.
    """
    for device in devices:
        for problem in problems:
            if not problem.scheme:
                continue
            for implementation in catalog.implementations(problem.op, problem.scheme, problem.phase):
                if implementation.capability.vendor not in (device.vendor, device.emulates):
                    continue
                if implementation.capability.why_not(problem, device) is not None:
                    continue
                for config in implementation.configs(problem, device):
                    if implementation.why_illegal(config, problem, device) is None:
                        yield Job(device, problem, implementation, config, True)
                        yield Job(device, problem, implementation, config, False)


def records_of(op: Op, job: Job) -> list[LaunchRecord]:
    """What a config launches, recorded on tensors without memory."""
    from liger_registry.launch import record
    from liger_registry.tuning.arguments import META, Arguments

    problem = job.problem
    call = job.implementation.bind(job.config, job.device, op.options_of(problem), op.needs_of(problem), problem)
    with record(aligned=job.aligned) as records:
        call(*Arguments.of(op, problem, META).tensors)
    return records


def _stratum(job: Job) -> tuple[object, ...]:
    return job.device.fingerprint, job.implementation.key


def sampled(found: Sequence[Job], count: int, stratum: Callable[[Job], object] = _stratum) -> list[Job]:
    """At most ``count`` jobs, the same ones every time.

    Every device and implementation has its share, and within it they are spread evenly; where there are fewer than
    implementations, some of these are left out.
    """
    if count >= len(found):
        return list(found)
    places: dict[object, list[int]] = {}
    for place, job in enumerate(found):
        places.setdefault(stratum(job), []).append(place)
    groups = list(places.values())
    if count < len(groups):
        groups = [groups[index * len(groups) // count] for index in range(count)]
    shares = [0] * len(groups)
    while sum(shares) < count:
        for n, group in enumerate(groups):
            if shares[n] < len(group) and sum(shares) < count:
                shares[n] += 1
    chosen = []
    for n, (group, share) in enumerate(zip(groups, shares, strict=True)):
        for index in range(share):
            place = index * len(group) // share
            # Aligned and unaligned ones stand side by side: an even stride alone would see one kind only.
            turned = min(place - place % 2 + (n + index) % 2, len(group) - 1)
            chosen.append(group[place if share * 2 > len(group) else turned])
    return [found[place] for place in sorted(chosen)]
