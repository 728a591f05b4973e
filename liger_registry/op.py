"""Operations as mathematical contracts.

An ``Op`` says what is computed (a reference in plain PyTorch), which options there are, what a choice depends on (dims,
dtypes, flags) and what passes from forward to backward (schemes). It says nothing of how: that is an implementation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields, Scalar
from liger_registry.contract import Description as Description
from liger_registry.contract import DimKind as DimKind
from liger_registry.contract import Input as Input
from liger_registry.contract import Option as Option
from liger_registry.contract import Scheme as Scheme
from liger_registry.errors import (
    DeviceMismatchError,
    InvalidInputError,
    RegistrationError,
    UnsupportedDtypeError,
    UnsupportedOptionError,
)
from liger_registry.problem import BACKWARD, FORWARD, SCHEME, Problem, bucket, budget_class

if TYPE_CHECKING:
    import torch

    from liger_registry.architecture import Architecture

    Tensors = tuple[torch.Tensor | None, ...]


# Keywords of launch functions and flags of problem keys, which inputs and options would hide.
RESERVED = frozenset({"device", "needs", "budget", "stages"})


@dataclass(frozen=True, slots=True)
class Op:
    """The contract of one operation.

    Attributes:
        name: such as ``rms_norm``.
        inputs: the tensors it takes, in order.
        options: its options, keyword or positional behind the inputs.
        outputs: names of what it returns.
        schemes: in the order in which an untuned choice tries them.
        dims: how each size enters the key.
        validate: ``(inputs, options)``; raises if shapes or dtypes contradict the contract. Sizes may be symbolic.
        describe: ``(inputs, options)``, validated, to a ``Description``.
        reference: ``(*inputs, **options)`` in plain, differentiable PyTorch with the roundings of the model family; its
            parameters and defaults are those of the contract, so that it can be called in the operation's place.
        magnitude: ``(inputs, grad_outputs, options)`` in float64 to a mapping from each output, saved tensor and
            ``grad_<input>`` to the size of the terms it sums, element by element: what rounding errors scale with.
        reduced: for each of those names the dims it is a sum over.
        example: ``(problem, device, seed, style)`` to inputs for a problem; ``style`` is one of ``examples.STYLES``.
        proxies: ``problem`` to smaller dims with the same code and a tail, for verification.
        calls: ``(architecture, tokens, dtype)`` to what a model calls, as ``(description, options)``.
        order: for each phase the implementations' names in the order in which the ``heuristic`` tier tries them.
        budget: the default memory budget in bytes for a problem; None for no limit.
        odd: ``dtype`` to descriptions of actual, odd sizes and of every flag that changes code, for the conformance
            suite; the first is of middling size, and also what layouts are tried with. None takes generic ones, for
            operations on (rows, hidden).
        asked: for each output that is not always there the bool option that asks for it.
        constant: outputs that no gradient flows through.
        overwrites: for each input that backward may write into the bool option that allows it.
        fixed: ``problem`` to the values of options that its key knows by class alone.
        cut: ``(inputs, options)`` to the same call such that each row's results depend on that row alone and results
            without rows are sums over them, which verification at full size needs; None if there is no such call.
        check_values: ``(inputs, options)``; raises if values contradict the contract. Asked only if ``LIGER_CHECK`` is
            set, since it waits for the device.
        autocast: inputs that ``torch.autocast`` casts, as it casts those of a linear layer. The operation then runs
            with autocast off. Others keep their dtypes under autocast.
        compiled: options to those that stand for them in compiled graphs; for options that concern memory alone.
        private: a stage of others, which ``list`` does not name.
        by_name: models call it in special trainings alone, so warmup leaves it out unless it is named.
    """

    name: str
    inputs: tuple[Input, ...]
    options: tuple[Option, ...]
    outputs: tuple[str, ...]
    schemes: tuple[Scheme, ...]
    dims: Mapping[str, DimKind]
    validate: Callable[[Tensors, Mapping[str, Any]], None]
    describe: Callable[[Tensors, Mapping[str, Any]], Description]
    reference: Callable[..., Any]
    magnitude: Callable[[Tensors, Tensors, Mapping[str, Any]], Mapping[str, torch.Tensor]]
    reduced: Mapping[str, tuple[str, ...]]
    example: Callable[[Problem, torch.device | str, int, str], Tensors]
    proxies: Callable[[Problem], Sequence[Mapping[str, int]]]
    calls: Callable[[Architecture, int, str], Iterable[Description]]
    order: Mapping[str, tuple[str, ...]]
    budget: Callable[[Problem], int | None] = field(default=lambda problem: None)
    odd: Callable[[str], Iterable[Description]] | None = None
    asked: Mapping[str, str] = field(default_factory=dict)
    constant: frozenset[str] = frozenset()
    overwrites: Mapping[str, str] = field(default_factory=dict)
    fixed: Callable[[Problem], Mapping[str, Scalar]] = field(default=lambda problem: {})
    cut: Callable[[Tensors, Mapping[str, Any]], tuple[Tensors, Mapping[str, Any]]] | None = None
    check_values: Callable[[Tensors, Mapping[str, Any]], None] | None = None
    autocast: tuple[str, ...] = ()
    compiled: Callable[[Mapping[str, Any]], Mapping[str, Any]] = field(default=lambda options: options)
    private: bool = False
    by_name: bool = False
    doc: str = ""

    @property
    def signature(self) -> inspect.Signature:
        """How the operation is called: inputs first, then options, all by position or by keyword."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        inputs = [
            inspect.Parameter(i.name, kind, default=None if i.optional else inspect.Parameter.empty)
            for i in self.inputs
        ]
        return inspect.Signature([*inputs, *[inspect.Parameter(o.name, kind, default=o.default) for o in self.options]])

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The inputs that gradients flow to, in order."""
        return tuple(i.name for i in self.inputs if i.differentiable)

    def schemes_for(self, options: Mapping[str, Any]) -> tuple[Scheme, ...]:
        """The schemes that can serve a call with these options, in order."""
        return tuple(s for s in self.schemes if not any(options[n] in values for n, values in s.excludes.items()))

    def scheme(self, name: str) -> Scheme:
        """The scheme of that name; LookupError if there is none."""
        for scheme in self.schemes:
            if scheme.name == name:
                return scheme
        raise LookupError(f"{self.name} has no scheme {name!r}")

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensors, dict[str, Scalar]]:
        """The inputs and validated options of a call.

        Raises:
            UnsupportedOptionError: an argument the operation does not have, or a value the option does not take.
            InvalidInputError: an input that is no tensor.
            DeviceMismatchError: tensors on different devices.
        """
        signature = self.signature
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UnsupportedOptionError(
                f"{self.name} cannot be called like that",
                why=str(error),
                candidates=[i.name for i in self.inputs] + [o.name for o in self.options],
                fix=f"call it as {self.name}({', '.join(map(str, signature.parameters.values()))})",
            ) from None
        bound.apply_defaults()
        tensors = tuple(bound.arguments[i.name] for i in self.inputs)
        for spec, tensor in zip(self.inputs, tensors, strict=True):
            if tensor is None and not spec.optional:
                raise InvalidInputError(f"{spec.name} of {self.name} is missing", fix="pass a torch.Tensor")
        self._check_tensors(tensors)
        return tensors, {o.name: o.validate(self.name, bound.arguments[o.name]) for o in self.options}

    def _check_tensors(self, tensors: Sequence[Any]) -> None:
        import torch

        devices = {}
        for spec, tensor in zip(self.inputs, tensors, strict=True):
            if tensor is None and spec.optional:
                continue
            if not isinstance(tensor, torch.Tensor):
                raise InvalidInputError(
                    f"{spec.name} of {self.name} is no tensor",
                    why=f"got {type(tensor).__name__}",
                    fix="pass a torch.Tensor",
                )
            if tensor.layout is not torch.strided or tensor.is_nested:
                raise InvalidInputError(
                    f"{spec.name} of {self.name} is no dense tensor",
                    why=f"its layout is {'nested' if tensor.is_nested else tensor.layout}",
                    fix=f"pass {spec.name}.to_dense()",
                )
            devices[spec.name] = tensor.device
        if len(set(devices.values())) > 1:
            raise DeviceMismatchError(
                f"the tensors of {self.name} lie on different devices",
                why=", ".join(f"{name} on {device}" for name, device in devices.items()),
                fix="move them to one device before the call",
            )

    def problem(
        self,
        description: Description,
        phase: str,
        scheme: str = "",
        needs: Sequence[bool] = (),
        budget: int | None = None,
    ) -> Problem:
        """The problem key of a call.

        Args:
            description: what the call looks like.
            phase: ``forward``, ``backward`` or ``scheme``.
            scheme: the scheme, except in phase ``scheme``.
            needs: for backward, scheme and a forward that computes gradients, which differentiable inputs need one.
            budget: the memory budget in bytes, which enters as its ``budget_class``.
        """
        dims = {n: bucket(v) if self.dims[n] is DimKind.BUCKET else v for n, v in description.dims.items()}  # type: ignore[arg-type]
        flags: dict[str, Scalar] = dict(description.flags)
        if self.takes_needs(phase, scheme):
            flags["needs"] = ",".join(n for n, need in zip(self.differentiable, needs, strict=True) if need)
        if budget is not None:
            flags["budget"] = budget_class(budget)
        return Problem(
            self.name, "" if phase == SCHEME else scheme, phase, Fields(dims), description.dtypes, Fields(flags)
        )

    def has(self, problem: Problem) -> bool:
        """Whether a call can be such a problem.

        A table or a log may hold those of another version of the contract, or what somebody made up. An example on
        the meta device, described anew, must be the same problem, field by field.
        """
        schemes = {scheme.name for scheme in self.schemes}
        phase = problem.scheme in schemes and problem.phase in (FORWARD, BACKWARD)
        choice = problem.phase == SCHEME and not problem.scheme and len(schemes) > 1
        known = problem.op == self.name and (phase or choice)
        if not known or problem.dims.keys() != self.dims.keys():
            return False
        try:
            bare = replace(problem, flags=problem.flags.without("budget"))
            budget = problem.flags.get("budget")
            if (budget is None) is not (self.budget(bare) is None) or not isinstance(budget, int | None):
                return False
            fixed = self.options_of(problem)
            options = {o.name: o.validate(self.name, fixed[o.name]) for o in self.options}
            inputs = self.example(problem, "meta", 0, "random")
            self.validate(inputs, options)
            again = self.describe(inputs, options)
            needs = self.needs(problem) if self.takes_needs(problem.phase, problem.scheme) else ()
            return self.problem(again, problem.phase, problem.scheme, needs, budget) == problem
        except Exception:  # whatever a contract's functions make of what it does not know
            return False

    def takes_needs(self, phase: str, scheme: str) -> bool:
        """Whether which gradients are needed is part of a problem of this phase."""
        return phase != FORWARD or self.scheme(scheme).gradients

    def needs_of(self, problem: Problem) -> tuple[bool, ...] | None:
        """What a launch function is told of the gradients that are needed; None if it is not."""
        return self.needs(problem) if self.takes_needs(problem.phase, problem.scheme) else None

    def needs(self, problem: Problem) -> tuple[bool, ...]:
        """Which differentiable inputs need a gradient in a problem, in order."""
        named = str(problem.flags.get("needs", "")).split(",")
        return tuple(name in named for name in self.differentiable)

    def options_of(self, problem: Problem) -> dict[str, Scalar]:
        """The options a problem fixes, with defaults for those that are not part of its key."""
        fixed = self.fixed(problem)
        return {o.name: fixed.get(o.name, problem.flags.get(o.name, o.default)) for o in self.options}

    def outputs_of(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The outputs that a call with these options returns."""
        return tuple(n for n in self.outputs if n not in self.asked or options[self.asked[n]])

    def check(self) -> None:
        """Raise RegistrationError if the contract contradicts itself."""
        if not self.name.isidentifier():
            raise RegistrationError(f"{self.name!r} is no name for an operation", fix="use an identifier")
        names = [i.name for i in self.inputs] + [o.name for o in self.options]
        if not all(name.isidentifier() for name in names) or len(set(names)) < len(names):
            raise RegistrationError(f"op {self.name!r} has inputs and options that are no distinct identifiers")
        if taken := RESERVED & set(names):
            raise RegistrationError(f"op {self.name!r} uses reserved names", why=", ".join(sorted(taken)))
        theirs = inspect.signature(self.reference).parameters
        ours = self.signature.parameters
        if [(p.name, p.default) for p in theirs.values()] != [(p.name, p.default) for p in ours.values()]:
            raise RegistrationError(
                f"the reference of op {self.name!r} does not take its inputs and options",
                why=f"it takes ({', '.join(map(str, theirs.values()))}), the contract has "
                f"({', '.join(map(str, ours.values()))})",
            )
        if not self.schemes or {FORWARD, BACKWARD} - set(self.order):
            raise RegistrationError(f"op {self.name!r} needs a scheme and an order of implementations for each phase")


def dtype_name(tensor: torch.Tensor | None) -> str:
    """The dtype's name in a problem key: ``bfloat16``; ``none`` for an absent tensor."""
    return "none" if tensor is None else str(tensor.dtype)[6:]


def check_dtype(op: str, tensor: torch.Tensor, allowed: Sequence[str], name: str) -> None:
    """Raise UnsupportedDtypeError unless the tensor's dtype is allowed."""
    if dtype_name(tensor) not in allowed:
        raise UnsupportedDtypeError(
            f"{op} is not defined for {name} of dtype {dtype_name(tensor)}",
            candidates=allowed,
            fix=f"cast {name} first, for example {name}.to(torch.bfloat16)",
        )
