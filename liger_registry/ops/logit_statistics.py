"""``logit_statistics``: what losses need to know of rows of logits. A stage of the losses over a linear head.

With ``z = scale * logits``, or ``softcap * tanh(scale * logits / softcap)``, in fp32 (float64 logits: float64), a row
has, with its target column apart (see ``ops._logits``):

============ ========================================================= ==========
output       what it is                                                asked by
============ ========================================================= ==========
log_rest     ``log(sum of exp(z))`` without the target; -inf if empty
target_logit ``z`` of the target; 0 where there is none
weighted_sum ``sum of class_weight * z`` (weights of 1 if None)        weighted
mean_logit   ``sum of softmax(z) * z``, the target included            entropy
best         the largest z; no gradient                                predict
prediction   its lowest index, int64; no gradient                      predict
============ ========================================================= ==========

A target outside [0, vocab) means that the row has none in here, so that a slab of a vocabulary can be asked alone.

Backward takes ``log_rest``, ``target_logit`` and ``mean_logit`` as given and recomputes none of them, so that a
slab can be given those of the whole row. Columns other than the target get ``g_log_rest * exp(z - log_rest)``, the
target ``g_target_logit``; all get ``g_weighted_sum * w``, ``g_mean_logit * p * (1 + z - mean_logit)`` and the slope
of ``z``. Here ``p`` is ``exp(z - logaddexp(log_rest, target_logit))`` where the row has its target in here, else
``exp(z - log_rest)``: for rows whose target lies in another slab, give the whole row's logsumexp as ``log_rest``, and
its gradient as that of ``log_rest``. None of these exponentials is more than 1, whatever the roundings of ``z``.

Columns are compared by ``scale * logits`` for ``prediction``, which the cap, saturating, could only make equal. Logits
of -inf count nothing; of +inf or NaN they give no finite ``log_rest``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields, Scalar
from liger_registry.errors import InvalidInputError
from liger_registry.examples import fill
from liger_registry.op import Description, DimKind, Input, Op, Option, Scheme, check_dtype, dtype_name
from liger_registry.ops._logits import (
    DTYPES,
    class_weights,
    derivative,
    exponent,
    is_target,
    slope,
    split_softmax,
    targets,
    transformed,
    wide,
)
from liger_registry.problem import BACKWARD, FORWARD, Problem

if TYPE_CHECKING:
    import torch

    from liger_registry.architecture import Architecture

    Tensors = tuple[torch.Tensor | None, ...]

# Odd sizes, the middling one first; 5000 is wider than a block of the implementations that loop.
SIZES = ((5, 41), (5, 1), (9, 3), (3, 1536), (0, 41), (1, 41), (2, 5000))
# What takes the place of the options that a key knows by class alone.
SOFTCAP, SCALE = 30.0, 0.75
_FLAGS = ("weighted", "entropy", "predict", "in_place")


def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a call contradicts the contract; sizes may be symbolic.

    Raises:
        InvalidInputError: logits that are not (rows, vocab) with a vocab of at least 1, a target that is not int64
            (rows,), or class weights of another shape, or without ``weighted``.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 and float64.
    """
    logits, target, class_weight = inputs
    assert logits is not None
    assert target is not None
    if logits.dim() != 2 or logits.shape[-1] == 0:
        raise InvalidInputError(
            f"logits of logit_statistics have shape {tuple(logits.shape)}",
            why="they must be (rows, vocab) with a vocab of at least 1",
            fix="pass logits.reshape(-1, vocab)",
        )
    check_dtype("logit_statistics", logits, DTYPES, "logits")
    if target.shape != logits.shape[:1] or dtype_name(target) != "int64":
        raise InvalidInputError(
            f"target of logit_statistics is {dtype_name(target)} of shape {tuple(target.shape)}",
            why=f"logits of shape {tuple(logits.shape)} have int64 targets of shape ({logits.shape[0]},)",
            fix="pass target.reshape(-1).long()",
        )
    if class_weight is not None:
        check_dtype("logit_statistics", class_weight, DTYPES, "class_weight")
        if class_weight.shape != logits.shape[-1:] or not options["weighted"]:
            raise InvalidInputError(
                f"class_weight of logit_statistics has shape {tuple(class_weight.shape)}"
                + ("" if options["weighted"] else ", and weighted is False"),
                why=f"it must have shape ({logits.shape[-1]},), and only the weighted sum reads it",
                fix="pass one weight a class and weighted=True, or None",
            )


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtypes, and the options that change code; of the cap only whether there is one."""
    logits, _, class_weight = inputs
    assert logits is not None
    return Description(
        dims=Fields(rows=logits.shape[0], vocab=logits.shape[1]),
        dtypes=Fields(logits=dtype_name(logits), class_weight=dtype_name(class_weight)),
        flags=Fields(capped=options["softcap"] != 0, **{name: options[name] for name in _FLAGS}),
    )


def fixed(problem: Problem) -> dict[str, Scalar]:
    """A cap where the problem has one, and a scale, which the key does not know, that is not 1."""
    return {"softcap": SOFTCAP if problem.flags.get("capped") else 0.0, "scale": SCALE}


def formula(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    softcap: float,
    scale: float,
    weighted: bool,
    entropy: bool,
    predict: bool,
    in_place: bool,
) -> Tensors:
    """All outputs in order, None for those not asked for."""
    import torch

    z = transformed(logits, softcap, scale)
    log_rest, target_logit, _ = split_softmax(z, target)
    weighted_sum = mean_logit = best = prediction = None
    if weighted:
        weighted_sum = (z if class_weight is None else z * class_weight.to(z.dtype)).sum(-1)
    if entropy:
        mean_logit = (torch.softmax(z, -1) * z.masked_fill(z == -torch.inf, 0.0)).sum(-1)
    if predict:
        prediction = transformed(logits.detach(), 0.0, scale).max(-1).indices
        best = z.detach().gather(-1, prediction[:, None]).squeeze(-1)
    return log_rest, target_logit, weighted_sum, mean_logit, best, prediction


def reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None = None,
    softcap: float = 0.0,
    scale: float = 1.0,
    weighted: bool = False,
    entropy: bool = False,
    predict: bool = False,
    in_place: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Those of the outputs that are asked for, in plain, differentiable PyTorch.

    Args:
        logits: (rows, vocab), floating.
        target: (rows,), int64.
        class_weight: (vocab,), or None for weights of 1.
        softcap: the cap; 0 for none.
        scale: a factor on the logits, before the cap.
        weighted: whether ``weighted_sum`` is asked for.
        entropy: whether ``mean_logit`` is.
        predict: whether ``best`` and ``prediction`` are.
        in_place: whether backward may write the gradient into the logits.
    """
    found = formula(logits, target, class_weight, softcap, scale, weighted, entropy, predict, in_place)
    return tuple(y for y in found if y is not None)


def _scheme_reference(
    logits: torch.Tensor, target: torch.Tensor, class_weight: torch.Tensor | None, **options: Any
) -> Tensors:
    return formula(logits, target, class_weight, **options)


def allocate(logits: torch.Tensor, target: torch.Tensor, class_weight: torch.Tensor | None, **options: Any) -> Tensors:
    """Empty outputs, each (rows,), None for those not asked for."""
    import torch

    def row(asked: bool = True, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        return logits.new_empty(logits.shape[0], dtype=dtype or wide(logits.dtype)) if asked else None

    predict = options["predict"]
    return row(), row(), row(options["weighted"]), row(options["entropy"]), row(predict), row(predict, torch.int64)


def backward(
    g_log_rest: torch.Tensor | None,
    g_target_logit: torch.Tensor | None,
    g_weighted_sum: torch.Tensor | None,
    g_mean_logit: torch.Tensor | None,
    g_best: None,
    g_prediction: None,
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    log_rest: torch.Tensor,
    target_logit: torch.Tensor,
    mean_logit: torch.Tensor | None,
    needs: tuple[bool, ...],
    softcap: float,
    scale: float,
    **options: Any,
) -> Tensors:
    """``(grad_logits,)`` in plain PyTorch from the statistics as they are given; never in place."""
    import torch

    if not needs[0]:
        return (None,)
    z = transformed(logits, softcap, scale)
    there, _, mask = is_target(target, logits.shape[1])
    rest = log_rest.masked_fill(log_rest == -torch.inf, 0.0)
    dz = torch.zeros_like(z)
    if g_log_rest is not None:
        dz = (z - rest[:, None]).clamp_max(0.0).exp() * g_log_rest[:, None]
    dz = dz.masked_fill(mask, 0.0)
    if g_target_logit is not None:
        dz = torch.where(mask, g_target_logit[:, None].to(z.dtype), dz)
    if g_weighted_sum is not None:
        dz = dz + g_weighted_sum[:, None] * (1.0 if class_weight is None else class_weight.to(z.dtype))
    if g_mean_logit is not None:
        assert mean_logit is not None
        total = torch.where(there, torch.logaddexp(log_rest, target_logit), log_rest)
        p = (z - total.masked_fill(total == -torch.inf, 0.0)[:, None]).clamp_max(0.0).exp()
        steps = (1.0 + z - mean_logit[:, None]).masked_fill(z == -torch.inf, 0.0)
        dz = dz + g_mean_logit[:, None] * p * steps
    dz = dz * (derivative(logits, softcap, scale) if softcap else scale)
    return (dz.to(logits.dtype),)


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64, times what ``exponent`` says of exponentials."""
    import torch

    logits, target, class_weight = inputs
    assert logits is not None
    assert target is not None
    z = transformed(logits, options["softcap"], options["scale"])
    known = z.masked_fill(z.isinf(), 0.0)
    log_rest, target_logit, there = split_softmax(z, target)
    total = torch.where(there, torch.logaddexp(log_rest, target_logit), log_rest)
    p = torch.softmax(z, -1)
    rest = (z - log_rest[:, None].masked_fill(log_rest[:, None].isinf(), 0.0)).exp()
    _, _, mask = is_target(target, logits.shape[1])
    rest = rest.masked_fill(mask, 0.0)
    weight = 1.0 if class_weight is None else class_weight
    # Below the normal numbers of fp32 an exponential has no digits, and a large gradient multiplies what is left.
    rest, p = rest + 2.0**-100, p + 2.0**-100
    sizes = {
        "log_rest": 1.0 + log_rest.abs() + (rest * known.abs()).sum(-1),
        "target_logit": target_logit.abs(),
        "weighted_sum": (z * weight).sum(-1).abs() + (known * weight).square().sum(-1).sqrt(),
        "mean_logit": (p * known.abs() * exponent(known, total)).sum(-1),
    }
    g_rest, g_target, g_weighted, g_mean = (None if g is None else g[:, None].abs() for g in grad_outputs[:4])
    dz = torch.zeros_like(z)
    if g_rest is not None:
        dz = dz + g_rest * rest * exponent(known, log_rest)
    if g_target is not None:
        dz = torch.where(mask, g_target, dz)
    if g_weighted is not None:
        dz = dz + g_weighted * (torch.ones_like(z) * weight).abs()
    if g_mean is not None:
        dz = dz + g_mean * p * (1.0 + known.abs() + sizes["mean_logit"][:, None]) * exponent(known, total)
    return {**sizes, "grad_logits": dz * slope(logits, options["softcap"], options["scale"])[1]}


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(logits, target, class_weight)`` for a problem; every fifth row has no target, on one side or the other."""
    import torch

    rows, vocab = problem.rows, problem.vocab
    logits = fill((rows, vocab), getattr(torch, str(problem.dtypes["logits"])), device, seed, style)
    target = targets(rows, vocab, device, seed, (-100, vocab, -1))
    if problem.dtypes["class_weight"] == "none":
        return logits, target, None
    return logits, target, class_weights(vocab, getattr(torch, str(problem.dtypes["class_weight"])), device, seed)


def odd(dtype: str) -> Iterator[Description]:
    """Odd sizes, and every option at one of them; in fp16 and fp32 a few of them."""
    weight = "float64" if dtype == "float64" else "float32"

    def described(rows: int, vocab: int, class_weight: str = "none", **on: bool) -> Description:
        flags = dict.fromkeys(("capped", *_FLAGS), False) | on
        return Description(
            Fields(rows=rows, vocab=vocab), Fields(logits=dtype, class_weight=class_weight), Fields(flags)
        )

    if dtype in ("float16", "float32"):
        # Of the code that is bf16's, only what reads and writes another dtype is new.
        for rows, vocab in SIZES[:1] + SIZES[3:4]:
            yield described(rows, vocab)
        yield described(5, 41, weight, weighted=True, entropy=True, predict=True)
        return
    for rows, vocab in SIZES:
        yield described(rows, vocab)
    for name in ("capped", *_FLAGS):
        yield described(5, 41, "none", **{name: True})
    yield described(5, 41, weight, weighted=True)
    for rows, vocab in ((5, 41), (2, 5000), (3, 1)):
        yield described(rows, vocab, weight, capped=True, weighted=True, entropy=True, predict=True, in_place=True)


def proxies(problem: Problem) -> tuple[dict[str, int], ...]:
    """Few rows of the true vocabulary, a multiple of no tile; the vocabulary is in the code and is never changed."""
    # 2^21 elements keep one check under 20 ms on a GPU.
    return ({"rows": max(3, min(261, (1 << 21) // problem.vocab))}, {"rows": 1})


def calls(architecture: Architecture, tokens: int, dtype: str) -> Iterable[Description]:
    """None: it is a stage of other operations, at the sizes of their slabs."""
    return ()


OP = Op(
    name="logit_statistics",
    doc="Statistics of rows of logits, with the target apart, as losses need them.",
    inputs=(
        Input("logits"),
        Input("target", differentiable=False),
        Input("class_weight", optional=True, differentiable=False),
    ),
    options=(
        Option("softcap", float, 0.0, minimum=0.0, doc="caps the scaled logits by a tanh; 0 for none"),
        Option("scale", float, 1.0, doc="a factor on the logits, before the cap"),
        Option("weighted", bool, False, doc="whether the weighted sum is asked for"),
        Option("entropy", bool, False, doc="whether the mean under the softmax is asked for"),
        Option("predict", bool, False, doc="whether the largest logit and its index are asked for"),
        Option("in_place", bool, False, doc="whether backward may write the gradient into the logits"),
    ),
    outputs=("log_rest", "target_logit", "weighted_sum", "mean_logit", "best", "prediction"),
    schemes=(
        Scheme(
            "default",
            saved_inputs=("logits", "target", "class_weight"),
            saved_outputs=("log_rest", "target_logit", "mean_logit"),
            saved=(),
            allocate=allocate,
            reference=_scheme_reference,
            backward=backward,
        ),
    ),
    dims={"rows": DimKind.BUCKET, "vocab": DimKind.EXACT},
    validate=validate,
    describe=describe,
    reference=reference,
    magnitude=magnitude,
    reduced={name: ("vocab",) for name in ("log_rest", "weighted_sum", "mean_logit", "grad_logits")},
    example=example,
    proxies=proxies,
    calls=calls,
    order={
        FORWARD: ("multi_row", "online", "column_split", "eager"),
        BACKWARD: ("multi_row", "row", "column_split", "eager"),
    },
    odd=odd,
    asked={"weighted_sum": "weighted", "mean_logit": "entropy", "best": "predict", "prediction": "predict"},
    constant=frozenset({"best", "prediction"}),
    overwrites={"logits": "in_place"},
    fixed=fixed,
    compiled=lambda options: {**options, "in_place": False},
    private=True,
)
