"""The catalogue of this distribution, installed or not, with two implementations that fail as only a GPU can."""

from __future__ import annotations

import torch

import liger_registry.ops
import liger_registry.portable
import liger_registry_cuda
import liger_registry_rocm
from liger_registry.catalog import Catalog
from liger_registry.implementation import Implementation


def illegal_access(x, w, *, device, eps, offset, casting):
    return x[torch.tensor([10**9], device=x.device)], x


def too_much(x, w, *, device, eps, offset, casting):
    return torch.empty(10**13, device=x.device), x


def build() -> Catalog:
    catalog = Catalog()
    with catalog.stage("liger-registry") as staging:
        for part in (liger_registry.ops, liger_registry.portable, liger_registry_cuda, liger_registry_rocm):
            part.register(staging)
    with catalog.stage("planted") as staging:
        for function in (illegal_access, too_much):
            launch = f"planted_gpu:{function.__name__}"
            staging.register(Implementation("rms_norm", "forward", function.__name__, launch))
    return catalog
