"""The functions of ``liger_kernel.ops`` and ``liger_kernel.functional``: values and gradients beside torch's."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_registry.drop_in import functional as forms
from liger_registry.drop_in import functions as f
from liger_registry.drop_in import loss_functions, utils
from liger_registry.drop_in.distillation import LigerFusedLinearDistillationBase
from liger_registry.drop_in.fsdp import _FSDPForwardRedirection
from liger_registry.errors import InvalidInputError, UnsupportedOptionError

#: The arguments of liger-kernel 0.8.5's forwards without ctx, and their defaults.
APPLY = {
    "LigerCrossEntropyFunction": (
        "_input, target, weight, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction='mean', "
        "softcap=None, return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False"
    ),
    "LigerFusedAddRMSNormFunction": "X, R, W, eps, offset=0.0, casting_mode='llama', in_place=True",
    "LigerFusedGateUpSiLUMulFunction": "y, in_place=False",
    "LigerFusedLinearCrossEntropyFunction": (
        "_input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, "
        "label_smoothing=0.0, reduction='mean', softcap=None, return_z_loss=False, accum_dtype=None, "
        "use_token_scaling=False, return_token_accuracy=False, return_predicted_tokens=False, ce_impl=None, "
        "ce_mode=None, chunk_mem_const=1"
    ),
    "LigerFusedLinearJSDFunction": (
        "student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, "
        "ignore_index=-100, temperature=1.0, accum_dtype=None, jsd_impl=None, jsd_mode=None"
    ),
    "LigerGELUMulFunction": "a, b",
    "LigerGroupNormFunction": "X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps",
    "LigerJSDFunction": (
        "_input, target, shift_labels=None, beta=0.5, ignore_index=-100, jsd_impl=None, jsd_mode=None"
    ),
    "LigerKLDivLossFunction": "y_pred, y_true, reduction='batchmean', log_target=False, eps=1e-10",
    "LigerLayerNormFunction": "X, W, B, eps",
    "LigerLlama4RopeFunction": "q, k, freqs_cis, BLOCK_SIZE=None",
    "LigerMLPFunction": "input, gate_weight, up_weight, down_weight, gate_multiplier=1.0, down_multiplier=1.0",
    "LigerQwen2VLMRopeFunction": "q, k, cos, sin, mrope_section, unsqueeze_dim=1",
    "LigerRMSNormFunction": "X, W, eps, offset=0.0, casting_mode='llama', in_place=True, row_mode=None",
    "LigerReLUSquaredFunction": "x",
    "LigerRopeFunction": "q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None",
    "LigerSiLUMulFunction": "a, b, gate_multiplier=1.0, down_multiplier=1.0",
    "LigerSoftmaxFunction": "x",
    "LigerTVDLossFunction": "p, q, shift_labels=None, reduction='batchmean', ignore_index=-100",
    "LigerTiledMLPFunction": "fn, mlp_module, x, shards, compute_params=None",
}


def spelled(function) -> str:
    found = inspect.signature(function).parameters.values()
    return ", ".join(x.name if x.default is x.empty else f"{x.name}={x.default!r}" for x in found)


@pytest.mark.parametrize("name", APPLY)
def test_arguments_are_those_of_liger_kernel(name):
    assert spelled(getattr(f, name).apply) == APPLY[name]


def test_none_is_forgotten():
    assert {n for n in vars(f) if n.startswith("Liger")} == set(APPLY)
    losses = {n: v for n, v in vars(loss_functions).items() if n.startswith("Liger")}
    assert len(losses) == 8
    assert all(v.apply.__name__.startswith("liger_fused_linear_") for v in losses.values())


def agree(ours, theirs, *inputs):
    """Values and gradients of all floating inputs."""
    results = []
    for function in (ours, theirs):
        leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
        out = function(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        grads = torch.autograd.grad(
            sum((x * (i + 1)).square().sum() for i, x in enumerate(out)), [x for x in leaves if x.requires_grad]
        )
        results.append((*out, *grads))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def r(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_layers():
    agree(
        lambda x, w: f.LigerRMSNormFunction.apply(x, w, 1e-6), lambda x, w: F.rms_norm(x, (8,), w, 1e-6), r(3, 8), r(8)
    )
    agree(lambda x, w: forms.rms_norm(x, w, offset=1.0), lambda x, w: F.rms_norm(x, (8,), w + 1, 1e-6), r(3, 8), r(8))
    agree(
        lambda x, y, w: f.LigerFusedAddRMSNormFunction.apply(x, y, w, 1e-6),
        lambda x, y, w: (F.rms_norm(x + y, (8,), w, 1e-6), x + y),
        *(r(3, 8), r(4, 8)[:3], r(8)),
    )
    agree(forms.layer_norm, lambda x, w, b: F.layer_norm(x, (8,), w, b, 1e-6), r(3, 8), r(8), r(1, 8)[0])
    agree(forms.layer_norm, lambda x, w: F.layer_norm(x, (8,), w, None, 1e-6), r(3, 8), r(8))
    agree(lambda x: f.LigerSoftmaxFunction.apply(x), lambda x: x.softmax(-1), r(3, 8))
    agree(forms.geglu, lambda a, b: F.gelu(a, approximate="tanh") * b, r(3, 8), r(4, 8)[:3])
    agree(lambda a, b: forms.swiglu(a, b, 0.5, 3.0), lambda a, b: F.silu(0.5 * a) * b * 3, r(3, 8), r(4, 8)[:3])
    agree(f.LigerFusedGateUpSiLUMulFunction.apply, lambda y: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1], r(3, 8))
    agree(
        lambda *a: f.LigerMLPFunction.apply(*a, 0.5, 2.0),
        lambda x, g, u, d: F.linear(F.silu(0.5 * F.linear(x, g)) * F.linear(x, u), d) * 2,
        *(r(3, 8), r(12, 8), r(13, 8)[:12], r(8, 12)),
    )
    angles = r(1, 5, 4).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()

    def turned(x):
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    agree(lambda q, k: forms.rope(q, k, cos, sin), lambda q, k: (turned(q), turned(k)), r(2, 4, 5, 8), r(2, 2, 5, 8))


def test_losses():
    target = torch.tensor([1, -100, 7])
    x, weight = r(3, 11), r(11, 8)
    found = forms.cross_entropy(x, target, lse_square_scale=0.1, return_z_loss=True, return_predicted_tokens=True)
    z = 0.1 * x.logsumexp(-1)[[0, 2]].square().mean()
    torch.testing.assert_close(found[0], F.cross_entropy(x, target) + z)
    torch.testing.assert_close(found[1], z)
    assert found[2] is None
    assert found[3].tolist() == [x[0].argmax(), -1, x[2].argmax()]
    hidden = r(3, 8)
    agree(
        lambda h, w: forms.fused_linear_cross_entropy(h, w, target, reduction="sum")[0],
        lambda h, w: F.cross_entropy(h @ w.T, target, reduction="sum"),
        *(hidden, weight),
    )
    p, q = x.softmax(-1), r(4, 11)[:3].softmax(-1)
    agree(
        lambda x: forms.kl_div(x.log_softmax(-1), q), lambda x: F.kl_div(x.log_softmax(-1), q, reduction="batchmean"), x
    )
    torch.testing.assert_close(f.LigerTVDLossFunction.apply(p, q), 0.5 * (p - q).abs().sum() / 3)
    m = 0.5 * (p + q)
    right = 0.5 * (F.kl_div(m.log(), p, reduction="sum") + F.kl_div(m.log(), q, reduction="sum")) / 3
    torch.testing.assert_close(forms.jsd(p.log(), q.log()), right)
    other = r(12, 8)[:11]
    torch.testing.assert_close(
        forms.fused_linear_jsd(hidden, weight, hidden, other),
        forms.jsd(F.linear(hidden, weight).log_softmax(-1), F.linear(hidden, other).log_softmax(-1)),
    )


def test_both_halves_of_the_fused_loss():
    hidden, weight, bias = r(6, 8), r(11, 8).requires_grad_(), r(11).requires_grad_()
    target = torch.tensor([1, 2, 3, -100, 5, 6])
    *_, of_hidden, of_weight, of_bias = f.fused_linear_cross_entropy_forward(hidden, weight, target, bias=bias)
    leaf = hidden.clone().requires_grad_()
    right = torch.autograd.grad(F.cross_entropy(F.linear(leaf, weight, bias), target), (leaf, weight, bias))
    torch.testing.assert_close((of_hidden, of_weight, of_bias), right)
    doubled = f.fused_linear_cross_entropy_backward(torch.tensor(2.0), of_hidden, of_weight, None)
    torch.testing.assert_close(doubled[:2], (2 * right[0], 2 * right[1]))
    assert doubled[2] is None
    assert f.fused_linear_cross_entropy_forward(hidden, weight.detach(), target)[5:] == (None, None)


@pytest.mark.parametrize("name", ["impl", "mode", "backend"])
def test_choices_of_implementations_are_refused(name):
    with pytest.raises(UnsupportedOptionError, match=f"{name} of softmax cannot be 'cutile'"):
        forms.softmax(r(2, 4), **{name: "cutile"})
    with pytest.raises(UnsupportedOptionError, match="jsd_impl"):
        f.LigerJSDFunction.apply(r(2, 4), r(2, 4), jsd_impl="cutile")


def test_tiles():
    mlp = nn.Sequential(nn.Linear(4, 9), nn.SiLU(), nn.Linear(9, 4))
    calls = []

    def part(module, x):
        calls.append(x.shape[-2])
        return module(x)

    agree(lambda x: f.apply_tiled_mlp(part, mlp, x, compute_params=list(mlp.parameters())), mlp, r(2, 10, 4))
    assert calls[:3] == [4, 4, 2]  # as long as x is wide
    agree(lambda x: f.apply_tiled_mlp(part, mlp, x, 5), mlp, r(2, 10, 4))


class Squares(LigerFusedLinearDistillationBase):
    """A loss of somebody's own, as liger-kernel's users write them."""

    @staticmethod
    def distillation_loss_fn(student_logits, teacher_logits, target=None, ignore_index=None, beta=0.5, power=2):
        rows = (student_logits - teacher_logits).abs().pow(power).mean(-1)
        return beta * rows.masked_fill(target == ignore_index, 0.0).sum()

    @classmethod
    def forward(cls, ctx, student_input, student_weight, teacher_input, teacher_weight, target, student_bias, both):
        return super().forward(
            cls, ctx, student_input, student_weight, teacher_input, teacher_weight, target, student_bias,
            chunk_size=4, weight_hard_loss=0.3, weight_soft_loss=0.7, beta=2.0, temperature=1.5, power=4,
            return_soft_hard_loss=both,
        )  # fmt: skip

    @staticmethod
    def backward(ctx, *grads):
        return *LigerFusedLinearDistillationBase.backward(ctx, *grads)[:6], None


@pytest.mark.parametrize("bias", [True, False])
def test_a_distillation_loss_of_ones_own(bias):
    hidden, weight, shift = r(10, 8).requires_grad_(), r(11, 8).requires_grad_(), r(11).requires_grad_()
    shift = shift if bias else None
    teacher, teacher_weight = r(10, 6), r(13, 6)
    target = torch.arange(10) % 11
    target[3:5] = -100
    logits = F.linear(hidden, weight, shift)
    hard = F.cross_entropy(logits, target)
    rows = (F.pad(logits, (0, 2)) - teacher @ teacher_weight.T).div(1.5).pow(4).mean(-1)
    soft = 2 * rows[target != -100].sum() / 8
    right = 0.3 * hard + 0.7 * soft
    loss, of_soft, of_hard = Squares.apply(hidden, weight, teacher, teacher_weight, target, shift, True)
    torch.testing.assert_close((loss, of_soft, of_hard), (right, soft, hard), rtol=1e-5, atol=1e-5)
    leaves = [hidden, weight, *([shift] if bias else [])]
    for mine, other in zip(*(torch.autograd.grad(3 * x, leaves) for x in (loss, right)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    assert Squares.apply(hidden, weight, teacher, teacher_weight, target, shift, False) == loss
    with pytest.raises(NotImplementedError, match="distillation_loss_fn"):
        LigerFusedLinearDistillationBase.distillation_loss_fn(hidden, hidden, target, -100)


def test_what_programs_ask_of_the_machine(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert utils.is_hip()
    assert utils.calculate_settings(65536) == (65536, 16)
    monkeypatch.setattr(torch.version, "hip", None)
    assert utils.calculate_settings(65536) == (65536, 32)
    with pytest.raises(InvalidInputError, match="65537"):
        utils.calculate_settings(65537)
    called = utils.transformers_version_dispatch("1.0", max, min, (1, 2), (3, 4))
    assert called == 3
    assert utils.transformers_version_dispatch("999.0", max, min, (1, 2), (3, 4)) == 2
    assert utils.infer_device() in ("cpu", "cuda", "xpu")
    with utils.device_context("cpu"):
        pass


def test_part_of_a_sharded_module(monkeypatch):
    """FSDP's own steps run around the function, and what was bound before is back in it and afterwards."""
    from liger_registry.drop_in import fsdp

    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self._fsdp_wrapped_module = inner
            self.steps = []

        def forward(self, *args, **kwargs):
            self.steps.append("gather")
            try:
                return self._fsdp_wrapped_module(*args, **kwargs)
            finally:
                self.steps.append("free")

    monkeypatch.setattr(fsdp, "FullyShardedDataParallel", Wrapper)
    wrapped = Wrapper(nn.Linear(2, 2))
    seen = []
    method = lambda x, *, y: seen.append((list(wrapped.steps), x, y)) or "result"  # noqa: E731
    assert _FSDPForwardRedirection()(wrapped, method, 1, y=2) == "result"
    assert seen == [(["gather"], 1, 2)]
    assert wrapped.steps == ["gather", "free"]
    assert "forward" not in wrapped._fsdp_wrapped_module.__dict__
    bound = wrapped._fsdp_wrapped_module.forward = lambda x: x
    with pytest.raises(ZeroDivisionError):
        _FSDPForwardRedirection()(wrapped, lambda: 1 / 0)
    assert wrapped._fsdp_wrapped_module.__dict__["forward"] is bound
    with pytest.raises(InvalidInputError, match="no FSDP module"):
        _FSDPForwardRedirection()(nn.Linear(2, 2), method)


def test_the_mlps_that_know_their_layer():
    from types import SimpleNamespace

    from liger_registry.transformers.geglu import LigerGEGLUMLPForGemma4
    from liger_registry.transformers.swiglu import LigerHunyuanV1SwiGLUMLP

    config = SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_act="silu")
    mlp = LigerHunyuanV1SwiGLUMLP(config, layer_idx=3, is_shared_mlp=True)
    assert mlp.layer_idx == 3
    agree(mlp, lambda x: mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)), r(3, 8))
    gemma = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 6, "num_kv_shared_layers": 2}
    config = SimpleNamespace(**gemma, hidden_activation="gelu_pytorch_tanh", use_double_wide_mlp=True)
    widths = [LigerGEGLUMLPForGemma4(config, layer).up_proj.out_features for layer in (None, 0, 3, 4, 5)]
    assert widths == [12, 12, 12, 24, 24]
    config.use_double_wide_mlp = False
    assert LigerGEGLUMLPForGemma4(config, 5).up_proj.out_features == 12
