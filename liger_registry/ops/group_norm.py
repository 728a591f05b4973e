"""``group_norm``: normalisation over groups of channels (Wu and He, 2018), as ``torch.nn.functional.group_norm``.

``y = (x - mean) / sqrt(var + eps) * weight + bias``, rounded once to the dtype of ``x``; ``mean`` and the biased
``var`` are those of a sample's group of channels over all positions. All of it is in fp32 (float64 inputs: float64),
and so are the saved ``mean`` and ``rstd``, which torch rounds to the dtype of ``x``. A group of a single element is
normalised to 0, where torch raises if it is the only one.

The number of positions, ``spatial``, is exact in the key: images and latents have few sizes, a config is right for one
of them and hardly for another, and with the batch as the one bucket a call can be verified sample by sample. It is not
in the code that gets compiled, beyond whether 16 divides it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields
from liger_registry.errors import InvalidInputError
from liger_registry.examples import fill
from liger_registry.op import Description, DimKind, Input, Op, Option, Scheme, check_dtype, dtype_name
from liger_registry.problem import BACKWARD, FORWARD, Problem

if TYPE_CHECKING:
    import torch

    from liger_registry.architecture import Architecture

    Tensors = tuple[torch.Tensor | None, ...]

DTYPES = ("float32", "float16", "bfloat16", "float64")
#: Of the models that use it most, diffusion models and their autoencoders.
GROUPS = 32
# Odd batches, channels, groups and positions, the middling one first; 1 position is an input of two dimensions.
SIZES = (
    (3, 6, 2, 41),
    (2, 6, 6, 7),
    (1, 5, 1, 3),
    (2, 12, 4, 1),
    (2, 24, 2, 64),
    (0, 6, 3, 5),
    (2, 4, 2, 1536),
    (1, 40, 1, 48),
    (1, 4, 1, 4100),
)
VARIANTS = ((True, False), (False, True), (False, False))


def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a call contradicts the contract; sizes may be symbolic.

    Raises:
        InvalidInputError: fewer than two dimensions, no channels or positions, channels that the groups do not divide,
            a weight or bias of another shape than (channels,).
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 and float64.
    """
    x, groups = inputs[0], options["groups"]
    assert x is not None
    if x.dim() < 2 or any(size == 0 for size in x.shape[1:]):
        raise InvalidInputError(
            f"x of group_norm has shape {tuple(x.shape)}",
            why="it has channels in its second dimension, and none behind the first may be empty",
            fix="pass x of shape (batch, channels, *spatial)",
        )
    channels = x.shape[1]
    if channels % groups:
        raise InvalidInputError(
            f"x of group_norm has {channels} channels, which {groups} groups do not divide",
            fix="pass groups, a divisor of the second dimension of x",
        )
    check_dtype("group_norm", x, DTYPES, "x")
    for name, vector in zip(("weight", "bias"), inputs[1:], strict=True):
        if vector is None:
            continue
        check_dtype("group_norm", vector, DTYPES, name)
        if vector.shape != (channels,):
            raise InvalidInputError(
                f"{name} of group_norm has shape {tuple(vector.shape)}, x has {tuple(x.shape)}",
                why=f"the {name} must have shape ({channels},)",
                fix=f"pass the {name} of this layer, or None",
            )


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtypes, and its groups."""
    x, weight, bias = inputs
    assert x is not None
    return Description(
        dims=Fields(batch=x.shape[0], channels=x.shape[1], spatial=math.prod(x.shape[2:])),
        dtypes=Fields(x=dtype_name(x), weight=dtype_name(weight), bias=dtype_name(bias)),
        flags=Fields(groups=options["groups"]),
    )


def _statistics_dtype(x: torch.Tensor) -> torch.dtype:
    import torch

    return torch.float64 if x.dtype == torch.float64 else torch.float32


def normalised(x: torch.Tensor, groups: int, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The normalised x (batch, groups, size of a group), mean and rstd (batch, groups), in the statistics' dtype."""
    import torch

    batch, channels = x.shape[:2]
    size = channels // groups * math.prod(x.shape[2:])
    wide = x.to(_statistics_dtype(x)).reshape(batch, groups, size)
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return centred * rstd, mean[..., 0], rstd[..., 0]


def formula(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, mean, rstd)``; x and y (batch, channels, *spatial), mean and rstd (batch, groups)."""
    y, mean, rstd = normalised(x, groups, eps)
    y = y.reshape(x.shape)
    channel = (x.shape[1], *[1] * (x.dim() - 2))
    if weight is not None:
        y = y * weight.to(y.dtype).reshape(channel)
    if bias is not None:
        y = y + bias.to(y.dtype).reshape(channel)
    return y.to(x.dtype), mean, rstd


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    groups: int = GROUPS,
    eps: float = 1e-6,
) -> torch.Tensor:
    """``y`` in plain, differentiable PyTorch.

    Args:
        x: (batch, channels, *spatial), floating.
        weight: (channels,), or None.
        bias: (channels,), or None.
        groups: how many groups the channels are in; a divisor of their number.
        eps: added to the variance.
    """
    return formula(x, weight, bias, groups, eps)[0]


def _scheme_reference(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, ...]:
    return formula(x, weight, bias, **options)


def allocate(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Empty ``(y, mean, rstd)``: y of the shape of x, with its strides where its last dimension is contiguous."""
    import torch

    layout = torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format
    mean, rstd = (x.new_empty((x.shape[0], options["groups"]), dtype=_statistics_dtype(x)) for _ in range(2))
    return torch.empty_like(x, memory_format=layout), mean, rstd


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64; random rounding errors add as the root of the sum of squares."""
    x, weight, bias = inputs
    (dy,) = grad_outputs
    assert x is not None
    assert dy is not None
    normed, mean, rstd = normalised(x, options["groups"], options["eps"])
    size = normed.shape[-1]
    channel = (x.shape[1], *[1] * (x.dim() - 2))
    # x and the mean may be much larger than their difference, and the mean's own error is a part of the terms' size.
    root = x.reshape(normed.shape).pow(2).mean(-1).sqrt()
    offset = rstd * (mean.abs() + root / 16)
    spread = normed.abs() + offset[..., None]
    w = x.new_ones(x.shape[1]) if weight is None else weight
    scaled = (dy * w.reshape(channel)).reshape(normed.shape)
    terms = scaled * normed
    # Of the two means over a group: their own size, and what errors of random sign leave of their terms.
    shift = scaled.mean(-1, keepdim=True).abs() + scaled.pow(2).sum(-1, keepdim=True).sqrt() / size
    slope = terms.mean(-1, keepdim=True).abs() + terms.pow(2).sum(-1, keepdim=True).sqrt() / size
    y = spread.reshape(x.shape) * w.abs().reshape(channel)
    sizes = {
        "y": y if bias is None else y + bias.abs().reshape(channel),
        "mean": root,
        "rstd": rstd * (1 + rstd * mean.abs()),
        "grad_x": (rstd[..., None] * (scaled.abs() + shift + spread * slope)).reshape(x.shape),
    }
    over = [d for d in range(x.dim()) if d != 1]
    for name, vector, values in (
        ("grad_weight", weight, dy * spread.reshape(x.shape)),
        ("grad_bias", bias, dy),
    ):
        if vector is not None:
            sizes[name] = values.sum(over).abs() + values.pow(2).sum(over).sqrt()
    return sizes


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(x, weight, bias)`` for a problem, x of shape (batch, channels, spatial); on the meta device without values."""
    import torch

    meta = str(device) == "meta"
    shape = (problem.batch, problem.channels, problem.spatial)
    x = fill(shape, getattr(torch, str(problem.dtypes["x"])), device, seed, style)

    def vector(name: str, number: int, middle: float) -> torch.Tensor | None:
        if problem.dtypes[name] == "none":
            return None
        dtype = getattr(torch, str(problem.dtypes[name]))
        made = fill((problem.channels,), dtype, device, seed + number, "random", 0.25)
        return made if meta else made + middle

    return x, vector("weight", 1, 1.0), vector("bias", 2, 0.0)


def odd(dtype: str) -> Iterator[Description]:
    """Odd sizes; at the first also without weight, bias or both, and with a weight in another dtype than x."""
    for batch, channels, groups, spatial in SIZES:
        dims = Fields(batch=batch, channels=channels, spatial=spatial)
        yield Description(dims, Fields(x=dtype, weight=dtype, bias=dtype), Fields(groups=groups))
    batch, channels, groups, spatial = SIZES[0]
    dims = Fields(batch=batch, channels=channels, spatial=spatial)
    for weight, bias in VARIANTS:
        names = Fields(x=dtype, weight=dtype if weight else "none", bias=dtype if bias else "none")
        yield Description(dims, names, Fields(groups=groups))
    other = "float32" if dtype != "float32" else "bfloat16"
    yield Description(dims, Fields(x=dtype, weight=other, bias=dtype), Fields(groups=groups))


def proxies(problem: Problem) -> tuple[dict[str, int], ...]:
    """Few samples of the true channels and positions, which say how far each of the loops goes."""
    # 2^21 elements keep one check under 20 ms on a GPU.
    size = int(problem.channels) * int(problem.spatial)
    return ({"batch": max(2, min(5, (1 << 21) // size))}, {"batch": 1})


def calls(architecture: Architecture, tokens: int, dtype: str) -> Iterable[Description]:
    """None: language models do not use it."""
    return ()


OP = Op(
    name="group_norm",
    doc="Normalisation over groups of channels and all positions.",
    inputs=(Input("x"), Input("weight", optional=True), Input("bias", optional=True)),
    options=(
        Option("groups", int, GROUPS, minimum=1, doc="how many groups the channels are in"),
        Option("eps", float, 1e-6, minimum=0.0, doc="added to the variance"),
    ),
    outputs=("y",),
    schemes=(Scheme("default", ("x", "weight", "bias"), ("mean", "rstd"), allocate, _scheme_reference),),
    dims={"batch": DimKind.BUCKET, "channels": DimKind.EXACT, "spatial": DimKind.EXACT},
    validate=validate,
    describe=describe,
    reference=reference,
    magnitude=magnitude,
    # Terms of a group's sums: at most all channels and positions.
    reduced={
        "y": ("channels", "spatial"),
        "mean": ("channels", "spatial"),
        "rstd": ("channels", "spatial"),
        "grad_x": ("channels", "spatial"),
        "grad_weight": ("batch", "spatial"),
        "grad_bias": ("batch", "spatial"),
    },
    example=example,
    proxies=proxies,
    calls=calls,
    order={
        FORWARD: ("whole", "split", "group", "functional", "eager"),
        BACKWARD: ("whole", "split", "group", "functional", "eager"),
    },
    odd=odd,
)
