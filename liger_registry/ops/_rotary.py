"""Rotary embedding (Su et al., 2021) in plain PyTorch: what ``rope`` and ``qk_norm_rope`` have in common.

Heads are (batch, heads, tokens, head_dim); the first ``rotary_dim`` columns are turned in pairs, the others pass.
Tables ``cos`` and ``sin`` are (tokens, columns), (1 or batch, tokens, columns) or (1 or batch, 1, tokens, columns).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from liger_registry.errors import InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.examples import fill
from liger_registry.op import check_dtype, dtype_name
from liger_registry.ops.rms_norm import DTYPES
from liger_registry.problem import Problem

if TYPE_CHECKING:
    import torch

# Model types whose queries and keys are turned in pairs of neighbours, read from transformers 5.24: tables of full
# width with each angle twice, tables of one column a pair, those that round once, and those that write halves.
_NEIGHBOURS = frozenset({"blt", "cohere", "cohere2", "cohere2_moe"})
_ONE_A_PAIR = frozenset({"codegen", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "gptj", "helium"})
_WIDE = frozenset({"cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe"})
# Examples of up to so many tokens have a batch and a length; of more, one token an entry of the batch, so that rows of
# the first dimension can be verified by themselves. In memory both are (batch, tokens, heads, head_dim).
_SMALL = 2048


def flags_of(model_type: str) -> dict[str, bool]:
    """The options of ``rope`` with which a family's layers are served."""
    family = model_type.removesuffix("_text")
    half = family in _ONE_A_PAIR
    interleaved = half or family in _NEIGHBOURS
    return {"interleaved": interleaved, "deinterleave": False, "half": half, "wide": family in _WIDE}


def validate_heads(op: str, q: torch.Tensor, k: torch.Tensor | None) -> None:
    """Raise unless q and k are heads of the same tokens.

    Raises:
        InvalidInputError: not four-dimensional, or of different batches, tokens or head sizes.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 and float64, or two of them.
    """
    for name, x in (("q", q), ("k", k)):
        if x is None:
            continue
        if x.dim() != 4 or x.shape[-1] == 0:
            raise InvalidInputError(
                f"{name} of {op} has shape {tuple(x.shape)}",
                why="it takes heads, (batch, heads, tokens, head_dim) with head_dim >= 1",
                fix=f"pass {name}.view(batch, tokens, heads, head_dim).transpose(1, 2)",
            )
        check_dtype(op, x, DTYPES, name)
    if k is None:
        return
    if (k.shape[0], k.shape[2], k.shape[3]) != (q.shape[0], q.shape[2], q.shape[3]):
        raise InvalidInputError(
            f"k of {op} has shape {tuple(k.shape)}, q has {tuple(q.shape)}",
            why="they may differ in their heads alone",
            fix="pass queries and keys of the same tokens; call it once for each if they differ",
        )
    if k.dtype != q.dtype:
        raise UnsupportedDtypeError(
            f"k of {op} is {dtype_name(k)}, q is {dtype_name(q)}",
            why="both are turned with the same roundings",
            fix="cast one, for example k.to(q.dtype)",
        )


def validate_tables(op: str, q: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, half: bool) -> None:
    """Raise unless cos and sin are tables for the tokens of q.

    Raises:
        InvalidInputError: missing, of another rank, batch or length, of an odd width or one beyond the heads'.
        UnsupportedDtypeError: a dtype other than float32, float16, bfloat16 and float64, or two of them.
    """
    for name, table in (("cos", cos), ("sin", sin)):
        if table is None:
            raise InvalidInputError(f"{name} of {op} is missing", fix="pass a table of (tokens, rotary_dim)")
        check_dtype(op, table, DTYPES, name)
        batch, tokens, width = q.shape[0], q.shape[2], q.shape[3]
        shape = table.shape
        fits = 2 <= table.dim() <= 4 and shape[-2] == tokens
        fits = fits and (table.dim() == 2 or shape[0] == 1 or shape[0] == batch)
        if not fits or (table.dim() == 4 and shape[1] != 1):
            raise InvalidInputError(
                f"{name} of {op} has shape {tuple(shape)}, q has {tuple(q.shape)}",
                why="it is (tokens, columns), (1 or batch, tokens, columns) or (1 or batch, 1, tokens, columns)",
                fix=f"index it with the positions of these tokens first, for example {name}[position_ids]",
            )
        columns = shape[-1] * 2 if half else shape[-1]
        if columns == 0 or columns % 2 or columns > width:
            raise InvalidInputError(
                f"{name} of {op} has {shape[-1]} columns, q has heads of {width}",
                why=f"they turn {columns} columns, which must be an even number from 2 to {width}",
                fix="pass tables of rotary_dim columns, or of rotary_dim / 2 with half=True",
            )
    assert cos is not None
    assert sin is not None
    if cos.shape != sin.shape:
        raise InvalidInputError(
            f"cos and sin of {op} have shapes {tuple(cos.shape)} and {tuple(sin.shape)}",
            fix="pass tables of one shape",
        )
    if cos.dtype != sin.dtype:
        raise UnsupportedDtypeError(
            f"cos and sin of {op} are {dtype_name(cos)} and {dtype_name(sin)}",
            fix="cast one, for example sin.to(cos.dtype)",
        )


def validate_options(op: str, interleaved: bool, deinterleave: bool, half: bool) -> None:
    """Raise UnsupportedOptionError for options that contradict each other."""
    if deinterleave and not (interleaved and half):
        raise UnsupportedOptionError(
            f"{op} cannot deinterleave these pairs",
            why="it reads pairs of neighbours, whose tables have one column a pair",
            fix="pass interleaved=True, half=True and cos[..., : rotary_dim // 2], likewise sin",
        )


def over_heads(table: torch.Tensor) -> torch.Tensor:
    """A table as (1 or batch, 1, tokens, columns), or (1, tokens, columns): what heads broadcast with."""
    return table.unsqueeze(1) if table.dim() == 3 else table


def rotate_pairs(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Each pair (a, b) as (-b, a)."""
    import torch

    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def formula(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    deinterleave: bool = False,
    half: bool = False,
    wide: bool = False,
) -> torch.Tensor:
    """Heads turned as the model families write it; options as of ``rope``."""
    import torch

    cos, sin = over_heads(cos), over_heads(sin)
    width = cos.shape[-1] * 2 if half else cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if wide:
        turned = turned.to(torch.promote_types(x.dtype, torch.float32))
    if deinterleave:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:
        if half:
            cos, sin = (
                t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)  # copies, as in the models
                for t in (cos, sin)
            )
        turned = turned * cos + rotate_pairs(turned, interleaved) * sin
    if wide:
        turned = turned.to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def output_dtype(x: torch.dtype, cos: torch.Tensor, wide: bool = False) -> torch.dtype:
    """The dtype of turned heads: products promote, unless the sum is rounded back."""
    import torch

    return x if wide else torch.promote_types(x, cos.dtype)


def empty_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Empty heads of x's shape, with its strides where its last dimension is contiguous."""
    import torch

    layout = torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format
    return torch.empty_like(x, dtype=dtype, memory_format=layout)


def laid_out(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A result with the strides that ``empty_like(like)`` has."""
    out = empty_like(like, result.dtype)
    return result if result.stride() == out.stride() else out.copy_(result)


def sizes_of(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, options: Mapping[str, Any]
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """The size of the two terms of each turned element, and a function from those of gradients to theirs."""
    import torch

    def signed(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        # One column of a pair is a difference and the other a sum; each is a sum of sizes under one sign of the sine.
        return torch.maximum(function(sin.abs()).abs(), function(-sin.abs()).abs())

    def back(g: torch.Tensor) -> torch.Tensor:
        def gradient(sine: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                leaf = torch.zeros_like(x, requires_grad=True)
                return torch.autograd.grad(formula(leaf, cos.abs(), sine, **options), leaf, g.abs())[0]

        return signed(gradient)

    return signed(lambda sine: formula(x.abs(), cos.abs(), sine, **options)), back


def shape_of(tokens: int) -> tuple[int, int]:
    """The batch and the length of an example of so many tokens."""
    if tokens > _SMALL:
        return tokens, 1
    batch = next((b for b in (4, 3, 2) if tokens % b == 0 and tokens > b), 1)
    return batch, tokens // batch


def example_heads(
    problem: Problem, heads: int, dtype: str, device: torch.device | str, seed: int, style: str
) -> torch.Tensor:
    """Heads for a problem, in memory (batch, tokens, heads, head_dim)."""
    import torch

    batch, tokens = shape_of(problem.tokens)
    shape = (batch, tokens, heads, problem.head_dim)
    values = fill(shape, getattr(torch, dtype), device, seed, style if heads else "random")
    return values.transpose(1, 2)


def example_tables(
    problem: Problem, columns: int, device: torch.device | str, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of random angles; the seed chooses rank and whether a batch shares them.

    The angles of a pair's two columns differ, which those of a model do not: a kernel that took one for the other would
    be right otherwise.
    """
    import torch

    batch, tokens = shape_of(problem.tokens)
    dtype = getattr(torch, str(problem.dtypes["cos"]))
    shapes: list[tuple[int, ...]] = [(batch, tokens, columns), (batch, 1, tokens, columns)]
    if problem.tokens <= _SMALL:
        shapes += [(tokens, columns), (1, tokens, columns), (1, 1, tokens, columns)]
    shape = shapes[(seed + seed // 1000) % len(shapes)]
    angles = fill(shape, torch.float32, device, seed + 5)
    if str(device) == "meta":
        return angles.to(dtype), angles.to(dtype)
    angles = angles * math.pi
    return angles.cos().to(dtype), angles.sin().to(dtype)


def proxies(problem: Problem) -> tuple[dict[str, int], ...]:
    """Few tokens with all heads, a multiple of no tile: 3 x 87, and one."""
    # 2^20 elements keep one check within tens of milliseconds; heads and their size are in the code.
    width = (int(problem.heads_q) + int(problem.heads_k)) * int(problem.head_dim)
    return ({"tokens": max(3, min(261, (1 << 20) // max(width, 1)))}, {"tokens": 1})


def odd_sizes() -> Iterator[tuple[int, int, int, int, int]]:
    """Tokens, query heads, key heads, head size and rotary size: middling first."""
    yield from ((10, 3, 2, 24, 16), (5, 2, 1, 3, 2), (15, 1, 3, 41, 40), (7, 5, 5, 2, 2), (0, 2, 1, 8, 8))
    yield from ((1, 4, 2, 16, 16), (37, 2, 2, 20, 12))
