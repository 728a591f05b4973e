"""Root-mean-square and layer norms: found by the formula that their forward computes, in every spelling and rounding.

The forward is read, and for each pair of dtypes, of x and of the weight, compared with the formulas of ``rms_norm`` and
``layer_norm`` for these dtypes. The replacement serves the pairs for which one of them is the very same, with the
casting found, and calls the module's own code for all others; a module whose present dtype is not among them is left
alone. So a norm with a cast less is taken for what it is, and never for what it resembles.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from liger_registry.dtensor import all_spread
from liger_registry.transformers.engine.adapters import Enabled
from liger_registry.transformers.engine.binding import Binding
from liger_registry.transformers.engine.calls import (
    FLOATING,
    call,
    dtype_name,
    float_dtype,
    reference,
    takes,
    usable_place,
)
from liger_registry.transformers.engine.expressions import Expr, add, brief, cast, const, dtype_of, mul, number
from liger_registry.transformers.engine.matching import Holes, hole, match
from liger_registry.transformers.engine.probe import confirm
from liger_registry.transformers.engine.reading import Reading, Unreadable, read_method
from liger_registry.transformers.engine.rebuild import Shared
from liger_registry.transformers.engine.report import Row
from liger_registry.transformers.engine.rounding import Unrounded, normalised, rounded, standardised

Tensor = torch.Tensor
Pair = tuple[torch.dtype, "torch.dtype | None"]
# A casting, the eps and offset that make it the module's, and the attribute that the eps was read from.
Same = tuple[str, float, float, str]

_WIDE = const(torch.float32)
_AFFINE = 3  # nodes more than this would be no norm's


@dataclass(frozen=True)
class Formula:
    """Which operation a forward computes, and with what.

    Attributes:
        op: ``rms_norm`` or ``layer_norm``.
        eps: added to the mean of squares, or to the variance.
        offset: added to the weight.
        weight: path of the weight; None without one.
        bias: the same for the bias.
        castings: for each pair of dtypes, of x and of the weight, the casting of ``rms_norm`` that is the same; "" for
            ``layer_norm``, which has one.
        width: that of the last dimension, where the code names it.
        autocast: what it also holds for under autocast: all tensors, those in float32 ("single"), or none.
        eps_at: the attribute that is the eps; empty where it is none's value.
        numbers: other attributes whose numbers the formula depends on, and what they were when it was read.
    """

    op: str
    eps: float
    offset: float
    weight: str | None
    bias: str | None
    castings: tuple[tuple[Pair, str], ...]
    width: int | None = None
    autocast: str = "all"
    eps_at: str = ""
    numbers: tuple[tuple[str, float], ...] = ()

    def weight_of(self, module: nn.Module) -> Any:  # noqa: ANN401 - whatever the module has there now
        """A module's weight; None without one."""
        return None if self.weight is None else getattr(module, self.weight)

    @property
    def text(self) -> str:
        """For the report."""
        castings = {casting for _, casting in self.castings if casting}
        told = [f"eps {self.eps:g}"] + ([f"casting {'/'.join(sorted(castings))}"] if castings else [])
        if self.offset:
            told.append(f"offset {self.offset:g}")
        if self.weight is None:
            told.append("no weight")
        return f"reads as {self.op}: {', '.join(told)}"


class NormForward:
    """A norm's forward through its operation; the module's own for whatever that would round otherwise.

    Args:
        module: the norm.
        formula: what its forward computes.
        operate: calls an operation by name.
    """

    def __init__(self, module: nn.Module, formula: Formula, operate: Any = call) -> None:  # noqa: ANN401
        self.module, self.formula, self.operate = module, formula, operate
        self.castings = dict(formula.castings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """The forward."""
        if len(args) == 1 and not kwargs:
            (x,), weight, formula = args, self.weight, self.formula
            if formula.op == "rms_norm":
                options = self.options(x, weight)
                if options is not None:
                    return self.operate("rms_norm", x, weight, **options)
            else:
                bias = None if formula.bias is None else getattr(self.module, formula.bias)
                eps = self.eps
                if eps is not None and self._is_served(x, weight, bias):
                    if formula.offset and weight is not None:
                        weight = weight + formula.offset
                    return self.operate("layer_norm", x, weight, bias, eps=eps)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def weight(self) -> Any:  # noqa: ANN401 - see Formula.weight_of
        """The module's weight; None without one."""
        return self.formula.weight_of(self.module)

    @property
    def eps(self) -> float | None:
        """The eps that the module has now; None where the formula no longer holds for its numbers."""
        formula, module = self.formula, self.module
        for name, value in formula.numbers:
            if attrgetter(name)(module) != value:
                return None
        if not formula.eps_at:
            return formula.eps
        eps = getattr(module, formula.eps_at)
        return eps if type(eps) is float and 0.0 <= eps < math.inf else None

    def options(self, x: Any, weight: Tensor | None) -> dict[str, Any] | None:  # noqa: ANN401
        """The options of ``rms_norm`` for these tensors; None where it would round otherwise, or not take them."""
        eps = self.eps
        if eps is None or not self.fits(x, weight, None):
            return None
        casting = self.castings.get((x.dtype, None if weight is None else weight.dtype))
        return {"eps": eps, "offset": self.formula.offset, "casting": casting} if casting else None

    def _is_served(self, x: Any, weight: Tensor | None, bias: Tensor | None) -> bool:  # noqa: ANN401
        """Whether ``layer_norm`` takes these tensors, and rounds as the module does."""
        if not self.fits(x, weight, bias) or (x.dtype, None if weight is None else weight.dtype) not in self.castings:
            return False
        return bias is None or weight is None or bias.dtype == weight.dtype

    def fits(self, x: Any, weight: Tensor | None, bias: Tensor | None) -> bool:  # noqa: ANN401
        """Whether the operation takes these tensors, wherever its dtypes do."""
        vectors = [vector for vector in (weight, bias) if vector is not None]
        if not (takes(x, *vectors) or all_spread((x, *vectors))) or x.dim() == 0 or x.shape[-1] == 0:
            return False
        for vector in vectors:
            if vector.shape != x.shape[-1:] or vector.device != x.device:
                return False
        width = self.formula.width
        if width is not None and x.shape[-1] != width:
            return False
        autocast = self.formula.autocast
        if autocast == "all" or not torch.is_autocast_enabled(x.device.type):
            return True
        return autocast == "single" and all(t.dtype == torch.float32 for t in (x, *vectors))


def find(model: nn.Module, enabled: Enabled) -> Iterator[Binding | Row]:
    """The norms of a model."""
    dtype = float_dtype(model)
    for path, module in model.named_modules():
        looks_like = _looks_like(module)
        if looks_like is None:
            continue
        try:
            formula = formula_of(module)
        except Unreadable as error:
            if enabled.get(looks_like) and _named_norm(module):
                yield Row(looks_like, path, False, error.reason, type(module).__name__)
            continue
        if enabled.get(formula.op):
            yield _bound(path, module, formula, dtype)


def _bound(path: str, module: nn.Module, formula: Formula, dtype: torch.dtype) -> Binding | Row:
    kind = type(module).__name__

    def left(reason: str) -> Row:
        return Row(formula.op, path, False, reason, kind)

    where, reason = usable_place(module)
    if reason:
        return left(reason)
    weight = formula.weight_of(module)
    own = dtype if weight is None else weight.dtype
    if own not in FLOATING:
        return left(f"its weight is in {dtype_name(own)}")
    served = {pair for pair, _ in formula.castings}
    if (own, None if weight is None else own) not in served:
        return left(f"in {dtype_name(own)} it rounds in other places than {formula.op}")
    reason = _confirmed(module, formula)
    if reason:
        return left(reason)
    return Binding(formula.op, path, module, where, NormForward(module, formula), formula.text)


def _looks_like(module: nn.Module) -> str | None:
    """The operation that a module may compute; None for what is no norm at a glance."""
    if any(True for _ in module.children()):
        return None
    tensors = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    if len(tensors) > _AFFINE or isinstance(module, (nn.Linear, nn.Embedding, nn.Dropout)):
        return None
    return "layer_norm" if "layernorm" in type(module).__name__.lower() else "rms_norm"


def _named_norm(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "norm" in name and not any(other in name for other in ("batchnorm", "groupnorm", "instancenorm"))


# -- formulas --------------------------------------------------------------------------------------------------------

_known: Shared[Formula | str] = Shared()


def formula_of(module: nn.Module) -> Formula:
    """The operation that a norm's forward computes.

    Raises:
        Unreadable: it computes none; the reason says what instead.
    """
    reading = read_method(module)
    found = _known.get_or_make(type(module), reading, lambda: _formula_or_reason(reading, type(module).__name__))
    if isinstance(found, str):
        raise Unreadable(found)
    return found


def _formula_or_reason(reading: Reading, name: str) -> Formula | str:
    try:
        return _formula(reading, name)
    except Unreadable as error:
        return error.reason


def _formula(reading: Reading, name: str) -> Formula:
    result = reading.result
    strange = Unreadable(f"forward of {name} is no known formula: {brief(result)}")
    if len(reading.parameters) != 1:
        raise Unreadable(f"forward of {name} takes more than one tensor: {', '.join(reading.parameters)}")
    x = Expr("param", (), reading.parameters[0])
    vectors = dict.fromkeys(node for node in result.walk() if node.op == "attr")
    ranks = dict(reading.read)
    width = _width(reading)
    if len(vectors) > 2:
        raise strange
    for op, weight, bias in _roles(tuple(vectors)):
        pairs: Iterable[Pair] = itertools.product(FLOATING, (None,) if weight is None else FLOATING)
        found = {pair: same for pair in pairs if (same := _same(op, result, x, weight, bias, pair))}
        numbers = {told[1:] for same in found.values() for told in same}
        if len(numbers) == 1:
            ((eps, offset, eps_at),) = numbers
            if any(ranks.get(str(v.value)) != ("tensor", 1) for v in vectors):
                raise Unreadable(f"the weight of {name} has more than one dimension")
            first, second = (None if v is None else str(v.value) for v in (weight, bias))
            autocast, (at, others) = _autocast(reading), _read_numbers(reading, eps_at)
            return Formula(op, eps, offset, first, second, _chosen(found), width, autocast, at, others)
    raise strange


def _read_numbers(reading: Reading, eps_at: str) -> tuple[str, tuple[tuple[str, float], ...]]:
    """The attribute that is the eps, as a float of the module itself, and the other attributes that are numbers."""
    plain = [(name, told) for name, told in reading.read if isinstance(told, tuple) and len(told) == 2]
    found = {name: told[1] for name, told in plain if told[0] in (bool, int, float)}
    own = "." not in eps_at and type(found.get(eps_at)) is float
    return eps_at if own else "", tuple((n, value) for n, value in found.items() if not own or n != eps_at)


def _autocast(reading: Reading) -> str:
    """Arithmetic in float32 is left alone by autocast; PyTorch's own norms it moves to float32."""
    if reading.assumes:
        return "none"
    torch_norms = ("layer_norm", "rms_norm")
    return "single" if any(node.op in torch_norms for node in reading.result.walk()) else "all"


def _chosen(found: Mapping[Pair, list[Same]]) -> tuple[tuple[Pair, str], ...]:
    """One casting for each pair: of several that are the same there the one that most pairs have."""
    names = {pair: [casting for casting, *_ in same] for pair, same in found.items()}
    often = Counter(casting for castings in names.values() for casting in castings)
    return tuple((pair, max(castings, key=lambda casting: often[casting])) for pair, castings in names.items())


def _width(reading: Reading) -> int | None:
    """The width that the code checks, or names as its shape."""
    widths: set[object] = set()
    for guard in reading.guards:
        holes = match(Expr("not", (Expr("eq", (Expr("size", (hole("x"), const(-1))), hole("width", "const"))),)), guard)
        widths.add(None if holes is None else holes["width"].value)
    for node in reading.result.walk():
        if node.op in ("layer_norm", "rms_norm"):
            shape = node.args[1]
            widths.add(shape.value[-1] if isinstance(shape.value, tuple) else shape.args[-1].value)
    if not widths:
        return None
    (width,) = widths if len(widths) == 1 else (None,)
    if not isinstance(width, int):
        raise Unreadable("it raises under conditions that are not known")
    return width


def _roles(vectors: tuple[Expr, ...]) -> Iterator[tuple[str, Expr | None, Expr | None]]:
    """The operations, with every way the tensors can be a weight and a bias."""
    if not vectors:
        yield "rms_norm", None, None
        yield "layer_norm", None, None
    elif len(vectors) == 1:
        yield "rms_norm", vectors[0], None
        yield "layer_norm", vectors[0], None
    else:
        yield "layer_norm", vectors[0], vectors[1]
        yield "layer_norm", vectors[1], vectors[0]


def _same(op: str, result: Expr, x: Expr, weight: Expr | None, bias: Expr | None, pair: Pair) -> list[Same]:
    """With what an operation is the expression, for tensors of two dtypes."""
    dtypes = {x: pair[0]}
    for vector in (weight, bias):
        if vector is not None:
            assert pair[1] is not None
            dtypes[vector] = pair[1]
    try:
        ours = rounded(result, dtypes)
    except Unrounded:
        return []
    same: list[Same] = []
    for casting, formula in _formulas(op, x, weight, bias):
        holes = match(rounded(formula, dtypes), ours)
        if holes is not None and (numbers := _numbers(holes)) is not None:
            same.append((casting, *numbers, holes.get("eps", const(0.0)).path))
    return same


def _numbers(holes: Holes) -> tuple[float, float] | None:
    eps, offset = (number(holes.get(name, const(0.0))) for name in ("eps", "offset"))
    return None if eps is None or offset is None or eps < 0 else (float(eps), float(offset))


def _formulas(op: str, x: Expr, weight: Expr | None, bias: Expr | None) -> Iterator[tuple[str, Expr]]:
    """The formulas of an operation with a hole for its eps, and one for the offset of the weight."""
    eps, offset = hole("eps", "const"), hole("offset", "const")
    wide = (normalised if op == "rms_norm" else standardised)(cast(x, _WIDE), eps)
    if weight is None:
        yield "gemma" if op == "rms_norm" else "", cast(wide, dtype_of(x))
        return
    if op == "rms_norm":
        for factor in (weight, add(weight, offset)):
            yield "llama", mul(cast(wide, dtype_of(x)), factor)
        for factor in (cast(weight, _WIDE), add(cast(weight, _WIDE), offset)):
            yield "gemma", cast(mul(wide, factor), dtype_of(x))
        return
    for factor in (weight, add(weight, offset)):
        scaled = mul(wide, cast(factor, _WIDE))
        yield "", cast(scaled if bias is None else add(scaled, cast(bias, _WIDE)), dtype_of(x))


# -- probes ----------------------------------------------------------------------------------------------------------


def _confirmed(module: nn.Module, formula: Formula) -> str:
    """Whether the operation does on random numbers what the class does; asked once for each class and formula."""
    weight = formula.weight_of(module)
    width = formula.width or (41 if weight is None else weight.shape[-1])

    def probe() -> str:
        served = {pair for pair, _ in formula.castings}
        dtypes = [d for d in FLOATING[:2] if (d, None if weight is None else d) in served]
        bound = functools.partial(NormForward, formula=formula, operate=reference)
        return confirm(module, bound, lambda made: _shape(made, formula, width), dtypes)

    return _probed.get_or_make(type(module), (formula, width), probe)


_probed: Shared[str] = Shared()


def _shape(made: nn.Module, formula: Formula, width: int) -> tuple[int, int, int]:
    weight = formula.weight_of(made)
    return 2, 3, width if weight is None else weight.shape[-1]
