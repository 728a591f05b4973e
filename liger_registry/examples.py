"""Inputs for verification and measurement: random, and such that a fault has nowhere to hide.

Each style puts weight where a class of bugs lives. ``tail`` makes the last row and column dominate their sums, so a
missing mask or a dropped tail moves the error by whole ulps instead of drowning among thousands of right elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STYLES = ("random", "tail", "spike", "tiny", "shifted", "zeros")


def fill(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    style: str = "random",
    scale: float = 1.0,
) -> torch.Tensor:
    """A tensor of the given style.

    Args:
        shape: its shape.
        dtype: a floating dtype.
        device: ``meta`` gives a tensor without values.
        seed: fixes the values on a kind of device.
        style: ``random`` is standard normal; ``tail`` has a last row and last column 32 times as large; ``spike`` has
            one element of 256 in each row; ``tiny`` is of order 1e-3, where ``eps`` matters; ``shifted`` has mean 4;
            ``zeros`` has every other row zero.
        scale: a factor on all of it.
    """
    import torch

    if style not in STYLES:
        raise ValueError(f"no style {style!r}; there are {STYLES}")
    if str(device) == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    generator = torch.Generator(device=device).manual_seed(seed)
    # float32, also for float64: the reference casts up, and values that float32 holds are as good as any.
    values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    if style == "tail":
        values[..., -1:] *= 32
        if values.dim() > 1:
            values[..., -1:, :] *= 32
    elif style == "spike" and values.numel():
        where = torch.randint(shape[-1], (*shape[:-1], 1), generator=generator, device=device)
        values.scatter_(-1, where, 256.0)
    elif style == "tiny":
        values *= 1e-3
    elif style == "shifted":
        values += 4
    elif style == "zeros" and values.dim() > 1:
        values.view(-1, shape[-1])[::2] = 0
    return (values * scale).to(dtype)
