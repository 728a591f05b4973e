"""What the rest of the package may know about the Triton that is installed; Triton itself is imported on first use."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import Any

# The argument convention of a compiled kernel's `run` was read in the sources of 3.4.0, 3.6.0, 3.7.1 and 3.9.0: grid x,
# y, z, raw stream, function, packed metadata, launch metadata, enter hook, exit hook, then every argument of the
# signature in order, constexprs included. From 3.10 on launches go through `kernel[grid]` until somebody has read it.
_PREPARED_FROM, _PREPARED_BELOW = (3, 4), (3, 10)

#: Keywords of a launch that configure the compiler; every other one names a ``tl.constexpr`` parameter.
LAUNCH_OPTIONS = frozenset(
    {
        "num_warps",
        "num_stages",
        "num_ctas",
        "maxnreg",
        "enable_fp_fusion",
        "launch_cooperative_grid",
        "launch_pdl",
        "waves_per_eu",
        "matrix_instr_nonkdim",
        "kpack",
        "schedule_hint",
    }
)


@lru_cache(maxsize=1)
def triton_available() -> bool:
    """Whether Triton is installed; does not import it."""
    try:
        return importlib.util.find_spec("triton") is not None
    except (ImportError, ValueError):  # ValueError: somebody put a module without a spec into sys.modules
        return False


@lru_cache(maxsize=1)
def triton_release() -> tuple[int, int] | None:
    """Major and minor of the installed Triton, ``(3, 7)``; None without one. Reads the package's metadata."""
    if not triton_available():
        return None
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-windows"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        break
    else:
        import triton

        version = str(triton.__version__)
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def triton_version() -> str:
    """The installed Triton's minor version, ``"3.7"``; ``"none"`` without one."""
    release = triton_release()
    return "none" if release is None else f"{release[0]}.{release[1]}"


def interpreting() -> bool:
    """Whether ``@triton.jit`` makes functions that Triton's interpreter runs on the CPU (``TRITON_INTERPRET``)."""
    if not triton_available():
        return False
    knobs = sys.modules.get("triton.knobs")
    if knobs is not None:
        return bool(knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def prepared_supported() -> bool:
    """Whether compiled kernels of the installed Triton may be called without going through ``kernel[grid]``."""
    release = triton_release()
    return release is not None and _PREPARED_FROM <= release < _PREPARED_BELOW


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel: what Triton specialises on, and its default if it has one."""

    name: str
    constexpr: bool
    specialize: bool
    specialize_alignment: bool
    default: object = inspect.Parameter.empty

    @property
    def required(self) -> bool:
        """Whether a launch must give it."""
        return self.default is inspect.Parameter.empty


def kernel_parameters(kernel: Any) -> tuple[Parameter, ...]:  # noqa: ANN401 - Triton's types are not importable here
    """The parameters of a kernel, compiled or interpreted, in the order of its signature."""
    marks = {p.name: (p.do_not_specialize, p.do_not_specialize_on_alignment) for p in getattr(kernel, "params", ())}
    parameters = []
    for parameter in inspect.signature(kernel.fn).parameters.values():
        note = parameter.annotation
        text = note if isinstance(note, str) else getattr(note, "__name__", str(note))
        unmarked, unaligned = marks.get(parameter.name, (False, False))
        parameters.append(
            Parameter(
                parameter.name, "constexpr" in text, not unmarked, not unmarked and not unaligned, parameter.default
            )
        )
    return tuple(parameters)


def bind(
    kernel_name: str, parameters: Sequence[Parameter], count: int, names: Sequence[str]
) -> tuple[tuple[int | str | None, ...], tuple[str, ...]]:
    """Where each argument of a kernel comes from, for ``count`` positional arguments and keywords ``names``.

    Returns:
        For each parameter of the signature an index into the positional arguments, the name of a keyword, or None for
        its default; and those keywords that are launch options.

    Raises:
        TypeError: an argument too many, one missing, or a keyword that is neither a constexpr nor a launch option.
    """
    sources: list[int | str | None] = []
    taken = 0
    for parameter in parameters:
        if parameter.constexpr and parameter.name in names:
            sources.append(parameter.name)
        elif not parameter.constexpr and taken < count:
            sources.append(taken)
            taken += 1
        elif parameter.required:
            kind = "constexpr " if parameter.constexpr else ""
            raise TypeError(f"launch of {kernel_name}() lacks {kind}parameter {parameter.name!r}")
        else:
            sources.append(None)
    if taken < count:
        raise TypeError(
            f"launch of {kernel_name}() gives {count} arguments for {taken} parameters that are no constexpr"
        )
    options = tuple(name for name in names if name not in sources)
    unknown = [name for name in options if name not in LAUNCH_OPTIONS]
    if unknown:
        constexprs = [p.name for p in parameters if p.constexpr]
        raise TypeError(
            f"launch of {kernel_name}() has no keyword {unknown[0]!r}; its constexprs are {', '.join(constexprs)}, "
            f"and launch options are {', '.join(sorted(LAUNCH_OPTIONS))}"
        )
    return tuple(sources), options
