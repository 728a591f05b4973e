"""``qk_norm_rope``: the ``rms_norm`` over each head of queries and keys and the ``rope`` behind it, in one pass.

``q_out = rope(rms_norm(q, q_weight))``, likewise k: what Qwen 3, Gemma 3 and their kin do between projection and
attention. Castings and offset are those of ``rms_norm`` (see ``ops/rms_norm.py``), pairs and tables those of ``rope``
(see ``ops/rope.py``). Forward rounds where those two do: the norm to the dtype of its result, each product of the
rotation and their sum to the promoted dtype of that and cos. Backward is in the statistics' dtype and rounded once.

Heads are (batch, heads, tokens, head_dim) of any strides; results have those of q and k where their last dimension is
contiguous. Saved are the reciprocal roots of the mean squares, (batch, tokens, heads), of queries and of keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError
from liger_registry.examples import fill
from liger_registry.op import Description, DimKind, Input, Op, Option, Scheme, check_dtype, dtype_name
from liger_registry.ops import _rotary, rms_norm
from liger_registry.ops.rms_norm import CASTINGS, DTYPES
from liger_registry.problem import BACKWARD, FORWARD, Problem

if TYPE_CHECKING:
    import torch

    from liger_registry.architecture import Architecture

    Tensors = tuple[torch.Tensor | None, ...]


def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a call contradicts the contract; sizes may be symbolic.

    Raises:
        InvalidInputError: q and k no heads of the same tokens, a weight of another width, or cos and sin no tables.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 and float64, or two where one is due.
    """
    q, k, q_weight, k_weight, cos, sin = inputs
    assert q is not None
    assert q_weight is not None
    assert k_weight is not None
    _rotary.validate_heads("qk_norm_rope", q, k)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_dtype("qk_norm_rope", weight, DTYPES, name)
        if weight.shape != q.shape[-1:]:
            raise InvalidInputError(
                f"{name} of qk_norm_rope has shape {tuple(weight.shape)}, q has {tuple(q.shape)}",
                why=f"the weight must have shape ({q.shape[-1]},)",
                fix="pass the weight of this layer's norm over a head",
            )
    if q_weight.dtype != k_weight.dtype:
        raise UnsupportedDtypeError(
            f"q_weight and k_weight of qk_norm_rope are {dtype_name(q_weight)} and {dtype_name(k_weight)}",
            fix="cast one, for example k_weight.to(q_weight.dtype)",
        )
    _rotary.validate_tables("qk_norm_rope", q, cos, sin, False)


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtypes; tokens are those of all the batch."""
    q, k, _, _, cos, _ = inputs
    assert q is not None
    assert k is not None
    assert cos is not None
    batch, heads, tokens, width = q.shape
    names = ("q", "k", "q_weight", "k_weight", "cos", "sin")
    return Description(
        dims=Fields(tokens=batch * tokens, heads_q=heads, heads_k=k.shape[1], head_dim=width, rotary_dim=cos.shape[-1]),
        dtypes=Fields({name: dtype_name(x) for name, x in zip(names, inputs, strict=True)}),
        flags=Fields(casting=options["casting"], interleaved=options["interleaved"]),
    )


def _formula(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    offset: float,
    casting: str,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    normed, rstd = rms_norm.formula(x, weight, eps, offset, casting)
    return _rotary.formula(normed, cos, sin, interleaved), rstd


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(q_out, k_out)`` in plain, differentiable PyTorch.

    Args:
        q: (batch, heads, tokens, head_dim), floating, of any strides.
        k: the same with another number of heads.
        q_weight: (head_dim,).
        k_weight: (head_dim,), of the dtype of q_weight.
        cos: (tokens, rotary_dim), (1 or batch, tokens, rotary_dim) or (1 or batch, 1, tokens, rotary_dim).
        sin: of the shape and dtype of cos.
        eps: added to the mean of squares.
        offset: added to the weights.
        casting: the model family whose roundings apply.
        interleaved: pairs are neighbours.
    """
    rest = (cos, sin, eps, offset, casting, interleaved)
    return _formula(q, q_weight, *rest)[0], _formula(k, k_weight, *rest)[0]


def _scheme_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    outputs, saved = [], []
    for x, weight in ((q, q_weight), (k, k_weight)):
        out, rstd = _formula(x, weight, cos, sin, **options)
        outputs.append(_rotary.laid_out(out, x))
        batch, heads, tokens, _ = x.shape
        saved.append(rstd.new_empty(batch, tokens, heads).copy_(rstd.view(batch, heads, tokens).transpose(1, 2)))
    return *outputs, *saved


def allocate(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Empty ``(q_out, k_out, q_rstd, k_rstd)``."""
    import torch

    dtype = _rotary.output_dtype(rms_norm.output_dtype(q, q_weight, options["casting"]), cos)
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    rstd = (x.new_empty(x.shape[0], x.shape[2], x.shape[1], dtype=statistics) for x in (q, k))
    return _rotary.empty_like(q, dtype), _rotary.empty_like(k, dtype), *rstd


def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """The size of the summed terms, float64: those of the rotation, of the norm's, and of the sum over all rows."""
    q, k, q_weight, k_weight, cos, sin = inputs
    assert cos is not None
    assert sin is not None
    norm = {name: options[name] for name in ("eps", "offset", "casting")}
    pairing = {"interleaved": options["interleaved"]}
    sizes = {}
    for name, x, weight, gradient in zip(("q", "k"), (q, k), (q_weight, k_weight), grad_outputs, strict=True):
        assert x is not None
        assert weight is not None
        assert gradient is not None
        normed, rstd = rms_norm.formula(x, weight, **norm)
        sizes[f"{name}_out"], back = _rotary.sizes_of(normed, cos, sin, pairing)
        sizes[f"{name}_rstd"] = rstd.view(x.shape[:-1]).transpose(1, 2)
        found = rms_norm.magnitude((x, weight), (back(gradient),), norm)
        sizes[f"grad_{name}"], sizes[f"grad_{name}_weight"] = found["grad_x"], found["grad_weight"]
    return sizes


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(q, k, q_weight, k_weight, cos, sin)`` for a problem; on the meta device without values."""
    import torch

    def weight(name: str, number: int) -> torch.Tensor:
        values = fill(
            (problem.head_dim,), getattr(torch, str(problem.dtypes[name])), device, seed + number, "random", 0.25
        )
        return values if str(device) == "meta" else values + 1

    q = _rotary.example_heads(problem, problem.heads_q, str(problem.dtypes["q"]), device, seed, style)
    k = _rotary.example_heads(problem, problem.heads_k, str(problem.dtypes["k"]), device, seed + 1, style)
    tables = _rotary.example_tables(problem, problem.rotary_dim, device, seed)
    return q, k, weight("q_weight", 2), weight("k_weight", 3), *tables


def _described(
    sizes: tuple[int, ...], dtype: str, weight: str = "", tables: str = "", casting: str = "llama", **flags: bool
) -> Description:
    tokens, heads_q, heads_k, head_dim, rotary_dim = sizes
    weight, tables = weight or dtype, tables or dtype
    return Description(
        Fields(tokens=tokens, heads_q=heads_q, heads_k=heads_k, head_dim=head_dim, rotary_dim=rotary_dim),
        Fields(q=dtype, k=dtype, q_weight=weight, k_weight=weight, cos=tables, sin=tables),
        Fields(casting=casting, interleaved=flags.get("interleaved", False)),
    )


def odd(dtype: str) -> Iterable[Description]:
    """Odd sizes, then castings, neighbours as pairs, and weights and tables of another dtype.

    Rounding is what dtypes differ in, so sizes are listed for one of them.
    """
    middle, narrow, whole, _, none, single, _ = _rotary.odd_sizes()
    if dtype != "bfloat16":
        yield _described(whole, dtype)
        yield _described(middle, dtype, casting="gemma", interleaved=True)
        return
    for each in (middle, narrow, whole, none, single):
        yield _described(each, dtype)
    for casting in CASTINGS[1:]:
        yield _described(middle, dtype, casting=casting)
    yield _described(whole, dtype, interleaved=True)
    yield _described(middle, dtype, "float32")
    yield _described(middle, dtype, "", "float32", "gemma")
    yield _described(middle, "float32", dtype, dtype)


def calls(architecture: Architecture, tokens: int, dtype: str) -> Iterable[Description]:
    """Norm and rotation of a model's queries and keys, where it has both."""
    sizes = (tokens, architecture.heads, architecture.kv_heads, architecture.head_dim, architecture.rotary_dim)
    flags = _rotary.flags_of(architecture.model_type)
    # What tables of one column a pair or other roundings need is left to the two operations by themselves.
    fits = not (flags["half"] or flags["wide"])
    if architecture.qk_norm and all(sizes) and architecture.rotary_dim % 2 == 0 and fits:
        yield _described(sizes, dtype, casting=architecture.norm_casting, interleaved=flags["interleaved"])


OP = Op(
    name="qk_norm_rope",
    doc="Root-mean-square normalisation of each head of queries and keys, then rotary embedding: (q_out, k_out).",
    inputs=(
        Input("q"),
        Input("k"),
        Input("q_weight"),
        Input("k_weight"),
        Input("cos", differentiable=False),
        Input("sin", differentiable=False),
    ),
    options=(
        Option("eps", float, 1e-6, minimum=0.0, doc="added to the mean of squares"),
        Option("offset", float, 0.0, doc="added to the weights; 1 for Gemma"),
        Option("casting", str, "llama", choices=CASTINGS, doc="the model family whose roundings apply"),
        Option("interleaved", bool, False, doc="pairs are neighbours, not columns half the width apart"),
    ),
    outputs=("q_out", "k_out"),
    schemes=(
        Scheme(
            "default",
            ("q", "k", "q_weight", "k_weight", "cos", "sin"),
            ("q_rstd", "k_rstd"),
            allocate,
            _scheme_reference,
        ),
    ),
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
    reduced={
        "q_out": ("head_dim",),
        "k_out": ("head_dim",),
        "q_rstd": ("head_dim",),
        "k_rstd": ("head_dim",),
        "grad_q": ("head_dim",),
        "grad_k": ("head_dim",),
        "grad_q_weight": ("tokens", "heads_q"),
        "grad_k_weight": ("tokens", "heads_k"),
    },
    example=example,
    proxies=_rotary.proxies,
    calls=calls,
    odd=odd,
    order={FORWARD: ("tokens", "heads", "functional", "eager"), BACKWARD: ("tokens", "heads", "eager")},
)
