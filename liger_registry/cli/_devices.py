"""The device that a verb measures or verifies on, which has to be present."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from liger_registry.cli import _render
from liger_registry.errors import UnknownDeviceError

if TYPE_CHECKING:
    from liger_registry.device import Device
    from liger_registry.runtime import Registry

# A full cache directory is found out at once and not in the middle of a night's tuning.
_LEAST_FREE = 100 << 20


def use_interpreter(name: str | None) -> None:
    """Have Triton run kernels in its interpreter if the device of that name is one; to be called before torch comes.

    Raises:
        UnknownDeviceError: Triton was imported already, and decided otherwise.
    """
    if not (name or "").startswith("interpreter"):
        return
    if os.environ.get("TRITON_INTERPRET") != "1" and "triton" in sys.modules:
        raise UnknownDeviceError("Triton was imported without its interpreter", fix="set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"


def present(name: str | None, registry: Registry) -> tuple[Device, str]:
    """The device of a name and where torch puts its tensors; without a name the GPU of this rank, else the CPU.

    Raises:
        UnknownDeviceError: there is none of that name, or it is not present.
    """
    import torch

    from liger_registry.device import Device

    local = _render.environ_number("LOCAL_RANK", 0)
    if name is None and torch.cuda.is_available():
        name = f"cuda:{local % torch.cuda.device_count()}"
    device = registry.device if name is None else Device.parse(name)
    if device.vendor in ("cpu", "interpreter"):
        return device, "cpu"
    if device.index is None:
        raise UnknownDeviceError(
            f"{device.sku} cannot be measured or verified by its name",
            fix="name a device that is present, such as cuda:0",
        )
    return device, f"cuda:{device.index}"


def why_unwritable(path: Path) -> str:
    """Why nothing can be kept below a directory, which need not exist; empty if it can."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".liger-tune-"):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        return f"{path}: {error.strerror or error}; set LIGER_TUNE_CACHE_DIR to a directory that can be written"
    return f"{path}: only {free >> 20} MiB are free" if free < _LEAST_FREE else ""
