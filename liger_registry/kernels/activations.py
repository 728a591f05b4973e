"""Activation functions and their slopes in device code, fp32 in and out.

Each of them is ``x`` times a share between 0 and 1, and none of the forms below multiplies an overflow by a zero or
subtracts numbers that nearly agree. Exponentials lose about as many units of fp32 as their argument is large: what
comes out at -80 is right to 5e-6 of itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Beyond it the share is 0 or 1 in fp32, and powers of x would overflow.
_FAR = tl.constexpr(16.0)
# sqrt(8 / pi), twice the factor within the tanh.
_STEEP = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(0.044715)
# 1 / sqrt(2 pi)
_DENSITY = tl.constexpr(0.3989422804014327)


@triton.jit
def _exponent(x, ACTIVATION: tl.constexpr):
    """``k`` of ``x / (1 + exp(-k))``: x for silu, sqrt(8 / pi) (x + 0.044715 x^3) for gelu's tanh form.

    0.5 (1 + tanh(z)) is 1 / (1 + exp(-2z)) without the cancellation that costs the former all digits below x = -5.
    """
    if ACTIVATION == "silu":
        k = x
    else:
        near = tl.minimum(tl.maximum(x, -_FAR), _FAR)
        k = _STEEP * near * (1.0 + _CUBIC * near * near)
    return k


@triton.jit
def _normal_tail(x):
    """``exp(-x^2 / 2)``, and the share of a normal distribution beyond ``|x|``, ``erfc(|x| / sqrt(2)) / 2``.

    The share is the exponential times r P(s), r = 1 / (|x| + 4), s = (|x| - 4) r. P was fitted to the least relative
    error over 0 <= |x| <= 16.5, 1.0e-8; evaluated in fp32 the factor is right to 2.0e-7.
    """
    far = tl.minimum(tl.abs(x), _FAR)
    r = 1.0 / (far + 4.0)
    s = (far - 4.0) * r
    p = -0.00013977171 * s + 0.00016336994
    p = p * s + 0.0015656736
    p = p * s - 0.003503821
    p = p * s - 0.0075211306
    p = p * s + 0.06040238
    p = p * s - 0.18652418
    p = p * s + 0.38713697
    p = p * s - 0.60789657
    p = p * s + 0.75528514
    bell = tl.exp(-0.5 * far * far)
    return bell, bell * p * r


@triton.jit
def _shares(k):
    """``1 / (1 + exp(-k))`` and what it lacks to 1, without cancellation; the exponential never overflows."""
    e = tl.exp(-tl.abs(k))
    large = 1.0 / (1.0 + e)
    small = e * large
    return tl.where(k > 0.0, large, small), tl.where(k > 0.0, small, large)


@triton.jit
def activation(x, ACTIVATION: tl.constexpr):
    """``silu``, ``gelu_tanh``, ``gelu_none`` (by the error function) or ``relu_squared`` of x."""
    if ACTIVATION == "relu_squared":
        positive = tl.where(x <= 0.0, 0.0, x)  # unlike a maximum, keeps NaN
        y = positive * positive
    elif ACTIVATION == "gelu_none":
        _, tail = _normal_tail(x)
        y = x * tl.where(x < 0.0, tail, 1.0 - tail)
    else:
        k = _exponent(x, ACTIVATION)
        e = tl.exp(-tl.abs(k))
        # One rounding less than x times its share: this is what PyTorch rounds to bf16.
        y = tl.where(k > 0.0, x, x * e) / (1.0 + e)
    return y


@triton.jit
def value_and_slope(x, ACTIVATION: tl.constexpr):
    """An activation and its derivative by x."""
    if ACTIVATION == "relu_squared":
        positive = tl.where(x <= 0.0, 0.0, x)
        y = positive * positive
        slope = 2.0 * positive
    elif ACTIVATION == "gelu_none":
        bell, tail = _normal_tail(x)
        share = tl.where(x < 0.0, tail, 1.0 - tail)
        y = x * share
        slope = share + x * (_DENSITY * bell)
    else:
        share, rest = _shares(_exponent(x, ACTIVATION))
        if ACTIVATION != "silu":
            near = tl.minimum(tl.maximum(x, -_FAR), _FAR)
            rest *= _STEEP * (1.0 + 3.0 * _CUBIC * near * near)
        y = x * share
        slope = share + y * rest  # not x * rest first, which may overflow where the share is 0
    return y, slope
