"""Checks of what faces are constructed with, and of arguments that operations take under other names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from liger_registry.errors import UnsupportedOptionError

Tensor = torch.Tensor

REDUCTIONS = ("mean", "sum", "none")


def check_choice(face: str, name: str, value: object, choices: Iterable[object]) -> None:
    """Raise UnsupportedOptionError if an argument is not one of its values."""
    known = tuple(choices)
    if value not in known:
        raise UnsupportedOptionError(
            f"{name} of {face} cannot be {value!r}",
            candidates=map(repr, known),
            fix=f"pass {name}={known[0]!r}",
        )


def refuse(face: str, name: str, value: object, why: str, fix: str) -> None:
    """Raise UnsupportedOptionError for an argument that nothing here can honour, unless it is None."""
    if value is not None:
        raise UnsupportedOptionError(f"{name} of {face} cannot be {value!r}", why=why, fix=fix)


def initial(face: str, init_fn: str, size: int) -> torch.nn.Parameter:
    """A new weight of ones or zeros, (size,) of the default dtype."""
    check_choice(face, "init_fn", init_fn, ("ones", "zeros"))
    return torch.nn.Parameter(torch.ones(size) if init_fn == "ones" else torch.zeros(size))


def cap(face: str, softcap: float | None) -> float:
    """The option ``softcap`` of operations, for which 0 is none."""
    if softcap is None:
        return 0.0
    if not softcap > 0:
        raise UnsupportedOptionError(
            f"softcap of {face} cannot be {softcap!r}", why="it bounds the logits", fix="pass a number above 0, or None"
        )
    return float(softcap)


def check_loss(face: str, label_smoothing: float, reduction: str, softcap: float | None) -> None:
    """Raise UnsupportedOptionError unless a cross-entropy can be made with these."""
    if not 0 <= label_smoothing <= 1:
        raise UnsupportedOptionError(
            f"label_smoothing of {face} cannot be {label_smoothing!r}",
            why="it is the share of the uniform distribution",
            fix="pass a number from 0 to 1",
        )
    check_choice(face, "reduction", reduction, REDUCTIONS)
    cap(face, softcap)


def activation_of(face: str, config: Any, names: Iterable[str], attributes: Iterable[str]) -> str:  # noqa: ANN401
    """The activation that a model's config names, in the first of some attributes that is there.

    Raises:
        UnsupportedOptionError: another activation than the face computes.
    """
    known = tuple(names)
    given = [value for value in (getattr(config, name, None) for name in attributes) if value is not None]
    found = given[0] if given else known[0]
    if found not in known:
        raise UnsupportedOptionError(
            f"{face} does not compute the activation {found!r}",
            candidates=map(repr, known),
            fix="use the model's own layer, or the face of its activation",
        )
    return str(found)


def accumulation(face: str, accum_dtype: torch.dtype | None, hidden: Tensor) -> str:
    """The option ``accumulate`` of operations for a dtype that gradients of the head are summed in.

    Args:
        face: for the message.
        accum_dtype: float32, the dtype of hidden as the products see it, or None for the default.
        hidden: what the head is applied to.
    """
    if accum_dtype is None:
        return "auto"
    if accum_dtype == torch.float32:
        return "float32"
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    if accum_dtype == dtype:
        return "input"
    raise UnsupportedOptionError(
        f"accum_dtype of {face} cannot be {accum_dtype}",
        why=f"gradients are summed in fp32 or in the dtype of the products, here {dtype}",
        candidates=("None", "torch.float32", str(dtype)),
        fix="pass accum_dtype=torch.float32, or None",
    )
