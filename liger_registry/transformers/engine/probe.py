"""Probes: a replacement and the code it is for, on random numbers, before anything is bound.

They run on a *stand-in*, a module of the same class and attributes whose tensors are small random ones on the CPU. The
model's own module is only looked at: it may be on any device, on the meta device too, and in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from liger_registry.transformers.engine.calls import dtype_name

Tensor = torch.Tensor
Call = Callable[..., Tensor]

_LARGEST = 1 << 18
# Relative to the largest entry. A rounding more or less in a bf16 formula moves a tenth of all entries by 2^-8.
_CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
_ODD_SHARE = 0.02


class CannotStandIn(Exception):
    """A module of which there can be no small copy; ``reason`` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def stand_in(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A copy of a module with small random tensors, without hooks and without anything bound on the instance.

    All widths are divided by what they have in common, in tensors and in those attributes that repeat one of them, if
    the tensors are large. Children with a linear map's sizes (LoRA's, quantised ones) become plain linear maps.

    Raises:
        CannotStandIn: its tensors are large, and their sizes have nothing in common.
    """
    sizes = _sizes(module)
    factor = math.gcd(*sizes) if sizes and max(_numels(module), default=0) > _LARGEST else 1
    if factor == 1 and max(_numels(module), default=0) > _LARGEST:
        raise CannotStandIn("its tensors are too large for a probe on the CPU")
    generator = torch.Generator().manual_seed(0)
    return _copied(module, _Shrink(factor, sizes, dtype, generator))


class _Shrink:
    """How sizes and tensors of a stand-in come from the original's."""

    def __init__(self, factor: int, sizes: Iterable[int], dtype: torch.dtype, generator: torch.Generator) -> None:
        self.factor, self.sizes = factor, frozenset(sizes)
        self.dtype, self.generator = dtype, generator

    def size(self, size: int) -> int:
        return size // self.factor if size in self.sizes else size

    def tensor(self, tensor: Tensor) -> Tensor:
        shape = [self.size(n) for n in tensor.shape]
        if not tensor.is_floating_point():
            return torch.zeros(shape, dtype=tensor.dtype)
        # Not centred at zero, so that neither a factor nor an offset is lost among signs.
        made = torch.rand(shape, generator=self.generator) - 0.3
        return made.to(self.dtype)

    def attribute(self, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            return self.size(value)
        if isinstance(value, tuple) and all(type(v) is int for v in value):
            return type(value)([self.size(v) for v in value])
        return value


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                yield tensor


def _numels(module: nn.Module) -> Iterable[int]:
    return (math.prod(shape) for shape in _shapes(module))


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    linear = _linear_sizes(module)
    if linear is not None:
        return [linear]
    own = (*module._parameters.values(), *module._buffers.values())
    shapes = [tuple(t.shape) for t in own if t is not None]
    for child in module.children():
        shapes += _shapes(child)
    return shapes


def _sizes(module: nn.Module) -> list[int]:
    return sorted({n for shape in _shapes(module) for n in shape if n > 1})


def _linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """``(out, in)`` of whatever maps vectors linearly; None for other modules."""
    for inner, outer in (("in_features", "out_features"), ("nx", "nf")):
        sizes = getattr(module, outer, None), getattr(module, inner, None)
        if all(isinstance(n, int) for n in sizes):
            return sizes  # type: ignore[return-value]
    return None


def _copied(module: nn.Module, shrink: _Shrink) -> nn.Module:
    linear = _linear_sizes(module)
    if linear is not None:
        return _linear(module, linear, shrink)
    made = module.__class__.__new__(module.__class__)
    empty = nn.Module()
    state = {name: shrink.attribute(value) for name, value in module.__dict__.items() if name not in empty.__dict__}
    # What is bound on the instance stays there: a wrapper of its forward, or another replacement.
    state = {name: value for name, value in state.items() if not callable(getattr(type(module), name, None))}
    made.__dict__.update(empty.__dict__)
    made.__dict__.update(state)
    made.training = module.training
    for name, parameter in module._parameters.items():
        made._parameters[name] = None if parameter is None else nn.Parameter(shrink.tensor(parameter))
    for name, buffer in module._buffers.items():
        made._buffers[name] = None if buffer is None else shrink.tensor(buffer)
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else _copied(child, shrink)
    return made


def _linear(module: nn.Module, sizes: tuple[int, int], shrink: _Shrink) -> nn.Module:
    outer, inner = map(shrink.size, sizes)
    # On the meta device first, where initialising draws none of the caller's random numbers.
    made = nn.Linear(inner, outer, getattr(module, "bias", None) is not None, device="meta", dtype=shrink.dtype)
    made = made.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in made.parameters():
            values = torch.rand(parameter.shape, generator=shrink.generator) - 0.3
            parameter.copy_(values / math.sqrt(inner))
    return made


def inputs(shape: Sequence[int], dtype: torch.dtype, count: int = 1) -> list[Tensor]:
    """Random tensors that need gradients."""
    generator = torch.Generator().manual_seed(1)
    return [
        (2 * torch.randn(tuple(shape), generator=generator) + 0.25).to(dtype).requires_grad_() for _ in range(count)
    ]


def difference(own: Call, ours: Call, tensors: Sequence[Tensor], parameters: Sequence[Tensor] = ()) -> str:
    """What two functions of the same tensors differ in: "" if in nothing, else a few words for the report.

    Their values and the gradients of all tensors and parameters are compared, up to the order of sums in fp32; of bf16
    values nearly all must be equal to the bit. Of its gradients not: autograd adds up more roundings than we do.

    Args:
        own: the code as it is.
        ours: what is to take its place.
        tensors: both are called with; with gradients where they need them.
        parameters: whose gradients are compared too.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        expected = _outcome(own, tensors, parameters)
        torch.manual_seed(2)
        found = _outcome(ours, tensors, parameters)
    names = ["values", *(f"gradient {n}" for n in range(len(expected) - 1))]
    for name, one, other in zip(names, expected, found, strict=True):
        if (one is None) != (other is None):
            return f"{name}: there is one, or there is none"
        if one is not None and other is not None and (text := _differ(one, other, name == "values")):
            return f"{name}: {text}"
    return ""


def _outcome(function: Call, tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor | None]:
    with torch.enable_grad():
        copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        result = function(*copies)
        wanted = [t for t in (*copies, *parameters) if t.requires_grad]
        if not result.requires_grad:
            return [result]
        gradient = torch.linspace(-1, 1, result.numel()).reshape(result.shape).to(result.dtype)
        return [result.detach(), *torch.autograd.grad(result, wanted, gradient, allow_unused=True)]


def _differ(one: Tensor, other: Tensor, exactly: bool) -> str:
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
    if one.numel() == 0:
        return ""
    a, b = one.double(), other.double()
    if not bool(torch.isfinite(a).all()):
        return "its own are not finite"
    scale = max(float(a.abs().max()), 1e-30)
    worst = float((a - b).abs().max()) / scale
    if worst > _CLOSE.get(one.dtype, 2e-5):
        return f"off by {worst:.1e} of the largest"
    share = float((a != b).double().mean()) if exactly and one.dtype in (torch.bfloat16, torch.float16) else 0.0
    # One entry of few may be off by the order of a sum.
    if share * a.numel() > 1 and share > _ODD_SHARE:
        return f"{share:.0%} of the entries are rounded otherwise"
    return ""


def differs_in(dtype: torch.dtype, text: str) -> str:
    """What the report says of a difference."""
    return f"a probe on random numbers in {dtype_name(dtype)} differs in {text}"


def confirm(
    module: nn.Module,
    bound: Callable[[nn.Module], Call],
    shape: Callable[[nn.Module], Sequence[int]],
    dtypes: Iterable[torch.dtype],
    method: str = "forward",
) -> str:
    """Whether a replacement for a method of one tensor does on a stand-in what the method does; "" if so.

    Args:
        module: the original, for which a stand-in is made.
        bound: a module to what takes the place of the method on it.
        shape: a stand-in to the shape of the tensor.
        dtypes: of the tensor and of all parameters, one after the other.
        method: its name.
    """
    for dtype in dtypes:
        try:
            made = stand_in(module, dtype)
            own = getattr(type(made), method).__get__(made)
            parameters = [p for p in made.parameters() if p.requires_grad]
            text = difference(own, bound(made), inputs(shape(made), dtype), parameters)
        except CannotStandIn as error:
            return error.reason
        except Exception as error:
            return f"a probe on random numbers fails: {type(error).__name__}: {error}"
        if text:
            return differs_in(dtype, text)
    return ""
