"""``linear_sequence_loss``: a sum over groups of sequences of a function of their tokens' log-probabilities under a
linear output head, without (tokens, vocab) of logits.

Log-probabilities are those of ``linear_logp``: with ``z = scale * (hidden @ weight.T + bias)``, rounded once before the
scale, or ``softcap * tanh(z / softcap)`` of it, ``logp = z[target] - logsumexp(z)`` in fp32 (float64 inputs: float64),
0 for tokens whose target is ``ignore_index``, which get gradients of 0, and NaN for targets that are no class.

Tokens are ``ways * groups`` sequences of ``length``; sequence ``n`` is the ``n // groups``-th of group ``n % groups``.
``function`` is named by where it is, ``module:name``, so that it is the same in every process and in a compiled graph.
It is called as ``function(logp, constants, **settings)`` with logp (ways, groups, length), constants one dimension
more and settings from JSON, and gives the groups' terms, (groups,), of which the loss is the sum. Each term must depend
on its own group alone: the function is called with some groups at a time.

Such a loss can have its gradients computed while a group's logits are there, in three products instead of the four of
``linear_logp``. Forward holds them for an upstream gradient of 1. In fp16 some are below its smallest numbers then, for
which the scale that mixed precision multiplies losses by comes too late; ``linear_logp`` is the one for fp16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.config import Fields, Scalar
from liger_registry.errors import InvalidInputError
from liger_registry.examples import fill
from liger_registry.kernels.group_heuristics import default_budget
from liger_registry.op import Description, DimKind, Input, Op, Option, Scheme, check_dtype, dtype_name
from liger_registry.ops import _linear, linear_logp
from liger_registry.ops._linear import COMPACT, SCALE, SOFTCAP
from liger_registry.ops._logits import wide
from liger_registry.ops._sequence_loss_sizes import EXAMPLE, cut, magnitude
from liger_registry.problem import BACKWARD, FORWARD, Problem, bucket

if TYPE_CHECKING:
    import torch

    from liger_registry.architecture import Architecture

    Tensors = tuple[torch.Tensor | None, ...]

NAME = "linear_sequence_loss"
ACCUMULATE = ("auto", "float32", "input")
# A small one: a margin's error is then a small part of a slope, as it has to be for a tangent to stand for the loss.
_BETA = 2.0**-6
HELD = ("held_hidden", "held_weight", "held_bias")
# tokens, hidden, vocab, group; the middling one first.
SIZES = ((36, 24, 61, 4), (5, 1, 3, 1), (2, 41, 1, 2), (0, 8, 5, 1), (132, 16, 41, 4), (4, 40, 1537, 4))


def validate(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise if a call contradicts the contract; sizes may be symbolic.

    Raises:
        InvalidInputError: see ``ops._linear.validate``; constants of other tokens, or tokens that are no whole groups.
        UnsupportedDtypeError: see there; constants of another dtype than log-probabilities.
        UnsupportedOptionError: a function that cannot be found.
    """
    from liger_registry.kernels.group_loss import function_of

    hidden, weight, target, constants, bias = inputs
    assert hidden is not None
    assert weight is not None
    assert target is not None
    assert constants is not None
    _linear.validate(NAME, hidden, weight, target, bias)
    check_dtype(NAME, constants, (str(wide(hidden.dtype))[6:],), "constants")
    if constants.dim() == 0 or constants.shape[:-1] != target.shape:
        raise InvalidInputError(
            f"constants of {NAME} have shape {tuple(constants.shape)}, target has {tuple(target.shape)}",
            why="there must be as many a token as the function reads",
            fix="pass constants of shape (*target.shape, columns)",
        )
    rows = options["ways"] * options["length"]
    if (target.numel() % rows if rows else target.numel()) != 0:
        raise InvalidInputError(
            f"{NAME} got {target.numel()} tokens",
            why=f"a group has {options['ways']} sequences of {options['length']}",
            fix="pass whole groups",
        )
    function_of(options["function"], options["settings"])


def check_values(inputs: Tensors, options: Mapping[str, Any]) -> None:
    """Raise InvalidInputError if a target is neither a class nor ignored."""
    _, weight, target, *_ = inputs
    assert weight is not None
    assert target is not None
    _linear.check_targets(NAME, target, weight.shape[0], options["ignore_index"])


def describe(inputs: Tensors, options: Mapping[str, Any]) -> Description:
    """The call's sizes and dtypes, and the options that change code; of a group its size's bucket."""
    hidden, weight, target, _, bias = inputs
    assert hidden is not None
    assert weight is not None
    assert target is not None
    return Description(
        dims=Fields(tokens=target.numel(), hidden=hidden.shape[-1], vocab=weight.shape[0]),
        dtypes=Fields(hidden=dtype_name(hidden), weight=dtype_name(weight), bias=dtype_name(bias)),
        flags=Fields(
            softcapped=options["softcap"] != 0,
            group=min(bucket(options["ways"] * options["length"]), bucket(target.numel())),
            accumulate=options["accumulate"],
        ),
    )


def fixed(problem: Problem) -> dict[str, Scalar]:
    """A cap where the problem has one, a scale that is not 1, and pairs of sequences where tokens are whole groups."""
    group = int(problem.group) if int(problem.tokens) % int(problem.group) == 0 else 1
    return {
        "softcap": SOFTCAP if problem.flags.get("softcapped") else 0.0,
        "scale": SCALE,
        "ways": 2 if group > 1 else 1,
        "length": max(group // 2, 1),
        "settings": f'{{"beta": {_BETA}}}',
    }


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    constants: torch.Tensor,
    bias: torch.Tensor | None = None,
    function: str = EXAMPLE,
    settings: str = "{}",
    ways: int = 1,
    length: int = 1,
    softcap: float = 0.0,
    scale: float = 1.0,
    ignore_index: int = -100,
    accumulate: str = "auto",
    compact: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(loss, logp)`` in plain PyTorch, the first differentiable.

    Args:
        hidden: (..., hidden), floating; ``ways * groups`` sequences of ``length`` tokens one after the other.
        weight: (vocab, hidden), of the dtype of hidden.
        target: (...), int64.
        constants: (..., columns), in the dtype of log-probabilities, what the function knows of tokens.
        bias: (vocab,), or None.
        function: ``module:name`` of the function.
        settings: its keyword arguments, JSON.
        ways: sequences of a group.
        length: tokens of a sequence.
        softcap: caps the scaled logits; 0 for none.
        scale: a factor on the logits, before the cap.
        ignore_index: the target of tokens that do not count.
        accumulate: the dtype in which the head's gradient is summed over slabs; concerns roundings alone.
        compact: whether ignored tokens are left out of the products; concerns time and memory alone.
    """
    from liger_registry.kernels.group_loss import function_of

    found = linear_logp.formula(
        hidden, weight, target, bias, softcap, scale, ignore_index, False, False, False, compact
    )
    logp = found[0]
    assert logp is not None
    rows = max(ways * length, 1)
    shape = ways, target.numel() // rows, length
    loss = logp.sum()
    if target.numel():
        loss = function_of(function, settings)(logp.reshape(shape), constants.reshape(*shape, -1)).sum()
    return loss, logp.detach()


def allocate(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    constants: torch.Tensor,
    bias: torch.Tensor | None,
    needs: tuple[bool, ...],
    **options: Any,
) -> Tensors:
    """Empty outputs and, contiguous, the gradients of hidden, weight and bias; None for those not needed."""
    held = (
        hidden.new_empty(x.shape) if x is not None and need else None
        for x, need in zip((hidden, weight, bias), needs, strict=True)
    )
    dtype = wide(hidden.dtype)
    return hidden.new_empty((), dtype=dtype), hidden.new_empty(target.shape, dtype=dtype), *held


def scheme_reference(*inputs: torch.Tensor | None, needs: tuple[bool, ...], **options: Any) -> Tensors:
    """Outputs, and the gradients of hidden, weight and bias for an upstream gradient of 1."""
    import torch

    from liger_registry.recompute import gradients

    with torch.no_grad():
        loss, logp = reference(*inputs, **options)  # type: ignore[arg-type]
    wanted = (needs[0], needs[1], False, False, needs[2])
    found = gradients(lambda *xs: reference(*xs, **options)[0], inputs, (torch.ones_like(loss),), wanted)
    return loss, logp, *(None if found[i] is None else found[i].contiguous() for i in (0, 1, 4))  # type: ignore[union-attr]


def scheme_backward(*tensors: torch.Tensor | None, needs: tuple[bool, ...], **options: Any) -> Tensors:
    """The gradients that forward holds times that of the loss."""
    grad_loss, held = tensors[0], tensors[7:]
    assert grad_loss is not None
    return tuple(
        (g.to(grad_loss.dtype) * grad_loss).to(g.dtype) if g is not None and need else None
        for g, need in zip(held, needs, strict=True)
    )


def example(problem: Problem, device: torch.device | str, seed: int = 0, style: str = "random") -> Tensors:
    """``(hidden, weight, target, constants, bias)``; see ``ops._linear.example``."""
    import torch

    hidden, weight, target, bias = _linear.example(problem, device, seed, style)
    tokens, group = int(problem.tokens), int(problem.group)
    assert hidden is not None
    shape = (tokens, 3)
    constants = fill(shape, torch.float32, device, seed + 5, "random", 1.0)
    if not constants.is_meta:
        # Scores are means, so that margins are of order 1; shares are not negative.
        constants[:, 0] = (constants[:, 0].abs() + 0.5) * (2.0 / max(group, 1))
        constants[:, 2] = constants[:, 2].abs() + 0.25
    return hidden, weight, target, constants.to(wide(hidden.dtype)), bias


def described(
    sizes: tuple[int, int, int, int], dtype: str, bias: str = "none", accumulate: str = "auto", softcapped: bool = False
) -> Description:
    """A call of so many tokens, of some width and vocabulary, in groups of so many."""
    tokens, hidden, vocab, group = sizes
    return Description(
        Fields(tokens=tokens, hidden=hidden, vocab=vocab),
        Fields(hidden=dtype, weight=dtype, bias=bias),
        Fields(softcapped=softcapped, group=group, accumulate=accumulate),
    )


def odd(dtype: str) -> Iterator[Description]:
    """Odd sizes, a bias and every way to sum in bf16; in other dtypes a few of them, one with a cap."""
    first, last = SIZES[0], SIZES[-1]
    yield described(first, dtype)
    yield described(last, dtype, dtype, softcapped=True)
    if dtype == "bfloat16":
        for sizes in SIZES[1:]:
            yield described(sizes, dtype)
        yield described(first, dtype, dtype)
        for accumulate in ACCUMULATE[1:]:
            yield described((132, 16, 41, 4), dtype, accumulate=accumulate)


def proxies(problem: Problem) -> tuple[dict[str, int], ...]:
    """As many whole groups as fit the problem but one, of a narrow head; and one group."""
    group = max(int(problem.group), 1)
    tokens = max(group, min(int(problem.tokens), 1 << 16) // group * group - group)
    return ({"tokens": tokens, "hidden": 16, "vocab": 41}, {"tokens": group, "hidden": 24, "vocab": 131})


def calls(architecture: Architecture, tokens: int, dtype: str) -> Iterable[Description]:
    """The output head of a language model, as a preference loss over pairs of 1,024 tokens each reads it."""
    if architecture.vocab:
        sizes = tokens, architecture.hidden, architecture.vocab, min(2048, bucket(tokens))
        yield described(sizes, dtype, softcapped=architecture.softcap != 0)


OP = Op(
    by_name=True,
    name=NAME,
    doc="A loss of groups of sequences, a function of their tokens' log-probabilities, without their logits.",
    inputs=(
        Input("hidden"),
        Input("weight"),
        Input("target", differentiable=False),
        Input("constants", differentiable=False),
        Input("bias", optional=True),
    ),
    options=(
        Option("function", str, EXAMPLE, doc="'module:name' of the function"),
        Option("settings", str, "{}", doc="its keyword arguments, JSON"),
        Option("ways", int, 1, minimum=1, doc="sequences of a group"),
        Option("length", int, 1, minimum=0, doc="tokens of a sequence"),
        Option("softcap", float, 0.0, minimum=0.0, doc="caps the scaled logits by a tanh; 0 for none"),
        Option("scale", float, 1.0, doc="a factor on the logits, before the cap"),
        Option("ignore_index", int, -100, doc="the target of tokens that do not count"),
        Option("accumulate", str, "auto", choices=ACCUMULATE, doc="the dtype that sums the head's gradient over slabs"),
        Option("compact", str, "auto", choices=COMPACT, doc="whether ignored tokens are left out of the products"),
    ),
    outputs=("loss", "logp"),
    schemes=(
        Scheme(
            "grad_in_forward",
            saved_inputs=("hidden", "weight", "target", "constants", "bias"),
            saved=HELD,
            allocate=allocate,
            reference=scheme_reference,
            gradients=True,
            owned=HELD,
            backward=scheme_backward,
        ),
    ),
    dims={"tokens": DimKind.BUCKET, "hidden": DimKind.EXACT, "vocab": DimKind.EXACT},
    validate=validate,
    describe=describe,
    reference=reference,
    magnitude=magnitude,
    reduced={
        "loss": ("tokens", "hidden", "vocab"),
        "logp": ("hidden", "vocab"),
        **{f"{kind}_hidden": ("vocab",) for kind in ("grad", "held")},
        **{f"{kind}_{name}": ("tokens",) for kind in ("grad", "held") for name in ("weight", "bias")},
    },
    example=example,
    proxies=proxies,
    calls=calls,
    order={FORWARD: ("group_slabs", "vocab_slabs"), BACKWARD: ("scale_unless_one", "scale")},
    budget=default_budget,
    odd=odd,
    constant=frozenset({"logp"}),
    fixed=fixed,
    cut=cut,
    check_values=check_values,
    autocast=("hidden", "weight", "bias"),
    compiled=lambda options: {**options, "compact": "off"} if options["compact"] == "auto" else options,
)
