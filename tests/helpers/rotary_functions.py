"""Rotary functions in many spellings, for the tests of what recognises them."""

from __future__ import annotations

import torch

from liger_registry.transformers.engine.rotations import Pairs


def rotate_half(x):
    middle = x.shape[-1] // 2
    return torch.cat((-x[..., middle:], x[..., :middle]), dim=-1)


def rotate_neighbours(x):
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((-odd, even), dim=-1).flatten(-2)


def halves(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def chunks(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def one(x):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    return one(q), one(k)


def other_sign(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + -rotate_half(q) * sin, k * cos + -rotate_half(k) * sin


def back_in_its_dtype(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_out, k_out = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
    return q_out.to(q.dtype), k_out.to(k.dtype)


def vision(q, k, cos, sin):
    dtypes = q.dtype, k.dtype
    q, k = q.float(), k.float()
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
    return q.to(dtypes[0]), k.to(dtypes[1])


def partial(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]
    results = [
        torch.cat([x[..., :width] * cos + rotate_half(x[..., :width]) * sin, x[..., width:]], -1) for x in (q, k)
    ]
    return results[0], results[1]


def last(x, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]
    passed, rest = x[..., :-width], x[..., -width:]
    return torch.cat([passed, (rest.float() * cos + rotate_half(rest).float() * sin).to(x.dtype)], -1)


def neighbours(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_neighbours(q) * sin, k * cos + rotate_neighbours(k) * sin


def first_half_of_tables(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
    return q * cos + rotate_neighbours(q) * sin, k * cos + rotate_neighbours(k) * sin


def one_at_a_time(x, sin, cos):
    cos, sin = (t[:, :, None, :].repeat_interleave(2, 3) for t in (cos, sin))
    return x * cos + rotate_neighbours(x) * sin


def half_tables(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    q = torch.cat((q1 * cos - q2 * sin, q2 * cos + q1 * sin), -1)
    return q, torch.cat((k1 * cos - k2 * sin, k2 * cos + k1 * sin), -1)


def written_as_halves(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = (t[..., : t.shape[-1] // 2].unsqueeze(unsqueeze_dim) for t in (cos, sin))

    def one(x):
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    return one(q), one(k)


def sorted_first(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def one(x):
        b, h, s, d = x.shape
        x = x.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)
        return x * cos + rotate_half(x) * sin

    return one(q), one(k)


def keys_or_none(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q = q * cos + rotate_half(q) * sin
    if k is None:
        return q
    return q, k * cos + rotate_half(k) * sin


def indexed(q, k, cos, sin, position_ids, unsqueeze_dim=1):
    cos, sin = cos[position_ids].unsqueeze(unsqueeze_dim), sin[position_ids].unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def sections(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    sizes = mrope_section * 2
    cos, sin = (
        torch.cat([part[n % 3] for n, part in enumerate(t.split(sizes, dim=-1))], -1).unsqueeze(unsqueeze_dim)
        for t in (cos, sin)
    )
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def complex_tables(xq, xk, freqs_cis):
    q, k = (torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) for x in (xq, xk))
    freqs_cis = freqs_cis[:, :, None, :]
    q, k = torch.view_as_real(q * freqs_cis).flatten(3), torch.view_as_real(k * freqs_cis).flatten(3)
    return q.type_as(xq), k.type_as(xk)


def plain_tables(q, k, cos, sin):
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


NEIGHBOURS = {"interleaved": True, "half": True}
FUNCTIONS = {
    halves: Pairs(),
    chunks: Pairs(),
    other_sign: Pairs(negated=True),
    back_in_its_dtype: Pairs(),
    vision: Pairs(),
    partial: Pairs(partial=True),
    last: Pairs(partial=True, last=True),
    neighbours: Pairs(interleaved=True),
    first_half_of_tables: Pairs(**NEIGHBOURS, first=True),
    one_at_a_time: Pairs(**NEIGHBOURS),
    half_tables: Pairs(half=True),
    written_as_halves: Pairs(**NEIGHBOURS, deinterleave=True, first=True),
    sorted_first: Pairs(sorted=True),
    keys_or_none: Pairs(),
    indexed: Pairs(),
    sections: Pairs(),
    complex_tables: Pairs(**NEIGHBOURS),
    plain_tables: Pairs(),
}


# -- what resembles them -----------------------------------------------------------------------------------------------


def scaled(q, k, cos, sin, unsqueeze_dim=1):
    q, k = halves(q, k, cos, sin, None, unsqueeze_dim)
    return q * 2, k


def forgets_a_term(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * cos, k * cos + rotate_half(k) * cos


def exchanges(q, k, cos, sin, unsqueeze_dim=1):
    q, k = halves(q, k, cos, sin, None, unsqueeze_dim)
    return k, q


def constant_width(q, k, cos, sin, unsqueeze_dim=1):
    q, k = halves(q, k, cos, sin, None, unsqueeze_dim)
    return torch.cat((q[..., :64], q[..., 64:] * 2), -1), k


def small_scale(q, k, cos, sin, unsqueeze_dim=1):
    return halves(q, k, cos * 1.0001, sin, None, unsqueeze_dim)


def rounds_otherwise(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos - rotate_half(q) * -sin + 0 * q, (k.float() * cos + rotate_half(k) * sin).to(k.dtype)


def on_lengths(q, k, cos, sin, unsqueeze_dim=1):
    if q.shape[2] > 4096:
        cos = cos * 2
    return halves(q, k, cos, sin, None, unsqueeze_dim)


def random_too(q, k, cos, sin, unsqueeze_dim=1):
    q, k = halves(q, k, cos, sin, None, unsqueeze_dim)
    return torch.nn.functional.dropout(q, 0.0), k


def writes(q, k, cos, sin, unsqueeze_dim=1):
    q.mul_(cos.unsqueeze(unsqueeze_dim))
    return q, k


SCALE = 1


def uses_a_global(q, k, cos, sin, unsqueeze_dim=1):
    q, k = halves(q, k, cos, sin, None, unsqueeze_dim)
    return q * SCALE, k


def three(q, k, v, cos, sin, unsqueeze_dim=1):
    q, k = halves(q, k, cos, sin, None, unsqueeze_dim)
    return q, k, v * cos.unsqueeze(unsqueeze_dim)


def decorated_inside(q, k, cos, sin):
    @torch.no_grad()
    def one(x):
        return x * cos + rotate_half(x) * sin

    return one(q), one(k)
