"""``jsd``, ``kl_div``, ``tvd`` and ``logit_divergence`` in the interpreter: what conformance does not try.

Those are the reductions that count rows, infinities, the gradient in the place of the logits, and a GPU's roundings.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from gpu_rounding import round_as_a_gpu

from liger_registry import Device
from liger_registry.kernels import divergences, logit_divergence
from liger_registry.ops import fused_linear_jsd as heads_contract
from liger_registry.ops import jsd, kl_div, tvd
from liger_registry.ops import logit_divergence as contract
from liger_registry.portable import fused_linear_jsd

DEVICE = Device.parse("interpreter")
OPS = {"jsd": jsd.OP, "kl_div": kl_div.OP, "tvd": tvd.OP}
CONFIGS = {"row": {}, "tiles": {"programs_per_unit": 1}}
INF = math.inf


def run(name, implementation, inputs, grad=None, **options):
    """Loss, and gradient for an upstream one."""
    told = {o.name: o.default for o in OPS[name].options} | options
    config = {"block": 16, "num_warps": 4, "device": DEVICE, **CONFIGS[implementation], **told}
    loss, scale = getattr(divergences, f"forward_{implementation}")(*inputs, **config)
    grad = torch.ones_like(loss) if grad is None else grad
    (dx,) = getattr(divergences, f"backward_{implementation}")(grad, *inputs, scale, needs=(True,), **config)
    return loss, dx


@pytest.mark.parametrize("implementation", CONFIGS)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("reduction", ["mean", pytest.param("batchmean", marks=pytest.mark.ci)])
def test_rows_are_counted(name, implementation, reduction):
    x, y = (torch.randn(5, 41, generator=torch.Generator().manual_seed(s)).log_softmax(-1) for s in (1, 2))
    for labels in (None, torch.tensor([1, -100, 3, -100, 5]), torch.full((5,), -100)):
        loss, dx = run(name, implementation, (x, y, labels), torch.tensor(0.7), reduction=reduction)
        leaf = x.double().requires_grad_()
        right = OPS[name].reference(leaf, y.double(), labels, reduction=reduction)
        torch.testing.assert_close(loss.double(), right, rtol=1e-5, atol=1e-8)
        (expected,) = torch.autograd.grad(right, leaf, torch.tensor(0.7).double())
        torch.testing.assert_close(dx.double(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("implementation", CONFIGS)
def test_extreme_values(implementation):
    half = math.log(0.5)
    x = torch.tensor([[-INF, -INF, half, half, -100.0, 0.0]])
    y = torch.tensor([[-INF, half, -INF, half, 0.0, -100.0]])
    ps, qs = 0.25 * math.log(4), 0.75 * math.log(4 / 3)
    loss, dx = run("jsd", implementation, (x, y, None), beta=0.25, reduction="none")
    right = torch.tensor([[0.0, 0.5 * ps, 0.5 * qs, 0.0, ps, qs]])
    torch.testing.assert_close(loss, right, rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(dx, torch.tensor([[0, 0, 0.5 * qs, 0, 0, qs]]), rtol=1e-6, atol=1e-30)
    for target, options in ((y, {"log_target": True}), (y.exp(), {})):
        loss, dx = run("kl_div", implementation, (x, target, None), reduction="none", **options)
        assert loss[0, :5].tolist() == [0.0, INF, 0.0, 0.0, 100.0]
        torch.testing.assert_close(dx, -y.exp())
    nan = torch.tensor([[math.nan, 0.5]])
    for name in OPS:
        assert run(name, implementation, (nan, torch.tensor([[0.5, 0.5]]), None))[0].isnan()
        assert run(name, implementation, (torch.tensor([[0.5, 0.5]]), nan, None))[0].isnan()


@pytest.mark.parametrize("implementation", ["row", "column_split"])
def test_the_gradient_may_take_the_place_of_the_logits(implementation):
    slab = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    student, teacher = slab[:, :41], torch.randn(3, 41, generator=torch.Generator().manual_seed(1))
    labels, scale = torch.tensor([0, -100, 2]), torch.tensor(0.5)
    options = {"beta": 0.3, "ignore_index": -100, "temperature": 2.0, "gradient": True}
    right = contract.OP.schemes[0].reference(
        student.double(), teacher.double(), labels, scale, in_place=False, **options
    )
    behind = slab[:, 41:].clone()
    config = {"block": 16, "num_warps": 4} | ({"splits": 2} if implementation == "column_split" else {})
    forward = getattr(logit_divergence, f"forward_{implementation}")
    loss, slope = forward(student, teacher, labels, scale, device=DEVICE, in_place=True, **options, **config)
    assert slope.data_ptr() == slab.data_ptr()
    torch.testing.assert_close(loss.double(), right[0], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(student.double(), right[1], rtol=1e-4, atol=1e-7)
    assert torch.equal(slab[:, 41:], behind)


@pytest.fixture(params=[pytest.param("numpy", marks=pytest.mark.ci), "gpu"])
def rounding(request, monkeypatch):
    """Products that are rounded before they are added, and those that are not."""
    if request.param == "gpu":
        round_as_a_gpu(monkeypatch)


def divergence(implementation, student, teacher, **options):
    told = {"beta": 0.3, "ignore_index": -100, "temperature": 1.5, "gradient": True, "in_place": False} | options
    config = {"block": 16, "num_warps": 4} | ({"splits": 2} if implementation == "column_split" else {})
    forward = getattr(logit_divergence, f"forward_{implementation}")
    return forward(student, teacher, None, None, device=DEVICE, **told, **config)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", ["row", "column_split"])
def test_one_column_diverges_by_exactly_nothing(implementation, dtype):
    """Divided by a temperature, 6,001 is rounded; it has to be less itself 0 all the same."""
    logits = (6001.0, 3.3, -777.7), (41.3, 0.7, 99.9)
    student, teacher = (torch.tensor([[x] for x in row], dtype=dtype) for row in logits)
    for beta in (0.0, 0.3, 1.0):
        loss, slope = divergence(implementation, student, teacher, beta=beta)
        assert loss.tolist() == [0.0, 0.0, 0.0]
        assert slope.flatten().tolist() == [0.0, 0.0, 0.0]


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("beta", [0.3, 1.0])
@pytest.mark.parametrize("implementation", ["row", "column_split"])
def test_columns_far_below_the_largest_keep_their_difference(implementation, beta):
    """Log-probabilities of -28.551 and -28.542: in fp32 they have 4 digits of their difference."""
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(4, 41, generator=generator)
    teacher = student + torch.randn(4, 41, generator=generator) * 0.01
    student[:, -1], teacher[:, -1] = 44.805946350097656, 44.83
    _, slope = divergence(implementation, student, teacher, beta=beta)
    right = contract.OP.schemes[0].reference(
        student.double(), teacher.double(), None, None, beta=beta, ignore_index=-100, temperature=1.5, gradient=True,
        in_place=False,
    )[1]  # fmt: skip
    far = slice(0, 40)  # of the last the terms cancel
    torch.testing.assert_close(slope[:, far].double(), right[:, far], rtol=2e-4, atol=0.0)


@pytest.mark.usefixtures("rounding")
def test_heads_of_one_column_diverge_by_exactly_nothing():
    heads = ([[1921.0], [3.3], [-96.0]], [[3.125]], [[41.3], [0.7], [99.9]], [[0.75]])
    stage = functools.partial(logit_divergence.forward_row, device=DEVICE, block=16, num_warps=4)
    loss, *slopes = fused_linear_jsd.forward_single(
        *(torch.tensor(x, dtype=torch.float16) for x in heads),
        None,
        device=DEVICE,
        stages={"divergence": stage},
        needs=(True, True),
        **{o.name: o.default for o in heads_contract.OP.options} | {"temperature": 1.5, "beta": 0.3},
    )
    assert loss.item() == 0.0
    assert not any(slope.any() for slope in slopes)
