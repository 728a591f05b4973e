"""Faults of kernels, planted into the contract's own formula, so that each can be planted into any operation.

A fault takes the launch function that is right and the problem, and gives launch functions that are wrong, by name, or
none where the operation has no place for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from planting import (
    Place,
    Variants,
    after,
    before,
    middling_case,
    observable,
    place_of,
    planted,
    read_tensors,
    results_of,
    same_results,
    shapes_of,
)  # fmt: skip
from torch.utils._python_dispatch import TorchDispatchMode

from liger_registry.implementation import Implementation
from liger_registry.op import Op
from liger_registry.problem import BACKWARD, Problem

# -- places that are not written, or written by another ----------------------------------------------------------------


def tail_column(place: Place) -> Variants:
    """Off by one: the last column is not computed."""
    for name, shape in shapes_of(place).items():
        if len(shape) and shape[-1] > 1:
            yield name, after(place, lambda y: y.index_fill_(-1, torch.tensor([y.shape[-1] - 1]), 0.0), name)


def last_row(place: Place) -> Variants:
    """Off by one: the last row is not computed."""
    for name, shape in shapes_of(place).items():
        if len(shape) > 1 and shape[0] > 1:
            yield name, after(place, lambda y: y.index_fill_(0, torch.tensor([y.shape[0] - 1]), 0.0), name)


def store_mask(place: Place) -> Variants:
    """No mask at the store: what is beyond a row's end lands in the next row's first element."""

    def spill(y):
        y[1:, ..., 0] = y[:-1, ..., -1] * 1.0009765625
        return y

    for name, shape in shapes_of(place).items():
        if len(shape) > 1 and shape[0] > 1 and shape[-1] > 1:
            yield name, after(place, spill, name)


def second_round(place: Place) -> Variants:
    """Programs that go round a second time go on with what they had, where the device has few units."""
    buckets = [name for name in place.op.dims if place.op.dims[name].name == "BUCKET"]
    for name, shape in shapes_of(place).items():
        if not len(shape) or shape[0] < 16 or not buckets:
            continue

        def launch(*tensors, device, name=name, **rest):
            results = list(place.right(*tensors, device=device, **rest))
            at = place.results.index(name)
            if results[at] is not None and device.units * 4 < results[at].shape[0]:
                results[at] = results[at].clone(memory_format=torch.preserve_format)
                results[at][device.units * 4 :] = results[at][:1].clone()
            return tuple(results)

        yield name, launch


# -- memory ------------------------------------------------------------------------------------------------------------


def load_mask(place: Place) -> Variants:
    """No mask at the load: the last element of each row is joined by the one that lies behind it in memory."""

    def reads_on(t):
        if t.dim() < 2 or not t.is_floating_point() or not t.numel() or t.stride(-1) != 1:
            return t
        beyond = t.as_strided(t.shape[:-1], t.stride()[:-1], t.storage_offset() + t.shape[-1])
        changed = t.clone()
        changed[..., -1] += beyond.nan_to_num(0.5)
        return changed

    for name in read_tensors(place, least=2):
        yield name, before(place, reads_on, name)


def wrong_stride(place: Place) -> Variants:
    """Takes a tensor to be contiguous."""

    def dense(t):
        strides = torch.empty(t.shape, device="meta").stride()
        return t.as_strided(t.shape, strides, t.storage_offset())

    for name in read_tensors(place, least=1, integers=True):
        yield name, before(place, dense, name)


def aligned_alone(place: Place) -> Variants:
    """A kernel compiled for aligned pointers reads from the aligned address below."""

    def down(t):
        items = 16 // t.element_size()
        return t.as_strided(t.shape, t.stride(), t.storage_offset() // items * items)

    for name in read_tensors(place, least=1):
        yield name, before(place, down, name)


def stale_scratch(place: Place) -> Variants:
    """Reads scratch that nobody wrote, got without torch's Python functions for it, before all else.

    Not of a few numbers: malloc's small holes cannot be filled with certainty, and a GPU's allocator has none below 512
    bytes.
    """
    for name, shape in shapes_of(place).items():
        if shape.numel() < 512:
            continue
        known: dict[object, torch.Size] = {}

        def launch(*tensors, name=name, known=known, **rest):
            key = tuple(None if t is None else t.shape for t in tensors)
            first = next(t for t in tensors if t is not None)
            scratch = first.new_tensor([], dtype=torch.float32).resize_(known.get(key, (1,)))
            results = list(place.right(*tensors, **rest))
            at = place.results.index(name)
            if key in known:
                results[at] = results[at] + (0 * scratch).to(results[at].dtype)
            known[key] = results[at].shape
            return tuple(results)

        yield name, launch


def kept_buffer(place: Place) -> Variants:
    """A buffer kept by shape, and not cleared between calls: what it held is added."""
    for name in shapes_of(place):
        if not middling_case(place).formula[name].any():
            continue  # what is always zero adds nothing
        kept: dict[object, torch.Tensor] = {}

        def adds(y, kept=kept):
            before = kept.get(y.shape)
            kept[y.shape] = y.clone()
            return y if before is None else y + before

        yield name, after(place, adds, name)


def first_pointer(place: Place) -> Variants:
    """Answers from the first call of a shape, as a graph that was captured with its tensors does."""
    held: dict[object, tuple[Any, ...]] = {}

    def launch(*tensors, **rest):
        key = tuple(None if t is None else t.shape for t in tensors)
        return held.setdefault(key, place.right(*tensors, **rest))

    yield "results", launch


def writes_input(place: Place) -> Variants:
    """Scales an input in place when it is done with it."""
    allowed = set(place.op.overwrites) | set(place.scheme.owned)
    for name in read_tensors(place, least=1):
        if name in allowed:
            continue

        def launch(*tensors, name=name, **rest):
            results = place.right(*tensors, **rest)
            results = tuple(r.clone() if isinstance(r, torch.Tensor) else r for r in results)
            tensor = place.given(tensors)[name]
            if 0 not in tensor.stride():
                tensor.mul_(2)
            return results

        yield name, launch


# -- numbers -----------------------------------------------------------------------------------------------------------


class Narrow(TorchDispatchMode):
    """Sums and products of matrices are accumulated in bf16, term by term."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.name()
        x = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if x is not None and x.is_floating_point():
            if name in ("aten::sum.dim_IntList", "aten::mean.dim") and args[1]:
                dims = [d % x.dim() for d in args[1]]
                total = self._total(x, dims)
                total = total / _count(x, dims) if "mean" in name else total
                shaped = total.reshape([1 if d in dims else n for d, n in enumerate(x.shape)])
                keep = len(args) > 2 and args[2]
                return (shaped if keep else total).to(kwargs.get("dtype") or x.dtype)
            if name in ("aten::sum", "aten::sum.default", "aten::mean", "aten::mean.default"):
                total = self._total(x, list(range(x.dim())))
                return (total / x.numel() if "mean" in name else total).to(kwargs.get("dtype") or x.dtype)
            if name in ("aten::mm", "aten::mm.default"):
                products = (x[:, k : k + 1].float() * args[1][k : k + 1].float() for k in range(x.shape[1]))
                return self._sum(products, x.new_zeros(x.shape[0], args[1].shape[1])).to(x.dtype)
        return func(*args, **kwargs)

    @classmethod
    def _total(cls, x, dims):
        rest = [d for d in range(x.dim()) if d not in dims]
        flat = x.permute(*dims, *rest).reshape(-1, *(x.shape[d] for d in rest))
        return cls._sum((row.float() for row in flat), flat.new_zeros(flat.shape[1:]))

    @staticmethod
    def _sum(terms, zero):
        total = zero.to(torch.bfloat16)
        for term in terms:
            total = (total.float() + term).to(torch.bfloat16)
        return total.float()


def _count(x, dims):
    count = 1
    for d in dims:
        count *= x.shape[d]
    return count


def narrow_sums(place: Place) -> Variants:
    """Sums in bf16."""

    def launch(*tensors, **rest):
        with Narrow():
            return place.right(*tensors, **rest)

    case = middling_case(place)
    if not same_results(results_of(place, case, place.right, {}), results_of(place, case, launch, {})):
        yield "sums", launch


def early_cast(place: Place) -> Variants:
    """Inputs are rounded to half of their bits on the way in, or results on the way out.

    Where all are float32: a weight in float32 beside inputs in bf16 may lose what no result shows.
    """
    if set(place.problem.dtypes.values()) - {"none"} != {"float32"}:
        return
    dtype = torch.bfloat16
    for name in read_tensors(place, least=1):
        yield name, before(place, lambda t: t.to(dtype).to(t.dtype) if t.is_floating_point() else t, name)
    for name in shapes_of(place):
        values = middling_case(place).formula[name]
        if not torch.equal(values.to(dtype).to(values.dtype), values):  # as whether a token was right
            yield f"{name} out", after(place, lambda y: y.to(dtype).to(y.dtype), name)


def other_dtype(place: Place) -> Variants:
    """A result in another dtype than the formula's."""
    for name in shapes_of(place):
        yield name, after(place, lambda y: y.to(torch.float16 if y.dtype == torch.float32 else torch.float32), name)


def dropped_option(place: Place) -> Variants:
    """An option keeps its default, or the value that stands for its class, whatever is given."""
    own = place.op.options_of(place.problem)
    for option in place.op.options:
        if option.name in DROPPABLE.get(place.op.name, ()) or option.name in ROUNDINGS:
            continue
        for value in dict.fromkeys((option.default, own[option.name])):
            if observable(place, option, value):

                def launch(*tensors, name=option.name, value=value, **rest):
                    return place.right(*tensors, **{**rest, name: value})

                yield f"{option.name} is {value}", launch


#: Options that say where a model's formula rounds. Another family's roundings are within a unit in the last place, as
#: the accuracy rule allows; that ours are the family's own, bit for bit, is held by the tests of these operations.
ROUNDINGS = ("casting", "wide")
#: Options about memory and time, which change no number.
DROPPABLE = {
    name: ("in_place", "accumulate", "compact", "return_z_loss", "return_token_accuracy", "return_predicted_tokens")
    for name in ("cross_entropy", "fused_linear_cross_entropy")
} | {
    "fused_linear_jsd": ("accumulate", "compact"), "linear_logp": ("compact",), "logit_divergence": ("in_place",),
    "linear_sequence_loss": ("accumulate", "compact"), "logit_statistics": ("in_place",),
}  # fmt: skip


def mean_gradient(place: Place) -> Variants:
    """Gradients of the outputs are applied after the sum: their mean stands for all of them."""
    if place.problem.phase == BACKWARD:
        for name in read_tensors(place, least=1):
            if name.startswith("grad_of_"):
                yield name, before(place, lambda g: g.float().mean().to(g.dtype).expand(g.shape), name)


def unit_gradient(place: Place) -> Variants:
    """The gradient of an output is taken to be 1, as `loss.backward()` gives it."""
    if place.problem.phase == BACKWARD:
        case = middling_case(place)
        for name in place.tensors[: len(place.op.outputs)]:
            launch = before(place, torch.ones_like, name)
            if not same_results(results_of(place, case, place.right, {}), results_of(place, case, launch, {})):
                yield name, launch


def too_many_gradients(place: Place) -> Variants:
    """Computes gradients that nobody asked for."""
    needs, absent = place.op.needs(place.problem), {n for n, d in place.problem.dtypes.items() if d == "none"}
    there = [need for n, need in zip(place.op.differentiable, needs, strict=True) if n not in absent]
    if place.problem.phase == BACKWARD and any(there) and not all(there):

        def launch(*tensors, needs, **rest):
            return place.right(*tensors, needs=(True,) * len(needs), **rest)

        case = middling_case(place)
        # Where forward computes the gradients, backward has none but those that were asked for.
        if not same_results(results_of(place, case, place.right, {}), results_of(place, case, launch, {})):
            yield "gradients", launch


FAULTS = {
    f.__name__: f
    for f in (
        tail_column, last_row, store_mask, second_round, load_mask, wrong_stride, aligned_alone, stale_scratch,
        kept_buffer, first_pointer, writes_input, narrow_sums, early_cast, other_dtype, dropped_option, mean_gradient,
        unit_gradient, too_many_gradients,
    )
}  # fmt: skip
#: Faults whose second run would differ; planted into what does not declare to be deterministic, too.
STATEFUL = ("kept_buffer",)


def every_plant(op: Op, problem: Problem, faults: Iterable[str] = ()) -> Iterator[tuple[str, str, Implementation]]:
    """Each fault, or some of them, in each place of an operation, as ``(fault, where, implementation)``."""
    place = place_of(op, problem)
    for fault, plant in FAULTS.items():
        if faults and fault not in faults:
            continue
        for where, launch in plant(place):
            yield fault, where, planted(place, fault, launch, deterministic=fault not in STATEFUL)
