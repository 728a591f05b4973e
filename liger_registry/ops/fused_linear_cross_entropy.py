"""``fused_linear_cross_entropy``: the cross-entropy of a linear output head, without (tokens, vocab) of logits.

``z`` are the logits ``hidden @ weight.T + bias``, rounded once to the dtype of hidden, then, in fp32 (float64 inputs:
float64), times ``scale`` and capped by ``softcap * tanh(. / softcap)``. With ``lse = logsumexp(z)``, the class weights
``w`` (1 if None), ``y`` the target and ``e`` the label smoothing, each token's loss is, as in
``torch.nn.functional.cross_entropy``,

    (1 - e) * w[y] * (lse - z[y]) + e / vocab * sum of w * (lse - z)

and ``lse_square_scale * lse^2`` besides (PaLM, Chowdhery et al., 2022, section 5), which ``z_loss`` is alone. The mean
divides the first by the sum of ``w[y]`` and the second by the number of tokens that count, or both by ``num_items``.

Tokens whose target is ``ignore_index`` count for nothing and get gradients of 0; where nothing counts all is 0, and a
mean that divides by 0, of class weights that are all 0 or a ``num_items`` of 0, is 0 with gradients of 0, as in
``cross_entropy`` (PyTorch: NaN). A target that is neither ignored nor a class makes the loss NaN. ``token_accuracy`` is
the part of the tokens that count whose largest logit is the target's, or 0 and 1 for each with ``reduction="none"``;
``predicted_tokens`` is the index of the largest, the lowest of several, and -1 for ignored tokens. No gradient flows
through outputs other than ``loss``.

Scheme ``grad_in_forward``: the upstream gradient of a scalar is a factor, so that forward computes all gradients, three
products in all, and backward scales them. In fp16, where a token's part of a mean is no number and the sum over many
tokens is infinite, these are in fp32 until then. Scheme ``recompute`` saves two numbers a token and computes the logits
again, four products.

Summed over slabs of rows the gradient of a 16-bit weight is rounded once a slab, up to four times under the default
budget: typically 1.6 times, at most 1.9 times the error of one product was measured. ``accumulate="float32"`` gives the
error of one product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields, Scalar
from liger_registry.errors import InvalidInputError
from liger_registry.examples import fill
from liger_registry.kernels.linear_heuristics import row_budget
from liger_registry.op import Description, DimKind, Input, Op, Option, Scheme, check_dtype, dtype_name
from liger_registry.ops import _linear
from liger_registry.ops._linear import COMPACT, SCALE, SMOOTHING, SOFTCAP, SQUARE, Sizes
from liger_registry.ops._linear_cross_entropy import (
    allocate_grads,
    allocate_statistics,
    divisors,
    grads_backward,
    grads_reference,
    recompute_reference,
    reference,
)
from liger_registry.ops._logits import DTYPES
from liger_registry.problem import BACKWARD, FORWARD, Problem

if TYPE_CHECKING:
    import torch

    from liger_registry.architecture import Architecture

    Tensors = tuple[torch.Tensor | None, ...]

NAME = "fused_linear_cross_entropy"
REDUCTIONS = ("mean", "sum", "none")
ACCUMULATE = ("auto", "float32", "input")
HELD = ("held_hidden", "held_weight", "held_bias")
FLAGS = ("softcapped", "scaled", "smoothed", "squared", "predict", "per_token")
# tokens, hidden, vocab; the middling one first.
SIZES = ((37, 24, 61), (5, 1, 3), (1, 41, 1), (0, 8, 5), (300, 16, 41), (3, 40, 1537))


def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a call contradicts the contract; sizes may be symbolic.

    Raises:
        InvalidInputError: see ``ops._linear.validate``; class weights that are not (vocab,); a ``num_items`` that is
            not 0-dim, or for another reduction than the mean; a label smoothing above 1.
        UnsupportedDtypeError: see there.
    """
    hidden, weight, target, bias, class_weight, num_items = inputs
    assert hidden is not None
    assert weight is not None
    assert target is not None
    _linear.validate(NAME, hidden, weight, target, bias)
    if class_weight is not None:
        check_dtype(NAME, class_weight, DTYPES, "class_weight")
        if class_weight.shape != weight.shape[:1]:
            raise InvalidInputError(
                f"class_weight of {NAME} has shape {tuple(class_weight.shape)}, weight has {tuple(weight.shape)}",
                why=f"there must be one weight a class, ({weight.shape[0]},)",
                fix="pass one weight a class, or None",
            )
    if num_items is not None and (num_items.dim() or dtype_name(num_items) not in ("int64", "int32", *DTYPES)):
        raise InvalidInputError(
            f"num_items of {NAME} is {dtype_name(num_items)} of shape {tuple(num_items.shape)}",
            why="it is one number, what the mean divides by",
            fix="pass a 0-dim tensor, as torch.tensor(count, device=hidden.device)",
        )
    if num_items is not None and options["reduction"] != "mean":
        raise InvalidInputError(
            f"num_items of {NAME} is given with reduction={options['reduction']!r}",
            why="only a mean divides by it",
            fix="pass reduction='mean', or leave num_items out",
        )
    if not 0.0 <= options["label_smoothing"] <= 1.0:
        raise InvalidInputError(
            f"label_smoothing of {NAME} cannot be {options['label_smoothing']}",
            why="it is the part of the loss that all classes share",
            fix="pass a number from 0 to 1",
        )


def check_values(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise InvalidInputError if a target is neither a class nor ignored."""
    _, weight, target = inputs[:3]
    assert weight is not None
    assert target is not None
    _linear.check_targets(NAME, target, weight.shape[0], options["ignore_index"])


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtypes, and the options that change code."""
    hidden, weight, target, bias, class_weight, _ = inputs
    assert hidden is not None
    assert weight is not None
    assert target is not None
    names = {"hidden": hidden, "weight": weight, "bias": bias, "class_weight": class_weight}
    return Description(
        dims=Fields(tokens=target.numel(), hidden=hidden.shape[-1], vocab=weight.shape[0]),
        dtypes=Fields({name: dtype_name(t) for name, t in names.items()}),
        flags=Fields(
            softcapped=options["softcap"] != 0,
            scaled=options["scale"] != 1,
            smoothed=options["label_smoothing"] != 0,
            squared=options["lse_square_scale"] != 0,
            predict=options["return_token_accuracy"] or options["return_predicted_tokens"],
            per_token=options["reduction"] == "none",
            accumulate=options["accumulate"],
        ),
    )


def fixed(problem: Problem) -> dict[str, Scalar]:
    """For each option that the key knows by class alone a value of that class."""
    on = {name: bool(problem.flags.get(name)) for name in FLAGS}
    return {
        "softcap": SOFTCAP if on["softcapped"] else 0.0,
        "scale": SCALE if on["scaled"] else 1.0,
        "label_smoothing": SMOOTHING if on["smoothed"] else 0.0,
        "lse_square_scale": SQUARE if on["squared"] else 0.0,
        "reduction": "none" if on["per_token"] else "mean",
        "return_z_loss": on["squared"],
        "return_token_accuracy": on["predict"],
        "return_predicted_tokens": on["predict"],
    }


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64; see ``ops._linear.Sizes``."""
    import torch

    class_weight, num_items, upstream = inputs[4], inputs[5], grad_outputs[0]
    assert upstream is not None
    sizes = Sizes(inputs, options)
    vocab, smoothing, per_token = sizes.weight.shape[0], options["label_smoothing"], options["reduction"] == "none"
    counted = sizes.target != options["ignore_index"]
    every = sizes.z.new_ones(vocab) if class_weight is None else class_weight.double()
    own = every[sizes.target.clamp(0, vocab - 1)]
    first, second = own.new_ones(()), own.new_ones(())
    if options["reduction"] == "mean":
        first, second = divisors(sizes.target, counted & sizes.there, counted, own, class_weight, num_items)
    zero = torch.zeros_like(own)
    loss = torch.where(counted, own * (1.0 - smoothing) / first, zero)
    shared = torch.where(counted, smoothing / vocab / first, zero)
    square = torch.where(counted, options["lse_square_scale"] / second, zero)
    logp, off = sizes.logp()
    terms = loss * off + shared * (sizes.lse_error * every.sum() + (sizes.error * every).sum(-1))
    squares = square * sizes.lse.abs() * (sizes.lse.abs() + 2.0 * sizes.lse_error)
    total = terms + squares

    def reduced(values: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return values.view(sizes.shape) if per_token else values.square().sum().sqrt() + whole.sum().abs()

    lse_slope = shared * every.sum() + 2.0 * square * sizes.lse

    def gradients(up: torch.Tensor) -> dict[str, torch.Tensor]:
        weighted = -(shared * up)[:, None] * every if smoothing else None
        return sizes.gradients(loss * up, lse_slope * up, weighted)

    if per_token:
        ours = gradients(upstream.reshape(-1))
    else:  # what forward holds is for an upstream gradient of 1
        held = gradients(torch.ones_like(loss))
        ours = {name: size * upstream.abs() for name, size in held.items()}
        ours |= {f"held_{name[5:]}": size for name, size in held.items()}
    return {
        "loss": reduced(total, loss * logp + square * sizes.lse.square()),
        "z_loss": reduced(squares, square * sizes.lse.square()),
        "log_rest": torch.where(counted, sizes.rest_error, zero),
        "target_logit": torch.where(counted, sizes.logit_error, zero),
        **ours,
    }


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(hidden, weight, target, bias, class_weight, num_items)``; see ``ops._linear.example``.

    The key does not know whether there is a ``num_items``; examples of style ``tiny`` of a mean have one.
    """
    import torch

    class_weight = num_items = None
    if problem.dtypes["class_weight"] != "none":
        dtype = getattr(torch, str(problem.dtypes["class_weight"]))
        class_weight = fill((int(problem.vocab),), dtype, device, seed + 4, "random", 0.25)
        class_weight = class_weight if class_weight.is_meta else class_weight.abs() + 0.5
    if style == "tiny" and not problem.flags.get("per_token"):
        num_items = torch.tensor(2 * int(problem.tokens) + 1, device=device)
    return (*_linear.example(problem, device, seed, style), class_weight, num_items)


def described(
    sizes: tuple[int, int, int],
    dtype: str,
    bias: str = "none",
    class_weight: str = "none",
    accumulate: str = "auto",
    **on: bool,
) -> Description:
    """A call of these sizes with some flags on."""
    flags = dict.fromkeys(FLAGS, False) | on
    dims = dict(zip(("tokens", "hidden", "vocab"), sizes, strict=True))
    dtypes = {"hidden": dtype, "weight": dtype, "bias": bias, "class_weight": class_weight}
    return Description(Fields(dims), Fields(dtypes), Fields(flags, accumulate=accumulate))


def odd(dtype: str) -> Iterator[Description]:
    """Odd sizes, and in bf16 every optional input and flag at the first of them.

    In fp16 only calls with one loss a token: gradients that forward holds in fp32 there, made of operands in fp16,
    agree with the formula as well as two roundings to fp16 do, which is not what a result in fp32 is held to.
    """
    weight, first, last = "float64" if dtype == "float64" else "float32", SIZES[0], SIZES[-1]
    everything: dict[str, Any] = dict.fromkeys(FLAGS, True)
    if dtype != "bfloat16":
        both: tuple[dict[str, Any], ...] = ({"per_token": True}, everything)
        for on in both:
            yield described(first, dtype, dtype, **on)
        if dtype != "float16":
            yield described(first, dtype)
            yield described(last, dtype, dtype, weight, **everything | {"per_token": False})
        return
    for sizes in SIZES:
        yield described(sizes, dtype)
    yield described(first, dtype, dtype)
    yield described(first, dtype, class_weight=weight)
    for name in FLAGS:
        flag: dict[str, Any] = {name: True}
        yield described(first, dtype, **flag)
    for accumulate in ACCUMULATE[1:]:
        yield described((300, 16, 41), dtype, accumulate=accumulate)
    for per_token in (False, True):
        yield described(last, dtype, dtype, weight, **everything | {"per_token": per_token})


def proxies(problem: Problem) -> tuple[dict[str, int], ...]:
    """Slabs of every size with a tail, of a narrow head; its width and vocabulary are in no code.

    Tokens are a few less than the problem's, or than two of the largest slabs have.
    """
    tokens = max(1, min(int(problem.tokens), 1 << 16) - 3)
    return ({"tokens": tokens, "hidden": 16, "vocab": 41}, {"tokens": min(5, tokens), "hidden": 24, "vocab": 131})


def cut(inputs: Tensors, options: Mapping[str, Any]) -> tuple[Tensors, Mapping[str, Any]]:
    """The same call with the mean's divisor given, so that the loss is a sum over tokens.

    A weighted mean that has a square besides, which it divides by another number, becomes one of class weights that
    are scaled and a square that is.
    """
    import torch

    *others, class_weight, num_items = inputs
    target = others[2]
    if options["reduction"] != "mean" or num_items is not None:
        return inputs, options
    assert target is not None
    counted = target != options["ignore_index"]
    count = counted.sum().clamp_min(1)
    if class_weight is None:
        return (*others, None, count), options
    vocab = class_weight.shape[0]
    right = counted & (target >= 0) & (target < vocab)
    own = class_weight.double()[target.clamp(0, vocab - 1)]
    total = torch.where(right, own, 0.0).sum()
    return (*others, class_weight * (count / total).to(class_weight.dtype), count), options


def calls(architecture: Architecture, tokens: int, dtype: str) -> Iterable[Description]:
    """The output head of a language model with its loss."""
    if architecture.vocab:
        sizes = tokens, architecture.hidden, architecture.vocab
        yield described(sizes, dtype, softcapped=architecture.softcap != 0)


OP = Op(
    name=NAME,
    doc="The cross-entropy of a linear output head, without materialising the logits.",
    inputs=(
        Input("hidden"),
        Input("weight"),
        Input("target", differentiable=False),
        Input("bias", optional=True),
        Input("class_weight", optional=True, differentiable=False),
        Input("num_items", optional=True, differentiable=False),
    ),
    options=(
        Option("ignore_index", int, -100, doc="the target of tokens that do not count"),
        Option("label_smoothing", float, 0.0, minimum=0.0, doc="the part of the loss that all classes share"),
        Option("lse_square_scale", float, 0.0, doc="the factor of the logsumexp's square, a part of the loss"),
        Option("softcap", float, 0.0, minimum=0.0, doc="caps the scaled logits by a tanh; 0 for none"),
        Option("reduction", str, "mean", choices=REDUCTIONS, doc="what becomes of the tokens' losses"),
        Option("accumulate", str, "auto", choices=ACCUMULATE, doc="the dtype that sums the head's gradient over slabs"),
        Option("compact", str, "auto", choices=COMPACT, doc="whether ignored tokens are left out of the products"),
        Option("return_z_loss", bool, False, doc="whether the square's part of the loss is returned too"),
        Option("return_token_accuracy", bool, False, doc="whether the part of right predictions is"),
        Option("return_predicted_tokens", bool, False, doc="whether the predictions are"),
        Option("scale", float, 1.0, doc="a factor on the logits, before the cap"),
    ),
    outputs=("loss", "z_loss", "token_accuracy", "predicted_tokens"),
    schemes=(
        Scheme(
            "grad_in_forward",
            saved_inputs=("hidden", "weight", "target", "bias", "class_weight", "num_items"),
            saved=HELD,
            allocate=allocate_grads,
            reference=grads_reference,
            gradients=True,
            owned=HELD,
            excludes={"reduction": ("none",)},
            backward=grads_backward,
        ),
        Scheme(
            "recompute",
            saved_inputs=("hidden", "weight", "target", "bias", "class_weight", "num_items"),
            saved=("log_rest", "target_logit"),
            allocate=allocate_statistics,
            reference=recompute_reference,
        ),
    ),
    dims={"tokens": DimKind.BUCKET, "hidden": DimKind.EXACT, "vocab": DimKind.EXACT},
    validate=validate,
    describe=describe,
    reference=reference,
    magnitude=magnitude,
    reduced={
        "loss": ("tokens", "hidden", "vocab"),
        "z_loss": ("tokens", "hidden", "vocab"),
        "log_rest": ("hidden", "vocab"),
        "target_logit": ("hidden",),
        **{f"{kind}_hidden": ("vocab",) for kind in ("grad", "held")},
        **{f"{kind}_{name}": ("tokens",) for kind in ("grad", "held") for name in ("weight", "bias")},
    },
    example=example,
    proxies=proxies,
    calls=calls,
    order={
        FORWARD: ("single", "chunked", "vocab_slabs", "row_slabs"),
        BACKWARD: ("scale_unless_one", "scale", "vocab_slabs"),
    },
    budget=row_budget,
    odd=odd,
    asked={
        "z_loss": "return_z_loss",
        "token_accuracy": "return_token_accuracy",
        "predicted_tokens": "return_predicted_tokens",
    },
    constant=frozenset({"z_loss", "token_accuracy", "predicted_tokens"}),
    fixed=fixed,
    cut=cut,
    check_values=check_values,
    autocast=("hidden", "weight", "bias"),
    compiled=lambda options: {**options, "compact": "off"} if options["compact"] == "auto" else options,
)
