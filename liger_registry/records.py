"""What a launch was asked for, as plain data: the one record that offline compiles, pruning and reports work from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Argument:
    """What Triton knows of a runtime argument when it compiles.

    Attributes:
        kind: ``pointer``, ``int``, ``float``, ``bool`` or ``none``.
        dtype: a pointer's dtype, ``bfloat16``.
        aligned: whether a pointer is divisible by 16 bytes.
        small: whether 32-bit byte offsets reach all of a pointer's storage (AMD specialises on it).
        value: an int that stands for all that Triton specialises alike: 1, or 16 or 17 above 0, 2**32 or 2**63; where
            it does not specialise, only the base counts, and is stood for by 17 above it.
    """

    kind: str
    dtype: str = ""
    aligned: bool = True
    small: bool = True
    value: int = 0

    @classmethod
    def of(cls, value: Any, aligned: bool = True, specialize: bool = True) -> Argument:  # noqa: ANN401
        """The argument as a launch would see it, on memory that is or is not aligned.

        Args:
            value: what a launch is given.
            aligned: whether its memory is taken to be aligned.
            specialize: whether the kernel's parameter lets Triton specialise on an int's value.
        """
        if value is None:
            return cls("none")
        if isinstance(value, bool):
            return cls("bool")
        if isinstance(value, int):
            base = 0 if -(2**31) <= value < 2**31 else 2**63 if value >= 2**63 else 2**32
            if not specialize:
                return cls("int", value=base + 17)
            return cls("int", value=1 if value == 1 else base + (17 if value % 16 else 16))
        if isinstance(value, float):
            return cls("float")
        if not hasattr(value, "data_ptr"):
            raise TypeError(f"a kernel takes no {type(value).__name__} as an argument")
        offset = value.storage_offset() * value.element_size()
        small = value.untyped_storage().size() < 2**31
        return cls("pointer", str(value.dtype).removeprefix("torch."), aligned and offset % 16 == 0, small)


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One launch as it was asked for: all that decides which binary runs, and the grid.

    Attributes:
        kernel: where the kernel is, ``module:qualname``.
        grid: the block counts.
        arguments: one for each positional argument.
        constexprs: the ``tl.constexpr`` parameters that were given, by name, sorted.
        options: the launch options that were given, by name, sorted.
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[Argument, ...]
    constexprs: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def text(self) -> str:
        """The constexprs and options as one line, ``block=1024,num_warps=4``."""
        return ",".join(f"{name}={value}" for name, value in (*self.constexprs, *self.options))
