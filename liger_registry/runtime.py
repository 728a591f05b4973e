"""The public object ``registry``: catalogue, plugins, tables and dispatcher put together, each on first use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from liger_registry.assembly import HERE, Assembly
from liger_registry.assembly import build_catalog as build_catalog
from liger_registry.autograd import Tensors
from liger_registry.catalog import Catalog
from liger_registry.config import Config, Scalar
from liger_registry.decision import Decision, Terms
from liger_registry.device import Device
from liger_registry.errors import (
    RegistryError,
    TuningWarning,
    UnsupportedOptionError,
)
from liger_registry.explain import Explanation, Explanations, explain
from liger_registry.freezing import Freezer, make_plan, tabled
from liger_registry.handle import Handle, Handles, capturing, make_handle
from liger_registry.library import Face, LibraryFace
from liger_registry.memo import keep
from liger_registry.op import Op
from liger_registry.pins import Names, Pins, current, key_of, naming, pins_for
from liger_registry.plan import Plan
from liger_registry.problem import BACKWARD, FORWARD, SCHEME, Problem
from liger_registry.settings import Settings
from liger_registry.stages import by_default, deciding

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from liger_registry.implementation import Implementation

# Decisions by device, problem and terms; some 600 bytes each.
MEMO = 16_384
# Problems that calls have asked for; as many as the log of misses holds.
CALLED = 4096


class Registry(Assembly):
    """Operations, their implementations, and which one to use.

    Args:
        settings: instead of what the environment says.
        catalog: instead of what the installed distributions register.
    """

    def __init__(self, settings: Settings | None = None, catalog: Catalog | None = None) -> None:
        super().__init__(settings, catalog)
        self._handles = Handles()
        self._memo: dict[Any, Decision] = {}
        self._schemes: dict[tuple[str, Problem], str] = {}
        # In the order of their last calls. No memo: freeze() asks for it after everything else was forgotten.
        self._asked: dict[tuple[str, Problem], None] = {}

    def __reduce__(self) -> str | tuple[Any, ...]:
        return "registry" if self.public else super().__reduce__()

    @property
    def public(self) -> bool:
        """Whether it is the registry that this package offers as ``registry``."""
        return self is globals().get("registry")

    @property
    def checking(self) -> bool:
        """Whether calls hold values against the contract (``LIGER_CHECK``)."""
        return self.settings.check

    # -- choosing --------------------------------------------------------------------------------------------------

    def get(
        self,
        op: str,
        *,
        implementation: Names = None,
        config: Mapping[str, Scalar] | None = None,
        memory_budget: int | None = None,
        _pins: Pins = (),
    ) -> Handle:
        """A stable handle on an operation, ``registry.get("rms_norm")(x, weight)``.

        Args:
            op: the operation's name.
            implementation: pins one, by name or by ``vendor:name``; a mapping pins by phase.
            config: pins that implementation's config too.
            memory_budget: bytes that an implementation may allocate beyond the outputs.

        Raises:
            UnknownOpError: no such operation.
            UnknownImplementationError: no such implementation.
            ConfigOutsideSpaceError: the config is not in the implementation's space.
        """
        if torch.compiler.is_compiling():
            return LibraryFace(self._face(op, implementation, config, memory_budget))  # type: ignore[return-value]
        return self._handle(op, implementation, config, memory_budget, _pins)

    def _handle(
        self,
        op: str,
        implementation: Names,
        config: Mapping[str, Scalar] | None,
        memory_budget: int | None,
        _pins: Pins = (),
    ) -> Handle:
        if memory_budget is not None and not (type(memory_budget) is int and memory_budget >= 0):
            raise UnsupportedOptionError(
                f"memory_budget of {op} cannot be {memory_budget!r}",
                why="it is a number of bytes",
                fix="pass an int of at least 0, or leave it out",
            )
        asked = key_of(implementation, config)
        key = op, _pins, asked, memory_budget
        if asked is not None and (known := self._handles.get(key)) is not None:
            return known
        contract = self.catalog.op(op)
        # Raises for all that has no key.
        pins = (*_pins, *pins_for(self.catalog, contract, implementation, config))
        return self._handles.setdefault(key, make_handle(contract, self, pins, memory_budget))

    def _face(
        self,
        op: str,
        implementation: Names,
        config: Mapping[str, Scalar] | None,
        memory_budget: int | None,
    ) -> Face:
        """The library face of what ``get`` would return; called while tracing."""
        return self._handle(op, implementation, config, memory_budget).face

    # Dynamo runs a function marked so and keeps the constants it returns, instead of tracing the lookup.
    _face._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @contextmanager
    def use(
        self, op: str, implementation: str | Mapping[str, str], config: Mapping[str, Scalar] | None = None
    ) -> Iterator[None]:
        """Pin an implementation of an operation within a block, in this thread or task.

        In eager mode forward and backward are both decided where forward is called. A compiled graph decides each phase
        when it runs, so a pin of the backward has to surround ``backward()`` there.

        Args:
            op: the operation's name.
            implementation: by name or by ``vendor:name``; a mapping pins by phase.
            config: pins that implementation's config too.

        Raises:
            UnknownImplementationError: no such implementation.
        """
        pins = pins_for(self.catalog, self.catalog.op(op), implementation, config)
        token = current.set((*pins, *current.get()))
        try:
            yield
        finally:
            current.reset(token)

    def bound(
        self,
        op: Op,
        phase: str,
        scheme: str,
        tensors: Tensors,
        options: Mapping[str, Any],
        needs: tuple[bool, ...],
        pins: Pins,
        budget: int | None,
    ) -> Callable[..., tuple[Any, ...]]:
        """For the library face: the launch function of one phase with everything but its tensors filled in."""
        # A graph that was traced has the shapes of one scheme in it.
        decision, device = self.choose(op, tensors, options, phase, needs, pins, budget, scheme)
        with self.stages_of(pins):
            told = needs if op.takes_needs(phase, scheme) else None
            return decision.implementation.bind(decision.config, device, options, told, decision.problem)

    def stages_of(self, pins: Pins = ()) -> AbstractContextManager[None]:
        """Within it this registry answers for the stages of composites, under a handle's pins."""

        def decide(problem: Problem, device: Device) -> tuple[Implementation, Config]:
            self._note((device.fingerprint, problem))
            found = self.decide(problem, device, self.terms(pins))
            return found.implementation, found.config

        return deciding(decide)

    def terms(self, own: Pins = (), budget: int | None = None) -> Terms:
        """The terms of a choice now: a handle's own pins before those of ``use`` and the environment's."""
        environment = tuple((target, name, None) for target, name in self.settings.pins)
        return Terms((*own, *current.get(), *environment), torch.are_deterministic_algorithms_enabled(), budget)

    def _terms_of(self, problem: Problem) -> Terms:
        """The terms of a call that this is the problem of, as far as the key tells its budget."""
        return self.terms(budget=problem.flags.get("budget", self.settings.memory_budget))  # type: ignore[arg-type]

    def problem_of(
        self,
        op: Op,
        tensors: Tensors,
        options: Mapping[str, Any],
        phase: str,
        needs: Sequence[bool],
        budget: int | None,
        scheme: str | None = None,
    ) -> tuple[Problem, int | None]:
        """The problem of a validated call in a scheme, the first by default, and the memory budget it is held to."""
        scheme = op.schemes[0].name if scheme is None else scheme
        description = op.describe(tensors, options)
        default = op.budget(op.problem(description, phase, scheme, needs))
        held = next((b for b in (budget, self.settings.memory_budget, default) if b is not None), None)
        # The budget is part of the key only where the operation declares one: elsewhere it is legality alone.
        return op.problem(description, phase, scheme, needs, held if default is not None else None), held

    def device_of(self, tensors: Tensors) -> Device:
        """The device of a call."""
        return Device.of(next(t for t in tensors if t is not None).device, interpret=self.settings.interpret)

    @property
    def device(self) -> Device:
        """The device that is meant where none is named: the GPU if there is one, else the CPU or the interpreter."""
        device = Device.default()
        interpreted = device.vendor == "cpu" and self.settings.interpret
        return Device.of(torch.device("cpu"), interpret=True) if interpreted else device

    def scheme_of(
        self, op: Op, tensors: Tensors, options: Mapping[str, Any], needs: Sequence[bool], budget: int | None = None
    ) -> str:
        """The scheme of a call; decided before either of its phases."""
        able = op.schemes_for(options)
        if len(able) == 1:
            return able[0].name
        problem, _ = self.problem_of(op, tensors, options, SCHEME, needs, budget, "")
        device, memo = self.device_of(tensors), self._schemes
        key = device.fingerprint, problem
        self._note(key)
        if (known := memo.get(key)) is None:
            if capturing(tensors):
                return able[0].name  # no table is read and nothing is decided for later
            known = self.dispatcher.decide_scheme(problem, device).scheme
            known = known if known in [s.name for s in able] else able[0].name
            keep(memo, key, known, MEMO)
        return known

    def choose(
        self,
        op: Op,
        tensors: Tensors,
        options: Mapping[str, Any],
        phase: str,
        needs: Sequence[bool],
        pins: Pins = (),
        budget: int | None = None,
        scheme: str = "",
    ) -> tuple[Decision, Device]:
        """The decision for one phase of a call under a handle's pins and budget, and the device it is for."""
        op.validate(tensors, options)
        scheme = scheme or self.scheme_of(op, tensors, options, needs, budget)
        problem, budget = self.problem_of(op, tensors, options, phase, needs, budget, scheme)
        device, terms = self.device_of(tensors), self.terms(pins, budget)
        self._note((device.fingerprint, problem))
        if capturing(tensors):
            known = self._memo.get((device.fingerprint, problem, terms))
            return known or self.dispatcher.decide_without_io(problem, device, terms), device
        return self.decide(problem, device, terms), device

    def decide(self, problem: Problem, device: Device | None = None, terms: Terms | None = None) -> Decision:
        """The decision for a problem on a device (the default one), as a call would get it."""
        device, terms = device or self.device, terms or self._terms_of(problem)
        key = (device.fingerprint, problem, terms)
        memo = self._memo  # the one from before: what was decided while it was forgotten is forgotten with it
        if (known := memo.get(key)) is None:
            with naming(terms.pins, self.settings.pins, problem):
                known = self.dispatcher.decide(problem, device, terms)
            keep(memo, key, known, MEMO)
        return known

    def explain(self, problem: Problem, device: Device | None = None, terms: Terms | None = None) -> Explanation:
        """Why a problem on a device is decided as it is."""
        terms = terms or self._terms_of(problem)
        with naming(terms.pins, self.settings.pins, problem):
            return explain(self.dispatcher, problem, device or self.device, terms)

    def explain_call(self, handle: Handle, tensors: Tensors, options: Mapping[str, Any]) -> Explanations:
        """The explanations of a call: forward, and backward if anything needs a gradient."""
        op, needs, device = handle.op, handle.needs(tensors), self.device_of(tensors)
        op.validate(tensors, options)
        scheme = self.scheme_of(op, tensors, options, needs, handle.budget)
        found = []
        for phase in (FORWARD, BACKWARD) if any(needs) else (FORWARD,):
            problem, budget = self.problem_of(op, tensors, options, phase, needs, handle.budget, scheme)
            found.append(self.explain(problem, device, self.terms(handle.own_pins, budget)))
        return Explanations(found)

    def forget(self) -> None:
        """Drop all memos, so that new registrations, tables and plans are seen."""
        self._memo, self._schemes = {}, {}
        for handle in self._handles.values():
            handle.forget()

    # -- tuning and plans ------------------------------------------------------------------------------------------

    def _on_miss(self, problem: Problem, device: Device) -> bool:
        if self.settings.mode == "tune" and self.plan is None:
            try:
                self.tune([problem], device, lock_timeout_s=0.0)  # a call does not wait for another tuner
                return True
            except RegistryError as error:  # such as another process that tunes: the call goes on untuned
                warnings.warn(f"{problem.text} stays untuned: {error}", TuningWarning, stacklevel=2)
        self.misses.add(device.fingerprint, problem)
        return False

    def tune(self, problems: Iterable[Problem], device: Device | None = None, **options: Any) -> Any:  # noqa: ANN401
        """Measure problems on the present device and persist the choices; see ``tuning.tuner.tune``.

        Candidates run in a worker process, except where this process registered what no worker can load.
        """
        from liger_registry.tuning.tuner import tune

        wanted = list(problems)
        known = (i for name in {p.op for p in wanted} for i in self.catalog.implementations(name))
        here = self._given_catalog is not None or any(i.distribution == HERE for i in known)
        if "catalog_source" not in options:
            options.setdefault("isolate", not here)
        device = device or self.device
        report = tune(wanted, catalog=self.catalog, device=device, store=self.user_store, **options)
        self.forget()
        return report

    def freeze(
        self,
        group: ProcessGroup | None = None,
        *,
        problems: Iterable[Problem] | None = None,
        compile: bool = False,
    ) -> Plan:
        """Fix the decisions of a job: every rank of ``group`` calls this once and gets the same plan.

        Args:
            group: a ``torch.distributed`` process group; None for the default one, or for this process alone.
            problems: what to decide; None for the problems in the tables that the ranks can read, those of this
                device's architecture in the shipped ones included, and those called so far.
            compile: also load the kernels of this rank's decisions, so that the first step loads nothing.

        Returns:
            The plan. From here on it answers; what it lacks is answered by the heuristics, on every rank alike.

        Raises:
            PlanError: a rank could not decide or cannot carry the plan out; raised on every rank.
        """
        self.thaw()

        def prepare() -> Freezer:
            dispatcher, device = self.dispatcher, self.device
            called = self._called(device)
            given = (lambda: {*called, *tabled(dispatcher, device)}) if problems is None else (lambda: problems)
            return Freezer(dispatcher, device, given, self._terms_of, self._loader(device) if compile else None)

        plan = make_plan(group, prepare)
        self.dispatcher.plan = plan
        self.forget()
        return plan

    def _loader(self, device: Device) -> Callable[[list[Decision]], object]:
        from liger_registry.tuning.preload import preload

        return lambda decisions: preload(self.catalog, decisions, device)

    def thaw(self) -> None:
        """Let go of the plan; tables answer again."""
        if self._dispatcher is not None:
            self._dispatcher.plan = None
        self.forget()

    def _called(self, device: Device) -> list[Problem]:
        """The problems that calls have asked for so far, in the order of their last calls."""
        return [problem for place, problem in list(self._asked) if place == device.fingerprint]

    def _note(self, key: tuple[str, Problem]) -> None:
        """Remember that a call asked for a problem."""
        self._asked.pop(key, None)
        keep(self._asked, key, None, CALLED)


registry = Registry()


def _stage(problem: Problem, device: Device) -> tuple[Implementation, Config]:
    """What a stage runs where no call of the registry asks: in tuning, verification and offline compiles."""
    # A traced question records no miss and tunes nothing.
    decision = registry.dispatcher.decide(problem, device, registry.terms(), trace=[])
    return decision.implementation, decision.config


by_default(_stage)
