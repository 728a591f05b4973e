"""Checks of what losses are constructed and called with, and what else several of them need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.errors import InvalidInputError, UnsupportedOptionError

if TYPE_CHECKING:
    import torch


def either(condition: torch.Tensor, yes: float, no: float, dtype: torch.dtype) -> torch.Tensor:
    """``yes`` where the condition holds, else ``no``.

    ``torch.where`` of two numbers makes tensors of them on the host, which a GPU has to be waited for with.
    """
    return condition.new_full((), yes, dtype=dtype).where(condition, no)


def check_choice(face: str, name: str, value: object, choices: Iterable[object]) -> None:
    """Raise UnsupportedOptionError if an option is not one of its values."""
    known = tuple(choices)
    if value not in known:
        raise UnsupportedOptionError(
            f"{name} of {face} cannot be {value!r}", candidates=map(repr, known), fix=f"pass {name}={known[0]!r}"
        )


def positive(value: float) -> bool:
    """Whether a number is above 0."""
    return value > 0


def finite(value: float) -> bool:
    """Whether a number is neither NaN nor infinite."""
    return abs(value) < math.inf


def at_least_zero(value: float) -> bool:
    """Whether a number is not below 0."""
    return value >= 0


def share(value: float) -> bool:
    """Whether a number is from 0 to 1."""
    return 0 <= value <= 1


def number(value: float) -> bool:
    """Whether a number is one."""
    return value == value


def check_number(
    face: str,
    name: str,
    value: Any,  # noqa: ANN401
    allowed: Callable[[float], bool],
    why: str,
    fix: str,
) -> None:
    """Raise UnsupportedOptionError unless a value is a number, and an allowed one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not allowed(value):
        raise UnsupportedOptionError(f"{name} of {face} cannot be {value!r}", why=why, fix=fix)


def check_flags(face: str, **flags: object) -> None:
    """Raise UnsupportedOptionError if one of them is not True or False."""
    for name, value in flags.items():
        check_choice(face, name, value, (False, True))


def check_unused(
    face: str, given: Mapping[str, Any], defaults: Mapping[str, Any], used: Iterable[str], why: str
) -> None:
    """Raise UnsupportedOptionError if an option that nothing would read has another value than its default.

    Args:
        face: for the message.
        given: options by name.
        defaults: their defaults.
        used: those that are read.
        why: what does not read the others.
    """
    for name in set(given) - set(used):
        if given[name] != defaults[name]:
            raise UnsupportedOptionError(
                f"{name}={given[name]!r} would do nothing in {face}",
                why=f"{why} does not read it",
                fix=f"leave it at {defaults[name]!r}, its default",
            )


def check_chunking(face: str, compiled: object, chunk_size: object) -> None:
    """Raise UnsupportedOptionError unless liger-kernel would take these; neither has an effect on results here."""
    check_flags(face, compiled=compiled)
    if type(chunk_size) is not int or chunk_size < 1:
        raise UnsupportedOptionError(
            f"chunk_size of {face} cannot be {chunk_size!r}",
            why="it counts sequences",
            fix="leave it out: how much is computed at once is chosen by memory, see Head(memory_budget=...)",
        )


def check_sequences(face: str, hidden: torch.Tensor, target: torch.Tensor, name: str = "target") -> None:
    """Raise InvalidInputError unless hidden is (sequences, tokens, hidden), and target (sequences, tokens)."""
    if hidden.dim() != 3 or hidden.shape[:2] != target.shape:
        raise InvalidInputError(
            f"_input of {face} has shape {tuple(hidden.shape)}, {name} {tuple(target.shape)}",
            why=f"they must be (sequences, tokens, hidden), and {name} (sequences, tokens)",
            fix=f"pass the hidden states of whole sequences, and {name} shifted so that each state has what follows it",
        )


def check_pairs(face: str, target: torch.Tensor) -> None:
    """Raise InvalidInputError unless the number of sequences is even."""
    if target.shape[0] % 2:
        raise InvalidInputError(
            f"{face} got {target.shape[0]} sequences",
            why="the first half of a batch are the chosen, the second the rejected ones of the same prompts",
            fix="pass torch.cat([chosen, rejected]) of as many chosen as rejected sequences",
        )


def check_shape(face: str, name: str, tensor: torch.Tensor | None, *shapes: tuple[int, ...]) -> None:
    """Raise InvalidInputError if a tensor that is there has none of some shapes."""
    if tensor is not None and tuple(tensor.shape) not in shapes:
        raise InvalidInputError(
            f"{name} of {face} has shape {tuple(tensor.shape)}",
            candidates=shapes,
            fix=f"pass {name} of one of these shapes",
        )


def check_reference(face: str, use_ref_model: bool, needed: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Raise InvalidInputError if a reference is asked for and not there, or there and not asked for.

    Args:
        face: for the message.
        use_ref_model: whether it is asked for.
        needed: ``ref_input`` and ``ref_weight``, both of which make a reference.
        others: what takes their place, or goes with them.
    """
    there = [name for name, value in {**needed, **others}.items() if value is not None]
    if not use_ref_model and there:
        raise InvalidInputError(
            f"{face} got {', '.join(there)}",
            why="use_ref_model=False, so that they would have no effect",
            fix="construct it with use_ref_model=True, or leave them out",
        )
    ready = all(value is not None for value in needed.values())
    stands_in = any(value is not None for name, value in others.items() if name != "ref_bias")
    if use_ref_model and not ready and not stands_in:
        raise InvalidInputError(
            f"{face} has no reference",
            why="use_ref_model=True takes ref_input and ref_weight, or log-probabilities that were computed before",
            fix="pass ref_input and ref_weight, or construct it with use_ref_model=False",
        )
    if stands_in and any(value is not None for value in (*needed.values(), others.get("ref_bias"))):
        raise InvalidInputError(
            f"{face} got two references: {', '.join(there)}",
            why="log-probabilities that were computed before take the place of ref_input, ref_weight and ref_bias",
            fix="pass the ones or the others",
        )
