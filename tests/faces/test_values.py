"""Every exported name against plain PyTorch: values and gradients in float64, and values in fp32."""

from __future__ import annotations

import copy
import io
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import liger_registry.transformers as faces

CONFIG = SimpleNamespace(
    hidden_size=6, intermediate_size=10, hidden_act="silu", mlp_multipliers=(0.7, -1.25), mlp_bias=False
)
GELU = SimpleNamespace(hidden_size=6, intermediate_size=10, hidden_act="gelu_pytorch_tanh")
TARGET = torch.tensor([3, -100, 0, 6, 2, 2, -100, 5])
LABELS = torch.tensor([1, -100, 1, 1, -100, 1, 1, 1])
MASK = (LABELS != -100)[:, None]


def rms(x, weight, eps=1e-6, offset=0.0):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * (weight + offset)


def gated(activation):
    def reference(m, x, *_):
        return m.down_proj(activation(m.gate_proj(x)) * m.up_proj(x))

    return reference


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


def falcon(m, x):
    gate, down = CONFIG.mlp_multipliers
    return m.down_proj(F.silu(m.gate_proj(x) * gate) * m.up_proj(x)) * down


def phi3(m, x):
    gate, up = m.gate_up_proj(x).chunk(2, -1)
    return m.down_proj(F.silu(gate) * up)


def halves(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def rope(q, k, cos, sin):
    return halves(q, cos[None, None], sin[None, None]), halves(k, cos[None, None], sin[None, None])


def neighbours(q, k, angles):
    def turn(x):
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * angles[None, :, None]
        return torch.view_as_real(z).flatten(-2)

    return turn(q), turn(k)


def mrope(q, k, cos, sin, *_):
    # As the model writes it: sections twice over, each from the axis whose turn it is.
    cos, sin = (
        torch.cat([part[n % 3] for n, part in enumerate(torch.split(t, [1, 2, 1, 1, 2, 1], -1))], -1).unsqueeze(1)
        for t in (cos, sin)
    )
    return halves(q, cos, sin), halves(k, cos, sin)


def kl(x, p):
    return (p * (p.log() - x)).sum() / x.numel()


def jsd(x, y, *_, beta=0.5):
    m = torch.logaddexp(y + math.log(beta), x + math.log(1 - beta))
    terms = beta * y.exp() * (y - m) + (1 - beta) * x.exp() * (x - m)
    return torch.where(MASK, terms, 0.0).sum() / MASK.sum()


def linear_jsd(student, head, teacher, teacher_head, *_):
    return jsd((student @ head.T).log_softmax(-1), (teacher @ teacher_head.T).log_softmax(-1))


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_probabilities(seed):
    return random(8, 7, seed=seed).log_softmax(-1)


X, W, B = random(2, 5, 6), random(6, seed=1), random(6, seed=2)
IMAGE = random(3, 6, 4, seed=3)
Q, K = random(2, 4, 5, 8, seed=4), random(2, 2, 5, 8, seed=5)
ANGLE = random(5, 4, seed=6)
COS, SIN = torch.cat((ANGLE, ANGLE), -1).cos(), torch.cat((ANGLE, ANGLE), -1).sin()
THREE = torch.cat((random(3, 2, 5, 4, seed=7),) * 2, -1)
TOKENS = [t.transpose(1, 2).contiguous() for t in (Q, K)]
LOGITS = random(8, 7, seed=8)
HIDDEN, HEAD = random(8, 6, seed=9), random(7, 6, seed=10)
TEACHER, TEACHER_HEAD = random(8, 3, seed=11), random(7, 3, seed=12)


def randomised(module):
    """A layer in float64 whose parameters are not what they start as."""
    module = module.double()
    for number, parameter in enumerate(module.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=20 + number))
    return module


# Name to (the face or its layer, the same in plain PyTorch, its arguments). References of layers take the layer first.
CASES = {
    "LigerRMSNorm": (lambda: faces.LigerRMSNorm(6), lambda m, x: rms(x, m.weight), (X,)),
    "LigerRMSNormForMuseGlimmer": (
        lambda: faces.LigerRMSNormForMuseGlimmer(with_scale=False),
        lambda m, x: rms(x, None),
        (X,),
    ),
    "LigerRMSNormForMuseGlimmerTextCentered": (
        lambda: faces.LigerRMSNormForMuseGlimmerTextCentered(6),
        lambda m, x: rms(x, m.weight, offset=1.0),
        (X,),
    ),
    "LigerFusedAddRMSNorm": (
        lambda: faces.LigerFusedAddRMSNorm(6, offset=1.0, casting_mode="gemma"),
        lambda m, x, r: (rms(x + r, m.weight, offset=1.0), x + r),
        (X, random(2, 5, 6, seed=13)),
    ),
    "LigerLayerNorm": (
        lambda: faces.LigerLayerNorm(6),
        lambda m, x: F.layer_norm(x, (6,), m.weight, m.bias, 1e-6),
        (X,),
    ),
    "LigerGroupNorm": (
        lambda: faces.LigerGroupNorm(6, 2),
        lambda m, x: F.group_norm(x, 2, m.weight, m.bias, 1e-6),
        (IMAGE,),
    ),
    "LigerSwiGLUMLP": (lambda: faces.LigerSwiGLUMLP(CONFIG, 12), gated(F.silu), (X,)),
    "LigerSwiGLUMLPForMuseGlimmer": (lambda: faces.LigerSwiGLUMLPForMuseGlimmer(CONFIG), gated(F.silu), (X,)),
    "LigerQwen3MoeSwiGLUMLP": (lambda: faces.LigerQwen3MoeSwiGLUMLP(CONFIG), gated(F.silu), (X,)),
    "LigerMLP": (lambda: faces.LigerMLP(CONFIG), gated(F.silu), (X,)),
    "LigerTiledSwiGLUMLP": (lambda: faces.LigerTiledSwiGLUMLP(CONFIG, 2), gated(F.silu), (X,)),
    "LigerGEGLUMLP": (lambda: faces.LigerGEGLUMLP(GELU), gated(tanh_gelu), (X,)),
    "LigerTiledGEGLUMLP": (lambda: faces.LigerTiledGEGLUMLP(GELU, 3), gated(tanh_gelu), (X,)),
    "LigerFalconH1SwiGLUMLP": (lambda: faces.LigerFalconH1SwiGLUMLP(CONFIG), falcon, (X,)),
    "LigerFalconH1MLP": (lambda: faces.LigerFalconH1MLP(CONFIG), falcon, (X,)),
    "LigerPhi3SwiGLUMLP": (lambda: faces.LigerPhi3SwiGLUMLP(CONFIG), phi3, (X,)),
    "LigerBlockSparseTop2MLP": (
        lambda: faces.LigerBlockSparseTop2MLP(CONFIG),
        lambda m, x: m.w2(F.silu(m.w1(x)) * m.w3(x)),
        (X,),
    ),
    "LigerSoftmax": (lambda: faces.LigerSoftmax(), lambda m, x: x.softmax(-1), (X,)),
    "LigerReLUSquared": (lambda: faces.LigerReLUSquared(), lambda m, x: x.relu().square(), (X,)),
    "LigerCrossEntropyLoss": (
        lambda: faces.LigerCrossEntropyLoss(),
        lambda m, x, t: F.cross_entropy(x, t),
        (LOGITS, TARGET),
    ),
    "LigerFusedLinearCrossEntropyLoss": (
        lambda: faces.LigerFusedLinearCrossEntropyLoss(),
        lambda m, w, x, t, b: F.cross_entropy(x @ w.T + b, t),
        (HEAD, HIDDEN, TARGET, random(7, seed=14)),
    ),
    "LigerJSD": (
        lambda: faces.LigerJSD(),
        lambda m, *a: jsd(*a),
        (LOGITS.log_softmax(-1), log_probabilities(15), LABELS),
    ),
    "LigerKLDIVLoss": (
        lambda: faces.LigerKLDIVLoss(log_target=True),
        lambda m, x, y: kl(x, y.exp()),
        (LOGITS.log_softmax(-1), log_probabilities(15)),
    ),
    "LigerTVDLoss": (
        lambda: faces.LigerTVDLoss(),
        lambda m, p, q, _: torch.where(MASK, (p - q).abs() / 2, 0.0).sum() / MASK.sum(),
        (LOGITS.softmax(-1), log_probabilities(15).exp(), LABELS),
    ),
    "LigerFusedLinearJSD": (
        lambda: faces.LigerFusedLinearJSD(),
        lambda m, *a: linear_jsd(*a),
        (HIDDEN, HEAD, TEACHER, TEACHER_HEAD, LABELS),
    ),
    "liger_rms_norm": (faces.liger_rms_norm, lambda x, w, e: rms(x, w, e), (X, W, 1e-2)),
    "liger_fused_add_rms_norm": (
        faces.liger_fused_add_rms_norm,
        lambda x, r, w, e: (rms(x + r, w, e), x + r),
        (X, random(2, 5, 6, seed=13), W, 1e-2),
    ),
    "liger_layer_norm": (faces.liger_layer_norm, lambda x, w, b, e: F.layer_norm(x, (6,), w, b, e), (X, W, B, 1e-2)),
    "liger_group_norm": (
        faces.liger_group_norm,
        lambda x, w, b, c, g, e: F.group_norm(x, g, w, b, e),
        (IMAGE, W, B, 6, 3, 1e-2),
    ),
    "liger_swiglu": (faces.liger_swiglu, lambda a, b: F.silu(a) * b, (X, random(2, 5, 6, seed=16))),
    "liger_geglu": (faces.liger_geglu, lambda a, b: tanh_gelu(a) * b, (X, random(2, 5, 6, seed=16))),
    "liger_relu_squared": (faces.liger_relu_squared, lambda x: x.relu().square(), (X,)),
    "liger_softmax": (faces.liger_softmax, lambda x: x.softmax(-1), (X,)),
    "liger_rope": (faces.liger_rope, rope, (Q, K, COS, SIN)),
    "liger_rotary_pos_emb": (faces.liger_rotary_pos_emb, rope, (Q, K, COS, SIN)),
    "liger_qwen2vl_mrope": (faces.liger_qwen2vl_mrope, mrope, (Q, K, THREE.cos(), THREE.sin(), [1, 2, 1])),
    "liger_llama4_text_rotary_pos_emb": (
        faces.liger_llama4_text_rotary_pos_emb,
        neighbours,
        (*TOKENS, torch.polar(torch.ones_like(ANGLE), ANGLE)),
    ),
    "liger_llama4_vision_rotary_pos_emb": (
        lambda q, k, a: faces.liger_llama4_vision_rotary_pos_emb(q, k, a[:, None]),
        neighbours,
        (*TOKENS, torch.polar(torch.ones_like(ANGLE), ANGLE)),
    ),
    "liger_cross_entropy": (faces.liger_cross_entropy, F.cross_entropy, (LOGITS, TARGET)),
    "liger_fused_linear_cross_entropy": (
        faces.liger_fused_linear_cross_entropy,
        lambda x, w, t: F.cross_entropy(x @ w.T, t),
        (HIDDEN, HEAD, TARGET),
    ),
    "liger_jsd": (faces.liger_jsd, jsd, (LOGITS.log_softmax(-1), log_probabilities(15), LABELS)),
    "liger_kl_div": (faces.liger_kl_div, kl, (LOGITS.log_softmax(-1), log_probabilities(15).exp())),
    "liger_tvd": (
        faces.liger_tvd,
        lambda p, q: (p - q).abs().mean() / 2,
        (LOGITS.softmax(-1), log_probabilities(15).exp()),
    ),
    "liger_fused_linear_jsd": (
        faces.liger_fused_linear_jsd,
        linear_jsd,
        (HIDDEN, HEAD, TEACHER, TEACHER_HEAD, LABELS),
    ),
}
# Targets, tables and teachers are constants to the faces, as they are to liger-kernel.
CONSTANT = {
    **{name: {1} for name in ("LigerJSD", "LigerKLDIVLoss", "LigerTVDLoss", "liger_jsd", "liger_kl_div", "liger_tvd")},
    **{name: {2, 3} for name in ("LigerFusedLinearJSD", "liger_fused_linear_jsd")},
    **{name: {2, 3} for name in ("liger_rope", "liger_rotary_pos_emb", "liger_qwen2vl_mrope")},
}
LAYERS = [name for name in CASES if name.startswith("Liger")]


def prepared(name, dtype=torch.float64):
    """``(function, reference, arguments, tensors that get gradients)`` of a case."""
    face, reference, arguments = CASES[name]
    leaves = []
    if name in LAYERS:
        module = randomised(face()).to(dtype)
        leaves += module.parameters()
        face, plain = module, reference
        reference = lambda *a: plain(module, *a)  # noqa: E731
    given = []
    for number, value in enumerate(arguments):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.detach().to(dtype, copy=True)
            if number not in CONSTANT.get(name, ()):
                leaves.append(value.requires_grad_())
        given.append(value)
    return face, reference, given, leaves


def gradients(outputs, leaves):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum((y * random(*y.shape, seed=30 + n).to(y.dtype)).sum() for n, y in enumerate(outputs))
    return torch.autograd.grad(total, leaves)


# torch's checkpoints load Dynamo, which takes three seconds.
FIRST = [pytest.param(name, marks=pytest.mark.ci if "Tiled" in name else ()) for name in CASES]


def test_every_exported_name_has_a_case():
    # What works on whole models is tested in tests/models, tests/drop_in, tests/trl and tests/distributed.
    engine = {"Adapter", "Applied", "AutoLigerKernelForCausalLM", "Binding", "Report", "Row", "applied_to", "apply"}
    hub = {"kernel_mapping", "register_kernels"}
    trainers = {"AppliedToTRL", "LigerRegistryCallback", "apply_to_trl"}
    ranks = {"vocabulary_parallel_cross_entropy", "vocabulary_parallel_logp"}
    assert set(CASES) == set(faces.__all__) - {"CrossEntropyOutput"} - engine - hub - trainers - ranks


@pytest.mark.parametrize("name", FIRST)
def test_values_and_gradients_are_those_of_plain_torch(name):
    face, reference, arguments, leaves = prepared(name)
    found, expected = face(*arguments), reference(*arguments)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    if leaves:
        torch.testing.assert_close(
            gradients(found, leaves), gradients(expected, leaves), rtol=1e-8, atol=1e-10, check_dtype=True
        )


@pytest.mark.parametrize("name", FIRST)
def test_fp32_is_near_float64_and_the_arguments_are_left_as_they_are(name):
    face, _, arguments, leaves = prepared(name, torch.float32)
    before = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    wide, _, exact, _ = prepared(name)
    found, expected = face(*arguments), wide(*exact)
    for y, y64 in zip(*((t if isinstance(t, tuple) else (t,)) for t in (found, expected)), strict=True):
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.double(), y64, rtol=1e-4, atol=1e-5)
    upstream = [torch.full_like(y, 0.5) for y in (found if isinstance(found, tuple) else (found,))]
    torch.autograd.backward(found, upstream)
    assert all(leaf.grad is not None for leaf in leaves)
    assert all((g == 0.5).all() for g in upstream)
    for a, b in zip(arguments, before, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", [name for name in LAYERS if "Tiled" not in name])
def test_layers_copy_pickle_and_save(name):
    face, _, arguments, _ = prepared(name)
    expected = face(*arguments)
    buffer = io.BytesIO()
    torch.save(face, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(face), pickle.loads(pickle.dumps(face)), torch.load(buffer, weights_only=False)):
        torch.testing.assert_close(copied(*arguments), expected, rtol=0, atol=0)
        assert copied.state_dict().keys() == face.state_dict().keys()


# Half a second each, and five for Dynamo.
@pytest.mark.ci
@pytest.mark.parametrize("name", CASES)
def test_every_face_is_one_graph(name):
    face, _, arguments, leaves = prepared(name)
    torch._dynamo.reset()
    compiled = torch.compile(face, backend="aot_eager", fullgraph=True)
    found, expected = compiled(*arguments), face(*arguments)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    if leaves:
        torch.testing.assert_close(gradients(found, leaves), gradients(expected, leaves), rtol=1e-9, atol=1e-11)
