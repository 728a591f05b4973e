"""The public object ``registry``: catalogue, plugins, tables and dispatcher put together, each on first use."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from liger_registry.autograd import Handle, Tensors, make_handle
from liger_registry.catalog import Catalog, Staging
from liger_registry.config import Config, Scalar
from liger_registry.device import Device
from liger_registry.dispatch import CLUSTER, SHIPPED_TABLES, USER, Decision, Dispatcher, Source, Terms
from liger_registry.errors import (
    ConfigOutsideSpaceError,
    RegistrationError,
    RegistryError,
    TuningWarning,
    UnknownImplementationError,
    UnsupportedOptionError,
)
from liger_registry.explain import Explanation, Explanations, explain
from liger_registry.implementation import Implementation
from liger_registry.library import Face, LibraryFace
from liger_registry.misses import MissLog
from liger_registry.op import Op
from liger_registry.plan import Exchange, Plan, agree
from liger_registry.plugins import PluginRecord, load_kernels, tuning_roots, warn_of
from liger_registry.problem import BACKWARD, FORWARD, Problem
from liger_registry.settings import Settings
from liger_registry.store import TableStore
from liger_registry.table import Choice

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# What is registered in a running process, not by a distribution; it is selected only after verification, like a plugin.
HERE = "this process"
Pins = tuple[tuple[str, str, "Config | None"], ...]
_pins: ContextVar[Pins] = ContextVar("liger_registry_pins", default=())
# Decisions by device, problem and terms; some 600 bytes each.
MEMO = 16_384


def build_catalog(settings: Settings | None = None) -> Catalog:
    """A catalogue with everything that the installed distributions register; what fails is left out with a warning."""
    catalog = Catalog()
    warn_of(load_kernels(catalog, settings or Settings.from_environ()))
    return catalog


class Registry:
    """Operations, their implementations, and which one to use.

    Args:
        settings: instead of what the environment says.
        catalog: instead of what the installed distributions register.
    """

    def __init__(self, settings: Settings | None = None, catalog: Catalog | None = None) -> None:
        self._given_settings, self._given_catalog = settings, catalog
        self._lock = threading.RLock()
        self._settings: Settings | None = settings
        self._dispatcher: Dispatcher | None = None
        self._records: tuple[PluginRecord, ...] = ()
        self._building = False
        self._handles: dict[Any, Handle] = {}
        self._all_handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._memo: dict[Any, Decision] = {}
        self._misses: MissLog | None = None
        self.pins = _pins.get

    def __reduce__(self) -> str | tuple[Any, ...]:
        return "registry" if self.public else super().__reduce__()

    @property
    def public(self) -> bool:
        """Whether it is the registry that this package offers as ``registry``."""
        return self is globals().get("registry")

    # -- parts, each made on first use -----------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """What the environment said when this registry was first used."""
        if self._settings is None:
            self._settings = Settings.from_environ()
        return self._settings

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher over the catalogue and all tables."""
        if self._dispatcher is None:
            with self._lock:
                if self._dispatcher is None:
                    self._dispatcher = self._build()
                    warn_of(self._records)  # last, because a warning may be an error here
        return self._dispatcher

    def _build(self) -> Dispatcher:
        if self._building:
            raise RegistrationError(
                "a plugin uses the registry while the registry loads its plugins",
                fix="register into the argument of register(registry)",
            )
        catalog = self._given_catalog
        records: tuple[PluginRecord, ...] = ()
        if catalog is None:
            catalog, self._building = Catalog(), True
            try:
                records = load_kernels(catalog, self.settings)
            finally:
                self._building = False
        sources = [Source(USER, TableStore(self.settings.cache_dir))]
        sources += [Source(CLUSTER, TableStore(path, readonly=True)) for path in self.settings.table_dirs]
        shipped, found = tuning_roots(self.settings)
        sources += [Source(SHIPPED_TABLES, TableStore(path, readonly=True, trusted=True)) for path in shipped]
        self._records = (*records, *found)
        for target, _ in self.settings.pins:
            catalog.op(target.partition("/")[0])  # raises; a pin of an operation that is not there would do nothing
        return Dispatcher(catalog, sources, mode=self.settings.mode, on_miss=self._on_miss)

    @property
    def catalog(self) -> Catalog:
        """All operations and implementations."""
        return self.dispatcher.catalog

    @property
    def plan(self) -> Plan | None:
        """The frozen plan, if ``freeze`` was called."""
        return self.dispatcher.plan

    def stores(self) -> tuple[tuple[str, TableStore], ...]:
        """The stores of tables in the order in which they are searched, as ``(kind, store)``."""
        return tuple((source.kind, source.store) for source in self.dispatcher.sources)

    @property
    def user_store(self) -> TableStore:
        """The store that tuning writes to."""
        return self.dispatcher.sources[0].store

    @property
    def misses(self) -> MissLog:
        """What was asked for and no table answered exactly, earlier runs included."""
        if self._misses is None:
            self._misses = MissLog(self.settings.cache_dir / "misses.jsonl")
        return self._misses

    def plugins(self) -> tuple[PluginRecord, ...]:
        """What became of every entry point."""
        self.dispatcher  # noqa: B018 - loads them
        return self._records

    def op(self, name: str) -> Op:
        """The contract of an operation; UnknownOpError if there is none."""
        return self.catalog.op(name)

    # -- registering -----------------------------------------------------------------------------------------------

    def register(self, *items: Op | Implementation) -> None:
        """Register operations or implementations in this process, all or none of them.

        An implementation is selected automatically only after it passed verification on this device: tune it, or pin
        it.

        Raises:
            RegistrationError: an item contradicts itself or its contract.
            RegistrationClashError: it is there already.
        """
        with self.catalog.stage(HERE) as staging:
            for item in items:
                staging.register(item)
        self.forget()

    @contextmanager
    def stage(self, distribution: str) -> Iterator[Staging]:
        """A staging under a distribution's name; committed if the block ends without an exception."""
        with self.catalog.stage(distribution) as staging:
            yield staging
        self.forget()

    def reload(self) -> None:
        """Read the environment, the plugins and the tables anew; handles stay valid."""
        with self._lock:
            self._settings, self._dispatcher, self._misses = self._given_settings, None, None
            self._records = ()
            self.forget()

    # -- choosing --------------------------------------------------------------------------------------------------

    def get(
        self,
        op: str,
        *,
        implementation: str | Mapping[str, str] | None = None,
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
        implementation: str | Mapping[str, str] | None,
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
        key = (op, _pins, memory_budget) if implementation is None and config is None else None
        if key is not None and (known := self._handles.get(key)) is not None:
            return known
        contract = self.catalog.op(op)
        pins = (*_pins, *self._pins_for(contract, implementation, config))
        handle = make_handle(contract, self, pins, memory_budget)
        self._all_handles.add(handle)
        if key is not None:
            handle = self._handles.setdefault(key, handle)
        return handle

    def _face(
        self,
        op: str,
        implementation: str | Mapping[str, str] | None,
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

        Args:
            op: the operation's name.
            implementation: by name or by ``vendor:name``; a mapping pins by phase.
            config: pins that implementation's config too.

        Raises:
            UnknownImplementationError: no such implementation.
        """
        token = _pins.set((*self._pins_for(self.catalog.op(op), implementation, config), *_pins.get()))
        try:
            yield
        finally:
            _pins.reset(token)

    def _pins_for(
        self, op: Op, implementation: str | Mapping[str, str] | None, config: Mapping[str, Scalar] | None
    ) -> Pins:
        if implementation is None:
            if config is not None:
                raise UnknownImplementationError(
                    f"a config of {op.name} was given without its implementation",
                    candidates=[i.id for i in self.catalog.implementations(op.name)],
                    fix="pass implementation= too",
                )
            return ()
        pins: list[tuple[str, str, Config | None]] = []
        named = implementation if isinstance(implementation, Mapping) else {"": implementation}
        for phase, name in named.items():
            there = [
                i for i in self.catalog.implementations(op.name) if phase in ("", i.phase) and name in (i.id, i.name)
            ]
            if not there:
                self.catalog.find(op.name, op.schemes[0].name, phase or FORWARD, name)
            # Of one name on several vendors, each has a space of its own; the device that is called for decides.
            parsed = _parse(there, config) if config is not None else None
            # A config belongs to one phase; without a phase it is that of the first that has the implementation.
            target = f"{op.name}/{phase or there[0].phase}" if phase or parsed is not None else op.name
            pins.append((target, name, parsed))
        return tuple(pins)

    def bound(
        self,
        op: Op,
        phase: str,
        tensors: Tensors,
        options: Mapping[str, Any],
        needs: tuple[bool, ...],
        pins: Pins,
        budget: int | None,
    ) -> Callable[..., tuple[Any, ...]]:
        """For the library face: the launch function of one phase with everything but its tensors filled in."""
        decision, device = self.choose(op, tensors, options, phase, needs, pins, budget)
        return decision.implementation.bind(decision.config, device, options, needs if phase == BACKWARD else None)

    def terms(self, own: Pins = (), budget: int | None = None) -> Terms:
        """The terms of a choice now: a handle's own pins before those of ``use`` and the environment's."""
        environment = tuple((target, name, None) for target, name in self.settings.pins)
        return Terms((*own, *_pins.get(), *environment), torch.are_deterministic_algorithms_enabled(), budget)

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
    ) -> tuple[Problem, int | None]:
        """The problem of a call, and the memory budget it is held to."""
        op.validate(tensors, options)
        description = op.describe(tensors, options)
        scheme = op.schemes[0].name
        default = op.budget(op.problem(description, phase, scheme, needs))
        held = next((b for b in (budget, self.settings.memory_budget, default) if b is not None), None)
        # The budget is part of the key only where the operation declares one: elsewhere it is legality alone.
        return op.problem(description, phase, scheme, needs, held if default is not None else None), held

    def choose(
        self,
        op: Op,
        tensors: Tensors,
        options: Mapping[str, Any],
        phase: str,
        needs: Sequence[bool],
        pins: Pins = (),
        budget: int | None = None,
    ) -> tuple[Decision, Device]:
        """The decision for one phase of a call under a handle's pins and budget, and the device it is for."""
        problem, budget = self.problem_of(op, tensors, options, phase, needs, budget)
        tensor = next(t for t in tensors if t is not None)
        device = Device.of(tensor.device, interpret=self.settings.interpret)
        terms = self.terms(pins, budget)
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            known = self._memo.get((device.fingerprint, problem, terms))
            return known or self.dispatcher.decide_without_io(problem, device, terms), device
        return self.decide(problem, device, terms), device

    def decide(self, problem: Problem, device: Device | None = None, terms: Terms | None = None) -> Decision:
        """The decision for a problem on a device (the default one), as a call would get it."""
        device, terms = device or Device.default(), terms or self._terms_of(problem)
        key = (device.fingerprint, problem, terms)
        memo = self._memo  # the one from before: what was decided while it was forgotten is forgotten with it
        if (known := memo.get(key)) is None:
            known = self.dispatcher.decide(problem, device, terms)
            if len(memo) >= MEMO:
                memo.pop(next(iter(memo)), None)
            memo[key] = known
        return known

    def explain(self, problem: Problem, device: Device | None = None, terms: Terms | None = None) -> Explanation:
        """Why a problem on a device is decided as it is."""
        return explain(self.dispatcher, problem, device or Device.default(), terms or self._terms_of(problem))

    def explain_call(self, handle: Handle, tensors: Tensors, options: Mapping[str, Any]) -> Explanations:
        """The explanations of a call: forward, and backward if anything needs a gradient."""
        needs = handle.needs(tensors)
        tensor = next(t for t in tensors if t is not None)
        device = Device.of(tensor.device, interpret=self.settings.interpret)
        found = []
        for phase in (FORWARD, BACKWARD) if any(needs) else (FORWARD,):
            problem, budget = self.problem_of(handle.op, tensors, options, phase, needs, handle.budget)
            found.append(self.explain(problem, device, self.terms(handle.own_pins, budget)))
        return Explanations(found)

    def forget(self) -> None:
        """Drop all memos, so that new registrations, tables and plans are seen."""
        self._memo = {}
        for handle in list(self._all_handles):
            handle.forget()

    # -- tuning and plans ------------------------------------------------------------------------------------------

    def _on_miss(self, problem: Problem, device: Device, decision: Decision) -> bool:
        if self.settings.mode == "tune" and self.plan is None:
            try:
                self.tune([problem], device)
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
        device = device or Device.default()
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
        device = Device.default()
        called = self._called(device)
        self.thaw()

        def resolve(problem: Problem) -> Choice:
            return self.dispatcher.decide(problem, device, self._terms_of(problem), []).choice

        plan = agree(
            Exchange(group),
            device.fingerprint,
            lambda: called | self._tabled(device) if problems is None else problems,
            resolve,
            lambda plan: self._validate(plan, device),
        )
        self.dispatcher.plan = plan
        self.forget()
        if compile:
            from liger_registry.tuning.preload import preload

            preload(self.catalog, [self.decide(p, device) for place, p in plan if place == device.fingerprint], device)
        return plan

    def thaw(self) -> None:
        """Let go of the plan; tables answer again."""
        self.dispatcher.plan = None
        self.forget()

    def _called(self, device: Device) -> set[Problem]:
        """The problems that calls have asked for so far."""
        return {problem for fingerprint, problem, _ in list(self._memo) if fingerprint == device.fingerprint}

    def _tabled(self, device: Device) -> set[Problem]:
        """The problems in the tables this process can read, as far as the contracts still have such problems."""
        found: set[Problem] = set()
        for op in self.catalog.ops():
            for source in self.dispatcher.sources if self.settings.mode != "off" else ():
                tables = [source.store.load(device, op.name)]
                if source.kind == SHIPPED_TABLES:
                    tables += source.store.siblings(device, op.name)
                found |= {problem for table in tables for problem in table.problems if op.has(problem)}
        return found

    def _validate(self, plan: Plan, device: Device) -> None:
        for place, problem in plan:
            if place != device.fingerprint:
                continue
            choice = plan.choices[place, problem]
            if choice.implementation == "any:reference":
                continue
            implementation = self.catalog.find(problem.op, problem.scheme, problem.phase, choice.implementation)
            implementation.space.parse(choice.config)


def _parse(implementations: Sequence[Implementation], config: Mapping[str, Scalar]) -> Config:
    """The config in the first space that has it; ConfigOutsideSpaceError of the first space if none has."""
    for implementation in implementations:
        with suppress(ConfigOutsideSpaceError):
            return implementation.space.parse(config)
    return implementations[0].space.parse(config)


registry = Registry()
