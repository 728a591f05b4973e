"""Rotary functions of models: which of them ``rope`` computes, and with which options.

A function is taken for one only if its code does nothing but arithmetic (``linear``), so that it is the same map as
``rope`` with some options if the two agree on random numbers. They are compared bit for bit, in each pair of dtypes
that is to be served: what differs in a rounding is another function.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from liger_registry.ops.rope import reference
from liger_registry.transformers.engine.linear import LARGEST_CONSTANT, NotLinear, inputs_of

Tensor = torch.Tensor
Function = Callable[..., Any]
Dtypes = tuple[torch.dtype, torch.dtype]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES: tuple[Dtypes, ...] = tuple((heads, tables) for heads in _FLOATS for tables in _FLOATS)
# Sizes to compare in, all beyond the constants of such functions. Heads are odd in number, and of q and k different.
_BATCH, _HEADS, _TOKENS, _WIDTHS, _SECTIONS = 6, (7, 5), 9, (20, 28), (2, 3, 5)
assert min(_BATCH, *_HEADS, _TOKENS, *_WIDTHS) > LARGEST_CONSTANT


class NotRotary(Exception):
    """A function that ``rope`` does not compute; ``reason`` says why, for the report."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Roles(NamedTuple):
    """Which parameters of a function are what.

    Attributes:
        names: all, in order.
        heads: one or two that are turned.
        tables: cos and sin, or one of complex numbers.
        dim: says where the heads are, "" if none does.
        positions: indexes the tables, or "".
        sections: how many pairs take their angles from which of three tables, or "".
        needed: those without a default.
    """

    names: tuple[str, ...]
    heads: tuple[str, ...]
    tables: tuple[str, ...]
    dim: str = ""
    positions: str = ""
    sections: str = ""
    needed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pairs:
    """Which columns are turned by which columns of the tables.

    Attributes:
        interleaved, deinterleave, half: options of ``rope``.
        first: only the first halves of the tables' columns count.
        negated: the sine has the other sign.
        partial: the tables may be narrower than the heads.
        last: then the last columns are turned, not the first ones.
        sorted: the even columns are put before the odd ones first.
    """

    interleaved: bool = False
    deinterleave: bool = False
    half: bool = False
    first: bool = False
    negated: bool = False
    partial: bool = False
    last: bool = False
    sorted: bool = False

    def width(self, columns: int) -> int:
        """How many columns of a head are turned by tables of so many."""
        return columns * 2 if self.half and not self.first else columns

    def tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The tables as ``rope`` takes them."""
        if self.first:
            columns = cos.shape[-1] // 2
            cos, sin = cos[..., :columns], sin[..., :columns]
        return cos, -sin if self.negated else sin

    def heads(self, x: Tensor) -> Tensor:
        """Heads as ``rope`` takes them."""
        return torch.cat((x[..., 0::2], x[..., 1::2]), -1) if self.sorted else x

    def options(self, wide: bool) -> dict[str, bool]:
        """The options of ``rope``."""
        return {"interleaved": self.interleaved, "deinterleave": self.deinterleave, "half": self.half, "wide": wide}


@dataclass(frozen=True, slots=True)
class Rotation:
    """What ``rope`` computes like a function.

    Attributes:
        roles: of its parameters.
        pairs: the columns.
        wide: by dtypes of heads and tables whether it rounds once; others were not compared, or differ.
        layouts: by ranks of heads and tables the dimension of the heads, from the end, where no parameter tells.
        dim: the default of the parameter that does.
        alone: whether it returns a tensor, and not a pair, for keys that are None; None if it takes no such.
    """

    roles: Roles
    pairs: Pairs
    wide: Mapping[Dtypes, bool]
    layouts: Mapping[tuple[int, int], int]
    dim: int = 1
    alone: bool | None = None

    @property
    def name(self) -> str:
        """In words, for the report."""
        pairs = self.pairs
        words = ["neighbours" if pairs.interleaved or pairs.sorted else "halves"]
        words += ["of partial heads"] if pairs.partial else []
        words += ["by complex tables"] if len(self.roles.tables) == 1 else []
        words += ["by sections of three tables"] if self.roles.sections else []
        return " ".join(words)


class Case(NamedTuple):
    """An order of dimensions: where heads are, from the end, ranks of heads and tables, and a parameter's value."""

    dim: int
    ranks: tuple[int, int]
    parameter: int | None = None


_PARAMETER = (Case(-3, (4, 3), 1), Case(-2, (4, 3), 2))
_FIXED = (
    Case(-3, (4, 3)),
    Case(-2, (4, 3)),
    Case(-3, (4, 2)),
    Case(-3, (4, 4)),
    Case(-3, (3, 2)),
    Case(-2, (3, 2)),
)


def recognise(function: Function) -> Rotation:
    """What ``rope`` computes like this function.

    Raises:
        NotRotary: it cannot be read, does something else, or gives other numbers with every option there is.
    """
    roles = _roles(function)
    with torch.no_grad(), _disable_current_modes():
        pairs, cases = _structure(function, roles)
        wide = {}
        for dtypes in _DTYPES:
            for option in (False, True):
                if all(_agrees(function, roles, pairs, case, dtypes, option) for case in cases):
                    wide[dtypes] = option
                    break
        if (torch.float32, torch.float32) not in wide:
            raise NotRotary("it rounds as no option of rope does")
        layouts = {} if roles.dim else {case.ranks: case.dim for case in cases}
        return Rotation(roles, pairs, wide, layouts, _default(function, roles.dim), _alone(function, roles, cases[0]))


def _default(function: Function, name: str) -> int:
    if not name:
        return 1
    default = inspect.signature(function).parameters[name].default
    return default if isinstance(default, int) else 1


def _roles(function: Function) -> Roles:
    try:
        used = inputs_of(function)
    except NotLinear as error:
        raise NotRotary(error.reason) from error
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        names = tuple(name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD)
    else:
        names = tuple(parameters)
    tables: tuple[str, ...] = ("cos", "sin")
    if not set(tables) <= set(used):
        tables = tuple(name for name in used if name.startswith("freqs_c"))
    if len(tables) not in (1, 2) or (len(tables) == 2 and tables != ("cos", "sin")):
        raise NotRotary("it has no cos and sin")
    known = {"dim": "unsqueeze_dim", "positions": "position_ids", "sections": "mrope_section"}
    found = {role: name if name in used else "" for role, name in known.items()}
    heads = tuple(name for name in used if name not in tables and name not in found.values())
    if not 1 <= len(heads) <= 2:
        raise NotRotary(f"it computes of {', '.join(heads) or 'nothing'}, which is no pair of queries and keys")
    needed = tuple(name for name, p in parameters.items() if p.default is p.empty and name in names)
    return Roles(names, heads, tables, **found, needed=needed)


def _structure(function: Function, roles: Roles) -> tuple[Pairs, list[Case]]:
    """Which columns are turned by which, and where heads may be."""
    for pairs in _candidates(len(roles.tables) == 1):
        every = _PARAMETER if roles.dim else _FIXED
        cases = [case for case in every if _agrees(function, roles, pairs, case)]
        if not cases or (roles.dim and len(cases) < len(every)):
            continue
        for last in (False, True):
            narrow = replace(pairs, partial=True, last=last)
            if all(_agrees(function, roles, narrow, case) for case in cases):
                return narrow, cases
        return pairs, cases
    raise NotRotary("it turns no pairs of columns that rope knows")


def _candidates(complex_tables: bool) -> Iterator[Pairs]:
    if complex_tables:
        yield Pairs(interleaved=True, half=True)
        return
    columns = ((False, False), (True, False), (True, True))
    for negated, (half, first), interleaved in itertools.product((False, True), columns, (False, True)):
        for deinterleave in (False, True) if interleaved and half else (False,):
            yield Pairs(interleaved, deinterleave, half, first, negated)
    yield Pairs(sorted=True)


def _alone(function: Function, roles: Roles, case: Case) -> bool | None:
    """What the function gives for keys that are None."""
    if len(roles.heads) < 2:
        return None
    arguments = example(roles, Pairs(half=True), case, (torch.float32, torch.float32))
    arguments[roles.heads[1]] = None
    for columns in (10, 20):  # of tables with a column a pair, or twice as many
        for name in roles.tables:
            arguments[name] = arguments[name][..., :1].expand(*arguments[name].shape[:-1], columns).clone()
        try:
            found = function(**arguments)
        except Exception:  # what it raises for keys that it needs is its own affair
            continue
        if isinstance(found, Tensor):
            return True
        if isinstance(found, tuple) and len(found) == 2 and found[1] is None:
            return False
    return None


def example(roles: Roles, pairs: Pairs, case: Case, dtypes: Dtypes) -> dict[str, Any]:
    """Random arguments of the function."""
    generator = torch.Generator().manual_seed(len(roles.names) + case.dim)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    width = _WIDTHS[case.dim + 3]
    turned = width - 8 if pairs.partial else width
    columns = turned // 2 if pairs.half and not pairs.first else turned
    found: dict[str, Any] = dict.fromkeys(roles.needed)
    for name, heads in zip(roles.heads, _HEADS, strict=False):
        x = random(_BATCH, heads, _TOKENS, width).to(dtypes[0])
        x = x.transpose(1, 2) if case.dim == -2 else x
        found[name] = x if case.ranks[0] == 4 else x[0]
    rank = case.ranks[1]
    lead: tuple[int, ...] = {2: (_TOKENS,), 3: (_BATCH, _TOKENS), 4: (_BATCH, 1, _TOKENS)}[rank]
    if roles.positions:
        lead = (_TOKENS + 6,)
        found[roles.positions] = torch.randint(lead[0], (_BATCH, _TOKENS), generator=generator, device="cpu")
    if roles.sections:
        lead = (3, _BATCH, _TOKENS)
        middle = columns // 2 - _SECTIONS[0] - _SECTIONS[1]
        found[roles.sections] = [_SECTIONS[0], middle, _SECTIONS[1]]
    for name in roles.tables:
        x = random(*lead, columns).to(dtypes[1])
        found[name] = x if len(roles.tables) == 2 else torch.complex(x, random(*lead, columns).to(dtypes[1]))
    if case.parameter is not None:
        found[roles.dim] = case.parameter
    return found


def gathered(roles: Roles, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """cos and sin of the tokens, as the function makes them of its arguments."""
    if len(roles.tables) == 1:
        return given[roles.tables[0]].real, given[roles.tables[0]].imag
    cos, sin = (given[name] for name in roles.tables)
    if roles.positions:
        cos, sin = cos[given[roles.positions]], sin[given[roles.positions]]
    if roles.sections:
        sizes = list(given[roles.sections]) * 2
        cos, sin = (
            torch.cat([part[n % 3] for n, part in enumerate(table.split(sizes, -1))], -1) for table in (cos, sin)
        )
    return cos, sin


def _agrees(
    function: Function,
    roles: Roles,
    pairs: Pairs,
    case: Case,
    dtypes: Dtypes = (torch.float32, torch.float32),
    wide: bool = False,
) -> bool:
    """Whether the function gives what ``rope`` gives, bit for bit."""
    complex_tables = len(roles.tables) == 1
    if complex_tables and dtypes[1] != torch.float32:
        return False
    arguments = example(roles, pairs, case, dtypes)
    try:
        found = function(**arguments)
    except Exception:  # sizes or dtypes that it does not take; it is not called with those through rope
        return False
    results = found if isinstance(found, tuple) else (found,)
    if len(results) != len(roles.heads) or isinstance(found, tuple) != (len(roles.heads) == 2):
        return False
    cos, sin = pairs.tables(*gathered(roles, arguments))
    for name, result in zip(roles.heads, results, strict=True):
        x = arguments[name]
        expected = _expected(x, cos, sin, pairs, case, wide)
        if not isinstance(result, Tensor) or result.shape != expected.shape or result.dtype != expected.dtype:
            return False
        if complex_tables:
            # Products of complex numbers may be fused, which rounds once less.
            if not torch.allclose(result.float(), expected.float(), rtol=2 * torch.finfo(x.dtype).eps, atol=1e-5):
                return False
        elif not torch.equal(result, expected):
            return False
    return True


def _expected(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs, case: Case, wide: bool) -> Tensor:
    x = x if case.ranks[0] == 4 else x[None]
    x = x.transpose(1, 2) if case.dim == -2 else x
    x, options = pairs.heads(x), pairs.options(wide)
    if pairs.last:
        width = pairs.width(cos.shape[-1])
        turned = reference(x[..., -width:], None, cos, sin, **options)[0]
        result = torch.cat((x[..., :-width], turned), -1)
    else:
        result = reference(x, None, cos, sin, **options)[0]
    result = result.transpose(1, 2) if case.dim == -2 else result
    return result if case.ranks[0] == 4 else result[0]
