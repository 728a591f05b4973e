"""Where a measurement came from, and until when it is taken for true."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from importlib import metadata

import torch

from liger_registry.implementation import ANY, OWN_DISTRIBUTION, Implementation, source_hash
from liger_registry.launch import triton_version
from liger_registry.table import Provenance, Sample
from liger_registry.tuning.report import TOO_SLOW

#: Failures that another state of the machine may not show again: somebody else's memory, a load, a driver.
TRANSIENT = ("memory", "timeout", "crash", "error")
#: How long such a failure is believed.
BELIEVED = datetime.timedelta(days=1)


def provenance_of(implementation: Implementation, about: Mapping[str, str]) -> Provenance:
    """That of what is measured now.

    Args:
        implementation: what is measured.
        about: what the runner says of itself: versions and clocks.
    """
    return Provenance(
        triton=triton_version(),
        source=source_hash(implementation.launch),
        torch=about.get("torch", ""),
        driver=about.get("driver", ""),
        date=_now().isoformat(timespec="seconds"),
        clocks=about.get("clocks", ""),
        package=_package(implementation),
    )


def fresh(provenance: Provenance, implementation: Implementation) -> bool:
    """Whether it is of the code that is there today."""
    # Plain PyTorch is the same with any Triton; the dispatcher judges staleness alike.
    triton = implementation.capability.vendor == ANY or provenance.triton == triton_version()
    return triton and provenance.source == source_hash(implementation.launch)


def believed(sample: Sample, implementation: Implementation) -> bool:
    """Whether a sample spares measuring its candidate: always if it is fresh, but for failures that may pass.

    These are tried again after a day, and with another torch or another version of the distribution. What a CPU is too
    slow for stays so.
    """
    if not fresh(sample.provenance, implementation):
        return False
    if sample.status not in TRANSIENT or sample.detail.startswith(TOO_SLOW):
        return True
    try:
        age = _now() - datetime.datetime.fromisoformat(sample.provenance.date)
    except (TypeError, ValueError):  # no date, or one without a zone: a table that somebody edited
        return False
    same = (sample.provenance.torch, sample.provenance.package) == (torch.__version__, _package(implementation))
    return same and age < BELIEVED


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def _package(implementation: Implementation) -> str:
    distribution = implementation.distribution or OWN_DISTRIBUTION
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return distribution
