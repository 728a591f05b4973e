"""Layers: roundings, what they are made of and print, and what they refuse."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from liger_registry.errors import InvalidInputError, UnknownImplementationError, UnsupportedOptionError
from liger_registry.transformers import functional, geglu, mlp, rms_norm, swiglu, tiled_mlp
from liger_registry.transformers.fused_add_rms_norm import LigerFusedAddRMSNorm
from liger_registry.transformers.group_norm import LigerGroupNorm
from liger_registry.transformers.layer_norm import LigerLayerNorm
from liger_registry.transformers.rms_norm import LigerRMSNorm

CONFIG = {"hidden_size": 6, "intermediate_size": 10, "hidden_act": "silu", "mlp_multipliers": (0.7, -1.25)}
GATED = {"gate_proj.weight": (10, 6), "up_proj.weight": (10, 6), "down_proj.weight": (6, 10)}


def config(**changes):
    return SimpleNamespace(**{**CONFIG, **changes})


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def llama(x, weight, offset=0.0):
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    return (weight + offset) * normed.to(x.dtype)


def gemma(x, weight, offset=1.0):
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    return (normed * (weight.float() + offset)).to(x.dtype)


@pytest.mark.parametrize(
    ("name", "formula", "start"),
    [
        ("LigerRMSNorm", llama, 1.0),
        ("LigerRMSNormForOlmo2", llama, 1.0),
        ("LigerRMSNormForGlm4", llama, 1.0),
        ("LigerRMSNormForGemma", gemma, 0.0),
        ("LigerRMSNormForGemma2", gemma, 0.0),
        ("LigerRMSNormForGemma3", gemma, 0.0),
        ("LigerRMSNormForQwen3Next", gemma, 0.0),
        ("LigerRMSNormForMuseGlimmerTextCentered", gemma, 0.0),
        ("LigerRMSNormForGemma4", lambda x, w: gemma(x, w, 0.0), 1.0),
        ("LigerRMSNormForMuseGlimmer", lambda x, w: gemma(x, w, 0.0), 1.0),
    ],
)
def test_norms_have_the_roundings_and_the_start_of_their_family(name, formula, start):
    norm = getattr(rms_norm, name)(32)
    assert (norm.weight == start).all()
    norm = norm.bfloat16()
    norm.weight.data += random(32, seed=1, dtype=torch.bfloat16)
    x = random(5, 32, dtype=torch.bfloat16)
    assert torch.equal(norm(x), formula(x, norm.weight))


@pytest.mark.parametrize("name", ["LigerRMSNormForGemma4", "LigerRMSNormForMuseGlimmer"])
def test_norms_without_a_scale_have_no_weight(name):
    norm = getattr(rms_norm, name)(32, with_scale=False)
    x = random(5, 32, dtype=torch.bfloat16)
    assert torch.equal(norm(x), gemma(x, torch.zeros(32)))
    assert norm.weight is None
    assert not norm.state_dict()


def test_a_norm_of_no_width_with_a_weight_raises():
    with pytest.raises(UnsupportedOptionError, match="dim"):
        rms_norm.LigerRMSNormForMuseGlimmer()


@pytest.mark.parametrize("options", [{}, {"offset": 1.0}, {"casting_mode": "none"}, {"casting_mode": "gemma"}])
def test_a_wider_weight_does_not_widen_the_result(options):
    x, r = random(5, 32, dtype=torch.bfloat16), random(5, 32, seed=2, dtype=torch.bfloat16)
    assert LigerRMSNorm(32, **options)(x).dtype == torch.bfloat16
    assert [t.dtype for t in LigerFusedAddRMSNorm(32, **options)(x, r)] == [torch.bfloat16] * 2
    y = LigerLayerNorm(32)(x)
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("option", [{"eps": 1e-1}, {"offset": 0.5}, {"casting_mode": "gemma"}, {"init_fn": "zeros"}])
@pytest.mark.parametrize("made", [LigerRMSNorm, LigerFusedAddRMSNorm])
def test_every_option_of_a_norm_changes_the_result(made, option):
    x, r = random(8, 64, dtype=torch.bfloat16), random(8, 64, seed=2, dtype=torch.bfloat16)
    arguments = (x,) if made is LigerRMSNorm else (x, r)
    plain, other = (made(64, **given).bfloat16() for given in ({}, option))
    for norm in (plain, other):
        norm.weight.data += random(64, seed=1, dtype=torch.bfloat16)
    found, changed = plain(*arguments), other(*arguments)
    assert not torch.equal(*(t if isinstance(t, torch.Tensor) else t[0] for t in (found, changed)))


@pytest.mark.parametrize("made", [LigerRMSNorm, LigerFusedAddRMSNorm])
def test_in_place_changes_nothing(made):
    x, r, dy = (random(5, 32, seed=n) for n in range(3))
    found = []
    for in_place in (True, False):
        norm = made(32, in_place=in_place)
        leaves = [t.clone().requires_grad_() for t in ((x,) if made is LigerRMSNorm else (x, r))]
        y = norm(*leaves)
        upstream = [dy.clone() for _ in range(1 if isinstance(y, torch.Tensor) else 2)]
        torch.autograd.backward(y, upstream)
        assert all(torch.equal(g, dy) for g in upstream)
        assert all(torch.equal(a, b) for a, b in zip(leaves, (x, r), strict=False))
        found.append([norm.weight.grad, *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_functional_norms_take_in_place_by_position():
    x, w = random(5, 32), random(32, seed=1)
    y = functional.liger_rms_norm(x, w, 1e-6, 1.0, "gemma", True)
    torch.testing.assert_close(y, gemma(x, w))
    y, residual = functional.liger_fused_add_rms_norm(x, x, w, 1e-6, 1.0, "gemma", True)
    torch.testing.assert_close((y, residual), (gemma(2 * x, w), 2 * x))


def test_layers_print_their_arguments():
    norm = "weight_shape=(32,), eps=1e-06, offset=0.0, in_place=True, row_mode=None"
    assert LigerRMSNorm(32).extra_repr() == norm
    assert "weight_shape=None" in repr(LigerRMSNorm(32, elementwise_affine=False))
    assert LigerFusedAddRMSNorm(32).extra_repr() == "(32,), eps=1e-06, offset=0.0, in_place=False"
    assert LigerLayerNorm(32).extra_repr() == "32, eps=1e-06, impl=None, mode=None"
    assert LigerGroupNorm(6, 2).extra_repr() == "num_channels=6, num_groups=2, eps=1e-06"


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        (lambda: LigerRMSNorm(32), {"weight": (32,)}),
        (lambda: LigerRMSNorm(32, elementwise_affine=False), {}),
        (lambda: LigerFusedAddRMSNorm(32), {"weight": (32,)}),
        (lambda: LigerLayerNorm(32), {"weight": (32,), "bias": (32,)}),
        (lambda: LigerGroupNorm(6, 2), {"weight": (6,), "bias": (6,)}),
        (lambda: swiglu.LigerSwiGLUMLP(config()), GATED),
        (
            lambda: swiglu.LigerSwiGLUMLP(config(), 8),
            {k: tuple(8 if n == 10 else n for n in s) for k, s in GATED.items()},
        ),
        (lambda: geglu.LigerGEGLUMLP(config(hidden_act="gelu")), GATED),
        (lambda: tiled_mlp.LigerTiledSwiGLUMLP(config()), GATED),
        (lambda: mlp.LigerMLP(config()), GATED),
        (lambda: swiglu.LigerFalconH1SwiGLUMLP(config()), GATED),
        (
            lambda: swiglu.LigerFalconH1SwiGLUMLP(config(mlp_bias=True)),
            {**GATED, "gate_proj.bias": (10,), "up_proj.bias": (10,), "down_proj.bias": (6,)},
        ),
        (
            lambda: swiglu.LigerPhi3SwiGLUMLP(config()),
            {"gate_up_proj.weight": (20, 6), "down_proj.weight": (6, 10)},
        ),
        (
            lambda: swiglu.LigerBlockSparseTop2MLP(config()),
            {"w1.weight": (10, 6), "w2.weight": (6, 10), "w3.weight": (10, 6)},
        ),
    ],
)
def test_states_have_the_keys_and_shapes_of_liger_kernel(layer, shapes):
    assert {key: tuple(value.shape) for key, value in layer().state_dict().items()} == shapes


def test_biases_start_as_zeros_or_random_numbers():
    for made in (LigerLayerNorm, lambda n, **o: LigerGroupNorm(n, 2, **o)):
        assert not made(6).bias.any()
        assert made(6, bias=True).bias.all()
        assert not made(6, init_fn="zeros").weight.any()


def test_an_implementation_can_be_pinned():
    x = random(5, 32)
    expected = F.layer_norm(x, (32,), eps=1e-6)
    for options in ({"impl": "eager"}, {"backend": "eager"}, {"impl": "functional", "backend": "nowhere"}):
        torch.testing.assert_close(LigerLayerNorm(32, **options)(x), expected)
    layer = LigerLayerNorm(32)
    layer.backend = "eager"
    assert layer.impl == "eager"
    with pytest.raises(UnknownImplementationError, match="cutile"):
        LigerLayerNorm(32, impl="nvidia-cutile")(x)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: LigerRMSNorm(32, row_mode=True), "row_mode"),
        (lambda: LigerRMSNorm(32, init_fn="randn"), "init_fn"),
        (lambda: LigerRMSNorm(32, casting_mode="bf16"), "casting_mode"),
        (lambda: LigerFusedAddRMSNorm(32, init_fn="randn"), "init_fn"),
        (lambda: LigerFusedAddRMSNorm(32, casting_mode="bf16"), "casting_mode"),
        (lambda: LigerLayerNorm(32, mode="chunked"), "mode"),
        (lambda: LigerLayerNorm(32, init_fn="randn"), "init_fn"),
        (lambda: LigerGroupNorm(6, 4), "num_groups"),
        (lambda: LigerGroupNorm(6, 2, init_fn="randn"), "init_fn"),
        (lambda: swiglu.LigerSwiGLUMLP(config(hidden_act="gelu")), "'gelu'"),
        (lambda: swiglu.LigerSwiGLUMLPForMuseGlimmer(config(hidden_activation="gelu")), "'gelu'"),
        (lambda: swiglu.LigerPhi3SwiGLUMLP(config(hidden_act="relu")), "'relu'"),
        (lambda: swiglu.LigerBlockSparseTop2MLP(config(hidden_act="relu")), "'relu'"),
        (lambda: swiglu.LigerFalconH1SwiGLUMLP(config(hidden_act="relu")), "'relu'"),
        (lambda: mlp.LigerFalconH1MLP(config(mlp_bias=True)), "mlp_bias"),
        (lambda: geglu.LigerGEGLUMLP(config()), "'silu'"),
        (lambda: tiled_mlp.LigerTiledGEGLUMLP(config()), "'silu'"),
        (lambda: tiled_mlp.LigerTiledSwiGLUMLP(config(hidden_act="gelu")), "'gelu'"),
    ],
)
def test_what_is_not_supported_raises_where_the_layer_is_made(made, said):
    with pytest.raises(UnsupportedOptionError, match=said):
        made()


def test_row_mode_false_is_the_default_choice():
    assert LigerRMSNorm(32, row_mode=False)(random(5, 32)).shape == (5, 32)


def test_group_norm_takes_its_own_channels_alone():
    with pytest.raises(InvalidInputError, match="num_channels"):
        LigerGroupNorm(6, 2)(random(3, 4, 5))
    with pytest.raises(InvalidInputError, match="three dimensions"):
        LigerGroupNorm(6, 2)(random(3, 6))


@pytest.mark.parametrize(
    ("changes", "approximate"),
    [
        ({"hidden_act": "gelu_pytorch_tanh"}, "tanh"),
        ({"hidden_act": "gelu_new"}, "tanh"),
        ({"hidden_act": "gelu"}, "none"),
        ({"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}, "tanh"),
        ({"hidden_act": None, "hidden_activation": None}, "tanh"),
    ],
)
def test_the_gelu_is_the_configs(changes, approximate):
    layer = geglu.LigerGEGLUMLP(config(**changes)).double()
    x = 3 * random(5, 6, dtype=torch.float64)
    expected = layer.down_proj(F.gelu(layer.gate_proj(x), approximate=approximate) * layer.up_proj(x))
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_falcon_multiplies_its_bias_too():
    layer = swiglu.LigerFalconH1SwiGLUMLP(config(mlp_bias=True)).double()
    x, (gate, down) = random(5, 6, dtype=torch.float64), CONFIG["mlp_multipliers"]
    expected = layer.down_proj(F.silu(layer.gate_proj(x) * gate) * layer.up_proj(x)) * down
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.ci  # torch's checkpoints load Dynamo, which takes three seconds
@pytest.mark.parametrize("shards", [None, 1, 3, 50])
def test_tiles_are_computed_again_in_backward(shards):
    layer = tiled_mlp.LigerTiledSwiGLUMLP(config(), shards)
    plain = swiglu.LigerSwiGLUMLP(config())
    plain.load_state_dict(layer.state_dict())
    x = random(2, 15, 6).requires_grad_()
    calls = []
    layer.gate_proj.register_forward_hook(lambda module, args, output: calls.append(output.shape[-2]))
    y = layer(x)
    parts = {None: 3, 1: 1, 3: 3, 50: 15}[shards]
    assert len(calls) == parts
    assert sum(calls) == 15
    found = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    assert len(calls) == 2 * parts
    expected = plain(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), [x, *plain.parameters()]))


@pytest.mark.ci  # five seconds for Dynamo
def test_a_pinned_layer_and_one_called_before_are_one_graph():
    x = random(5, 32)
    for layer in (LigerLayerNorm(32, impl="eager"), LigerRMSNorm(32)):
        expected = layer(x)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), expected)
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
