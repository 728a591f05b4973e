"""Matrix products of losses over a linear head, by PyTorch: logits rounded once, and sums wider than their terms."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from liger_registry.kernels.linear_heuristics import ADDED_ROWS, BLOCK, SCALED, STAGE_BYTES, pitch

#: Whether PyTorch's products add to a wider tensor; up to 2.9 it wants both of one dtype.
_ADDS_WIDER = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)
#: Bytes of the fp32 product that a bias is added to at once; a stage's copies, which come later, take more.
_WIDE_BYTES = STAGE_BYTES // 2


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and sums: fp32, for float64 float64."""
    return torch.promote_types(dtype, torch.float32)


def new_slab(like: Tensor, rows: int, columns: int) -> Tensor:
    """Memory for (rows, columns) of logits, and narrower slabs; on a GPU rows begin at multiples of 64 elements."""
    step = pitch(columns) if like.is_cuda else columns
    return like.new_empty(rows * step)


def cut_slab(memory: Tensor, rows: int, columns: int) -> Tensor:
    """A (rows, columns) view of the slab's memory."""
    step = pitch(columns) if memory.is_cuda else columns
    return memory[: rows * step].view(rows, step)[:, :columns]


def logits_into(slab: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """``slab = hidden @ weight.T + bias``, rounded once."""
    if in_blocks(hidden):
        add_blocks(slab, hidden, weight.t(), None if bias is None else bias.expand(slab.shape))
    elif bias is None:
        torch.mm(hidden, weight.t(), out=slab)
    elif slab.dtype != wide(slab.dtype) and _widens(slab):
        _logits_with_bias(slab, hidden, weight, bias)
    else:
        torch.addmm(bias, hidden, weight.t(), out=slab)


def _widens(tensor: Tensor) -> bool:
    """Whether products of 16 bits can have results of fp32."""
    return tensor.is_cuda and torch.version.hip is None


def _logits_with_bias(slab: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Logits of 16 bits from products in fp32, some columns at a time, to which the bias is added.

    Where the library adds it is the library's choice, by shape and layout: kernels that share a sum, and those whose
    bias is a kernel of its own, round to 16 bits first. Slabs of one call would then differ by a rounding from each
    other and from backward's, 32 for a logit of 5,000.
    """
    rows, vocab = slab.shape
    columns = max(64, _WIDE_BYTES // (4 * max(rows, 1)) // 64 * 64)
    memory = torch.empty(rows * min(columns, vocab), dtype=torch.float32, device=slab.device)
    for here in row_slabs(vocab, columns):
        width = here.stop - here.start
        product = memory[: rows * width].view(rows, width)
        torch.mm(hidden, weight[here].t(), out_dtype=torch.float32, out=product)
        torch.add(product, bias[here], out=slab[:, here])


def add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """``total += left @ right``, or ``total = left @ right`` for the first; total may be of a wider dtype."""
    # A processor's product of 16 bits is rounded to them, which a wider sum is there to avoid.
    wider = left.device.type == "cpu" and total.dtype != left.dtype and not _widens(total)
    if wider or in_blocks(left):
        add_blocks(total, left, right, None if first else total)
    elif total.dtype == left.dtype:
        if first:
            torch.mm(left, right, out=total)
        else:
            torch.addmm(total, left, right, out=total)
    elif first and _widens(total):
        torch.mm(left, right, out_dtype=total.dtype, out=total)
    elif _ADDS_WIDER and _widens(total):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:  # no such product here: parts of it, rounded once where they cannot be wider, are added in the wider dtype
        rows = ADDED_ROWS // 2 if _widens(total) else ADDED_ROWS  # of a buffer of the same size
        for here in row_slabs(total.shape[0], rows):
            part = torch.mm(left[here], right, out_dtype=total.dtype) if _widens(total) else torch.mm(left[here], right)
            if first:
                total[here] = part
            else:
                total[here] += part


@functools.cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Whether the processor has products of 16-bit numbers."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    return name is None or bool(getattr(torch.ops.mkldnn, name, lambda: False)())


def in_blocks(operand: Tensor) -> bool:
    """Whether products are made of blocks in fp32: on a CPU that has none in 16 bits.

    PyTorch's own takes 224 s there for (128, 151936) @ (151936, 1024) in bf16, blocks take 1.
    """
    return operand.device.type == "cpu" and not _multiplies(operand.dtype)


def add_blocks(out: Tensor, left: Tensor, right: Tensor, addend: Tensor | None) -> None:
    """``out = left @ right + addend`` from products of blocks in fp32, rounded once; addend may be out itself."""
    sides = [min(side, BLOCK) for side in (left.shape[0], left.shape[1], right.shape[1])]
    # Used again for every block: fresh pages would take longer than the products.
    whole, first, second = (
        torch.empty(rows * columns, dtype=torch.float32)
        for rows, columns in ((sides[0], sides[2]), (sides[0], sides[1]), (sides[1], sides[2]))
    )

    def block(memory: Tensor, source: Tensor) -> Tensor:
        if source.stride(0) == 1 != source.stride(1):  # a transposed matrix, which a product takes as it is
            return block(memory, source.t()).t()
        return memory[: source.numel()].view(source.shape).copy_(source)

    for rows in row_slabs(left.shape[0], BLOCK):
        for columns in row_slabs(right.shape[1], BLOCK):
            place = out[rows, columns]
            total = whole[: place.numel()].view(place.shape)
            total.zero_() if addend is None else total.copy_(addend[rows, columns])
            for depth in row_slabs(left.shape[1], BLOCK):
                total.addmm_(block(first, left[rows, depth]), block(second, right[depth, columns]))
            place.copy_(total)


def add_columns(total: Tensor, slab: Tensor, first: bool) -> None:
    """``total += slab.sum(0)`` in the dtype of total; on a CPU a sum in another dtype would copy the slab first."""
    found = slab.sum(0, dtype=total.dtype) if slab.is_cuda else slab.sum(0)
    total.copy_(found) if first else total.add_(found)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient * factor`` in a dtype, in the gradient's own memory where that is its dtype.

    Args:
        gradient: contiguous.
        factor: 0-dim; a product of a 16-bit tensor with it would round it first.
        dtype: of the result.
    """
    if gradient.dtype == factor.dtype == dtype:
        return gradient.mul_(factor)
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    source, target = gradient.view(-1), out.view(-1)
    for here in row_slabs(source.numel(), SCALED):
        part = source[here]
        target[here] = part * factor if part.dtype == factor.dtype else part.to(factor.dtype).mul_(factor)
    return out


def row_slabs(count: int, rows: int) -> Iterator[slice]:
    """Slices of so many rows, the last one with what is left."""
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))
