"""Rotary embedding with the tables and layouts that models and liger-kernel hand over."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from liger_registry.errors import InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.transformers._arguments import check_choice
from liger_registry.transformers._handles import call

Tensor = torch.Tensor


def rotated(
    face: str,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    unsqueeze_dim: int,
    rotary_dim: int | None,
) -> tuple[Tensor, Tensor]:
    """Queries and keys turned, each of its own dtype; arguments as of ``functional.liger_rope``."""
    check_choice(face, "unsqueeze_dim", unsqueeze_dim, (1, 2))
    if cos.dim() == 4:
        cos, sin = (_without_heads(face, table, unsqueeze_dim) for table in (cos, sin))
    elif position_ids is not None and cos.dim() == 2:
        cos, sin = cos[position_ids], sin[position_ids]
        position_ids = None
    if position_ids is not None:
        raise UnsupportedOptionError(
            f"position_ids of {face} cannot be given with tables of shape {tuple(cos.shape)}",
            why="these have the rows of the tokens' positions already",
            fix="leave position_ids out, or pass tables of shape (positions, rotary_dim)",
        )
    half = False
    if rotary_dim is not None:
        cos, sin, half = _narrowed(face, cos, sin, q.shape[-1], rotary_dim)
    return turned(q, k, cos, sin, unsqueeze_dim, half=half)


def turned(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads_dim: int = 1,
    *,
    half: bool = False,
    interleaved: bool = False,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """The operation ``rope`` on heads in either layout, rounded once to the dtype of q if tables have another."""
    if heads_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    wide = wide or cos.dtype != q.dtype
    q, k = call("rope", q, k, cos, sin, interleaved=interleaved, half=half, wide=wide)
    return (q.transpose(1, 2), k.transpose(1, 2)) if heads_dim == 2 else (q, k)


def _without_heads(face: str, table: Tensor, unsqueeze_dim: int) -> Tensor:
    for dim in (unsqueeze_dim, 1):
        if table.shape[dim] == 1:
            return table.squeeze(dim)
    raise InvalidInputError(
        f"cos or sin of {face} has shape {tuple(table.shape)}",
        why="one table serves all heads",
        fix="pass tables of shape (batch, tokens, rotary_dim)",
    )


def _narrowed(face: str, cos: Tensor, sin: Tensor, width: int, rotary_dim: int) -> tuple[Tensor, Tensor, bool]:
    """Tables for ``rotary_dim`` columns, and whether they have one column a pair."""
    if rotary_dim % 2 or not 0 < rotary_dim <= width:
        raise UnsupportedOptionError(
            f"rotary_dim of {face} cannot be {rotary_dim!r}",
            why=f"pairs of columns are turned, of heads that have {width}",
            fix=f"pass an even number from 2 to {width}",
        )
    columns, pairs = cos.shape[-1], rotary_dim // 2
    if columns == rotary_dim:
        return cos, sin, False
    if columns < pairs:
        raise InvalidInputError(
            f"cos and sin of {face} have {columns} columns, rotary_dim is {rotary_dim}",
            why=f"there must be one column a pair at least, {pairs}",
            fix="pass tables of rotary_dim / 2 columns",
        )
    return cos[..., :pairs], sin[..., :pairs], True


def multimodal(
    face: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sections: Sequence[int], unsqueeze_dim: int
) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by angles that take their positions from three axes, section by section."""
    check_choice(face, "unsqueeze_dim", unsqueeze_dim, (1, 2))
    pairs = cos.shape[-1] // 2
    if len(sections) != 3 or sum(sections) != pairs or cos.dim() != 4 or cos.shape[0] != 3:
        raise InvalidInputError(
            f"cos of {face} has shape {tuple(cos.shape)}, mrope_section is {list(sections)}",
            why="there are a table and a section each for time, height and width, and sections hold all pairs",
            fix="pass tables of shape (3, batch, tokens, head_dim), and sections that add up to head_dim / 2",
        )
    # The second halves of the tables repeat the first, and each pair has its angle from one axis.
    ends = list(itertools.accumulate(sections))
    cos, sin = (
        torch.cat([table[axis, ..., end - sections[axis] : end] for axis, end in enumerate(ends)], -1)
        for table in (cos, sin)
    )
    return turned(q, k, cos, sin, unsqueeze_dim, half=True)


def complex_turned(face: str, q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbours turned as complex numbers in fp32, (batch, tokens, heads, head_dim); angles (..., tokens, pairs).

    Raises:
        UnsupportedDtypeError: angles that are not complex.
    """
    if not angles.is_complex():
        raise UnsupportedDtypeError(
            f"freqs_cis of {face} is {angles.dtype}",
            why="its parts are the cosines and sines",
            fix="pass a complex tensor; casting a model to a real dtype drops the sines",
        )
    return turned(q, k, angles.real, angles.imag, 2, half=True, interleaved=True, wide=True)
