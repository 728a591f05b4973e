"""What few operations have: optional and constant outputs, gradients in forward, handed-over buffers, overwritten
inputs, stages, autocast, checked values; through both faces and in verification."""

from __future__ import annotations

import pytest
import special
import torch

from liger_registry.errors import InvalidInputError, UnsupportedTransformError
from liger_registry.stages import deciding
from liger_registry.testing import conformance_cases


@pytest.fixture
def registry(tmp_path):
    return special.build(tmp_path)


@pytest.fixture
def op(registry):
    return registry.get(registry.name)


def leaves(rows=4, hidden=3, weight=True, dtype=torch.float64):
    x = torch.randn(rows, hidden, dtype=dtype, requires_grad=True)
    return x, torch.randn(hidden, dtype=dtype, requires_grad=True) if weight else None


def right(x, weight, upstream=1.0):
    loss = special.reference(x, weight)
    return torch.autograd.grad(upstream * loss, [t for t in (x, weight) if t is not None])


def test_outputs_come_when_they_are_asked_for(op):
    x, weight = leaves()
    mark = torch.tensor([0, 1, 2, 0])
    loss = op(x, weight, mark)
    assert isinstance(loss, torch.Tensor)
    full = op(x, weight, mark, return_rows=True)
    assert len(full) == 3
    assert torch.equal(full[0], loss)
    assert full[2].item() == 2
    with torch.no_grad():
        assert len(op(x, weight, mark, return_rows=True)) == 3
        assert torch.equal(op(x, weight, mark), loss)


def test_constant_outputs_have_no_gradient_and_optional_ones_do(op):
    x, weight = leaves()
    loss, rows, count = op(x, weight, torch.ones(4, dtype=torch.int64), return_rows=True)
    assert rows.requires_grad
    assert not count.requires_grad
    got = torch.autograd.grad(loss + (rows * torch.arange(4.0)).sum(), [x, weight])
    exact = special.reference(x, weight, return_rows=True)
    for mine, theirs in zip(
        got, torch.autograd.grad(exact[0] + (exact[1] * torch.arange(4.0)).sum(), [x, weight]), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_the_first_backward_hands_its_buffers_over_and_a_second_one_is_equal(op, registry):
    x, weight = leaves()
    loss = op(x, weight)
    buffer = loss.grad_fn.owned[0].data_ptr()
    first = torch.autograd.grad(3 * loss, [x, weight], retain_graph=True)
    assert first[0].data_ptr() == buffer
    kept = [g.clone() for g in first]
    for mine, theirs in zip(kept, right(x, weight, 3.0), strict=True):
        torch.testing.assert_close(mine, theirs)
    second = torch.autograd.grad(3 * loss, [x, weight])
    assert all(torch.equal(a, b) for a, b in zip(kept, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kept, first, strict=True)), "the first result was written again"
    assert [what for what, _ in registry.log] == ["grad forward", "grad backward", "grad forward", "grad backward"]
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, [x])


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_forward_computes_the_gradients_that_are_needed(op, registry, needs):
    x, weight = (t.requires_grad_(need) for t, need in zip(leaves(), needs, strict=True))
    loss = op(x, weight)
    assert registry.log == [("grad forward", needs)]
    loss.backward()
    for tensor, need in zip((x, weight), needs, strict=True):
        assert (tensor.grad is not None) is need
    registry.log.clear()
    with torch.no_grad():
        op(x, weight)
    assert registry.log == [("grad forward", (False, False))]


def test_a_scheme_that_cannot_serve_an_option_is_not_taken(op, registry):
    x, weight = leaves()
    loss = op(x, weight, reduction="none")
    assert [what for what, _ in registry.log] == ["forward", "stage"]
    loss.backward(torch.arange(4.0, dtype=torch.float64))
    exact = special.reference(x.detach().requires_grad_(), weight, reduction="none")
    torch.testing.assert_close(loss, exact)


def test_in_place_overwrites_the_input_and_refuses_a_second_backward(op):
    x, weight = leaves()
    memory, (dx, dweight) = x.detach().clone(), right(x, weight)
    view = memory.clone().requires_grad_()
    loss = op(view, weight, in_place=True)
    got = torch.autograd.grad(loss, [view, weight], retain_graph=True)
    assert got[0].data_ptr() == view.data_ptr()
    torch.testing.assert_close(got[0], dx)
    torch.testing.assert_close(got[1], dweight)
    with pytest.raises((UnsupportedTransformError, RuntimeError)):
        torch.autograd.grad(loss, [view])


def test_double_backward_is_refused(op):
    x, weight = leaves()
    for options in ({}, {"reduction": "none"}):
        (dx,) = torch.autograd.grad(op(x, weight, **options).sum(), [x], create_graph=True)
        with pytest.raises(UnsupportedTransformError, match="double backward"):
            dx.sum().backward()


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"return_rows": True}, {"in_place": True}], ids=str)
def test_compiled_in_one_graph(op, options):
    x, weight = leaves(dtype=torch.float32)
    mark = torch.tensor([0, 1, 2, 0])

    def step(x, weight):
        found = op(x, weight, mark, **options)
        loss, rows = found[:2] if isinstance(found, tuple) else (found, None)
        return loss.sum() if rows is None else loss + rows.sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        mine = torch.autograd.grad(compiled(x, weight), [x, weight])
        theirs = torch.autograd.grad(step(x.clone().requires_grad_(), weight), [weight])
        torch.testing.assert_close(mine[1], theirs[0])
        exact = special.reference(x, weight, mark, **options)
        total = exact[0] + exact[1].sum() if isinstance(exact, tuple) else exact.sum()
        torch.testing.assert_close(mine[0], torch.autograd.grad(total, [x])[0])


def test_the_library_operators_are_well_behaved(op, registry):
    x, weight = leaves(dtype=torch.float32)
    namespace, mark = torch.ops.liger_registry, torch.tensor([0, 1, 2, 0])
    first = getattr(namespace, f"{registry.name}_forward")
    second = getattr(namespace, f"{registry.name}_recompute_forward")
    terms = op.face[-1]
    torch.library.opcheck(first, (x, weight, mark, "mean", False, False, [True, True, False], terms))
    torch.library.opcheck(first, (x, None, None, "mean", False, False, [True, False, False], terms))
    torch.library.opcheck(second, (x, weight, mark, "none", True, False, terms))


def test_autocast_casts_the_inputs_it_names(op):
    x, weight = leaves(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = op(x, weight)
        compiled = torch.compile(lambda a, b: op(a, b), backend="aot_eager", fullgraph=True)(x, weight)
    assert loss.dtype == compiled.dtype == torch.bfloat16
    expected = op(x.bfloat16(), weight.bfloat16())
    assert torch.equal(loss, expected)
    assert torch.equal(compiled, expected)
    loss.backward()
    assert x.grad.dtype == torch.float32


def test_values_are_checked_on_demand(tmp_path):
    x, weight = leaves()
    wrong = torch.tensor([0, -1, 2, 0])
    plain = special.build(tmp_path)
    plain.get(plain.name)(x, weight, wrong)
    checking = special.build(tmp_path, check=True)
    handle = checking.get(checking.name)
    handle(x, weight, wrong.abs())
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="negative"):
            handle(x, weight, wrong)


def test_stages_are_decided_by_the_registry_and_can_be_pinned(op, registry):
    x, weight = leaves()
    op(x, weight, reduction="none")
    assert registry.log[-1] == ("stage", 2), "the heuristic's config"
    registry.log.clear()
    with registry.use(registry.stage_name, "plain", {"factor": 1}):
        op(x, weight, reduction="none")
    assert registry.log[-1] == ("stage", 1)
    assert any(p.op == registry.stage_name for p in registry._called(registry.device))


def test_conformance_covers_all_of_it(registry):
    def decide(problem, device):
        found = registry.decide(problem, device)
        return found.implementation, found.config

    with deciding(decide):
        cases = conformance_cases(registry.name, catalog=registry.catalog)
        for case in cases:
            case()
    text = " ".join(map(str, cases))
    for part in ("grad_in_forward-backward", "recompute-backward", "in_place=True", "return_rows=True", "needs=weight"):
        assert part in text


def test_autocast_leaves_float64_alone_in_both_faces(op):
    x, weight = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        loss = op(x, weight)
        compiled = torch.compile(lambda a, b: op(a, b), backend="aot_eager", fullgraph=True)(x, weight)
    assert loss.dtype == compiled.dtype == torch.float64
    assert torch.equal(loss, compiled)
