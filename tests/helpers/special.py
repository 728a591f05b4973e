"""An operation with everything that few have: optional and constant outputs, gradients in forward, buffers that are
handed over, an input that may be overwritten, a stage, autocast and a check of values."""

from __future__ import annotations

import itertools

import torch

from liger_registry import Catalog, Config, ConfigSpace, Implementation, Registry
from liger_registry.config import Fields
from liger_registry.errors import InvalidInputError
from liger_registry.examples import fill
from liger_registry.implementation import OWN_DISTRIBUTION
from liger_registry.op import Description, DimKind, Input, Op, Option, Scheme, dtype_name
from liger_registry.problem import BACKWARD, FORWARD, Problem
from liger_registry.recompute import gradients
from liger_registry.settings import Settings

numbers = itertools.count()
PLAIN = {"reduction": "mean", "return_rows": False, "in_place": False}


def reference(x, weight=None, mark=None, reduction="mean", return_rows=False, in_place=False):
    """Half the square of each row's sum, and on demand the sums and how many rows are marked."""
    z = (x if weight is None else x * weight).sum(-1)
    each = z.square() / 2
    loss = each if reduction == "none" else each.sum() / max(len(each), 1)
    count = torch.zeros((), dtype=torch.int64) if mark is None else (mark > 0).sum()
    return (loss, z, count) if return_rows else loss


def _outputs(x, weight, mark, options):
    found = reference(x, weight, mark, **options)
    return found if options["return_rows"] else (found, None, None)


def _units(x, weight, mark, needs, options):
    with torch.no_grad():
        found = gradients(
            lambda a, b: reference(a, b, mark, **options),
            (x, weight),
            [torch.ones((), dtype=x.dtype)],
            (needs[0], needs[1] and weight is not None),
        )
    return tuple(
        None if unit is None else torch.empty_like(like).copy_(unit)
        for unit, like in zip(found, (x, weight), strict=True)
    )


def grad_reference(x, weight, mark, needs, **options):
    return (*_outputs(x, weight, mark, options), *_units(x, weight, mark, needs, options))


def grad_allocate(x, weight, mark, needs, **options):
    unit = torch.empty_like(weight) if needs[1] and weight is not None else None
    return x.new_empty(()), None, None, torch.empty_like(x) if needs[0] else None, unit


def allocate(x, weight, mark, **options):
    rows = x.new_empty(x.shape[0])
    loss = torch.empty_like(rows) if options["reduction"] == "none" else x.new_empty(())
    asked = (torch.empty_like(rows), x.new_empty((), dtype=torch.int64)) if options["return_rows"] else (None, None)
    return loss, *asked, torch.empty_like(rows)


def recompute_reference(x, weight, mark, **options):
    return (*_outputs(x, weight, mark, options), (x if weight is None else x * weight).sum(-1))


def describe(inputs, options):
    x, weight, _ = inputs
    flags = {name: options[name] for name in ("reduction", "return_rows", "in_place")}
    return Description(
        Fields(rows=x.shape[0], hidden=x.shape[1]), Fields(x=dtype_name(x), weight=dtype_name(weight)), Fields(**flags)
    )


def magnitude(inputs, grads, options):
    x, weight, _ = inputs
    terms = x if weight is None else x * weight
    size = terms.abs().sum(-1)
    z = size.square() / 2
    n = max(len(z), 1)
    upstream = grads[0].abs() / n if options["reduction"] != "none" else grads[0].abs()
    extra = 0.0 if grads[1] is None else grads[1].abs()
    slope = (upstream * size + extra)[:, None]
    w = torch.ones_like(x[0]) if weight is None else weight.abs()
    sizes = {"loss": z if options["reduction"] == "none" else z.sum() / n, "rows": size, "z": size}
    sizes |= {"grad_x": slope * w, "unit_x": size[:, None] * w / n}
    if weight is not None:
        sizes |= {"grad_weight": (slope * x.abs()).sum(0), "unit_weight": (size[:, None] * x.abs()).sum(0) / n}
    return sizes


def example(problem, device, seed=0, style="random"):
    x = fill((problem.rows, problem.hidden), getattr(torch, problem.dtypes["x"]), device, seed, style)
    mark = torch.arange(problem.rows, device=device) % 3
    if problem.dtypes["weight"] == "none":
        return x, None, mark
    return x, fill((problem.hidden,), getattr(torch, problem.dtypes["weight"]), device, seed + 1), mark


def odd(dtype):
    for rows, hidden in ((5, 41), (1, 1), (0, 3)):
        yield Description(Fields(rows=rows, hidden=hidden), Fields(x=dtype, weight=dtype), Fields(**PLAIN))
    for changes in ({"reduction": "none"}, {"return_rows": True}, {"in_place": True}):
        yield Description(Fields(rows=5, hidden=3), Fields(x=dtype, weight="none"), Fields(**{**PLAIN, **changes}))


def check_values(inputs, options):
    if inputs[2] is not None and bool((inputs[2] < 0).any()):
        raise InvalidInputError("a mark is negative", fix="pass marks of at least 0")


def make_op(name, **changes):
    grad = Scheme(
        "grad_in_forward",
        ("x", "weight", "mark"),
        ("unit_x", "unit_weight"),
        grad_allocate,
        grad_reference,
        gradients=True,
        owned=("unit_x", "unit_weight"),
        excludes={"reduction": ("none",), "return_rows": (True,), "in_place": (True,)},
    )
    recompute = Scheme("recompute", ("x", "weight", "mark"), ("z",), allocate, recompute_reference)
    fields = {
        "name": name,
        "inputs": (Input("x"), Input("weight", optional=True), Input("mark", optional=True, differentiable=False)),
        "options": (
            Option("reduction", str, "mean", choices=("mean", "none")),
            Option("return_rows", bool, False),
            Option("in_place", bool, False),
        ),
        "outputs": ("loss", "rows", "count"),
        "schemes": (grad, recompute),
        "dims": {"rows": DimKind.BUCKET, "hidden": DimKind.EXACT},
        "validate": lambda inputs, options: None,
        "describe": describe,
        "reference": reference,
        "magnitude": magnitude,
        "reduced": {"loss": ("rows", "hidden"), "z": ("hidden",), "rows": ("hidden",), "grad_weight": ("rows",)},
        "example": example,
        "proxies": lambda problem: ({"rows": 5}, {"rows": 1}),
        "calls": lambda architecture, tokens, dtype: (),
        "order": {FORWARD: ("plain",), BACKWARD: ("plain",)},
        "odd": odd,
        "asked": {"rows": "return_rows", "count": "return_rows"},
        "constant": frozenset({"count"}),
        "overwrites": {"x": "in_place"},
        "check_values": check_values,
        "autocast": ("x", "weight"),
        "compiled": lambda options: {**options, "in_place": False},
    }
    return Op(**{**fields, **changes})


def build(root, **settings):
    """A registry over the operation, whose launches are written into ``registry.log`` as (what, needs)."""
    log = []
    name, stage_name = f"special{next(numbers)}", f"stage{next(numbers)}"

    def sums(x, weight, mark, *, device, factor, reduction, return_rows, in_place):
        log.append(("stage", factor))
        return recompute_reference(x, weight, mark, reduction=reduction, return_rows=return_rows, in_place=in_place)

    def grad_forward(x, weight, mark, *, device, needs, **options):
        log.append(("grad forward", needs))
        return grad_reference(x, weight, mark, needs, **options)

    def grad_backward(dloss, drows, dcount, x, weight, mark, unit_x, unit_weight, *, device, needs, **options):
        log.append(("grad backward", needs))
        assert drows is None
        assert dcount is None
        return tuple(None if unit is None else unit.mul_(dloss) for unit in (unit_x, unit_weight))

    def forward(x, weight, mark, *, device, stages, **options):
        log.append(("forward", None))
        return stages["sums"](x, weight, mark, **options)

    def backward(dloss, drows, dcount, x, weight, mark, z, *, device, needs, reduction, return_rows, in_place):
        log.append(("backward", needs))
        slope = z * dloss / (max(len(z), 1) if reduction == "mean" else 1)
        slope = (slope if drows is None else slope + drows)[:, None]
        dweight = (slope * x).sum(0) if needs[1] else None
        dx = None
        if needs[0]:
            dx = (slope * torch.ones_like(x) if weight is None else slope * weight).to(x.dtype)
            dx = x.copy_(dx) if in_place else dx
        return dx, dweight

    def stage_problem(problem, config):
        return {"sums": Problem(stage_name, "recompute", FORWARD, problem.dims, problem.dtypes, problem.flags)}

    made = Catalog()
    space = ConfigSpace(factor=[1, 2])
    stage_op = make_op(stage_name, private=True, schemes=(make_op(name).schemes[1],))
    with made.stage(OWN_DISTRIBUTION) as staging:
        for item in (
            make_op(name),
            stage_op,
            Implementation(name, FORWARD, "plain", grad_forward, "grad_in_forward"),
            Implementation(name, BACKWARD, "plain", grad_backward, "grad_in_forward"),
            Implementation(name, FORWARD, "plain", forward, "recompute", stages=stage_problem),
            Implementation(name, BACKWARD, "plain", backward, "recompute"),
            Implementation(
                stage_name, FORWARD, "plain", sums, "recompute", space, heuristic=lambda p, d: Config(factor=2)
            ),
        ):
            staging.register(item)
    registry = Registry(Settings(cache_dir=root / "cache", **settings), made)
    registry.log, registry.name, registry.stage_name = log, name, stage_name
    return registry
