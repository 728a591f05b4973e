"""``jsd``, ``kl_div`` and ``tvd``: values by hand and by torch, extreme values, options, bad input, both faces."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from liger_registry import registry
from liger_registry.config import Fields
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.examples import STYLES
from liger_registry.op import Description, DimKind
from liger_registry.ops import jsd, kl_div, tvd
from liger_registry.problem import BACKWARD, FORWARD

OPS = {"jsd": jsd.OP, "kl_div": kl_div.OP, "tvd": tvd.OP}
INF = math.inf
HALF = math.log(0.5)


def logs(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def distributions(rows=6, vocab=50, dtype=torch.float64, seed=0):
    """Log-probabilities of a student, which need a gradient, and of a teacher."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, vocab, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    return x.to(dtype).requires_grad_(), y.to(dtype)


def call(name, implementation, *args, **options):
    handle = registry.get(name, implementation=implementation) if implementation else registry.get(name)
    return handle(*args, **options)


def of(name, implementation):
    """An operation's reference, or a handle to one implementation."""
    if implementation == "reference":
        return OPS[name].reference
    return registry.get(name, implementation=implementation)


IMPLEMENTATIONS = ["reference", "eager"]


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_by_hand(implementation):
    # q = (1/2, 1/2), p = (1, 0): m = (3/4, 1/4) for beta 1/2.
    x, y = logs([0.5, 0.5]), logs([1.0, 0.0])
    right = 0.5 * math.log(4 / 3) + 0.5 * (0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    assert of("jsd", implementation)(x, y).item() == pytest.approx(right, rel=1e-12)
    assert of("jsd", implementation)(x, y, beta=0.0).item() == pytest.approx(math.log(2), rel=1e-12)
    assert of("jsd", implementation)(x, y, beta=1.0).item() == INF
    assert of("kl_div", implementation)(x, y.exp()).item() == pytest.approx(math.log(2), rel=1e-12)
    assert of("kl_div", implementation)(x, y, log_target=True).item() == pytest.approx(math.log(2), rel=1e-12)
    assert of("tvd", implementation)(x.exp(), y.exp()).item() == 0.5


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div_is_torchs(implementation, reduction, log_target):
    x, y = distributions()
    target = y if log_target else y.exp()
    options = {"reduction": reduction, "log_target": log_target}
    ours = of("kl_div", implementation)(x, target, eps=0.0, **options)
    theirs = functional.kl_div(x, target, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)
    upstream = torch.randn_like(theirs)
    a, b = (torch.autograd.grad(loss, x, upstream, retain_graph=True)[0] for loss in (ours, theirs))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_is_a_mean_of_torchs_divergences(implementation, beta):
    x, y = distributions()
    m = torch.logaddexp(y + math.log(beta), x + math.log(1 - beta))
    right = beta * functional.kl_div(m, y, reduction="batchmean", log_target=True)
    right = right + (1 - beta) * functional.kl_div(m, x, reduction="batchmean", log_target=True)
    ours = of("jsd", implementation)(x, y, beta=beta)
    torch.testing.assert_close(ours, right, rtol=1e-12, atol=0)
    a, b = (torch.autograd.grad(loss, x)[0] for loss in (ours, right))
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tvd_is_half_of_the_absolute_difference(implementation):
    x, y = distributions()
    p = x.detach().exp().requires_grad_()
    loss = of("tvd", implementation)(p, y.exp())
    assert loss.item() == pytest.approx(0.5 * (p - y.exp()).abs().sum().item() / 6, rel=1e-12)
    torch.testing.assert_close(torch.autograd.grad(loss, p)[0], (p - y.exp()).sign() / 12)


@pytest.mark.parametrize(
    ("name", "options"),
    [("jsd", {"beta": beta}) for beta in (0.0, 0.3, 1.0)]
    + [("kl_div", {"log_target": False}), ("kl_div", {"log_target": True}), ("tvd", {})],
)
def test_gradcheck(name, options):
    x, y = distributions(4, 5)
    labels = torch.tensor([0, -100, 2, 3])
    for reduction in ("none", "batchmean", "mean"):
        for given_labels in (None, labels):
            told = {**options, "reduction": reduction}
            torch.autograd.gradcheck(lambda t, o=told, k=given_labels: OPS[name].reference(t, y, k, **o), (x,))


# --- extreme values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equal_distributions_have_no_divergence_and_no_gradient(implementation, dtype):
    x, _ = distributions(dtype=dtype)
    for beta in (0.1, 0.5, 0.7):
        loss = of("jsd", implementation)(x, x.detach(), beta=beta)
        (grad,) = torch.autograd.grad(loss, x)
        assert loss.item() == 0
        assert (grad == 0).all()
    loss = of("tvd", implementation)(x, x.detach())
    assert loss.item() == 0
    assert (torch.autograd.grad(loss, x)[0] == 0).all()
    for beta in (0.0, 1.0):
        assert of("jsd", implementation)(x, x.detach(), beta=beta).item() == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_infinite_logarithms_and_wide_gaps(implementation, dtype):
    x = torch.tensor([[-INF, -INF, HALF, HALF, -100.0, 0.0]], dtype=dtype).requires_grad_()
    y = torch.tensor([[-INF, HALF, -INF, HALF, 0.0, -100.0]], dtype=dtype)
    loss = of("jsd", implementation)(x, y, beta=0.25, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), x)
    # Alone, p has .25 p log(1 / .25), and q .75 q log(1 / .75).
    ps, qs = 0.25 * math.log(4), 0.75 * math.log(4 / 3)
    right = torch.tensor([[0.0, 0.5 * ps, 0.5 * qs, 0.0, ps, qs]], dtype=dtype)
    torch.testing.assert_close(loss, right, rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(grad, torch.tensor([[0, 0, 0.5 * qs, 0, 0, qs]], dtype=dtype), rtol=1e-6, atol=1e-30)
    for name, target, options in (
        ("jsd", y, {"beta": 0.0}),
        ("kl_div", y, {"log_target": True}),
        ("kl_div", y.exp(), {"log_target": False}),
    ):
        # 0 (log 0 - log 0) is 0; p (log p - log 0) is infinite.
        loss = of(name, implementation)(x, target, reduction="none", **options)
        (grad,) = torch.autograd.grad(loss.sum(), x)
        assert loss[0, :4].tolist() == [0.0, INF, 0.0, 0.0]
        assert loss[0, 4].item() == 100.0
        torch.testing.assert_close(grad, -y.exp())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", OPS)
def test_nan_is_not_hidden(implementation, name):
    x, y = distributions(3, 4, torch.float32)
    for number, at in ((0, 1), (1, 2)):
        given = [x.detach().clone(), y.clone()]
        given[number][at, 0] = math.nan
        assert of(name, implementation)(*given).isnan()
        # An ignored row may hold anything.
        labels = torch.tensor([1, 1, 1])
        labels[at] = -100
        leaf = given[0].requires_grad_()
        loss = of(name, implementation)(leaf, given[1], labels)
        assert loss.isfinite()
        assert (torch.autograd.grad(loss, leaf)[0][at] == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
def test_nothing_to_count(implementation, name, reduction):
    x, y = distributions(3, 4)
    loss = of(name, implementation)(x, y, torch.full((3,), -100), reduction=reduction)
    assert (loss == 0).all()
    assert (torch.autograd.grad(loss.sum(), x)[0] == 0).all()
    none = x.detach()[:0].requires_grad_()
    for labels in (None, torch.zeros(0, dtype=torch.int64)):
        loss = of(name, implementation)(none, y[:0], labels, reduction=reduction)
        assert loss.sum().item() == 0
        assert torch.autograd.grad(loss.sum(), none)[0].shape == (0, 4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", OPS)
def test_ignored_rows_are_as_if_they_were_not_there(implementation, name):
    x, y = distributions(6, 9)
    labels = torch.tensor([0, 7, 1, 7, 2, 3])
    keep = labels != 7
    for reduction in ("sum", "mean", "batchmean"):
        loss = of(name, implementation)(x, y, labels, ignore_index=7, reduction=reduction)
        alone = of(name, implementation)(x[keep], y[keep], reduction=reduction)
        torch.testing.assert_close(loss, alone, rtol=1e-12, atol=0)
        a, b = (torch.autograd.grad(value, x)[0] for value in (loss, alone))
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


# --- the contract -----------------------------------------------------------------------------------------------------

DTYPE = st.sampled_from(["float32", "float16", "bfloat16", "float64"])
OWN = {
    "jsd": st.sampled_from([{"divergence": kind} for kind in ("mixture", "forward", "reverse")]),
    "kl_div": st.sampled_from([{"log_target": False}, {"log_target": True}]),
    "tvd": st.just({}),
}


@st.composite
def problems(draw):
    name = draw(st.sampled_from(sorted(OPS)))
    description = Description(
        Fields(rows=draw(st.integers(0, 40)), vocab=draw(st.integers(1, 60))),
        Fields(input=draw(DTYPE), target=draw(DTYPE)),
        Fields(elementwise=draw(st.booleans()), masked=draw(st.booleans()), **draw(OWN[name])),
    )
    phase = draw(st.sampled_from([FORWARD, BACKWARD]))
    return OPS[name], OPS[name].problem(description, phase, "default", (True,))


@given(problems(), st.sampled_from(STYLES), st.sampled_from(["cpu", "meta"]))
def test_an_example_of_a_problem_is_that_problem(pair, style, device):
    op, problem = pair
    inputs, options = op.example(problem, device, 3, style), op.options_of(problem)
    op.validate(inputs, options)
    assert op.problem(op.describe(inputs, options), problem.phase, "default", (True,)) == problem
    assert op.has(problem)


@given(problems())
def test_allocate_and_magnitudes_fit_the_reference(pair):
    op, problem = pair
    options, inputs = op.options_of(problem), op.example(problem, "cpu")
    empty, full = (f(*inputs, **options) for f in (op.schemes[0].allocate, op.schemes[0].reference))
    for a, b in zip(empty, full, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    wide = tuple(t.double() if t is not None and t.is_floating_point() else t for t in inputs)
    sizes = op.magnitude(wide, (torch.ones_like(full[0], dtype=torch.float64),), options)
    assert sizes["loss"].shape == full[0].shape
    assert sizes["grad_input"].shape == inputs[0].shape
    assert set(sizes) <= set(op.reduced)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_row_counts_are_never_exact(op):
    assert [name for name, kind in op.dims.items() if kind is DimKind.EXACT] == ["vocab"]
    op.check()


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("inputs", "error", "way_out"),
    [
        ((torch.ones(()), torch.ones(()), None), InvalidInputError, "vocab >= 1"),
        ((torch.ones(3, 0), torch.ones(3, 0), None), InvalidInputError, "vocab >= 1"),
        ((torch.ones(3, 4), torch.ones(3, 5), None), InvalidInputError, "one shape"),
        ((torch.ones(3, 4), torch.ones(4), None), InvalidInputError, "one shape"),
        ((torch.ones(3, 4), torch.ones(3, 4), torch.zeros(4).long()), InvalidInputError, "leading shape"),
        ((torch.ones(3, 4), torch.ones(3, 4), torch.zeros(3)), UnsupportedDtypeError, "cast shift_labels"),
        ((torch.ones(3, 4).int(), torch.ones(3, 4), None), UnsupportedDtypeError, "cast input"),
        ((torch.ones(3, 4), torch.ones(3, 4).to(torch.float8_e4m3fn), None), UnsupportedDtypeError, "cast target"),
    ],
)
def test_inputs_that_contradict_the_contract(name, inputs, error, way_out):
    with pytest.raises(error, match=name) as raised:
        registry.get(name)(*inputs)
    assert way_out in str(raised.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("jsd", {"beta": -0.1}),
        ("jsd", {"beta": 1.5}),
        ("jsd", {"reduction": "max"}),
        ("kl_div", {"eps": -1.0}),
        ("kl_div", {"log_target": 1}),
        ("tvd", {"beta": 0.5}),
        ("tvd", {"ignore_index": 0.5}),
    ],
)
def test_options_that_are_refused(name, options):
    x, y = distributions(2, 3)
    with pytest.raises(UnsupportedOptionError):
        registry.get(name)(x, y, **options)


def test_every_option_changes_the_result():
    x, y = distributions(4, 9)
    labels = torch.tensor([0, 1, -100, 7])
    y = y.exp()
    for name, changes in {
        "jsd": [{}, {"beta": 0.2}, {"reduction": "sum"}, {"ignore_index": 7}],
        "kl_div": [{}, {"log_target": True}, {"eps": 0.2}, {"reduction": "mean"}, {"ignore_index": 7}],
        "tvd": [{}, {"reduction": "mean"}, {"reduction": "sum"}, {"ignore_index": 0}],
    }.items():
        results = [registry.get(name)(x, y, labels, **change) for change in changes]
        if name == "tvd":
            results.append(registry.get(name)(x, y))
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(results, 2)), name


# --- both faces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("reduction", ["none", "batchmean"])
@pytest.mark.parametrize("implementation", [None, "eager"])
def test_the_handle_against_float64(name, reduction, implementation):
    x, y = distributions(7, 33, torch.bfloat16)
    labels = torch.tensor([0, 1, -100, 3, 4, 5, -100])
    before = x.detach().clone(), y.clone()
    loss = call(name, implementation, x, y, labels, reduction=reduction)
    assert loss.dtype == (torch.bfloat16 if name == "jsd" else torch.float32)
    upstream = torch.randn_like(loss)
    found = torch.autograd.grad(loss, x, upstream, retain_graph=True)[0]
    again = torch.autograd.grad(loss, x, upstream)[0]
    wide = x.detach().double().requires_grad_()
    exact = OPS[name].reference(wide, y.double(), labels, reduction=reduction)
    right = torch.autograd.grad(exact, wide, upstream.double())[0]
    torch.testing.assert_close(loss.double(), exact, rtol=1e-2 if name == "jsd" else 1e-5, atol=1e-6)
    torch.testing.assert_close(found.double(), right, rtol=1e-2, atol=1e-6)
    assert torch.equal(found, again)
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


@pytest.mark.parametrize("name", OPS)
def test_more_dimensions_are_rows(name):
    x, y = distributions(24, 5)
    cube = tuple(t.detach().view(2, 3, 4, 5).transpose(0, 2) for t in (x, y))
    flat = tuple(t.reshape(24, 5) for t in cube)
    labels = torch.arange(24).view(4, 3, 2)
    for reduction in ("batchmean", "mean", "none"):
        a = registry.get(name)(*cube, labels, ignore_index=3, reduction=reduction)
        b = registry.get(name)(*flat, labels.view(-1), ignore_index=3, reduction=reduction)
        torch.testing.assert_close(a.reshape(b.shape), b, rtol=1e-12, atol=0)


def test_a_target_that_needs_a_gradient_gets_none():
    x, y = distributions(3, 4)
    y.requires_grad_()
    loss = registry.get("kl_div")(x, y, log_target=True)
    assert torch.autograd.grad(loss, y, allow_unused=True) == (None,)


@pytest.mark.parametrize("slab_rows", [4, 64])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize(
    ("name", "options"), [("jsd", {"beta": 0.3}), ("jsd", {"beta": 1.0}), ("kl_div", {"log_target": False, "eps": 0.0})]
)
def test_row_chunks_are_eagers(name, options, reduction, slab_rows):
    from liger_registry import Device
    from liger_registry.portable import divergences as portable

    x, y = distributions(18, 7)
    x = x.detach()
    labels = torch.arange(18)
    told = {"device": Device.parse("cpu"), "reduction": reduction, "ignore_index": 5, **options}
    loss, scale = portable.forward_eager(x, y, labels, **told)
    ours, same = portable.forward_row_chunks(x, y, labels, slab_rows=slab_rows, **told)
    torch.testing.assert_close(ours, loss, rtol=1e-12, atol=0)
    assert (scale is None) == (same is None)
    grad = torch.randn_like(loss)
    (a,) = portable.backward_eager(grad, x, y, labels, scale, needs=(True,), **told)
    (b,) = portable.backward_row_chunks(grad, x, y, labels, scale, needs=(True,), slab_rows=slab_rows, **told)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    registry.get(name)
    x, y = distributions(3, 8, torch.float32)
    operator = getattr(torch.ops.liger_registry, f"{name}_forward").default
    options = tuple(o.default for o in OPS[name].options)
    torch.library.opcheck(operator, (x, y, torch.tensor([0, -100, 2]), *options, ""))


@pytest.mark.ci
def test_compiled_in_one_graph():
    x, y = distributions(6, 32, torch.float32)
    handle = registry.get("jsd")
    compiled = torch.compile(lambda t: handle(t.log_softmax(-1), y) * 2, fullgraph=True)
    a, b = (torch.autograd.grad(f(x), x)[0] for f in (compiled, lambda t: handle(t.log_softmax(-1), y) * 2))
    torch.testing.assert_close(a, b)
