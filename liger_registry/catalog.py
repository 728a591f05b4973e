"""What is registered: operations and implementations, committed whole by distribution.

A distribution registers into a ``Staging``. Nothing of it is visible before all of it was accepted, so that a plugin
that fails half-way leaves no half of itself behind.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from liger_registry.errors import RegistrationClashError, RegistrationError, UnknownImplementationError, UnknownOpError
from liger_registry.implementation import Implementation
from liger_registry.op import Op

if TYPE_CHECKING:
    from liger_registry.plugins import PluginRecord
    from liger_registry.problem import Problem

# A registration that runs away (a loop that never ends) must end as an error, not as a full memory.
MOST = 20_000

Key = tuple[str, str, str, str, str]


class Staging:
    """What one distribution registers; the argument of every ``register(registry)`` entry point."""

    def __init__(self, catalog: Catalog, distribution: str) -> None:
        self.distribution = distribution
        self.ops: dict[str, tuple[Op, str]] = dict(catalog._ops)
        self.implementations: dict[Key, Implementation] = dict(catalog._implementations)
        self._count = 0
        self.closed = False

    def register(self, item: Op | Implementation) -> None:
        """Stage an operation or an implementation.

        Raises:
            RegistrationError: it contradicts itself, or its operation's contract.
            RegistrationClashError: another distribution, or this one, registered the same before.
            UnknownOpError: an implementation of an operation that nobody registered.
        """
        if self.closed:
            # What was staged is the catalogue's own by now, which others read without a lock.
            raise RegistrationError(
                f"{self.distribution} registers after its registration ended", fix="use registry.register"
            )
        self._count += 1
        if self._count > MOST:
            raise RegistrationError(f"{self.distribution} registers more than {MOST} items", fix="end the loop")
        if isinstance(item, Op):
            self._register_op(item)
        elif isinstance(item, Implementation):
            self._register_implementation(item)
        else:
            raise RegistrationError(
                f"{self.distribution} registers a {type(item).__name__}", candidates=("Op", "Implementation")
            )

    def _register_op(self, op: Op) -> None:
        op.check()
        if op.name in self.ops:
            raise RegistrationClashError(
                f"two distributions register the operation {op.name!r}",
                why=f"{self.ops[op.name][1]} and {self.distribution}",
                fix="uninstall one of them, or leave one out of LIGER_PLUGINS",
            )
        self.ops[op.name] = (op, self.distribution)

    def _register_implementation(self, implementation: Implementation) -> None:
        op = _known_op(self.ops, implementation.op)
        if implementation.scheme not in [scheme.name for scheme in op.schemes]:
            raise RegistrationError(
                f"{op.name} has no scheme {implementation.scheme!r}", candidates=[scheme.name for scheme in op.schemes]
            )
        implementation.check(tuple(option.name for option in op.options))
        if (other := self.implementations.get(implementation.key)) is not None:
            raise RegistrationClashError(
                f"two distributions register {'/'.join(implementation.key)}",
                why=f"{other.distribution} and {self.distribution}",
                fix="rename one of them, or leave one out of LIGER_PLUGINS",
            )
        self.implementations[implementation.key] = implementation.from_distribution(self.distribution)


class Catalog:
    """All operations and implementations; reading needs no lock, for a commit replaces whole mappings.

    Attributes:
        failed: the plugins that should have registered here and are not loaded; errors name them and their reasons.
        generation: how many commits there were.
    """

    def __init__(self) -> None:
        self._ops: dict[str, tuple[Op, str]] = {}
        self._implementations: dict[Key, Implementation] = {}
        self._lock = threading.RLock()
        self._staging: Staging | None = None
        self.failed: tuple[PluginRecord, ...] = ()
        self.generation = 0

    @contextmanager
    def stage(self, distribution: str) -> Iterator[Staging]:
        """A staging for one distribution, committed if the block ends without an exception.

        Raises:
            RegistrationError: this thread is in another staging of the same catalogue.
        """
        with self._lock:
            if self._staging is not None:  # the outer one would overwrite what the inner one commits
                raise RegistrationError(
                    f"{distribution} registers while {self._staging.distribution} does",
                    fix="register into the staging that is open: the argument of register(registry)",
                )
            staging = self._staging = Staging(self, distribution)
            try:
                yield staging
                self._ops, self._implementations = staging.ops, staging.implementations
                self.generation += 1
            finally:
                staging.closed, self._staging = True, None

    def ops(self) -> tuple[Op, ...]:
        """All operations, by name."""
        return tuple(op for _, (op, _) in sorted(self._ops.items()))

    def op(self, name: str) -> Op:
        """The operation of that name; UnknownOpError with the candidates if there is none."""
        return _known_op(self._ops, name, self._why_missing())

    def implementations(
        self, op: str, scheme: str | None = None, phase: str | None = None
    ) -> tuple[Implementation, ...]:
        """The implementations of an operation, in the order in which they were registered."""
        self.op(op)
        return tuple(
            i
            for i in self._implementations.values()
            if i.op == op and scheme in (None, i.scheme) and phase in (None, i.phase)
        )

    def in_order(self, problem: Problem) -> list[Implementation]:
        """The implementations of a problem's phase in the order in which the heuristic tier tries them."""
        order = {name: n for n, name in enumerate(self.op(problem.op).order.get(problem.phase, ()))}
        there = self.implementations(problem.op, problem.scheme, problem.phase)
        return sorted(there, key=lambda i: (not i.trusted, order.get(i.name, len(order))))

    def find(self, op: str, scheme: str, phase: str, name: str) -> Implementation:
        """The implementation with that id (``cuda:persistent``) or, where it is unique, that bare name.

        Raises:
            UnknownImplementationError: none, or several of that bare name.
        """
        there = self.implementations(op, scheme, phase)
        matches = [i for i in there if name in (i.id, i.name)]
        if len(matches) == 1:
            return matches[0]
        raise UnknownImplementationError(
            f"{op} has {'several implementations' if matches else 'no implementation'} {name!r} in phase {phase}",
            why="name the vendor too" if matches else self._why_missing(),
            candidates=[i.id for i in (matches or there)],
            fix="`liger-tune plugins` shows what was loaded, and what failed to load and why",
        )

    def _why_missing(self) -> str:
        """Which plugins are not loaded, for one of them might have had what was asked for."""
        missing = [f"{r.name} of {r.distribution} {r.version} is {r.status}: {r.reason}" for r in self.failed]
        return " ".join(f"plugin {'; plugin '.join(missing)}".split()) if missing else ""


def _known_op(ops: dict[str, tuple[Op, str]], name: str, why: str = "") -> Op:
    if name in ops:
        return ops[name][0]
    raise UnknownOpError(
        f"there is no operation {name!r}",
        why=why,
        candidates=sorted(ops),
        fix="`liger-tune plugins` shows what was loaded, and what failed to load and why",
    )
