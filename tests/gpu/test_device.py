from __future__ import annotations

import pytest
import torch

from liger_registry.device import Device


def test_the_current_gpu_is_the_default() -> None:
    found = Device.default()
    assert found.vendor == ("rocm" if torch.version.hip else "cuda")
    assert found is Device.of(torch.empty(1, device="cuda"))
    assert found.index == torch.cuda.current_device()
    assert found.units >= 1
    assert found.limits.max_threads == 1024
    assert found.limits.warp_size in (32, 64)
    assert found.limits.shared_memory >= 48 << 10
    assert Device.from_json(found.to_json()) == found


def test_an_h200_is_one() -> None:
    found = Device.default()
    if "H200" not in found.name or found.units != 132:
        pytest.skip(f"this is no whole H200 but {found.name}, {found.units} units")
    known = Device.parse("h200")
    assert (found.vendor, found.arch, found.sku, found.units) == ("cuda", "sm_90", "h200", 132)
    assert found.limits == known.limits
    assert 0.97 < found.memory_bytes / known.memory_bytes <= 1
    assert found.siblings == known.siblings
