"""Where test tensors lie in memory, and what lies around them and in memory nobody has written yet.

Every tensor is a view into a buffer of its own whose other elements are poisoned: a read outside the view turns results
into NaN, a write outside it, or into it, changes the buffer, which is compared afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: ``guarded`` is contiguous and 16-byte aligned, ``misaligned`` begins one element later; ``padded`` has gaps between
#: rows, ``transposed`` the last two dimensions swapped in memory; ``rows`` repeats one row and ``scalar`` one element
#: with strides of 0, as the gradients of ``y.mean(0)`` and ``y.sum()`` do. ``strided`` and ``expanded`` are for
#: vectors such as weights: every second element, as of ``w[::2]``, and one repeated; other tensors are guarded.
#: ``gapped`` is ``strided`` for vectors and ``padded`` for all else.
LAYOUTS = ("guarded", "misaligned", "padded", "transposed", "rows", "scalar", "strided", "expanded", "gapped")

_GUARD = 128  # elements; keeps a view of any dtype of at least one byte 16-byte aligned
# Bytes beyond a block's own size: to align a block malloc asks for more than that, and takes the smallest hole that
# fits. Fences between the blocks keep it from giving them back to the system, whose pages are zero.
_SPARE = (0, 0, 64, 128, 256, 1024, 4096)
_INTEGER = 23130  # within the range of a vocabulary, so that a wild index is a wrong number before it is a crash
_EMPTY = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})


def poison(dtype: torch.dtype, huge: bool = False) -> float | int | bool:
    """What memory without a defined value is filled with: NaN, or a large finite number."""
    if dtype == torch.bool:
        return True
    if not (dtype.is_floating_point or dtype.is_complex):
        return min(_INTEGER, torch.iinfo(dtype).max)
    return 2.0**13 if huge else float("nan")


def place(tensor: torch.Tensor, layout: str = "guarded", behind: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The same values in a layout, and the flat buffer they lie in.

    Args:
        tensor: any tensor; scalars are only guarded or misaligned, vectors neither padded nor transposed.
        layout: one of ``LAYOUTS``. ``rows``, ``scalar`` and ``expanded`` keep the first row or element alone.
        behind: elements of poison behind the tensor, beside those that are always there.
    """
    shape = tensor.shape
    if layout not in LAYOUTS:
        raise ValueError(f"no layout {layout!r}; there are {LAYOUTS}")
    if layout == "gapped":
        layout = "strided" if tensor.dim() == 1 else "padded"
    if layout == "expanded":
        layout = "scalar" if tensor.dim() == 1 else "guarded"
    if layout in ("rows", "scalar") and tensor.numel() and tensor.dim():
        keep = tensor[(0,) * (tensor.dim() - 1)] if layout == "rows" else tensor.reshape(-1)[:1]
        # Who takes it to be contiguous reads poison, not another tensor or what is no memory at all.
        view, buffer = place(keep, behind=tensor.numel())
        return view.expand(shape), buffer
    strides = list(torch.empty(shape, device="meta").stride())
    if layout == "padded" and tensor.dim() >= 2:
        strides = list(torch.empty((*shape[:-1], shape[-1] + 16), device="meta").stride())
    elif layout == "transposed" and tensor.dim() >= 2:
        strides = list(torch.empty((*shape[:-2], shape[-1], shape[-2]), device="meta").stride())
        strides[-2:] = strides[-1], strides[-2]
    elif layout == "strided" and tensor.dim() == 1:
        strides = [2]
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if tensor.numel() else 0
    start = _GUARD + (1 if layout == "misaligned" else 0)
    size = start + extent + _GUARD + behind
    buffer = torch.full((size,), poison(tensor.dtype), dtype=tensor.dtype, device=tensor.device)
    view = buffer.as_strided(shape, strides, start)
    view.copy_(tensor)
    return view, buffer


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, for comparisons in which NaN equals itself and -0 differs from 0."""
    flat = tensor.detach().contiguous().reshape(-1)
    # One element is contiguous whatever its stride, and a view as bytes takes a stride of 1 alone.
    return (flat.as_strided((1,), (1,)) if flat.numel() == 1 else flat).view(torch.uint8)


class Poisoned(TorchFunctionMode):
    """Within it, tensors that PyTorch leaves uninitialised hold poison.

    ``torch.utils.deterministic.fill_uninitialized_memory`` would do the same only together with deterministic
    algorithms, which are another code than the one to be verified.
    """

    def __init__(self, huge: bool = False) -> None:
        super().__init__()
        self.huge = huge

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        empty = getattr(func, "__name__", "") in _EMPTY and isinstance(result, torch.Tensor)
        if empty and result.numel() and result.device.type != "meta":
            result.detach().fill_(poison(result.dtype, self.huge))
        return result


def dirty(device: torch.device | str, sizes: Sequence[int], huge: bool = False) -> object:
    """Poison memory and free it, so that scratch which C++ allocates next is not zero by luck.

    Args:
        device: where.
        sizes: bytes of each block.
        huge: with large numbers instead of NaN.

    Returns:
        What has to be held until the call is over.
    """
    value, wanted = poison(torch.float32, huge), [max(size, 512) for size in sizes for _ in range(2)]
    if torch.device(device).type == "cpu":
        wanted = [max(size, 512) + more for size in sizes for more in _SPARE]
    blocks, fences = [], []
    for size in wanted:
        blocks.append(torch.full((size // 4,), value, device=device))
        fences.append(torch.empty(1, device=device))
    del blocks
    return fences
