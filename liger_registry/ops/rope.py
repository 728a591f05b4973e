"""``rope``: rotary position embedding (Su et al., 2021) of queries and keys, with the roundings of the model families.

The first ``rotary_dim`` columns of each head are turned in pairs ``(a, b)``, the rest pass bit for bit::

    a_out = a * cos - b * sin        b_out = b * cos + a * sin

where each column has a cosine and a sine of its own. The families differ in the pairs, the tables and the roundings:

================================================ ==========================================================
transformers' families                           options
================================================ ==========================================================
Llama, Qwen, Gemma, GPT-NeoX and most others     none: pairs are column i and column i + rotary_dim / 2
GLM, Helium (first halves of their tables), GPT-J interleaved, half
BLT                                              interleaved
Cohere                                           interleaved, wide
Ernie 4.5 (first halves of its tables)           interleaved, half, wide
DeepSeek V3 (``apply_rotary_pos_emb_interleave``) interleaved, half, deinterleave
================================================ ==========================================================

``interleaved`` pairs neighbours, columns 2i and 2i + 1. With ``half`` the tables have one column a pair, so that
rotary_dim is twice their width. ``deinterleave`` reads neighbours and writes halves. Eager PyTorch rounds each product
to the promoted dtype of q and cos, then the sum: with bf16 tables the products of bf16 heads are rounded to bf16, with
fp32 tables the results are fp32. ``wide`` computes in fp32 and rounds the sum once to the dtype of q.

Results have the strides of q and k where the last dimension of those is contiguous, which is what the eager formula
gives for full heads: (batch, tokens, heads, head_dim) in memory after ``view`` and ``transpose``. Gradients are the
derivative of the formula with its roundings (each product to the dtype of q, then the sum; once if ``wide``), laid out
like the gradients that came in. None flows to cos and sin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields
from liger_registry.op import Description, DimKind, Input, Op, Option, Scheme, dtype_name
from liger_registry.ops import _rotary
from liger_registry.problem import BACKWARD, FORWARD, Problem
from liger_registry.recompute import gradients

if TYPE_CHECKING:
    import torch

    from liger_registry.architecture import Architecture

    Tensors = tuple[torch.Tensor | None, ...]

_FLAGS = ("interleaved", "deinterleave", "half", "wide")


def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a call contradicts the contract; sizes may be symbolic.

    Raises:
        InvalidInputError: q or k no heads of the same tokens, or cos and sin no tables for them.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 and float64, or two where one is due.
        UnsupportedOptionError: ``deinterleave`` without ``interleaved`` and ``half``.
    """
    q, k, cos, sin = inputs
    assert q is not None
    _rotary.validate_options("rope", options["interleaved"], options["deinterleave"], options["half"])
    _rotary.validate_heads("rope", q, k)
    _rotary.validate_tables("rope", q, cos, sin, options["half"])


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtypes; tokens are those of all the batch."""
    q, k, cos, sin = inputs
    assert q is not None
    assert cos is not None
    batch, heads, tokens, width = q.shape
    return Description(
        dims=Fields(
            tokens=batch * tokens,
            heads_q=heads,
            heads_k=0 if k is None else k.shape[1],
            head_dim=width,
            rotary_dim=cos.shape[-1] * 2 if options["half"] else cos.shape[-1],
        ),
        dtypes=Fields(q=dtype_name(q), k=dtype_name(k), cos=dtype_name(cos), sin=dtype_name(sin)),
        flags=Fields({name: options[name] for name in _FLAGS}),
    )


def reference(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    deinterleave: bool = False,
    half: bool = False,
    wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(q_out, k_out)`` in plain, differentiable PyTorch.

    Args:
        q: (batch, heads, tokens, head_dim), floating, of any strides.
        k: the same with another number of heads; without it ``k_out`` has no heads, (batch, 0, tokens, head_dim).
        cos: (tokens, columns), (1 or batch, tokens, columns) or (1 or batch, 1, tokens, columns), the rows of these
            tokens' positions, whatever they are. Always needed.
        sin: of the shape and dtype of cos. Always needed.
        interleaved: pairs are neighbours.
        deinterleave: the pairs' first columns are written before all second ones.
        half: cos and sin have one column a pair.
        wide: computed in fp32 and rounded once.
    """
    assert cos is not None
    assert sin is not None
    turned = (_rotary.formula(x, cos, sin, interleaved, deinterleave, half, wide) for x in (q, k) if x is not None)
    q_out, *rest = turned
    return q_out, rest[0] if rest else _no_heads(q_out)


def _no_heads(q_out: torch.Tensor) -> torch.Tensor:
    batch, _, tokens, width = q_out.shape
    return q_out.new_empty(batch, 0, tokens, width)


def _narrow(q: torch.Tensor) -> torch.Tensor:
    # Backward has neither q nor k, and of a promoted result it would not know what they were.
    return q.new_empty(q.shape[0], 0)


def _scheme_reference(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, ...]:
    q_out, k_out = reference(q, k, cos, sin, **options)
    return _rotary.laid_out(q_out, q), k_out if k is None else _rotary.laid_out(k_out, k), _narrow(q)


def allocate(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Empty ``(q_out, k_out, narrow)``; ``narrow`` has no elements, and the dtype of q and k."""
    dtype = _rotary.output_dtype(q.dtype, cos, options["wide"])
    q_out = _rotary.empty_like(q, dtype)
    return q_out, _no_heads(q_out) if k is None else _rotary.empty_like(k, dtype), _narrow(q)


def backward(
    dq_out: torch.Tensor | None,
    dk_out: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    narrow: torch.Tensor,
    *,
    needs: Sequence[bool],
    **options: Any,
) -> Tensors:
    """Gradients of ``(q, k)`` in plain PyTorch; they depend on neither."""
    found: list[torch.Tensor | None] = []
    for gradient, need in zip((dq_out, dk_out), needs, strict=True):
        if gradient is None or not need:
            found.append(None)
            continue
        # What is linear can be differentiated anywhere.
        anywhere = narrow.new_zeros(()).expand(gradient.shape)
        found += gradients(lambda x: _rotary.formula(x, cos, sin, **options), (anywhere,), (gradient,), (True,))
    return tuple(found)


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the two terms of each element, float64."""
    q, k, cos, sin = inputs
    assert cos is not None
    assert sin is not None
    sizes = {}
    for name, x, gradient in zip(("q", "k"), (q, k), grad_outputs, strict=True):
        if x is None:
            continue
        sizes[f"{name}_out"], back = _rotary.sizes_of(x, cos, sin, options)
        if gradient is not None:
            sizes[f"grad_{name}"] = back(gradient)
    return sizes


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(q, k, cos, sin)`` for a problem; on the meta device without values."""
    width = int(problem.rotary_dim) // 2 if problem.half else int(problem.rotary_dim)
    q = _rotary.example_heads(problem, problem.heads_q, str(problem.dtypes["q"]), device, seed, style)
    k = None
    if problem.dtypes["k"] != "none":
        k = _rotary.example_heads(problem, problem.heads_k, str(problem.dtypes["k"]), device, seed + 1, style)
    return q, k, *_rotary.example_tables(problem, width, device, seed)


def _described(sizes: tuple[int, ...], dtype: str, tables: str = "", k: bool = True, **flags: bool) -> Description:
    tokens, heads_q, heads_k, head_dim, rotary_dim = sizes
    tables = tables or dtype
    return Description(
        Fields(tokens=tokens, heads_q=heads_q, heads_k=heads_k if k else 0, head_dim=head_dim, rotary_dim=rotary_dim),
        Fields(q=dtype, k=dtype if k else "none", cos=tables, sin=tables),
        Fields({name: flags.get(name, False) for name in _FLAGS}),
    )


def odd(dtype: str) -> Iterable[Description]:
    """Odd sizes in halves, then neighbours, tables of one column a pair, tables of another dtype, and no keys.

    Rounding is what dtypes differ in, so all sizes are listed for one of them.
    """
    sizes = list(_rotary.odd_sizes())
    middle, whole = sizes[0], sizes[2]
    for each in sizes if dtype == "bfloat16" else (middle, whole):
        yield _described(each, dtype)
    if dtype == "float16":
        return
    yield _described(middle, dtype, interleaved=True)
    yield _described(middle, dtype, half=True)
    yield _described(middle, dtype, wide=True)
    yield _described(whole, dtype, interleaved=True, half=True)
    yield _described(whole, dtype, interleaved=True, half=True, deinterleave=True)
    if dtype == "bfloat16":
        yield _described(whole, dtype, interleaved=True)
        yield _described(middle, dtype, k=False)
        yield _described(middle, dtype, "float32")
        yield _described(middle, dtype, "float32", interleaved=True, half=True, wide=True)
        yield _described(middle, "float32", dtype)


def calls(architecture: Architecture, tokens: int, dtype: str) -> Iterable[Description]:
    """The rotation of a model's queries and keys, where the config tells heads and rotary size."""
    sizes = (tokens, architecture.heads, architecture.kv_heads, architecture.head_dim, architecture.rotary_dim)
    # Normalised heads are turned by ``qk_norm_rope`` where the adapter can fuse the two, and by this where it cannot.
    if all(sizes) and architecture.rotary_dim % 2 == 0:
        flags = _rotary.flags_of(architecture.model_type)
        tables = "float32" if "ernie" in architecture.model_type else dtype  # which keeps them in full precision
        yield _described(sizes, dtype, tables, **flags)


OP = Op(
    name="rope",
    doc="Rotary position embedding of queries and keys: (q_out, k_out).",
    # Only k may be left out, which has no place behind cos and sin in the order that models call it in.
    inputs=(
        Input("q"),
        Input("k", optional=True),
        Input("cos", optional=True, differentiable=False),
        Input("sin", optional=True, differentiable=False),
    ),
    options=(
        Option("interleaved", bool, False, doc="pairs are neighbours, not columns half the width apart"),
        Option("deinterleave", bool, False, doc="neighbours are read and halves written; takes the two beside it"),
        Option("half", bool, False, doc="cos and sin have one column a pair"),
        Option("wide", bool, False, doc="computed in fp32 and rounded once, not after each product"),
    ),
    outputs=("q_out", "k_out"),
    schemes=(Scheme("default", ("cos", "sin"), ("narrow",), allocate, _scheme_reference, backward=backward),),
    dims={
        "tokens": DimKind.BUCKET,
        "heads_q": DimKind.EXACT,
        "heads_k": DimKind.EXACT,
        "head_dim": DimKind.EXACT,
        "rotary_dim": DimKind.EXACT,
    },
    validate=validate,
    describe=describe,
    reference=reference,
    magnitude=magnitude,
    reduced={"q_out": (), "k_out": (), "narrow": (), "grad_q": (), "grad_k": ()},
    example=example,
    proxies=_rotary.proxies,
    calls=calls,
    odd=odd,
    order={FORWARD: ("tokens", "heads", "halves", "eager"), BACKWARD: ("tokens", "heads", "halves", "eager")},
)
