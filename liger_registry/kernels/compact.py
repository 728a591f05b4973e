"""Which rows of a loss are worth a matrix product: those whose target is not ignored.

This is the one place in forward and backward that waits for the device, because the number of rows that are left has to
be known on the host. It never does under stream capture.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_registry.errors import UnsupportedOptionError

AUTO, ON, OFF = "auto", "on", "off"
#: With ``auto``, more than this part of the rows left is not worth gathering and scattering them.
MOST_KEPT = 7 / 8
#: Multiplications of one product over all rows from which ``auto`` counts. On a GPU of 700 TFLOP/s three products of
#: this size take 1 ms, and waiting costs some 50 us in which the host does not run ahead.
WORTH = 1 << 37


def compact(target: Tensor, ignore_index: int, mode: str, size: int) -> Tensor | None:
    """The rows that count, in order; None for all of them.

    Args:
        target: (rows,) int64.
        ignore_index: the target of rows that do not count.
        mode: ``on``, ``off``, or ``auto``: where the products are large and enough rows are ignored, and no stream is
            being captured. On a CPU nothing waits, so that ``auto`` always counts there.
        size: multiplications of one product over all rows.

    Returns:
        (kept,) int64, or None.

    Raises:
        UnsupportedOptionError: ``on`` while a stream is being captured.
    """
    if not _wanted(target, mode, size):
        return None
    kept = (target != ignore_index).nonzero().squeeze(1)
    return kept if _few(kept.numel(), target.numel(), mode) else None


def compact_groups(target: Tensor, ignore_index: int, mode: str, size: int) -> tuple[Tensor, list[int]] | None:
    """The rows that count, group by group, and how many of them there are up to each group's end; None for all.

    Both are known from the counts of groups, so that the device is waited for once.

    Args:
        target: (groups, rows) int64; the others are those of ``compact``.
        ignore_index: see there.
        mode: see there.
        size: see there.

    Returns:
        (kept,) int64, positions in the flat target, and as many numbers as groups; or None.

    Raises:
        UnsupportedOptionError: see there.
    """
    if not _wanted(target, mode, size):
        return None
    counted = target != ignore_index
    ends: list[int] = counted.sum(1).cumsum(0).tolist()
    if not _few(ends[-1], target.numel(), mode):
        return None
    return counted.view(-1).nonzero_static(size=ends[-1]).squeeze(1), ends


def _wanted(target: Tensor, mode: str, size: int) -> bool:
    """Whether counting is worth it, and possible."""
    if mode == OFF or target.is_meta or target.numel() == 0:
        return False
    if target.is_cuda and torch.cuda.is_current_stream_capturing():
        if mode == ON:
            raise UnsupportedOptionError(
                "ignored rows cannot be dropped while a stream is being captured",
                why="how many are left would have to be known on the host",
                fix="pass compact='auto' or compact='off'",
            )
        return False
    return mode != AUTO or not target.is_cuda or size >= WORTH


def _few(kept: int, rows: int, mode: str) -> bool:
    """Whether so many rows that are left are worth gathering."""
    return kept <= (rows - 1 if mode == ON else int(MOST_KEPT * rows))
