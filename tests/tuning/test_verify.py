from __future__ import annotations

import planted
import pytest
import torch

from liger_registry.config import Config
from liger_registry.device import Device
from liger_registry.examples import STYLES
from liger_registry.tuning.case_cache import CaseCache
from liger_registry.tuning.cases import evaluate, make_case
from liger_registry.tuning.layouts import LAYOUTS, Poisoned, bits, place
from liger_registry.tuning.verify import Verification, proxies_for, verify

CPU = Device.parse("cpu")


def check(implementation, config=None, op=planted.AFFINE, **fields):
    problem = planted.problem(op=op.name, phase=implementation.phase, scheme=implementation.scheme, **fields)
    return verify(op, implementation, config or Config(), problem, CPU, "cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("implementation", [planted.PLAIN, planted.PLAIN_BACKWARD], ids=lambda i: i.phase)
def test_right_ones_pass(implementation, dtype):
    found = check(implementation, dtype=dtype)
    assert found.passed, found.detail
    results = 1 if implementation.phase == "forward" else 2
    # All styles at both proxies, one case with other options, and two on a device of few units.
    assert len(found.verdicts) == results * (2 * len(STYLES) + 1 + 2)


@pytest.mark.parametrize("needs", ["x", "w", "x,w"])
def test_backward_computes_what_is_needed(needs):
    assert check(planted.PLAIN_BACKWARD, needs=needs).passed


def test_wrong_in_the_last_rows_tail_alone():
    wrong = planted.FAULTY["wrong_tail"]
    assert check(wrong, Config(block=64), hidden=256).passed, "right where hidden is a multiple of the block"
    found = check(wrong, Config(block=64), hidden=200)
    assert not found.passed
    assert "worst element" in found.detail


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ignores_gain", "gain=1.5"),
        ("reads_empty", "finite"),
        ("gives_nan", "finite"),
        ("wrong_shape", "shape (37, 199), not (37, 200)"),
        ("writes_input", "wrote into its inputs"),
        ("out_of_bounds", "or beside them"),
        ("random_bits", "second run gives other bits"),
        ("dense_weight", "finite"),
        # Which of the two it is depends on what the allocator hands out.
        ("dirty_scratch", "finite|second run gives other bits"),
    ],
)
def test_faults_are_found_and_named(name, says):
    found = check(planted.FAULTY[name])
    assert not found.passed
    assert any(text in found.detail for text in says.split("|"))


@pytest.mark.parametrize(
    ("name", "needs", "says"),
    [("backward_too_much", "x", "grad_w is not asked for"), ("backward_drops_row", "x,w", "grad_w: error")],
)
def test_faults_of_backward(name, needs, says):
    found = check(planted.FAULTY_BACKWARD[name], needs=needs)
    assert not found.passed
    assert says in found.detail


def test_a_written_input_is_put_right_for_the_next_candidate():
    cache = CaseCache()
    problem = planted.problem()
    wrong = verify(planted.AFFINE, planted.FAULTY["writes_input"], Config(), problem, CPU, "cpu", cache=cache)
    assert not wrong.passed
    assert verify(planted.AFFINE, planted.PLAIN, Config(), problem, CPU, "cpu", cache=cache).passed


def test_exceptions_pass_through():
    with pytest.raises(ValueError, match="planted"):
        check(planted.FAULTY["raises"])


def test_saved_tensors_are_held_against_the_contract():
    catalog = planted.two_schemes()
    saving = catalog.find("twoway", "saving", "forward", "plain")
    assert check(saving, op=planted.TWOWAY).passed
    assert check(catalog.find("twoway", "saving", "backward", "plain"), op=planted.TWOWAY).passed
    lean = catalog.find("twoway", "lean", "forward", "plain")
    problem = planted.problem(op="twoway", scheme="saving")
    found = verify(planted.TWOWAY, lean, Config(), problem, CPU, "cpu")
    assert "1 of them, not 2 (y, gw)" in found.detail


def test_no_verdict_is_no_proof():
    assert not Verification.of([]).passed


@pytest.mark.parametrize(
    ("legal", "expected"),
    [
        (lambda rows: True, ({"rows": 37}, {"rows": 1})),
        (lambda rows: rows >= 2, ({"rows": 37},)),
        (lambda rows: rows >= 100, ({"rows": 133},)),
        (lambda rows: rows >= 250, ({"rows": 261},)),
        (lambda rows: rows < 37, ({"rows": 1}, {})),
        (lambda rows: rows == 256, ({},)),
    ],
)
def test_sizes_at_which_a_config_is_legal(legal, expected):
    space = planted.BLOCKS.where(lambda c, p, d: legal(p.rows), "rows")
    item = planted.implementation(planted.blocks, space=space)
    assert proxies_for(planted.AFFINE, item, Config(block=32), planted.problem(rows=256), CPU) == expected


def test_large_sizes_are_tried_in_few_styles():
    problem, op = planted.problem(hidden=1 << 16), planted.AFFINE
    assert len(CaseCache().get(op, problem, [{"rows": 64}, {"rows": 65}], STYLES, 0, "cpu")) == len(STYLES) + 2 + 1
    assert len(CaseCache().get(op, problem, [{"rows": 65}], STYLES, 0, "cpu")) == 2
    assert len(CaseCache().get(op, problem, [{"rows": 65}], ["zeros"], 0, "cpu")) == 1


def test_evaluate_agrees_with_arithmetic():
    x, w, dy = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5.0, 7.0]), torch.tensor([[1.0, 0.0], [2.0, 1.0]])
    found = evaluate(planted.AFFINE, (x, w), {"gain": 2.0}, (dy,), torch.float64)
    assert found["y"].tolist() == [[10, 28], [30, 56]]
    assert found["grad_x"].tolist() == [[10, 0], [20, 14]]
    assert found["grad_w"].tolist() == [14, 8]
    assert {t.dtype for t in found.values()} == {torch.float64}
    assert not any(t.requires_grad for t in found.values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 3, 7), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_layouts_keep_values_and_guard_them(layout, shape, dtype):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    view, buffer = place(tensor, layout)
    assert view.shape == shape
    if layout == "rows" and tensor.numel() and tensor.dim():
        assert torch.equal(view, tensor[(0,) * (tensor.dim() - 1)].expand(shape))
    elif layout == "scalar" and tensor.numel() and tensor.dim():
        assert torch.equal(view, tensor.flatten()[0].expand(shape))
    elif layout == "expanded" and tensor.dim() == 1:
        assert torch.equal(view, tensor[:1].expand(shape))
        assert view.stride() == (0,)
    else:
        assert torch.equal(view, tensor)
        assert layout != "strided" or view.is_contiguous() is (tensor.dim() != 1)
    assert buffer.dim() == 1
    assert buffer.numel() >= 256
    if dtype.is_floating_point:
        assert buffer[:128].isnan().all()
        assert buffer[-128:].isnan().all()
    aligned = view.storage_offset() * view.element_size() % 16 == 0
    assert aligned is (layout != "misaligned")


def test_poison_fills_what_python_leaves_uninitialised():
    x = torch.ones(3, 4)
    with Poisoned():
        made = [
            torch.empty(2, 3), torch.empty_like(x), x.new_empty(5), torch.empty_strided((2, 2), (2, 1)),
            x.new_empty_strided((2,), (1,)), torch.empty_permuted((2, 3), (1, 0)),
        ]  # fmt: skip
        counts = torch.empty(3, dtype=torch.int32)
        assert torch.zeros(3).sum() == 0
        assert torch.empty(3, device="meta").is_meta
    assert all(t.isnan().all() for t in made)
    assert (counts == 23130).all()
    with Poisoned(huge=True):
        assert (torch.empty(3) == 8192).all()


def test_bits_tell_zeros_apart_and_nans_not():
    nan = torch.tensor([float("nan"), 0.0])
    assert torch.equal(bits(nan), bits(nan.clone()))
    assert not torch.equal(bits(torch.tensor(0.0)), bits(torch.tensor(-0.0)))


def test_gradients_come_in_the_layouts_that_autograd_gives():
    problem = planted.problem(phase="backward")
    scheme = planted.AFFINE.schemes[0]
    strides = {s: make_case(planted.AFFINE, scheme, problem, s, 0, "cpu").grad_outputs[0].stride() for s in STYLES}
    assert strides["spike"] == (0, 0)
    assert strides["shifted"] == (0, 1)
    assert strides["tiny"] == (1, 64)
    assert strides["tail"] == (216, 1)


def test_cases_are_shared_within_a_number_of_bytes():
    problem, op = planted.problem(), planted.AFFINE
    cache = CaseCache()
    arguments = (op, problem, op.proxies(problem), STYLES, 0, "cpu")
    first = [make() for make in cache.get(*arguments)]
    assert [make() for make in cache.get(*arguments)] == first
    assert all(a is b() for a, b in zip(first, cache.get(*arguments), strict=True))
    other = cache.get(op, planted.problem(hidden=9), op.proxies(problem), STYLES, 0, "cpu")[0]()
    assert other.problem.hidden == 9
    none = CaseCache(0)
    assert none.get(*arguments)[0]() is not none.get(*arguments)[0]()
