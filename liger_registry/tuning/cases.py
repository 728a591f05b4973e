"""Cases: inputs of one style, and what every result of them should be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from liger_registry.config import Fields, Scalar
from liger_registry.errors import RegistryError
from liger_registry.examples import STYLES, fill
from liger_registry.op import Op, Scheme
from liger_registry.problem import BACKWARD, Problem
from liger_registry.tuning.layouts import place

if TYPE_CHECKING:
    Tensors = tuple[torch.Tensor | None, ...]

CONTIGUOUS = ("guarded", "guarded")
# Layout of inputs and of gradients by style; a gradient often comes expanded (`y.sum()`), transposed or as a slice, a
# weight as a column, a slice or expanded. Labels with gaps are also in a style that no one row dominates.
_LAYOUTS = {
    "random": CONTIGUOUS,
    # One of the few that large sizes are tried in.
    "tail": ("gapped", "gapped"),
    "spike": ("guarded", "scalar"),
    "tiny": ("expanded", "transposed"),
    "shifted": ("gapped", "rows"),
    "zeros": ("misaligned", "misaligned"),
}


# Above this product of dims only some styles are tried.
LARGE, FEW = 1 << 22, ("random", "tail")
#: Units of a device on which every program of a persistent grid goes round several times within few rows.
FEW_UNITS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs and the right results.

    Attributes:
        label: names it in verdicts.
        problem: with the actual sizes.
        options: the operation's options.
        inputs: the operation's inputs.
        grad_outputs: one for each output; None for an output without gradient.
        saved: what backward gets from forward behind the inputs, by the contract's own formula.
        truth: results by name in float64: outputs, saved tensors, ``grad_<input>``.
        formula: the same by the model's own formula in its dtypes.
        magnitude: the size of the terms each element sums.
        buffers: the memory that inputs, gradients and saved tensors lie in.
        units: of the device that a launch function is told of, at most; 0 for as many as it has.
    """

    label: str
    problem: Problem
    options: Mapping[str, Scalar]
    inputs: Tensors
    grad_outputs: Tensors
    saved: Tensors
    truth: Mapping[str, torch.Tensor]
    formula: Mapping[str, torch.Tensor]
    magnitude: Mapping[str, torch.Tensor]
    buffers: tuple[torch.Tensor, ...]
    units: int = 0

    @property
    def bytes(self) -> int:
        """The memory it holds."""
        held = (*self.buffers, *self.truth.values(), *self.formula.values(), *self.magnitude.values())
        return sum(t.numel() * t.element_size() for t in held)


def evaluate(
    op: Op,
    inputs: Tensors,
    options: Mapping[str, Any],
    grad_outputs: Tensors | None = None,
    dtype: torch.dtype | None = None,
    scheme: Scheme | None = None,
    needs: Sequence[bool] | None = None,
) -> dict[str, torch.Tensor]:
    """Everything the operation computes, in plain PyTorch.

    Args:
        op: the operation.
        inputs: its inputs.
        options: its options.
        grad_outputs: the gradient of each output; None leaves the gradients out.
        dtype: what floating tensors are cast to first: ``torch.float64`` gives the truth, None the model's own formula.
        scheme: whose saved tensors; the operation's first by default.
        needs: which differentiable inputs need a gradient, for a scheme whose forward computes gradients; all that are
            there by default.

    Returns:
        Outputs by name, saved tensors by name, and ``grad_<input>`` for each differentiable input that is there. What
        the call does not have is left out.
    """
    scheme = op.schemes[0] if scheme is None else scheme
    inputs = tuple(_cast(x, dtype) for x in inputs)
    # Which inputs get a gradient is decided by the contract, not by what the caller's tensors say.
    leaves = tuple(
        x.detach().requires_grad_(grad_outputs is not None) if x is not None and _wanted(op, spec.name, x) else x
        for spec, x in zip(op.inputs, inputs, strict=True)
    )
    with torch.enable_grad():
        outputs = op.reference(*leaves, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    present = op.outputs_of(options)
    results = {name: y.detach() for name, y in zip(present, outputs, strict=True)}
    results.update(_saved(op, scheme, inputs, options, needs))
    if grad_outputs is None:
        return results
    given = dict(zip(op.outputs, grad_outputs, strict=True))
    pairs = [
        (y, _cast(given[name], dtype))
        for name, y in zip(present, outputs, strict=True)
        if y.requires_grad and given[name] is not None
    ]
    wanted = {i.name: x for i, x in zip(op.inputs, leaves, strict=True) if x is not None and x.requires_grad}
    if pairs and wanted:
        ys, gs = zip(*pairs, strict=True)
        found = torch.autograd.grad(ys, tuple(wanted.values()), gs, allow_unused=True, materialize_grads=True)
        results.update({f"grad_{name}": g for name, g in zip(wanted, found, strict=True)})
    return results


def _saved(
    op: Op, scheme: Scheme, inputs: Tensors, options: Mapping[str, Any], needs: Sequence[bool] | None
) -> dict[str, torch.Tensor]:
    """What forward saves, by name, in plain PyTorch."""
    if not scheme.saved:
        return {}
    told: dict[str, Any] = {}
    if scheme.gradients:
        there = {i.name: x is not None for i, x in zip(op.inputs, inputs, strict=True)}
        told["needs"] = tuple(needs) if needs is not None else tuple(there[name] for name in op.differentiable)
    with torch.no_grad():
        saved = scheme.reference(*inputs, **options, **told)[len(op.outputs) :]
    return {name: value for name, value in zip(scheme.saved, saved, strict=True) if value is not None}


def _wanted(op: Op, name: str, tensor: torch.Tensor) -> bool:
    return name in op.differentiable and tensor.is_floating_point()


def _cast(tensor: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    if tensor is None or dtype is None or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


def _held(
    scheme: Scheme, truth: Mapping[str, torch.Tensor], formula: Mapping[str, torch.Tensor], name: str
) -> torch.Tensor | None:
    """What backward is given of forward: the formula's own values, so that they fit what backward computes again.

    Gradients that forward computed are the right ones, rounded. The formula's hold its errors, and a backward that only
    scales them would answer for these: with logits of 100 in fp32 they were 4.2 bounds off, where it may err by 4.
    """
    like = formula.get(name)
    if like is None or not scheme.gradients or not like.is_floating_point():
        return like
    return truth[name].to(like.dtype)


def gradient(shape: Sequence[int], dtype: torch.dtype, device: Any, seed: int, style: str) -> torch.Tensor:  # noqa: ANN401
    """A gradient of the given style; that of a scalar is an odd number of order one."""
    if len(shape) == 0:
        return torch.tensor(0.7 + 0.01 * (seed % 7), dtype=dtype, device=device)
    # Gradients are not normal numbers times 1e-3 with an offset: only where the weight lies matters here.
    return fill(tuple(shape), dtype, device, seed, style if style in ("random", "tail", "spike") else "random")


def make_case(
    op: Op,
    scheme: Scheme,
    problem: Problem,
    style: str,
    seed: int,
    device: Any,  # noqa: ANN401
    *,
    options: Mapping[str, Scalar] | None = None,
    layouts: tuple[str, str] | None = None,
    reshape: Callable[[Tensors], Tensors] | None = None,
    label: str = "",
) -> Case:
    """A case for a problem's actual sizes.

    Args:
        op: the operation.
        scheme: the scheme whose saved tensors count.
        problem: its dims are the actual sizes.
        style: one of ``examples.STYLES``.
        seed: fixes the values.
        device: torch's device.
        options: in place of those the problem fixes.
        layouts: of inputs and gradients, in place of the style's own.
        reshape: gives the inputs other shapes for the same problem.
        label: in place of one made of sizes and style.
    """
    options = op.options_of(problem) if options is None else options
    input_layout, grad_layout = layouts or _LAYOUTS.get(style, CONTIGUOUS)
    raw = op.example(problem, device, seed, style)
    raw = raw if reshape is None else reshape(raw)
    buffers: list[torch.Tensor] = []

    def put(tensor: torch.Tensor | None, layout: str) -> torch.Tensor | None:
        if tensor is None:
            return None
        view, buffer = place(tensor, layout)
        buffers.append(buffer)
        return view

    inputs = tuple(put(x, input_layout) for x in raw)
    needs = op.needs_of(problem)
    formula = evaluate(op, inputs, options, scheme=scheme, needs=needs)
    grads: Tensors = tuple(
        put(gradient(y.shape, y.dtype, device, seed + 100 + i, style), grad_layout)
        if y is not None and y.is_floating_point() and name not in op.constant
        else None
        for i, (name, y) in enumerate((name, formula.get(name)) for name in op.outputs)
    )
    # A transposed gradient has its tail in another place of memory; what counts is that all see the same values.
    asked = grads if problem.phase == BACKWARD else None
    if asked is not None:
        formula = evaluate(op, inputs, options, asked, scheme=scheme, needs=needs)
    truth = evaluate(op, inputs, options, asked, torch.float64, scheme, needs)
    wide = tuple(_cast(x, torch.float64) for x in inputs)
    with torch.no_grad():
        sizes = op.magnitude(wide, tuple(_cast(g, torch.float64) for g in grads), options)
    saved = tuple(
        put(_held(scheme, truth, formula, name), "guarded") for name in (*scheme.saved_outputs, *scheme.saved)
    )
    return Case(
        label=label or f"{problem.dims.text} {style}",
        problem=problem,
        options=options,
        inputs=inputs,
        grad_outputs=grads,
        saved=saved,
        truth=truth,
        formula=formula,
        magnitude={name: sizes.get(name, value.abs()) for name, value in truth.items()},
        buffers=tuple(buffers),
    )


def reduced(op: Op, name: str, problem: Problem) -> int:
    """How many terms a result sums in a problem of actual sizes."""
    sizes: list[int] = [getattr(problem, dim) for dim in op.reduced.get(name, ())]
    return math.prod(sizes)


def other_options(op: Op, problem: Problem, inputs: Tensors) -> dict[str, Scalar] | None:
    """Options that differ from the problem's own in all that is not part of the key; None if there are none.

    A candidate that ignores an option agrees with the reference for as long as the option has its default, and one that
    has a number in its code for as long as it is this number. Negative integers mark places of an integer input.
    """
    own = op.options_of(problem)
    changed: dict[str, Scalar] = {}
    for option in op.options:
        value, others = own[option.name], list[Scalar]()
        if option.kind is float and isinstance(value, float):
            # A number that the key knows by class must stay of its class, as a softcap that is off, or a beta below 1;
            # and bf16 does not tell a softcap of 30.5 from one of 30.
            others = [0.125 * value] if abs(value) > 8 else [value + 0.5, 0.75 * value, value + 0.125]
        elif option.kind is int and isinstance(value, int) and value < 0:
            others = [value - 7]
        elif option.choices:  # a key that knows a reduction only by whether it is one
            others = list(option.choices)
        for other in others if option.name not in problem.flags else ():
            if other != value and _same_key(op, problem, inputs, {**own, **changed, option.name: other}):
                changed[option.name] = other
                break
    return {**own, **changed} if changed else None


def _same_key(op: Op, problem: Problem, inputs: Tensors, options: Mapping[str, Scalar]) -> bool:
    try:
        op.validate(inputs, options)
        described = op.describe(inputs, options)
    except RegistryError:
        return False  # not a combination the operation takes
    return all(problem.flags.get(name) == value for name, value in described.flags.items())


def marking(op: Op, own: Mapping[str, Scalar], options: Mapping[str, Scalar]) -> Callable[[Tensors], Tensors] | None:
    """What marks the same places of integer inputs as before where a marker, such as ``ignore_index``, is another."""
    pairs = [(own[o.name], options[o.name]) for o in op.options if o.kind is int and own[o.name] != options[o.name]]
    if not pairs:
        return None

    def mark(inputs: Tensors) -> Tensors:
        marked = list(inputs)
        for number, x in enumerate(inputs):
            if x is not None and not x.is_floating_point() and x.dtype != torch.bool:
                for old, new in pairs:
                    marked[number] = torch.where(x == old, new, x).to(x.dtype)  # type: ignore[call-overload]
        return tuple(marked)

    return mark


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a case is made from.

    Attributes:
        problem: with the actual sizes.
        style: of the inputs.
        seed: fixes their values.
        layouts: of inputs and gradients.
        options: in place of those the problem fixes.
        units: of the device, at most; 0 for as many as it has.
    """

    problem: Problem
    style: str
    seed: int
    layouts: tuple[str, str]
    options: Fields | None = None
    units: int = 0

    def make(self, op: Op, device: Any) -> Case:  # noqa: ANN401
        """The case."""
        own, label = op.options_of(self.problem), ""
        if self.options is not None:
            changed = ",".join(f"{k}={v}" for k, v in self.options.items() if v != own[k])
            label = f"{self.problem.dims.text} {changed}"
        case = make_case(
            op,
            op.scheme(self.problem.scheme),
            self.problem,
            self.style,
            self.seed,
            device,
            options=own if self.options is None else dict(self.options),
            layouts=self.layouts,
            reshape=None if self.options is None else marking(op, own, self.options),
            label=label,
        )
        return self.on_its_units(case)

    def on_its_units(self, case: Case) -> Case:
        """A case of the same recipe for the units of this one."""
        return replace(case, units=self.units, label=f"{case.label} on {self.units} units") if self.units else case


def recipes(
    op: Op,
    problem: Problem,
    proxies: Sequence[Mapping[str, int]],
    styles: Sequence[str],
    seed: int,
    full: bool = True,
    walk: Mapping[str, int] | None = None,
) -> list[Recipe]:
    """The cases of a problem's proxies.

    Args:
        op: the operation.
        problem: the problem.
        proxies: sizes that take the place of its own.
        styles: of the inputs.
        seed: fixes the values.
        full: each style in its own layout; else the same values, all of them contiguous.
        walk: sizes at which programs go round several times on a device of ``FEW_UNITS`` units; None leaves that out.
    """
    found: list[Recipe] = []
    for dims in proxies:
        small = problem.having(**dims)
        # Sizes that only large configs need: a few styles of them keep one candidate within seconds on a CPU.
        for style in styles if math.prod(_sizes(small)) <= LARGE else [s for s in styles if s in FEW] or styles:
            # The style's own number keeps the values of one style the same, whichever others are asked for.
            own = seed + 1000 * STYLES.index(style)
            found.append(Recipe(small, style, own, _LAYOUTS[style] if full else CONTIGUOUS))
    # Of every size but a single row, since what an option does to some rows is lost in sums over thousands.
    for small in [problem.having(**dims) for dims in proxies if max(dims.values(), default=2) > 1 and found]:
        inputs = op.example(small, "meta", seed, "random")
        options = other_options(op, small, inputs) if math.prod(_sizes(small)) <= LARGE else None
        if options is not None:
            found.append(Recipe(small, "random", seed + 7, CONTIGUOUS, Fields(options)))
    if walk is not None:
        few = [style for style in FEW if style in styles] or [*styles[:1]]
        for style in few if full else few[:1]:
            own = seed + 1000 * STYLES.index(style)
            layouts = _LAYOUTS[style] if full else CONTIGUOUS
            found.append(Recipe(problem.having(**walk), style, own, layouts, units=FEW_UNITS))
    return found


def _sizes(problem: Problem) -> list[int]:
    return [int(getattr(problem, name)) for name in problem.dims]
