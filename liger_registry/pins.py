"""Pins: implementations that were asked for by name, by handle, by block or by environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from liger_registry.catalog import Catalog
from liger_registry.config import Config, Scalar
from liger_registry.errors import ConfigOutsideSpaceError, NoImplementationError, UnknownImplementationError
from liger_registry.implementation import Implementation
from liger_registry.op import Op
from liger_registry.problem import FORWARD, Problem

# ``(op or op/phase, implementation, config or None)``; the first that matches counts.
Pins = tuple[tuple[str, str, "Config | None"], ...]
Names = str | Mapping[str, str] | None

#: What ``registry.use`` pinned in this thread or task.
current: ContextVar[Pins] = ContextVar("liger_registry_pins", default=())


def pins_for(catalog: Catalog, op: Op, implementation: Names, config: Mapping[str, Scalar] | None) -> Pins:
    """The pins that an implementation by name, or names by phase, and a config stand for.

    Raises:
        UnknownImplementationError: no such implementation, or a config without one.
        ConfigOutsideSpaceError: the config is in the space of none that has the name, or no config at all.
    """
    _check_kinds(catalog, op, implementation, config)
    if implementation is None:
        if config is not None:
            raise UnknownImplementationError(
                f"a config of {op.name} was given without its implementation",
                candidates=[i.id for i in catalog.implementations(op.name)],
                fix="pass implementation= too",
            )
        return ()
    pins: list[tuple[str, str, Config | None]] = []
    named = implementation if isinstance(implementation, Mapping) else {"": implementation}
    for phase, name in named.items():
        there = [i for i in catalog.implementations(op.name) if phase in ("", i.phase) and name in (i.id, i.name)]
        if not there:
            catalog.find(op.name, op.schemes[0].name, phase or FORWARD, name)  # raises with the candidates
        # Of one name on several vendors, each has a space of its own; the device that is called for decides.
        parsed = _parse(there, config) if config is not None else None
        # A config belongs to one phase; without a phase it is that of the first that has the implementation.
        target = f"{op.name}/{phase or there[0].phase}" if phase or parsed is not None else op.name
        pins.append((target, name, parsed))
    return tuple(pins)


def _check_kinds(catalog: Catalog, op: Op, implementation: object, config: object) -> None:
    """Raise for what is no name and no config, before anything compares or hashes it."""
    named = implementation if isinstance(implementation, Mapping) else {"": implementation}
    for phase, name in named.items():
        if implementation is not None and not (isinstance(name, str) and isinstance(phase, str)):
            raise UnknownImplementationError(
                f"{op.name} has no implementation {implementation!r:.100}",
                why="an implementation is pinned by its name, or by a mapping of phases to names",
                candidates=dict.fromkeys(i.id for i in catalog.implementations(op.name)),
                fix="name a candidate",
            )
    if config is not None and not (isinstance(config, Mapping) and all(isinstance(name, str) for name in config)):
        raise ConfigOutsideSpaceError(
            f"{config!r:.100} is no config of {op.name}",
            why="a config is a mapping of parameter names to values",
            fix="pass config={...}; `liger-tune explain` lists the candidates",
        )


def _parse(implementations: Sequence[Implementation], config: Mapping[str, Scalar]) -> Config:
    """The config in the first space that has it; ConfigOutsideSpaceError of the first space if none has."""
    for implementation in implementations:
        with suppress(ConfigOutsideSpaceError):
            return implementation.space.parse(config)
    return implementations[0].space.parse(config)


def key_of(implementation: Names, config: Mapping[str, Scalar] | None) -> tuple[object, ...] | None:
    """A hashable form of what was asked for, by which handles are kept; None if there is none, as of a list."""
    names = tuple(implementation.items()) if isinstance(implementation, Mapping) else implementation
    try:
        key = names, None if config is None else Config(config)
        hash(key)
    except TypeError:
        return None
    return key


@contextmanager
def naming(pins: Pins, environment: Sequence[tuple[str, str]], problem: Problem) -> Iterator[None]:
    """Have what goes wrong with a pin say that it stands in ``LIGER_PIN``, if it does.

    Args:
        pins: all that hold for the problem; the environment's are the last of them.
        environment: the environment's.
        problem: the problem.
    """
    try:
        yield
    except (UnknownImplementationError, NoImplementationError) as error:
        targets = (problem.op, f"{problem.op}/{problem.phase}")
        place = next((n for n, (target, _, _) in enumerate(pins) if target in targets), len(pins))
        if not len(pins) - len(environment) <= place < len(pins):
            raise
        target, name, _ = pins[place]
        raise type(error)(
            f"LIGER_PIN={target}={name}: {error.what}",
            why=error.why,
            candidates=error.candidates,
            fix="name a candidate in LIGER_PIN, or unset it",
        ) from None
