"""What a contract is made of: inputs, options, schemes, and the description of one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from liger_registry.config import Fields, Scalar
from liger_registry.errors import UnsupportedOptionError

if TYPE_CHECKING:
    import torch


class DimKind(Enum):
    """How a size enters the problem key."""

    EXACT = "exact"
    BUCKET = "bucket"


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor an operation takes.

    Attributes:
        name: its name in signatures and problem keys.
        optional: None may be given in its place.
        differentiable: gradients flow to it.
    """

    name: str
    optional: bool = False
    differentiable: bool = True


@dataclass(frozen=True, slots=True)
class Option:
    """One option of an operation.

    Attributes:
        name: its keyword.
        kind: the Python type of its values; an int is taken where a float is wanted.
        default: the value if the caller gives none.
        choices: the only values it takes, if it is an enumeration.
        minimum: the least value, if it is a number.
        doc: one sentence for the documentation.
    """

    name: str
    kind: type
    default: Scalar
    choices: tuple[Scalar, ...] = ()
    minimum: float | None = None
    doc: str = ""

    def validate(self, op: str, value: object) -> Scalar:
        """``value`` as this option's kind.

        Raises:
            UnsupportedOptionError: of another kind, not among the choices, below the least, or not finite.
        """
        if self.kind is float and type(value) is int and abs(value) < 2**63:
            value = float(value)
        if not isinstance(value, bool | int | float | str) or type(value) is not self.kind:
            why = f"it takes a {self.kind.__name__}, not {type(value).__name__} {value!r}"
        elif self.choices and value not in self.choices:
            why = f"{value!r} is not among its values"
        elif isinstance(value, float) and not abs(value) < math.inf:
            why = "NaN and infinity are no values"
        elif self.minimum is not None and not (isinstance(value, int | float) and value >= self.minimum):
            why = f"{value!r} is below {self.minimum}"
        else:
            return value
        raise UnsupportedOptionError(
            f"option {self.name!r} of {op} cannot be {value!r}",
            why=why,
            candidates=map(repr, self.choices or (self.default,)),
            fix=f"pass {self.name}={self.default!r}, its default, or leave it out",
        )


@dataclass(frozen=True, slots=True)
class Scheme:
    """What passes from forward to backward.

    Attributes:
        name: ``default`` where there is one.
        saved_inputs: inputs that backward reads.
        saved: names of the extra tensors that forward returns behind the outputs, for backward alone.
        allocate: ``(*inputs, **options)`` to empty tensors of the shapes, dtypes and device of ``outputs + saved``,
            None for what a call does not have; it decides nothing and reads no values, so it serves as the fake
            implementation too.
        reference: ``(*inputs, **options)`` to ``outputs + saved`` in plain PyTorch.
        gradients: forward computes gradients already. Its problem then says which are needed, and its launch functions,
            ``allocate`` and ``reference`` take ``needs`` as backward's do.
        owned: those of ``saved`` that the first backward may write and hand over; a second one runs forward again.
            They stand at the end of ``saved``, and such a scheme saves all inputs.
        saved_outputs: outputs that backward reads too; it gets them between ``saved_inputs`` and ``saved``.
        backward: ``(*grad_outputs, *saved_inputs, *saved_outputs, *saved, needs, **options)`` to gradients in plain
            PyTorch; None where the inputs are all saved, and differentiating ``Op.reference`` serves.
        excludes: for options the values with which this scheme cannot serve a call.
    """

    name: str
    saved_inputs: tuple[str, ...]
    saved: tuple[str, ...]
    allocate: Callable[..., tuple[torch.Tensor | None, ...]]
    reference: Callable[..., tuple[torch.Tensor | None, ...]]
    gradients: bool = False
    owned: tuple[str, ...] = ()
    saved_outputs: tuple[str, ...] = ()
    excludes: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)
    backward: Callable[..., tuple[torch.Tensor | None, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Description:
    """What one call looks like: actual sizes, dtype names, flags that change the code."""

    dims: Fields
    dtypes: Fields
    flags: Fields
