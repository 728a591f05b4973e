"""Triton's interpreter with the roundings of a GPU, which contracts a product into the sum that takes it.

There ``a * b - c`` is one operation that rounds once, wherever ``a * b`` was computed and whoever else reads it. NumPy
rounds twice, so that code which needs two equal roundings is right in the interpreter and wrong on a GPU. Exponentials
are those of 2 of a rounded product, as the hardware has them.
"""

from __future__ import annotations

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

LOG2_E = np.float32(1.4426950408889634)


def _narrow(handle):
    return handle.data.dtype == np.float32


def _fused(left, right, addend, handle):
    with np.errstate(all="ignore"):
        # A product of two fp32 numbers is exact in float64.
        wide = np.multiply(left, right, dtype=np.float64) + np.asarray(addend, np.float64)
        return TensorHandle(wide.astype(np.float32), handle.dtype.scalar)


def _multiply(self, left, right):
    found = self.binary_op(left, right, np.multiply)
    if _narrow(found):
        found.factors = (left.data, right.data)
    return found


def _sum(sign, plain):
    def add(self, left, right):
        if _narrow(left) and _narrow(right):
            if hasattr(left, "factors"):
                return _fused(*left.factors, sign * right.data, left)
            if hasattr(right, "factors"):
                return _fused(sign * right.factors[0], right.factors[1], left.data, right)
        return self.binary_op(left, right, plain)

    return add


def _exponential(self, value):
    if not _narrow(value):
        return self.unary_op(value, np.exp)
    with np.errstate(all="ignore"):
        exponent = (value.data * LOG2_E).astype(np.float64)
        return TensorHandle(np.exp2(exponent).astype(np.float32), value.dtype.scalar)


def _moved(original, move):
    """An operation on shapes that keeps in mind what its operand is a product of."""

    def moved(self, *operands):
        found = original(self, *operands)
        (source,) = (o for o in operands if isinstance(o, TensorHandle))
        if hasattr(source, "factors"):
            shape = source.data.shape
            found.factors = tuple(move(np.broadcast_to(f, shape), found.data.shape) for f in source.factors)
        return found

    return moved


def round_as_a_gpu(monkeypatch):
    """Have the interpreter round so for the length of a test."""
    shapes = {
        "create_expand_dims": lambda factor, shape: factor.reshape(shape),
        "create_broadcast": np.broadcast_to,
        "create_splat": lambda factor, shape: np.full(shape, factor.reshape(-1)[0]),
    }
    for name, move in shapes.items():
        monkeypatch.setattr(InterpreterBuilder, name, _moved(getattr(InterpreterBuilder, name), move))
    monkeypatch.setattr(InterpreterBuilder, "create_fmul", _multiply)
    monkeypatch.setattr(InterpreterBuilder, "create_fadd", _sum(1, np.add))
    monkeypatch.setattr(InterpreterBuilder, "create_fsub", _sum(-1, np.subtract))
    monkeypatch.setattr(InterpreterBuilder, "create_exp", _exponential)
