"""One tuner a device: two that measure side by side would measure each other."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from liger_registry.errors import TuningBusyError, TuningWarning
from liger_registry.locking import locked, own_directory


def device_name(torch_device: torch.device | str) -> str:
    """What a device is called whichever processes see it under whichever index: its PCI bus, else ``cpu``."""
    place = torch.device(torch_device)
    if place.type != "cuda":
        return place.type
    properties = torch.cuda.get_device_properties(place)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in parts:
        return "pci-" + "-".join(f"{part:x}" for part in parts)
    return re.sub(r"[^0-9a-zA-Z-]", "", str(getattr(properties, "uuid", f"cuda-{place.index or 0}")))


@contextlib.contextmanager
def device_lock(torch_device: torch.device | str, timeout_s: float = 60.0) -> Iterator[Path]:
    """Hold the device for this process.

    Where no lock can be made the device is not held, and one warning says so: tuning goes on.

    Args:
        torch_device: the device.
        timeout_s: how long to wait for another tuner; negative waits for as long as it takes.

    Raises:
        TuningBusyError: another process holds it still.
    """
    path = Path(f"tuning-{device_name(torch_device)}.lock")
    with contextlib.ExitStack() as stack:
        try:
            path = own_directory() / path
            stack.enter_context(locked(path.with_suffix(""), timeout_s))
        except TimeoutError:
            raise TuningBusyError(
                f"another process is tuning on {torch_device}",
                why=f"it holds {path}" + (f", for more than {timeout_s:.3g} s" if timeout_s else ""),
                fix="wait until it is done, or tune on another device",
            ) from None
        except (OSError, NotImplementedError) as error:
            warnings.warn(
                f"nothing keeps another tuner away from {torch_device}, which would spoil what is measured: {error}",
                TuningWarning,
                stacklevel=3,
            )
        yield path
