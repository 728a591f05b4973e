"""Odd problems of an operation, for the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from liger_registry.config import Fields
from liger_registry.errors import RegistryError
from liger_registry.op import DimKind, Op
from liger_registry.problem import BACKWARD, FORWARD, Problem

WIDTHS = (1, 3, 41, 1536)
ROWS = (0, 1, 5)
#: More rows than any tile, with a tail, at one width.
TALL = 261
DTYPES = ("float32", "bfloat16", "float16", "float64")


def problems_for(op: Op, scheme: str, phase: str) -> list[Problem]:
    """Odd problems of an operation: widths 1, 3, 41 and 1536, 0, 1, 5 and 261 rows, all dtypes and choices.

    Dims are actual sizes, not buckets. Sizes that the operation's contract turns down are left out. A contract may list
    its own instead.
    """
    if op.odd is not None:
        return _declared(op, scheme, phase)
    sizes = [(5, width) for width in WIDTHS] + [(rows, 41) for rows in (*ROWS[:2], TALL)]
    found: dict[Problem, None] = {}
    every = op.differentiable
    for dtype in DTYPES:
        for rows, width in sizes:
            found.update(dict.fromkeys(_problems(op, scheme, phase, rows, width, dtype, every)))
    absent = [i.name for i in op.inputs if i.optional]
    for name in absent:
        found.update(dict.fromkeys(_problems(op, scheme, phase, 5, 41, "bfloat16", every, absent=name)))
    for option in op.options:
        for value in option.choices or ((False, True) if option.kind is bool else ()):
            flags = {option.name: value}
            found.update(dict.fromkeys(_problems(op, scheme, phase, 5, 41, "bfloat16", every, flags=flags)))
    if phase == BACKWARD:
        for name in every:
            found.update(dict.fromkeys(_problems(op, scheme, phase, 5, 41, "bfloat16", (name,))))
    return list(found)


def _declared(op: Op, scheme: str, phase: str) -> list[Problem]:
    """The problems that a contract lists, with all gradients; those of the first in bf16 also one by one."""
    assert op.odd is not None
    found: dict[Problem, None] = {}
    needed = phase == BACKWARD or op.scheme(scheme).gradients
    for dtype in ("bfloat16", *(d for d in DTYPES if d != "bfloat16")):
        for number, description in enumerate(op.odd(dtype)):
            there = tuple(description.dtypes.get(name, dtype) != "none" for name in op.differentiable)
            wanted = [there]
            if needed and number == 0 and dtype == "bfloat16":
                wanted += [tuple(i == n for i in range(len(there))) for n, here in enumerate(there) if here]
                wanted += [(False,) * len(there)] if phase == FORWARD else []
            for needs in wanted if needed else [()]:
                problem = op.problem(description, phase, scheme, needs)
                problem = replace(problem, dims=description.dims)
                if op.scheme(scheme) not in op.schemes_for(op.options_of(problem)):
                    continue
                budget = op.budget(problem)
                found[problem if budget is None else replace(problem, flags=problem.flags.having(budget=budget))] = None
    return list(found)


def _problems(
    op: Op,
    scheme: str,
    phase: str,
    rows: int,
    width: int,
    dtype: str,
    needs: Sequence[str],
    absent: str = "",
    flags: dict[str, Any] | None = None,
) -> Iterator[Problem]:
    """The problem that the contract makes of inputs of these sizes; none if it turns them down."""
    dims = Fields({name: width if kind is DimKind.EXACT else rows for name, kind in op.dims.items()})
    dtypes = Fields({i.name: "none" if i.name == absent else dtype for i in op.inputs})
    options = {o.name: o.default for o in op.options} | (flags or {})
    try:
        inputs = op.example(Problem(op.name, scheme, phase, dims, dtypes, Fields(options)), "cpu", 0, "random")
        op.validate(inputs, options)
        described = op.describe(inputs, options)
    except (RegistryError, ValueError, RuntimeError, IndexError):
        return
    if described.dims != dims or any(described.flags.get(n, v) != v for n, v in (flags or {}).items()):
        return
    named = {} if phase == FORWARD else {"needs": ",".join(n for n in op.differentiable if n in needs and n != absent)}
    if phase == FORWARD or named["needs"]:
        yield Problem(op.name, scheme, phase, dims, described.dtypes, described.flags.having(**named))
