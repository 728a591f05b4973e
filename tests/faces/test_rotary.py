"""Rotary embedding: layouts, tables and positions."""

from __future__ import annotations

import pytest
import torch

from liger_registry.errors import InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.transformers.functional import liger_qwen2vl_mrope, liger_rope
from liger_registry.transformers.llama4_rope import (
    liger_llama4_text_rotary_pos_emb,
    liger_llama4_vision_rotary_pos_emb,
)
from liger_registry.transformers.qwen2vl_mrope import liger_multimodal_rotary_pos_emb
from liger_registry.transformers.rope import (
    liger_rotary_pos_emb,
    liger_rotary_pos_emb_gpt_oss,
    liger_rotary_pos_emb_vision,
)

BATCH, HEADS, KV, TOKENS, WIDTH = 2, 4, 2, 5, 8


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tables(*leading, width=WIDTH, seed=3):
    angle = random(*leading, width // 2, seed=seed)
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def formula(x, cos, sin):
    """x of (batch, heads, tokens, width), tables that broadcast with it."""
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    a, b = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-b, a), -1) * sin, rest), -1)


@pytest.fixture
def q():
    return random(BATCH, HEADS, TOKENS, WIDTH, seed=1)


@pytest.fixture
def k():
    return random(BATCH, KV, TOKENS, WIDTH, seed=2)


@pytest.mark.parametrize("leading", [(TOKENS,), (1, TOKENS), (BATCH, TOKENS), (BATCH, 1, TOKENS)])
@pytest.mark.parametrize("width", [WIDTH, 4])
def test_tables_have_two_to_four_dimensions(leading, width, q, k):
    cos, sin = tables(*leading, width=width)
    over = [t if t.dim() == 4 else t.reshape(-1, TOKENS, width)[:, None] for t in (cos, sin)]
    found = liger_rotary_pos_emb(q, k, cos, sin)
    torch.testing.assert_close(found, (formula(q, *over), formula(k, *over)))


@pytest.mark.parametrize("leading", [(TOKENS,), (BATCH, TOKENS), (BATCH, TOKENS, 1)])
def test_heads_may_stand_behind_tokens(leading, q, k):
    cos, sin = tables(*leading)
    found = liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    flat = [t.reshape(-1, TOKENS, WIDTH) for t in (cos, sin)]
    expected = liger_rope(q, k, *flat)
    torch.testing.assert_close(found, tuple(t.transpose(1, 2) for t in expected))


def test_positions_pick_rows_of_tables_that_have_one_for_each(q, k):
    cos, sin = tables(20)
    positions = torch.tensor([[3, 4, 5, 6, 7], [0, 1, 2, 3, 19]])
    found = liger_rotary_pos_emb(q, k, cos, sin, positions)
    expected = formula(q, cos[positions][:, None], sin[positions][:, None])
    torch.testing.assert_close(found[0], expected)
    for leading in ((BATCH, TOKENS), (BATCH, 1, TOKENS)):
        with pytest.raises(UnsupportedOptionError, match="position_ids"):
            liger_rotary_pos_emb(q, k, *tables(*leading), positions)


@pytest.mark.parametrize("columns", [4, 3, 2])
def test_the_rotary_width_reads_tables_as_one_column_a_pair(columns, q, k):
    angle = random(TOKENS, columns, seed=3)
    pairs = torch.cat((angle[:, :2], angle[:, :2]), -1)
    full = [angle.cos(), angle.sin()] if columns == 4 else [pairs.cos(), pairs.sin()]
    found = liger_rope(q, k, angle.cos(), angle.sin(), rotary_dim=4)
    torch.testing.assert_close(found, (formula(q, *full), formula(k, *full)))


def test_gpt_oss_has_tables_of_half_the_width(q, k):
    cos, sin = tables(BATCH, TOKENS)
    found = liger_rotary_pos_emb_gpt_oss(q, k, cos[..., :4], sin[..., :4])
    torch.testing.assert_close(found, liger_rope(q, k, cos, sin))


def test_vision_has_no_batch_and_rounds_once():
    q, k = random(TOKENS, HEADS, WIDTH, dtype=torch.bfloat16), random(TOKENS, KV, WIDTH, seed=2, dtype=torch.bfloat16)
    cos, sin = (t.bfloat16() for t in tables(TOKENS))
    for found, x in zip(liger_rotary_pos_emb_vision(q, k, cos, sin), (q, k), strict=True):
        expected = formula(x.float().transpose(0, 1)[None], cos.float(), sin.float())[0].transpose(0, 1).bfloat16()
        assert torch.equal(found, expected)


def test_results_have_the_dtype_of_the_heads(q, k):
    q, k = q.bfloat16().requires_grad_(), k.bfloat16()
    cos, sin = (t.float() for t in tables(TOKENS))
    found = liger_rope(q, k, cos, sin)
    assert [t.dtype for t in found] == [torch.bfloat16] * 2
    assert torch.equal(found[0], formula(q.float(), cos, sin).bfloat16())
    found[0].float().sum().backward()
    assert q.grad.dtype == torch.bfloat16


def test_llama4_turns_neighbours_by_complex_numbers():
    xq, xk = random(BATCH, TOKENS, HEADS, WIDTH, dtype=torch.bfloat16), random(BATCH, TOKENS, KV, WIDTH).bfloat16()
    angle = random(BATCH, TOKENS, WIDTH // 2, seed=3).float()
    freqs = torch.polar(torch.ones_like(angle), angle)
    found = liger_llama4_text_rotary_pos_emb(xq, xk, freqs)
    for y, x in zip(found, (xq, xk), strict=True):
        z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * freqs[:, :, None]
        torch.testing.assert_close(y, torch.view_as_real(z).flatten(3).bfloat16())
    with pytest.raises(UnsupportedDtypeError, match="freqs_cis"):
        liger_llama4_text_rotary_pos_emb(xq, xk, angle)


@pytest.mark.parametrize("shape", [(5, 4), (5, 1, 4), (1, 5, 1, 4)])
@pytest.mark.parametrize("real", [False, True])
def test_llama4_vision_takes_angles_of_any_shape_and_real_ones(shape, real):
    q, k = random(BATCH, TOKENS, HEADS, WIDTH).float(), random(BATCH, TOKENS, KV, WIDTH, seed=2).float()
    angle = random(5, 4, seed=3).float()
    freqs = angle.cos() if real else torch.polar(torch.ones_like(angle), angle)
    found = liger_llama4_vision_rotary_pos_emb(q, k, freqs.reshape(shape))
    for y, x in zip(found, (q, k), strict=True):
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * freqs[None, :, None]
        torch.testing.assert_close(y, torch.view_as_real(z).flatten(3))
    with pytest.raises(InvalidInputError, match="freqs_ci"):
        liger_llama4_vision_rotary_pos_emb(q, k, freqs[:4])


def test_multimodal_heads_may_stand_behind_tokens(q, k):
    cos, sin = tables(3, BATCH, TOKENS)
    found = liger_multimodal_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin, [1, 1, 2], 2)
    expected = liger_qwen2vl_mrope(q, k, cos, sin, [1, 1, 2])
    torch.testing.assert_close(found, tuple(t.transpose(1, 2) for t in expected))
    assert not torch.equal(expected[0], liger_qwen2vl_mrope(q, k, cos, sin, [2, 1, 1])[0])
    for sections, table in (([1, 1, 1], cos), ([2, 2], cos), ([1, 1, 2], cos[0])):
        with pytest.raises(InvalidInputError, match="mrope_section"):
            liger_qwen2vl_mrope(q, k, table, table, sections)


def test_tables_and_options_that_do_not_fit_raise(q, k):
    cos, sin = tables(TOKENS)
    for options in (
        {"unsqueeze_dim": 0},
        {"unsqueeze_dim": -1},
        {"rotary_dim": 3},
        {"rotary_dim": 0},
        {"rotary_dim": 10},
    ):
        with pytest.raises(UnsupportedOptionError, match=next(iter(options))):
            liger_rope(q, k, cos, sin, **options)
    with pytest.raises(InvalidInputError, match="rotary_dim"):
        liger_rope(q, k, cos[:, :2], sin[:, :2], rotary_dim=8)
    with pytest.raises(InvalidInputError, match="cos"):
        liger_rope(q, k, *tables(BATCH, HEADS, TOKENS))
    with pytest.raises(InvalidInputError, match="cos"):
        liger_rope(q, k, *tables(TOKENS + 1))
