"""Implementations: one way to compute one phase of one operation.

An implementation is data (what it can do, which configs it has, what it costs) and the name of a launch function, which
is imported on first use, so that registering a kernel imports neither Triton nor the kernel.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from liger_registry.config import Config, ConfigSpace
from liger_registry.errors import PluginError, RegistrationError
from liger_registry.foreign import told
from liger_registry.problem import BACKWARD, FORWARD, Problem
from liger_registry.sources import source_hash as source_hash
from liger_registry.stages import stage

if TYPE_CHECKING:
    from liger_registry.device import Device

ANY = "any"
# How the reason begins for an implementation of another vendor; there are as many as vendors.
ELSEWHERE = "it is for"
FLOATS = ("float32", "float16", "bfloat16")
OWN_DISTRIBUTION = "liger-registry"
# The id of the last tier's implementation, which no distribution registers.
REFERENCE_ID = f"{ANY}:reference"


@dataclass(frozen=True, slots=True)
class Capability:
    """What an implementation can run on and with.

    Attributes:
        vendor: ``cuda``, ``rocm``, ``cpu`` or ``any`` (plain PyTorch).
        min_arch: the least architecture of that vendor, such as ``sm_80``.
        dtypes: the dtypes it takes for every tensor that is there.
        requires: import names of optional packages it needs.
    """

    vendor: str = ANY
    min_arch: str | None = None
    dtypes: tuple[str, ...] = (*FLOATS, "float64")
    requires: tuple[str, ...] = ()

    def why_not(self, problem: Problem, device: Device) -> str | None:
        """Why a problem on a device is out of reach; None if it is not."""
        from liger_registry.device import capability_number

        if self.vendor not in (ANY, device.vendor, device.emulates):
            return f"{ELSEWHERE} {self.vendor}, the device is {device.vendor}"
        if self.min_arch is not None and device.vendor == self.vendor:
            have, need = capability_number(device.arch), capability_number(self.min_arch)
            if have < need:
                return f"it needs {self.min_arch}, the device is {device.arch}"
        for tensor, dtype in problem.dtypes.items():
            if dtype not in self.dtypes and dtype != "none":
                return f"it does not take {tensor} in {dtype}"
        for package in self.requires:
            if not _installed(package):
                return f"the package {package} is not installed"
        return None


@functools.cache
def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # a package above it is missing
        return False


def no_objection(problem: Problem, device: Device) -> None:
    """What has nothing against an implementation that was not measured."""


def no_extra_bytes(problem: Problem, config: Config) -> int:
    """The cost of an implementation that allocates nothing beyond its outputs."""
    return 0


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute one phase of a scheme.

    A plugin's heuristic, predicates and ``extra_bytes`` are asked through ``propose``, ``configs`` and ``why_illegal``
    alone, which turn whatever they raise into a reason for a rejection. Those of this distribution may raise: a bug
    of ours is to be seen.

    Attributes:
        op: the operation's name.
        scheme: the scheme it belongs to.
        phase: ``forward`` or ``backward``.
        name: unique among the implementations of that phase and vendor.
        launch: ``module:function``, imported on first use, or the function itself. Called as
            ``fn(*tensors, device=device, **options, **config)``; backward also gets ``needs``.
        space: its config space.
        heuristic: ``(problem, device)`` to a config of the space, legal for every problem that the capability admits
            and for which the space is not empty.
        extra_bytes: ``(problem, config)`` to the peak of memory beyond the outputs, in bytes.
        capability: what it runs on.
        deterministic: equal inputs give equal bits.
        stages: ``(problem, config)`` to the problems of other operations that it runs, by name. Its launch function
            gets ``stages``, a mapping of those names to launch functions with device and decided config filled in.
        untuned: ``(problem, device)`` to why it is not chosen unless it was measured or asked for, though it is legal;
            None where nothing is against it.
        proven: whether this distribution's word is enough to choose it. A function of others that is known to break the
            accuracy rule in places is chosen only after it passed verification on the device, like a plugin's.
        distribution: the distribution that registered it; filled in by the registry.
        doc: one sentence for ``explain``.
    """

    op: str
    phase: str
    name: str
    launch: str | Callable[..., Any]
    scheme: str = "default"
    space: ConfigSpace = field(default_factory=ConfigSpace)
    heuristic: Callable[[Problem, Device], Config] = field(default=lambda problem, device: Config())
    extra_bytes: Callable[[Problem, Config], int] = no_extra_bytes
    capability: Capability = field(default_factory=Capability)
    deterministic: bool = True
    stages: Callable[[Problem, Config], Mapping[str, Problem]] | None = None
    untuned: Callable[[Problem, Device], str | None] = no_objection
    proven: bool = True
    distribution: str = ""
    doc: str = ""

    @property
    def id(self) -> str:
        """``vendor:name``, unique within an operation's scheme and phase."""
        return f"{self.capability.vendor}:{self.name}"

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """The identity in which two registrations clash: op, scheme, phase, vendor, name."""
        return self.op, self.scheme, self.phase, self.capability.vendor, self.name

    @property
    def own(self) -> bool:
        """Whether this distribution registered it, and what it raises is a bug to be seen."""
        return self.distribution == OWN_DISTRIBUTION

    @property
    def trusted(self) -> bool:
        """Whether it may be chosen before it was verified on the device."""
        return self.own and self.proven

    def from_distribution(self, distribution: str) -> Implementation:
        """The same implementation, marked with the distribution it came from."""
        return replace(self, distribution=distribution)

    def why_illegal(
        self, config: Config, problem: Problem, device: Device, budget: int | None = None, deterministic: bool = False
    ) -> str | None:
        """Why this implementation with this config may not serve a problem on a device; None if it may.

        Args:
            config: the config.
            problem: the problem.
            device: the device.
            budget: bytes that it may allocate beyond the outputs; None for no limit.
            deterministic: whether only deterministic implementations are wanted.
        """
        if deterministic and not self.deterministic:
            return "it is not deterministic, and torch.use_deterministic_algorithms is on"
        if (reason := self.capability.why_not(problem, device)) is not None:
            return reason
        try:
            reason = self.space.why_illegal(config, problem, device)
        except (Exception, SystemExit) as error:
            return self._raised("space", error)
        if reason is not None:
            return reason
        warps = config.get("num_warps", 1)
        threads = (warps if isinstance(warps, int) else 1) * device.limits.warp_size
        if threads > device.limits.max_threads:
            return f"{threads} threads a program, the device allows {device.limits.max_threads}"
        if budget is None:
            return None
        try:
            extra = self.extra_bytes(problem, config)
        except (Exception, SystemExit) as error:
            return self._raised("extra_bytes", error)
        if not isinstance(extra, int):
            return f"its extra_bytes gave {ascii(extra)[:80]}, which is no number of bytes"
        return f"it needs {extra:,} bytes beyond the outputs, the budget is {budget:,}" if extra > budget else None

    def propose(self, problem: Problem, device: Device) -> Config | str:
        """The config that the heuristic names, legal or not; the reason as text if it names none."""
        try:
            found = self.heuristic(problem, device)
        except (Exception, SystemExit) as error:
            return self._raised("heuristic", error)
        # A plugin's may return anything, whatever its type says.
        return found if isinstance(found, Config) else f"its heuristic gave {ascii(found)[:80]}, which is no Config"

    def why_not_untuned(self, problem: Problem, device: Device) -> str | None:
        """Why it is not chosen unless it was measured or asked for; None if it may be."""
        try:
            return self.untuned(problem, device)
        except (Exception, SystemExit) as error:
            return self._raised("untuned", error)

    def configs(self, problem: Problem, device: Device) -> Iterator[Config]:
        """The configs of the space in declared order that its predicates do not turn down.

        Those about which a plugin's predicate raises are among them: ``why_illegal`` says what it raised.
        """
        names, values = self.space.parameters.keys(), self.space.parameters.values()
        for chosen in itertools.product(*values):
            config = Config(dict(zip(names, chosen, strict=True)))
            try:
                legal = self.space.why_illegal(config, problem, device) is None
            except (Exception, SystemExit) as error:
                legal = bool(self._raised("space", error))
            if legal:
                yield config

    def _raised(self, what: str, error: BaseException) -> str:
        """What a plugin's callable raised, as a reason; raises it again where this distribution's own did."""
        if self.own:
            raise error
        return f"its {what} raised {' '.join(told(error).split())[:300]}"

    def function(self) -> Callable[..., Any]:
        """The launch function, imported now if it was given by name.

        Raises:
            PluginError: it cannot be imported.
        """
        return self.launch if callable(self.launch) else _import(self.launch, self.distribution)

    def why_not_importable(self) -> str | None:
        """Why the launch function cannot be imported, which this tries; None if it can."""
        try:
            self.function()
        except PluginError as error:
            return f"{error.what}: {error.why}"
        return None

    def bind(
        self,
        config: Config,
        device: Device,
        options: Mapping[str, Any],
        needs: tuple[bool, ...] | None = None,
        problem: Problem | None = None,
    ) -> Callable[..., tuple[Any, ...]]:
        """The launch function with all but the tensors filled in.

        Args:
            config: a config of the space.
            device: the device it launches on.
            options: the operation's options.
            needs: which differentiable inputs need a gradient; for backward, and for a forward that computes gradients.
            problem: what it serves; asked for by a composite alone, whose stages depend on it.
        """
        extra: dict[str, Any] = {} if needs is None else {"needs": needs}
        if self.stages is not None:
            assert problem is not None
            extra["stages"] = {name: stage(p, device) for name, p in self.stages(problem, config).items()}
        return functools.partial(self.function(), device=device, **options, **config, **extra)

    def check(self, options: tuple[str, ...]) -> None:
        """Raise RegistrationError if the implementation cannot be one.

        Args:
            options: the operation's option names, which the space may not use.
        """
        if self.phase not in (FORWARD, BACKWARD):
            raise RegistrationError(
                f"{self.op}:{self.name} has no phase {self.phase!r}", candidates=(FORWARD, BACKWARD)
            )
        if not self.name.isidentifier():
            raise RegistrationError(
                f"{self.name!r} is no name for an implementation of {self.op}", fix="use an identifier"
            )
        if isinstance(self.launch, str) and self.launch.count(":") != 1:
            raise RegistrationError(
                f"the launch function of {self.op}:{self.name} cannot be named {self.launch!r}",
                fix="write module:function",
            )
        if self.id == REFERENCE_ID:
            raise RegistrationError(f"{REFERENCE_ID} is the contract's own formula", fix="take another name")
        from liger_registry.device import VENDORS, capability_number

        if self.capability.vendor not in (ANY, *VENDORS):
            raise RegistrationError(
                f"{self.op}:{self.name} is for the unknown vendor {self.capability.vendor!r}",
                candidates=(ANY, *VENDORS),
            )
        if self.capability.min_arch is not None and not capability_number(self.capability.min_arch):
            raise RegistrationError(
                f"{self.op}:{self.name} needs an unknown architecture {self.capability.min_arch!r}",
                candidates=("sm_90", "gfx942"),
            )
        if taken := {*options, "device", "needs", "stages"} & set(self.space.parameters):
            raise RegistrationError(
                f"the space of {self.op}:{self.name} uses names of the operation's options",
                why=", ".join(sorted(taken)),
            )


@functools.cache
def _import(name: str, distribution: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        raise PluginError(
            f"the launch function {name} of {distribution or 'an unnamed distribution'} cannot be imported",
            why=told(error),
            fix="`liger-tune doctor` shows what is installed",
        ) from error
    if not callable(function):
        raise PluginError(f"the launch function {name} of {distribution} cannot be called", why=repr(function)[:200])
    return function  # type: ignore[no-any-return]
