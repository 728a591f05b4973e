"""Whether a module's method calls what was put into it: tried on a ghost of the module, of shapes without data."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from liger_registry.transformers.engine.calls import float_dtype

_TOKENS = (8, 1024)  # few; and many, for code that works on windows of the sequence
_MOST = 200  # calls tried, of a millisecond each
_HIDDEN = ("hidden_states", "residual", "q_resid")


class Reached(BaseException):  # not an Exception: code that catches those must not catch it
    """The call came to it."""


def signal(*args: object, **kwargs: object) -> None:
    """Stands in the place of a function to say that it is called.

    Raises:
        Reached: always.
    """
    raise Reached


def ghost(module: nn.Module, device: str = "meta", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A module of the same class and attributes with tensors that take no memory, without hooks and replaced methods.

    Layers with ``in_features`` and ``out_features``, of whatever kind, are plain linear ones in it.

    Args:
        module: the original, which is only looked at.
        device: "meta", or "cpu" for tensors of one zero, for code that looks at values.
        dtype: of linear layers.
    """
    made: nn.Module = object.__new__(type(module))
    made.__dict__ = {name: _empty(value, device) for name, value in module.__dict__.items()}
    made.__dict__.update(nn.Module().__dict__, training=module.training)
    for name in ("forward", "_old_forward", "_hf_hook"):
        made.__dict__.pop(name, None)
    for name, parameter in module._parameters.items():
        made._parameters[name] = None if parameter is None else nn.Parameter(_empty(parameter, device), False)
    made._buffers = {name: _empty(buffer, device) for name, buffer in module._buffers.items()}
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else _ghost_or_linear(child, device, dtype)
    return made


def _empty(value: Any, device: str) -> Any:  # noqa: ANN401
    if not isinstance(value, torch.Tensor):
        return value
    dtype = value.dtype if value.dtype.is_floating_point and value.element_size() > 1 else torch.int64
    return torch.zeros((), dtype=dtype, device=device).expand(value.shape)


def _ghost_or_linear(module: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    width, out = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if not isinstance(width, int) or not isinstance(out, int):
        return ghost(module, device, dtype)
    made = nn.Linear.__new__(nn.Linear)  # without initial values
    nn.Module.__init__(made)
    made.register_parameter("bias", None)
    made.in_features, made.out_features = width, out
    made.weight = nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(out, width), False)
    return made


def reaches(module: nn.Module, method: str, made: Callable[..., Any]) -> str | None:
    """Try to call a module so that it comes to ``signal`` in one of its methods.

    Args:
        module: it is only looked at.
        method: the method's name.
        made: the method, as a function, with ``signal`` in it.

    Returns:
        "" if it came there, None if it got to its end without, else what happened.
    """
    first = ""
    for device in ("meta", "cpu"):
        ended = False
        for tokens in _TOKENS:
            outcome = _tried(module, method, made, device, tokens)
            if outcome == "":
                return ""
            ended = ended or outcome is None
            first = first or outcome or ""
        if ended:
            return None
    return f"it could not be tried: {first}"


def _tried(module: nn.Module, method: str, made: Callable[..., Any], device: str, tokens: int) -> str | None:
    """The same as ``reaches`` with so many tokens on one device."""
    first = ""
    for arguments in itertools.islice(_arguments(module, tokens, device), _MOST):
        tried = ghost(module, device, float_dtype(module))
        tried.__dict__[method] = MethodType(made, tried)
        try:
            with torch.no_grad():
                tried.forward(**arguments)
            return None
        except Reached:
            return ""
        except Exception as error:  # whatever a model's code says to sizes that may be wrong
            first = first or _said(error)
    return first or "it takes nothing"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _arguments(module: nn.Module, tokens: int, device: str) -> Iterator[dict[str, Any]]:
    """What the forward of an attention may be called with."""
    forward = inspect.unwrap(type(module).forward)
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = {p.name for p in parameters if p.default is p.empty and p.name in names}
    if not names:
        return
    widths = _widths(module)
    others = widths if any(name.startswith(_HIDDEN[1:]) for name in names) else widths[:1]
    columns = _columns(module)
    masks = (False, True) if "attention_mask" in needed else (False,)
    for mask, real, rank, width, other, column in itertools.product(
        masks, (True, False), (3, 2), widths, others, columns
    ):
        lead = (1, tokens) if rank == 3 else (tokens,)
        given: dict[str, Any] = dict.fromkeys(needed)
        given[names[0]] = torch.zeros((), dtype=float_dtype(module), device=device).expand(*lead, width)
        if mask:
            given["attention_mask"] = torch.zeros((), dtype=torch.bool, device=device).expand(1, 1, tokens, tokens)
        for name in names[1:]:
            value = _argument(name, lead, (other, column), real, device)
            if value is not None:
                given[name] = value.to(float_dtype(module)) if name.startswith(_HIDDEN) else value
        yield given


class _Tables(tuple[torch.Tensor, ...]):
    """cos and sin; of whatever layer type somebody asks for."""

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401
        return self if isinstance(key, str) else super().__getitem__(key)


def _argument(name: str, lead: tuple[int, ...], sizes: tuple[int, int], real: bool, device: str) -> Any:  # noqa: ANN401
    width, columns = sizes
    zero = torch.zeros((), device=device)
    if name.startswith(("position_emb", "freqs_c")):
        table = zero.expand(*lead, columns)
        return _Tables((table, table)) if real else torch.complex(table, table)
    if name in ("cos", "sin"):
        return zero.expand(*lead, columns)
    if name in ("position_ids", "cache_position"):
        return torch.zeros(lead, dtype=torch.int64, device=device)
    if name == "cu_seqlens":
        return torch.tensor([0, lead[-1]], dtype=torch.int32)
    if name.startswith(_HIDDEN):
        return zero.expand(*lead, width)
    return None


def _widths(module: nn.Module) -> list[int]:
    """Widths that the hidden states may have, the likeliest first."""
    config = getattr(module, "config", None)
    found = [_size(owner, name) for owner in (module, config) for name in ("hidden_size", "embed_dim")]
    for part in module.modules():
        found += [_size(part, "in_features"), _size(part, "nx")]
    return list(dict.fromkeys(width for width in found if width > 0))[:6]


def _columns(module: nn.Module) -> list[int]:
    """How many columns tables may have: it matters only to code that uses them before, or in parts of the module."""
    found = []
    for owner in (getattr(module, "config", None), *module.modules()):
        for name in ("qk_rope_head_dim", "head_dim", "rotary_ndims", "rotary_dim"):
            size = _size(owner, name)
            found += [size, size // 2, size // 4]
    return list(dict.fromkeys([64, *(size for size in found if size > 0)]))[:8]


def _size(owner: object, name: str) -> int:
    """A number that somebody has under a name; 0 if none, as of configs that raise where layers have several."""
    try:
        size = getattr(owner, name, None)
    except Exception:  # transformers' AmbiguousGlobalPerLayerAttributeError is no AttributeError
        return 0
    return size if isinstance(size, int) else 0
