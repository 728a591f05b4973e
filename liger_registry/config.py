"""Launch configurations and the spaces they come from.

A ``Config`` is one assignment of parameters, a ``ConfigSpace`` the declared set of legal ones. Both are plain data: a
table names configs as JSON, and what is read back is accepted only if the space still contains it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from liger_registry.errors import ConfigOutsideSpaceError, InvalidSpaceError

if TYPE_CHECKING:
    from liger_registry.device import Device
    from liger_registry.problem import Problem

# The largest spaces of ours have a thousand configs before constraints; going through 100,000 takes a second.
MOST_CONFIGS = 100_000
Scalar = bool | int | float | str | None
Predicate = Callable[["Config", "Problem", "Device"], bool]
_F = TypeVar("_F", bound="Fields")


class Fields(Mapping[str, Scalar]):
    """An immutable, hashable, sorted mapping of names to JSON scalars, with attribute access."""

    __slots__ = ("_hash", "_items")
    _items: dict[str, Scalar]
    _hash: int

    def __init__(self, fields: Mapping[str, Scalar] | None = None, /, **more: Scalar) -> None:
        items = dict(sorted({**(fields or {}), **more}.items()))
        object.__setattr__(self, "_items", items)
        # The type of each value is part of identity: 1, 1.0 and True are equal in Python but not in a table.
        object.__setattr__(self, "_hash", hash(tuple((k, type(v), v) for k, v in items.items())))

    def __getitem__(self, name: str) -> Scalar:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a scalar of the declared kind, known to whoever declared it
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._items[name]
        except KeyError:
            raise AttributeError(f"no field {name!r}; there are: {', '.join(self._items) or 'none'}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fields):
            return NotImplemented
        return self._hash == other._hash and _typed(self._items) == _typed(other._items)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._items,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text})"

    def having(self: _F, **changes: Scalar) -> _F:
        """A copy in which the given fields are replaced or added."""
        return type(self)({**self._items, **changes})

    def without(self: _F, *names: str) -> _F:
        """A copy that lacks the given fields."""
        return type(self)({k: v for k, v in self._items.items() if k not in names})

    @property
    def text(self) -> str:
        """The canonical text, ``block_rows=4,num_warps=8``."""
        return ",".join(f"{k}={v}" for k, v in self._items.items())


def _typed(items: Mapping[str, Scalar]) -> list[tuple[str, type, Scalar]]:
    return [(k, type(v), v) for k, v in items.items()]


class Config(Fields):
    """One assignment of an implementation's parameters, ``Config(block_rows=4, num_warps=8)``."""

    __slots__ = ()


class ConfigSpace:
    """The declared set of configs of one implementation.

    Args:
        parameters: for each name the values it may take, in the order in which candidates are tried.

    Raises:
        InvalidSpaceError: a parameter without values, with values twice, or with a name or values that no table can
            hold; or so many configs that nobody could go through them.

    A space is a product narrowed by constraints::

        ConfigSpace(block_rows=[1, 2, 4], num_warps=[4, 8]).where(lambda c, p, d: c.block_rows * p.hidden <= 65536)
    """

    __slots__ = ("constraints", "parameters")

    def __init__(self, **parameters: Sequence[Scalar]) -> None:
        for name, values in parameters.items():
            what = f"parameter {name[:80]!r} of a config space"
            if isinstance(values, str) or not isinstance(values, Sequence) or values[:1] == values[:0]:
                raise InvalidSpaceError(
                    f"{what} has no values",
                    why=f"got {repr(values)[:80]}",
                    fix="give a non-empty list, such as num_warps=[4, 8]",
                )
            # Before the values are looked at one by one: a range of 10**12 is a sequence too.
            if values[MOST_CONFIGS:] != values[:0]:
                raise InvalidSpaceError(f"{what} has more than {MOST_CONFIGS:,} values", fix="name those worth a try")
            if not name.isidentifier() or len(name) > 64:
                raise InvalidSpaceError(f"{what} has a name that a table cannot hold", fix="use a short identifier")
            wrong = [v for v in values if not is_nameable(v)]
            if wrong or len(set(_typed_values(values))) != len(values):
                # A number of thousands of digits has no text in Python.
                bad = "an int" if wrong and isinstance(wrong[0], int) else repr(wrong[:1])[1:-1][:80]
                raise InvalidSpaceError(
                    f"{what} has values that a table cannot name",
                    why=f"{bad} is no JSON scalar of a usual size"
                    if wrong
                    else f"a value stands twice in {values!r:.80}",
                    fix="use each int, float, short printable str, bool or None once",
                )
        if len(parameters) > 64 or math.prod(map(len, parameters.values())) > MOST_CONFIGS:
            raise InvalidSpaceError(
                f"a config space has more than {MOST_CONFIGS:,} configs or 64 parameters",
                why=" x ".join(f"{len(values)} of {name}" for name, values in list(parameters.items())[:8]),
                fix="name the values worth a try; constraints narrow a space only after going through all of it",
            )
        self.parameters: dict[str, tuple[Scalar, ...]] = {k: tuple(v) for k, v in sorted(parameters.items())}
        self.constraints: tuple[tuple[Predicate, str], ...] = ()

    def where(self, predicate: Predicate, reason: str = "") -> ConfigSpace:
        """The same space narrowed by ``predicate(config, problem, device)``.

        Args:
            predicate: True where the config is legal.
            reason: what ``explain`` prints for a config that the predicate turns down.
        """
        space = ConfigSpace()
        space.parameters = self.parameters
        space.constraints = (*self.constraints, (predicate, reason or "a constraint of the space"))
        return space

    def __contains__(self, config: object) -> bool:
        return isinstance(config, Config) and self._outside(config) is None

    def configs(self, problem: Problem, device: Device) -> Iterator[Config]:
        """The legal configs for a problem on a device, in declared order."""
        for values in itertools.product(*self.parameters.values()):
            config = Config(dict(zip(self.parameters, values, strict=True)))
            if self.why_illegal(config, problem, device) is None:
                yield config

    def why_illegal(self, config: Config, problem: Problem, device: Device) -> str | None:
        """Why a config may not be used for a problem on a device; None if it may."""
        if (outside := self._outside(config)) is not None:
            return outside
        for predicate, reason in self.constraints:
            if not predicate(config, problem, device):
                return reason
        return None

    def parse(self, fields: Mapping[str, Scalar]) -> Config:
        """The config that ``fields`` name.

        Raises:
            ConfigOutsideSpaceError: a name is missing or unknown, or a value is not among the declared ones.
        """
        # The fields as they are: what cannot be hashed is no Config yet.
        if (outside := self._outside(fields)) is not None:
            text = ",".join(f"{name}={value}" for name, value in fields.items())
            raise ConfigOutsideSpaceError(
                f"config ({text}) is outside the declared space",
                why=outside,
                candidates=[f"{name} in {list(values)}" for name, values in self.parameters.items()],
                fix="take values that the space declares; `liger-tune explain` lists the candidates",
            )
        return Config(fields)

    def _outside(self, config: Mapping[str, Scalar]) -> str | None:
        if config.keys() != self.parameters.keys():
            return f"it has ({', '.join(config)}), the space has ({', '.join(self.parameters)})"
        for name, values in self.parameters.items():
            if (type(config[name]), config[name]) not in _typed_values(values):
                return f"{name}={config[name]!r} is not declared"
        return None


def is_scalar(value: object) -> bool:
    """Whether JSON can hold a value as a scalar; it has no NaN and no infinity."""
    return isinstance(value, bool | int | str | None) or (isinstance(value, float) and math.isfinite(value))


def is_nameable(value: object) -> bool:
    """Whether a table can hold a value of a config: a scalar of JSON that is neither huge nor a screen's control."""
    if isinstance(value, str):
        return len(value) <= 256 and value.isprintable()
    return is_scalar(value) and (not isinstance(value, int) or abs(value) < 1 << 63)


def _typed_values(values: Sequence[Scalar]) -> list[tuple[type, Scalar]]:
    return [(type(v), v) for v in values]
