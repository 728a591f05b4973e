"""A toy catalogue whose implementations each have one known fault; the worker builds it by name.

``affine`` is ``y = gain * x * w`` over x (rows, hidden) and w (hidden,). Its backward saves nothing. Costs are told to
a clock of this module, so that no test depends on how fast the machine is.
"""

from __future__ import annotations

import os
import time

import torch

from liger_registry.catalog import Catalog
from liger_registry.config import Config, ConfigSpace, Fields
from liger_registry.errors import InvalidInputError
from liger_registry.examples import fill
from liger_registry.implementation import Implementation
from liger_registry.op import Description, DimKind, Input, Op, Option, Scheme
from liger_registry.problem import BACKWARD, FORWARD, SCHEME, Problem

NOW = [0.0]
CALLS: list[str] = []


def clock() -> float:
    return NOW[0]


def spend(microseconds: float, name: str = "") -> None:
    NOW[0] += microseconds * 1e-6
    CALLS.append(name)


def reset() -> None:
    NOW[0] = 0.0
    CALLS.clear()


# --- the contract -----------------------------------------------------------------------------------------------------


def validate(inputs, options):
    x, w = inputs
    if x.dim() == 0 or w.shape != x.shape[-1:]:
        raise InvalidInputError("affine takes x (..., hidden) and w (hidden,)")


def describe(inputs, options):
    x, w = inputs
    dims = Fields(rows=x.shape[:-1].numel(), hidden=x.shape[-1])
    return Description(dims, Fields(x=str(x.dtype)[6:], w=str(w.dtype)[6:]), Fields())


def reference(x, w, gain=1.0):
    return gain * x * w


def scheme_reference(x, w, gain=1.0):
    return (reference(x, w, gain),)


def scheme_reference_saving(x, w, gain=1.0):
    return reference(x, w, gain), gain * w


def allocate(x, w, gain=1.0):
    return (torch.empty_like(x),)


def allocate_saving(x, w, gain=1.0):
    return torch.empty_like(x), torch.empty_like(w)


def magnitude(inputs, grad_outputs, options):
    (x, w), (dy,), gain = inputs, grad_outputs, options["gain"]
    terms = (gain * dy * x).reshape(-1, x.shape[-1])
    return {
        "y": (gain * x * w).abs(),
        "gw": (gain * w).abs(),
        "grad_x": (gain * dy * w).abs(),
        "grad_w": terms.sum(0).abs() + terms.pow(2).sum(0).sqrt(),
    }


def example(problem, device, seed=0, style="random"):
    x = fill((problem.rows, problem.hidden), getattr(torch, problem.dtypes["x"]), device, seed, style)
    return x, fill((problem.hidden,), getattr(torch, problem.dtypes["w"]), device, seed + 1, "random")


def make_op(name, schemes, order):
    return Op(
        name=name,
        inputs=(Input("x"), Input("w")),
        options=(Option("gain", float, 1.0, doc="a factor"),),
        outputs=("y",),
        schemes=schemes,
        dims={"rows": DimKind.BUCKET, "hidden": DimKind.EXACT},
        validate=validate,
        describe=describe,
        reference=reference,
        magnitude=magnitude,
        reduced={"grad_w": ("rows",)},
        example=example,
        proxies=lambda problem: ({"rows": 37}, {"rows": 1}),
        calls=lambda architecture, tokens, dtype: (),
        order=order,
    )


AFFINE = make_op(
    "affine",
    (Scheme("default", ("x", "w"), (), allocate, scheme_reference),),
    {FORWARD: ("plain",), BACKWARD: ("plain",)},
)
TWOWAY = make_op(
    "twoway",
    (
        Scheme("lean", ("x", "w"), (), allocate, scheme_reference),
        Scheme("saving", ("x", "w"), ("gw",), allocate_saving, scheme_reference_saving),
    ),
    {FORWARD: ("plain",), BACKWARD: ("plain",)},
)


def problem(op="affine", phase=FORWARD, rows=64, hidden=200, needs="x,w", dtype="float32", scheme="default"):
    flags = {} if phase == FORWARD else {"needs": needs}
    name = "" if phase == SCHEME else scheme
    return Problem(op, name, phase, Fields(rows=rows, hidden=hidden), Fields(x=dtype, w=dtype), Fields(flags))


# --- implementations --------------------------------------------------------------------------------------------------


def plain(x, w, *, device, gain, cost=100):
    spend(cost, "plain")
    return (gain * x * w,)


def blocks(x, w, *, device, gain, block):
    """Right; the cost falls with the block."""
    spend(3200 / block, f"blocks{block}")
    y = torch.empty_like(x)
    for start in range(0, x.shape[-1], block):
        y[..., start : start + block] = gain * x[..., start : start + block] * w[start : start + block]
    return (y,)


def fast(x, w, *, device, gain):
    spend(10, "fast")
    return (gain * x * w,)


def wrong_tail(x, w, *, device, gain, block):
    """Fast, and wrong in the last row's tail, where hidden is no multiple of the block."""
    spend(1, "wrong_tail")
    y = gain * x * w
    tail = x.shape[-1] % block
    if tail and y.numel():
        y.view(-1, x.shape[-1])[-1, -tail:] *= 1.03
    return (y,)


def ignores_gain(x, w, *, device, gain):
    spend(1)
    return (x * w,)


def reads_empty(x, w, *, device, gain):
    spend(1)
    return (torch.empty_like(x) * 0 + gain * x * w,)


def raises(x, w, *, device, gain):
    raise ValueError("planted")


def no_memory(x, w, *, device, gain):
    raise torch.OutOfMemoryError("planted: tried to allocate")


def gives_nan(x, w, *, device, gain):
    spend(1)
    return (gain * x * w * float("nan"),)


def wrong_shape(x, w, *, device, gain):
    spend(1)
    return ((gain * x * w)[..., :-1],)


def writes_input(x, w, *, device, gain):
    spend(1)
    y = gain * x * w
    x.mul_(2)
    return (y,)


def out_of_bounds(x, w, *, device, gain):
    spend(1)
    y = gain * x * w
    x.as_strided((1,), (1,), x.storage_offset() + x.numel()).fill_(0)
    return (y,)


def first_rows(x, w, *, device, gain, rows=512):
    """As if its grid held so many programs and no loop."""
    spend(1, "first_rows")
    y = torch.empty_like(x)
    y[:rows] = gain * x[:rows] * w
    return (y,)


def second_tile(x, w, *, device, gain, programs_per_unit=1, block_rows=4):
    """As a persistent grid whose programs go on with what they had of their first tile."""
    spend(1, "second_tile")
    y, programs = gain * x * w, device.units * programs_per_unit
    y[programs * block_rows :] *= 1.01
    return (y,)


def dense_weight(x, w, *, device, gain):
    """Takes the weight to be contiguous, and reads beside it."""
    spend(1, "dense_weight")
    return (gain * x * w.as_strided(w.shape, (1,) * w.dim()),)


def dirty_scratch(x, w, *, device, gain):
    """Reads memory that it got without any of the functions that torch's Python has for it."""
    spend(1, "dirty_scratch")
    return (x.new_tensor([]).resize_(x.shape) * 0 + gain * x * w,)


def hangs(x, w, *, device, gain):
    time.sleep(600)


def aborts(x, w, *, device, gain):
    os.abort()


def leaves(x, w, *, device, gain):
    os._exit(0)


def random_bits(x, w, *, device, gain):
    spend(1)
    return (gain * x * w * (1 + 1e-8 * torch.randint(-9, 9, x.shape)),)


def backward(dy, x, w, *, device, needs, gain, cost=100):
    spend(cost, "backward")
    wide = (gain * dy * x).reshape(-1, x.shape[-1])
    return gain * dy * w if needs[0] else None, wide.sum(0) if needs[1] else None


def backward_too_much(dy, x, w, *, device, needs, gain):
    return backward(dy, x, w, device=device, needs=(True, True), gain=gain, cost=1)


def backward_drops_row(dy, x, w, *, device, needs, gain):
    spend(1)
    wide = (gain * dy * x).reshape(-1, x.shape[-1])
    return gain * dy * w if needs[0] else None, wide[:-1].sum(0) if needs[1] else None


def backward_first_rows(dy, x, w, *, device, needs, gain):
    """Sums the gradient of w over the first 512 rows alone."""
    spend(1)
    gradient = (gain * dy * x)[:512].sum(0)
    return gain * dy * w if needs[0] else None, gradient if needs[1] else None


def backward_contiguous(dy, x, w, *, device, needs, gain, cost=1):
    """Fast, and wrong for gradients that are not contiguous, which it takes to be."""
    spend(cost, f"backward_contiguous{cost}")
    dense = dy if dy.is_contiguous() else dy.contiguous().flip(0) * 1.5
    return backward(dense, x, w, device=device, needs=needs, gain=gain, cost=0)


def saving(x, w, *, device, gain, cost=100):
    spend(cost, "saving")
    return gain * x * w, gain * w


def backward_saving(dy, x, w, gw, *, device, needs, gain, cost=50):
    spend(cost, "backward_saving")
    return dy * gw if needs[0] else None, (gain * dy * x).reshape(-1, x.shape[-1]).sum(0) if needs[1] else None


def implementation(function, name="", op="affine", phase=FORWARD, scheme="default", **fields):
    return Implementation(op, phase, name or function.__name__, function, scheme, **fields)


BLOCKS = ConfigSpace(block=[32, 64, 128])
PLAIN = implementation(plain)
PLAIN_BACKWARD = implementation(backward, "plain", phase=BACKWARD)
FAULTY = {f.__name__: implementation(f) for f in (
    ignores_gain, reads_empty, raises, no_memory, gives_nan, wrong_shape, writes_input, out_of_bounds, hangs, aborts,
    leaves, random_bits, dense_weight, dirty_scratch,
)}  # fmt: skip
FAULTY["wrong_tail"] = implementation(wrong_tail, space=BLOCKS, heuristic=lambda p, d: Config(block=32))
FAULTY_BACKWARD = {f.__name__: implementation(f, phase=BACKWARD) for f in (backward_too_much, backward_drops_row)}
BLOCKED = implementation(blocks, space=BLOCKS, heuristic=lambda p, d: Config(block=32))


def catalog(*implementations: Implementation, op=AFFINE) -> Catalog:
    made = Catalog()
    with made.stage("planted") as staging:
        staging.register(op)
        for item in implementations:
            staging.register(item)
    return made


# --- catalogues by name, for the worker -------------------------------------------------------------------------------


def faulty() -> Catalog:
    """The default, one that is faster and right, and everything that goes wrong without ending the process."""
    calm = [i for n, i in FAULTY.items() if n not in ("hangs", "aborts", "leaves")]
    return catalog(PLAIN, implementation(fast), *calm)


def deadly() -> Catalog:
    """The default, one that is faster and right, and what ends or hangs the process."""
    return catalog(PLAIN, *(FAULTY[n] for n in ("aborts", "hangs", "leaves")), implementation(fast))


def best_default() -> Catalog:
    return catalog(implementation(fast, "plain"), implementation(plain, "slower"))


def sized() -> Catalog:
    return catalog(PLAIN, BLOCKED)


def two_schemes() -> Catalog:
    two = {"op": "twoway"}
    return catalog(
        implementation(plain, scheme="lean", **two),
        implementation(backward, "plain", phase=BACKWARD, scheme="lean", **two),
        implementation(saving, "plain", scheme="saving", **two),
        implementation(backward_saving, "plain", phase=BACKWARD, scheme="saving", **two),
        op=TWOWAY,
    )


def illegal_access(x, w, *, device, gain):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def faulting() -> Catalog:
    """The default, and one after which a process can no longer be trusted."""
    return catalog(PLAIN, implementation(illegal_access))


def few_rows() -> Catalog:
    """The default, and one that is ten times as fast and fills the first 512 rows."""
    return catalog(PLAIN, implementation(first_rows))
