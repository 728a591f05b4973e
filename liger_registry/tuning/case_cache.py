"""Cases that several candidates share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from liger_registry.config import Fields
from liger_registry.op import DimKind, Op
from liger_registry.problem import Problem
from liger_registry.tuning.cases import Case, Recipe, recipes


class CaseCache:
    """Cases that several candidates share, up to a number of bytes; the worker holds one."""

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self._max = max_bytes
        self._bytes = 0
        self._group: object = None
        self._cases: dict[tuple[Recipe, str], Case] = {}
        self._recipes: dict[tuple[Any, ...], list[Recipe]] = {}

    def get(
        self,
        op: Op,
        problem: Problem,
        proxies: Sequence[Mapping[str, int]],
        styles: Sequence[str],
        seed: int,
        device: Any,  # noqa: ANN401
        full: bool = True,
        walk: Mapping[str, int] | None = None,
    ) -> Sequence[Callable[[], Case]]:
        """The cases of a problem's proxies, each made when it is called for; arguments are those of ``recipes``."""
        # Candidates differ in their proxies and problems in their rows, and many of the cases are the same.
        exact = {n: size for n, size in problem.dims.items() if op.dims.get(n) is not DimKind.BUCKET}
        group = (problem.op, problem.scheme, problem.phase, Fields(exact), problem.dtypes, problem.flags)
        if group != self._group:
            # Problems come one after the other: another one's cases are not asked for again soon.
            self.clear()
            self._group = group
        there = tuple(problem.having(**dims) for dims in proxies)
        key = (there, tuple(styles), seed, full, None if walk is None else problem.having(**walk))
        if key not in self._recipes:
            self._recipes[key] = recipes(op, problem, proxies, styles, seed, full, walk)

        def at(recipe: Recipe) -> Case:
            if recipe.units:  # the tensors are the same for any device
                return recipe.on_its_units(at(replace(recipe, units=0)))
            case = self._cases.get((recipe, str(device)))
            if case is None:
                case = recipe.make(op, device)
                if self._bytes + case.bytes <= self._max:
                    self._cases[recipe, str(device)] = case
                    self._bytes += case.bytes
            return case

        return [lambda recipe=recipe: at(recipe) for recipe in self._recipes[key]]  # type: ignore[misc]

    def clear(self) -> None:
        """Let go of everything held."""
        self._cases.clear()
        self._recipes.clear()
        self._bytes = 0
