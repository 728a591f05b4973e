"""What the contracts of gated activations, ``act(gate) * up``, have in common, and of activations alone.

``gate`` and ``up`` are (..., width). Without ``up``, ``gate`` is one packed tensor (..., 2 * width), the gates of a row
before its ups, as one projection gives them; its gradient is one tensor too. The problem key tells both apart by the
dtype of ``up``, which is ``none`` for a packed tensor.

Roundings are those of transformers' ``act_fn(gate) * up``: the activation is rounded to the gate's dtype, the product
to the dtype that PyTorch promotes both to, so that mixed dtypes are taken and mean what they mean there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields
from liger_registry.errors import InvalidInputError
from liger_registry.examples import fill
from liger_registry.op import Description, DimKind, Input, Op, Option, Scheme, check_dtype, dtype_name
from liger_registry.problem import BACKWARD, FORWARD, Problem

if TYPE_CHECKING:
    import torch

    from liger_registry.architecture import Architecture
    from liger_registry.config import Scalar

    Tensors = tuple[torch.Tensor | None, ...]
    # The activation, its slope as the sum of the sizes of its terms, and the exponent within, all in float64.
    Terms = Callable[[torch.Tensor, Mapping[str, Any]], "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"]

DTYPES = ("float32", "float16", "bfloat16", "float64")
# Odd sizes, the middling one first.
SIZES = ((5, 41), (5, 1), (37, 3), (3, 1536), (5, 48), (0, 41), (1, 41))
ORDER = {
    FORWARD: ("flat", "rows", "persistent", "functional", "eager"),
    BACKWARD: ("flat", "rows", "persistent", "functional", "eager"),
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Models whose MLP has no gate, or clamps it (gpt_oss), or whose config names the activation of something else (mamba).
_NO_GATE = _names(
    "arcee codegen cosmos3_edge falcon falcon_mamba gpt2 gpt_bigcode gpt_neo gpt_neox gptj gpt_oss jais2 mamba mamba2 "
    "mpt nanochat nemotron nemotron_h opt persimmon phi starcoder2 xlstm"
)
# Models with one projection for gates and ups in their dense MLP.
_PACKED = _names(
    "glm glm4 glm_image granitemoe granitemoe_swa granitemoehybrid granitemoeshared moshi phi3 phi4_multimodal zamba2"
)


def check_width(op: str, tensor: torch.Tensor, name: str) -> None:
    """Raise unless a tensor has a last dimension of at least one element, and a dtype the contract has.

    Raises:
        InvalidInputError: no last dimension, or one of width zero.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 and float64.
    """
    if tensor.dim() == 0 or tensor.shape[-1] == 0:
        raise InvalidInputError(
            f"{name} of {op} has shape {tuple(tensor.shape)}",
            why="its last dimension must be at least 1 wide",
            fix=f"pass {name} of shape (..., width) with width >= 1",
        )
    check_dtype(op, tensor, DTYPES, name)


def halves(gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up, as views where they are packed."""
    if up is not None:
        return gate, up
    width = gate.shape[-1] // 2
    return gate[..., :width], gate[..., width:]


def allocate(gate: torch.Tensor, up: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor]:
    """An empty ``y``: of a packed tensor contiguous, else with the gate's strides if its columns are contiguous."""
    import torch

    if up is None:
        return (gate.new_empty(*gate.shape[:-1], gate.shape[-1] // 2),)
    return (like(gate, torch.promote_types(gate.dtype, up.dtype)),)


def like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of the same shape, with the same strides where the last dimension is contiguous."""
    import torch

    layout = torch.preserve_format if tensor.stride(-1) == 1 else torch.contiguous_format
    return torch.empty_like(tensor, dtype=dtype, memory_format=layout)


def filled(
    shape: tuple[int, int], dtype: str, device: torch.device | str, seed: int, style: str = "random"
) -> torch.Tensor:
    """``fill`` with values whose products with each other and with gradients of that style fp16 holds, up to 65504."""
    import torch

    scale = {"tail": 2.0**-9, "spike": 2.0**-3}.get(style, 1.0) if dtype == "float16" else 1.0
    return fill(shape, getattr(torch, dtype), device, seed, style, scale)


def proxies(problem: Problem) -> tuple[dict[str, int], ...]:
    """Few rows at the true width, a multiple of no tile; the width is in the code and is never changed."""
    # 2^21 elements keep one check under 20 ms on a GPU.
    return ({"rows": max(3, min(261, (1 << 21) // problem.width))}, {"rows": 1})


def sizes(value: torch.Tensor, slope: torch.Tensor, exponent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sizes of an activation and its slope that rounding errors scale with.

    Where the activation dies out it is an exponential, whose relative error in fp32 is its exponent times a rounding.
    An element may be off by several roundings anyway; exponents beyond eight need more.
    """
    import torch

    condition = torch.where(exponent < 0, exponent.abs() / 8, 0.0).clamp_min(1.0)
    return value.abs() * condition, slope * condition


def gated_op(
    name: str,
    *,
    doc: str,
    reference: Callable[..., torch.Tensor],
    terms: Terms,
    options: tuple[Option, ...],
    flags: Callable[[Mapping[str, Any]], Mapping[str, Scalar]],
    variants: tuple[Mapping[str, Scalar], ...],
    flags_of: Callable[[Architecture], Mapping[str, Scalar] | None],
    fixed: Callable[[Problem], Mapping[str, Scalar]] = lambda problem: {},
) -> Op:
    """The contract of a gated activation.

    Args:
        name: the operation's.
        doc: one sentence.
        reference: ``(gate, up=None, **options)`` to the result.
        terms: ``(gate, options)``, the gate in float64, to the activation, the sizes of the terms of its slope, and the
            exponent of the exponential it dies out with.
        options: its options.
        flags: options to the flags of the problem key.
        variants: every combination of flags, the usual one first.
        flags_of: an architecture to the flags its gated MLPs have; None if they have another activation.
        fixed: as in ``Op``.
    """

    def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
        gate, up = inputs
        assert gate is not None
        check_width(name, gate, "gate")
        if up is None:
            if gate.shape[-1] % 2:
                raise InvalidInputError(
                    f"gate of {name} has shape {tuple(gate.shape)}, and there is no up",
                    why="a packed tensor has gates and ups of one width, so its last dimension is even",
                    fix="pass up as well, or a packed tensor (..., 2 * width)",
                )
            return
        check_width(name, up, "up")
        if up.shape != gate.shape:
            raise InvalidInputError(
                f"up of {name} has shape {tuple(up.shape)}, gate has {tuple(gate.shape)}",
                why="both must have the same shape; they are not broadcast",
                fix="expand the smaller of them first, for example up.expand_as(gate)",
            )

    def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
        gate, up = inputs
        assert gate is not None
        last = gate.shape[-1]
        return Description(
            dims=Fields(rows=gate.numel() // last, width=last // 2 if up is None else last),
            dtypes=Fields(gate=dtype_name(gate), up=dtype_name(up)),
            flags=Fields(flags(options)),
        )

    def scheme_reference(gate: torch.Tensor, up: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor]:
        return (reference(gate, up, **options),)

    def magnitude(inputs: Tensors, grad_outputs: Tensors, options: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        import torch

        packed, (dy,) = inputs[1] is None, grad_outputs
        assert inputs[0] is not None
        assert dy is not None
        gate, up = halves(*inputs)  # type: ignore[arg-type]
        scale, down = (abs(options.get(key, 1.0)) for key in ("gate_multiplier", "down_multiplier"))
        value, slope = sizes(*terms(gate * options.get("gate_multiplier", 1.0), options))
        dy, up = dy.abs() * down, up.abs()
        gradients = {"grad_gate": dy * up * slope * scale, "grad_up": dy * value}
        if packed:
            gradients = {"grad_gate": torch.cat(tuple(gradients.values()), -1)}
        return {"y": value * up * down, **gradients}

    def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
        import torch

        shape, gate_dtype = (problem.rows, problem.width), str(problem.dtypes["gate"])
        gate = filled(shape, gate_dtype, device, seed, style)
        if problem.dtypes["up"] == "none":
            return torch.cat((gate, filled(shape, gate_dtype, device, seed + 1)), -1), None
        return gate, filled(shape, str(problem.dtypes["up"]), device, seed + 1)

    def odd(dtype: str) -> Iterator[Description]:
        usual = Fields(variants[0])
        for number, (rows, width) in enumerate(SIZES):
            dims = Fields(rows=rows, width=width)
            yield Description(dims, Fields(gate=dtype, up=dtype), usual)
            if number in (0, 3, 5):
                yield Description(dims, Fields(gate=dtype, up="none"), usual)
        dims = Fields(rows=5, width=41)
        for variant in variants[1:]:
            for up in (dtype, "none"):
                yield Description(dims, Fields(gate=dtype, up=up), Fields(variant))
        other = "float32" if dtype != "float32" else "bfloat16"
        yield Description(dims, Fields(gate=dtype, up=other), usual)
        yield Description(dims, Fields(gate=other, up=dtype), usual)

    def calls(architecture: Architecture, tokens: int, dtype: str) -> Iterable[Description]:
        found = flags_of(architecture)
        if found is None or family(architecture) in _NO_GATE or not architecture.intermediate:
            return
        for rows, packed in _calls(architecture, tokens):
            yield Description(
                Fields(rows=rows, width=architecture.intermediate),
                Fields(gate=dtype, up="none" if packed else dtype),
                Fields(found),
            )

    return Op(
        name=name,
        doc=doc,
        inputs=(Input("gate"), Input("up", optional=True)),
        options=options,
        outputs=("y",),
        schemes=(Scheme("default", ("gate", "up"), (), allocate, scheme_reference),),
        dims={"rows": DimKind.BUCKET, "width": DimKind.EXACT},
        validate=validate,
        describe=describe,
        reference=reference,
        magnitude=magnitude,
        reduced={"y": (), "grad_gate": (), "grad_up": ()},
        example=example,
        proxies=proxies,
        calls=calls,
        order=ORDER,
        odd=odd,
        fixed=fixed,
    )


def family(architecture: Architecture) -> str:
    """The model type, that of a text model without what says so."""
    return architecture.model_type.removesuffix("_text")


def expert_rows(architecture: Architecture, tokens: int) -> tuple[int, int]:
    """Rows of all experts of a layer together, and of one of them where tokens spread evenly; dense models: tokens."""
    every = tokens * max(architecture.experts_per_token, 1)
    return every, max(every // max(architecture.experts, 1), 1)


def _calls(architecture: Architecture, tokens: int) -> list[tuple[int, bool]]:
    """Rows, and whether gates and ups are packed, of the gated MLPs of a model.

    Experts come packed: all of them at once from a grouped product, or one by one, where every count of tokens between
    none and all occurs and the average stands for them. Experts that are modules of their own have two projections.
    """
    if not architecture.experts:
        return [(tokens, family(architecture) in _PACKED)]
    every, average = expert_rows(architecture, tokens)
    return list(dict.fromkeys([(every, True), (average, True), (average, False)]))
