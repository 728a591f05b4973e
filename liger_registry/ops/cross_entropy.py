"""``cross_entropy``: the loss of logits against class indices, with the options of PyTorch's and Liger-Kernel's.

With ``z`` the logits in fp32 (float64: float64), capped by ``softcap * tanh(logits / softcap)`` if softcap is not 0,
``lse = logsumexp(z)``, class weights ``w`` (1 without ``class_weight``) and ``e = label_smoothing``, a row has ::

    (1 - e) * w[target] * (lse - z[target])  +  e / vocab * sum(w * (lse - z))  +  lse_square_scale * lse^2

Rows whose target is ``ignore_index`` are 0, in value and gradient; so is all of it if nothing is counted, and a mean
that divides by 0, of class weights that are all 0 or a ``num_items`` of 0 (PyTorch: NaN). Rows whose
target is no class are NaN, unless ``LIGER_CHECK=1`` has them raise. The three reductions:

========= ===========================================================================================================
none      the rows themselves, in the shape of target
sum       their sum
mean      the sum of the first two terms divided by the sum of ``w[target]`` as in PyTorch, that of the third by the
          number of counted rows as in Liger-Kernel 0.8.5. ``num_items`` takes the place of both.
========= ===========================================================================================================

Loss and ``z_loss`` (the third term, reduced alike) are in fp32 for every narrower dtype, as of models that cast their
logits up first; PyTorch and Liger-Kernel round them to that of the logits. ``token_accuracy`` is 1 where the target is
the largest logit, else 0: by rows, or the mean over counted rows for both ``sum`` and ``mean``, there too with
``num_items`` in place of their number. ``predicted_tokens`` are the indices of the largest logits, the lowest of
several, and -1 in rows that are not counted. Gradients flow through ``loss`` alone.

Forward saves the softmax with the target apart (see ``ops._logits``), and ``counts``, the sums that means divide by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields, Scalar
from liger_registry.errors import InvalidInputError
from liger_registry.op import Description, DimKind, Input, Op, Option, Scheme, check_dtype, dtype_name
from liger_registry.ops import _cross_entropy_cases as cases
from liger_registry.ops._logits import DTYPES, softplus, split_softmax, transformed, wide
from liger_registry.problem import BACKWARD, FORWARD, Problem

if TYPE_CHECKING:
    import torch

    from liger_registry.architecture import Architecture

    Tensors = tuple[torch.Tensor | None, ...]

REDUCTIONS = ("mean", "sum", "none")


def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a call contradicts the contract; sizes may be symbolic.

    Raises:
        InvalidInputError: logits without classes, a target that is not int64 of their leading shape, class weights of
            another number, ``num_items`` that is no single number or without ``reduction="mean"``, or a label
            smoothing above 1.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 and float64.
    """
    logits, target, class_weight, num_items = inputs
    assert logits is not None
    assert target is not None
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise InvalidInputError(
            f"logits of cross_entropy have shape {tuple(logits.shape)}",
            why="their last dimension is the classes, of which there must be one",
            fix="pass logits of shape (..., vocab) with vocab >= 1",
        )
    check_dtype("cross_entropy", logits, DTYPES, "logits")
    if target.shape != logits.shape[:-1] or dtype_name(target) != "int64":
        raise InvalidInputError(
            f"target of cross_entropy is {dtype_name(target)} of shape {tuple(target.shape)}",
            why=f"logits of shape {tuple(logits.shape)} have int64 targets of shape {tuple(logits.shape[:-1])}",
            fix="pass target.long() of that shape; classes are the last dimension, not the second",
        )
    if class_weight is not None:
        check_dtype("cross_entropy", class_weight, DTYPES, "class_weight")
        if class_weight.shape != logits.shape[-1:]:
            raise InvalidInputError(
                f"class_weight of cross_entropy has shape {tuple(class_weight.shape)}",
                why=f"there are {logits.shape[-1]} classes",
                fix=f"pass one weight a class, of shape ({logits.shape[-1]},), or None",
            )
    if num_items is not None and (num_items.numel() != 1 or options["reduction"] != "mean"):
        raise InvalidInputError(
            f"num_items of cross_entropy has shape {tuple(num_items.shape)}, reduction is {options['reduction']!r}",
            why="it is the one number that reduction='mean' divides by",
            fix="pass a tensor of one element and reduction='mean', or None",
        )
    if options["label_smoothing"] > 1:
        raise InvalidInputError(
            f"label_smoothing of cross_entropy is {options['label_smoothing']}",
            why="it is the share of the uniform distribution in the target's",
            fix="pass a number from 0 to 1",
        )


def check_values(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a target is neither a class nor ``ignore_index``; waits for the device.

    Raises:
        InvalidInputError: naming the first such value and where it stands.
    """
    import torch

    logits, target = inputs[:2]
    assert logits is not None
    assert target is not None
    vocab = logits.shape[-1]
    wrong = ((target < 0) | (target >= vocab)) & (target != options["ignore_index"])
    if bool(wrong.any()):
        flat = int(wrong.reshape(-1).to(torch.uint8).argmax())
        where = [int(i) for i in torch.unravel_index(torch.tensor(flat), wrong.shape)] if wrong.dim() else []
        raise InvalidInputError(
            f"target{where or ''} of cross_entropy is {int(target.reshape(-1)[flat])}",
            why=f"it is neither a class, 0 to {vocab - 1}, nor ignore_index={options['ignore_index']}"
            + (f"; {int(wrong.sum())} targets are not" if int(wrong.sum()) > 1 else ""),
            fix="correct the labels, or pass the number that marks ignored ones as ignore_index",
        )


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtypes, and the options that change code; of numbers only whether they are 0."""
    logits, _, class_weight, _ = inputs
    assert logits is not None
    vocab = logits.shape[-1]
    return Description(
        dims=Fields(rows=logits.numel() // vocab, vocab=vocab),
        dtypes=Fields(logits=dtype_name(logits), class_weight=dtype_name(class_weight)),
        flags=Fields(
            reduction=options["reduction"],
            **{flag: options[name] != 0 for flag, (name, _) in cases.CLASSES.items()},
            **{name: options[name] for name in cases.SWITCHES},
        ),
    )


def fixed(problem: Problem) -> dict[str, Scalar]:
    """A number other than 0 for each option of which the key knows only that."""
    return {name: number if problem.flags.get(flag) else 0.0 for flag, (name, number) in cases.CLASSES.items()}


def _inverse(number: torch.Tensor) -> torch.Tensor:
    """1 / number, 0 of 0: nothing to count is no loss."""
    import torch

    return torch.where(number == 0, 0.0, 1.0 / torch.where(number == 0, 1.0, number))


def formula(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    num_items: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float,
    reduction: str,
    return_z_loss: bool,
    return_token_accuracy: bool,
    return_predicted_tokens: bool,
    in_place: bool,
) -> Tensors:
    """All outputs, None for those not asked for, then ``(log_rest, target_logit, counts)``."""
    import torch

    shape, vocab = target.shape, logits.shape[-1]
    target = target.reshape(-1)
    counted = target != ignore_index
    z = transformed(logits.reshape(-1, vocab), softcap).masked_fill(~counted[:, None], 0.0)
    log_rest, target_logit, there = split_softmax(z, torch.where(counted, target, -1))
    # A target that is no class gives NaN, as a factor, so that it reaches the gradient too.
    factor = torch.where(counted & ~there, torch.nan, there.to(z.dtype))
    lse = torch.logaddexp(log_rest, target_logit)
    nll = torch.where(target_logit == torch.inf, torch.nan, softplus(log_rest - target_logit))
    weight = torch.ones_like(nll)
    if class_weight is not None:
        weight = class_weight.to(z.dtype)[torch.where(there, target, 0)]
    rows = (1 - label_smoothing) * weight * nll
    if label_smoothing:
        every = torch.ones_like(z[:1]) if class_weight is None else class_weight.to(z.dtype)[None]
        rows = rows + label_smoothing / vocab * (every.sum() * lse - (z * every).sum(-1))
    squares = lse_square_scale * lse.square() if lse_square_scale else torch.zeros_like(lse)
    # The choice between two constants: where a row is not counted, nothing of it may be NaN times 0.
    rows = torch.where(counted, rows * factor, 0.0)
    squares = torch.where(counted, squares * factor, 0.0)

    prediction = correct = None
    if return_token_accuracy or return_predicted_tokens:
        prediction = torch.where(there, logits.detach().reshape(-1, vocab).max(-1).indices, -1)
        correct = (prediction == target).to(z.dtype).masked_fill(~there, 0.0)
    count = counted.sum().to(z.dtype)
    counts = None
    if reduction == "none":
        loss, z_loss, accuracy = rows + squares, squares, correct
    else:
        counts = torch.stack([(weight * there).sum(), count])
        # What `cut` gives has two elements, as the two denominators may differ.
        items = counts if num_items is None else num_items.reshape(-1).to(z.dtype)
        whole = _inverse(items[-1])
        shares = (_inverse(items[0]), whole) if reduction == "mean" else (torch.ones_like(count),) * 2
        loss = rows.sum() * shares[0] + squares.sum() * shares[1]
        z_loss = squares.sum() * shares[1]
        accuracy = None if correct is None else correct.sum() * whole
    shaped = [loss, z_loss.detach() if return_z_loss else None, accuracy if return_token_accuracy else None]
    if reduction == "none":
        shaped = [None if y is None else y.reshape(shape) for y in shaped]
    tokens = prediction.reshape(shape) if prediction is not None and return_predicted_tokens else None
    saved = (torch.where(there, log_rest, 0.0), torch.where(there, target_logit, 0.0), counts)
    return (*shaped, tokens, *saved)


def reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None = None,
    num_items: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    in_place: bool = False,
) -> Any:  # noqa: ANN401 - a tensor, or a tuple of those that are asked for
    """The loss, and behind it in a tuple what else is asked for, in plain, differentiable PyTorch.

    Args:
        logits: (..., vocab), floating.
        target: (...), int64.
        class_weight: (vocab,), or None.
        num_items: one number, or None.
        ignore_index: targets that are not counted.
        label_smoothing: the share of the uniform distribution, 0 to 1.
        lse_square_scale: the factor of the squared logsumexp.
        softcap: the cap; 0 for none.
        reduction: ``mean``, ``sum`` or ``none``.
        return_z_loss: whether the squared logsumexp's part of the loss is asked for.
        return_token_accuracy: whether the share of right predictions is.
        return_predicted_tokens: whether the largest logits' indices are.
        in_place: whether backward may write the gradient into the logits.
    """
    found = formula(
        logits,
        target,
        class_weight,
        num_items,
        ignore_index,
        label_smoothing,
        lse_square_scale,
        softcap,
        reduction,
        return_z_loss,
        return_token_accuracy,
        return_predicted_tokens,
        in_place,
    )[:4]
    asked = tuple(y for y in found if y is not None)
    return asked[0] if len(asked) == 1 else asked


def _scheme_reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    num_items: torch.Tensor | None,
    **options: Any,
) -> Tensors:
    return formula(logits, target, class_weight, num_items, **options)


def allocate(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    num_items: torch.Tensor | None,
    **options: Any,
) -> Tensors:
    """Empty outputs, None for those not asked for, then ``log_rest`` and ``target_logit`` (rows,), ``counts`` (2,)."""
    import torch

    dtype, by_row = wide(logits.dtype), options["reduction"] == "none"
    shape = tuple(target.shape) if by_row else ()
    rows = math.prod(target.shape)  # torch.Size.numel would turn a symbolic size into a constant
    return (
        logits.new_empty(shape, dtype=dtype),
        logits.new_empty(shape, dtype=dtype) if options["return_z_loss"] else None,
        logits.new_empty(shape, dtype=dtype) if options["return_token_accuracy"] else None,
        logits.new_empty(tuple(target.shape), dtype=torch.int64) if options["return_predicted_tokens"] else None,
        logits.new_empty(rows, dtype=dtype),
        logits.new_empty(rows, dtype=dtype),
        None if by_row else logits.new_empty(2, dtype=dtype),
    )


def cut(inputs: Tensors, options: Mapping[str, Any]) -> tuple[Tensors, Mapping[str, Any]]:
    """The same call with a given denominator, so that results of some rows add up to those of all."""
    import torch

    logits, target, class_weight, num_items = inputs
    if options["reduction"] == "none" or num_items is not None:
        return inputs, options
    assert target is not None
    if options["reduction"] == "mean":
        assert logits is not None
        counted = target != options["ignore_index"]
        weights = count = counted.sum().to(torch.float32)
        if class_weight is not None:
            valid = counted & (target >= 0) & (target < logits.shape[-1])
            weights = (class_weight[torch.where(valid, target, 0)] * valid).sum().to(torch.float32)
        items = torch.stack([weights, count])
    elif options["return_token_accuracy"]:
        items = torch.ones(1, device=target.device)  # the mean that "sum" gives of the accuracy is no sum of rows'
    else:
        return inputs, options
    return (logits, target, class_weight, items), {**options, "reduction": "mean"}


def calls(architecture: Architecture, tokens: int, dtype: str) -> Iterable[Description]:
    """The loss of a model whose head and loss are not fused: its logits in their own dtype, which nothing casts up."""
    if architecture.vocab:
        flags = cases.flags(capped=architecture.softcap != 0)
        yield Description(
            Fields(rows=tokens, vocab=architecture.vocab), Fields(logits=dtype, class_weight="none"), Fields(flags)
        )


OP = Op(
    name="cross_entropy",
    doc="Cross-entropy of logits and class indices.",
    inputs=(
        Input("logits"),
        Input("target", differentiable=False),
        Input("class_weight", optional=True, differentiable=False),
        Input("num_items", optional=True, differentiable=False),
    ),
    options=(
        Option("ignore_index", int, -100, doc="targets that are not counted"),
        Option("label_smoothing", float, 0.0, minimum=0.0, doc="the share of the uniform distribution, 0 to 1"),
        Option("lse_square_scale", float, 0.0, minimum=0.0, doc="the factor of the squared logsumexp"),
        Option("softcap", float, 0.0, minimum=0.0, doc="caps the logits by a tanh; 0 for none"),
        Option("reduction", str, "mean", choices=REDUCTIONS, doc="of the rows"),
        Option("return_z_loss", bool, False, doc="whether the squared logsumexp's part is returned"),
        Option("return_token_accuracy", bool, False, doc="whether the share of right predictions is returned"),
        Option("return_predicted_tokens", bool, False, doc="whether the largest logits' indices are returned"),
        Option("in_place", bool, False, doc="whether backward may write the gradient into the logits"),
    ),
    outputs=("loss", "z_loss", "token_accuracy", "predicted_tokens"),
    schemes=(
        Scheme(
            "default",
            saved_inputs=("logits", "target", "class_weight", "num_items"),
            saved=("log_rest", "target_logit", "counts"),
            allocate=allocate,
            reference=_scheme_reference,
        ),
    ),
    dims={"rows": DimKind.BUCKET, "vocab": DimKind.EXACT},
    validate=validate,
    describe=describe,
    reference=reference,
    magnitude=cases.magnitude,
    reduced={
        **{name: ("rows", "vocab") for name in ("loss", "z_loss")},
        **{name: ("rows",) for name in ("token_accuracy", "counts")},
        **{name: ("vocab",) for name in ("log_rest", "grad_logits")},
    },
    example=cases.example,
    proxies=cases.proxies,
    calls=calls,
    order={
        FORWARD: ("multi_row", "online", "column_split", "functional", "eager"),
        BACKWARD: ("multi_row", "row", "column_split", "functional", "eager"),
    },
    odd=cases.odd,
    asked={
        "z_loss": "return_z_loss",
        "token_accuracy": "return_token_accuracy",
        "predicted_tokens": "return_predicted_tokens",
    },
    constant=frozenset({"z_loss", "token_accuracy", "predicted_tokens"}),
    overwrites={"logits": "in_place"},
    fixed=fixed,
    cut=cut,
    check_values=check_values,
    compiled=lambda options: {**options, "in_place": False},
)
