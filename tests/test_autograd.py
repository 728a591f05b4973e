"""The eager face: values, gradients, what each call may and may not do to its surroundings."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from liger_registry import registry
from liger_registry.autograd import Fused
from liger_registry.errors import (
    ConfigOutsideSpaceError,
    DeviceMismatchError,
    InvalidInputError,
    UnknownImplementationError,
    UnknownOpError,
    UnsupportedDtypeError,
    UnsupportedOptionError,
    UnsupportedTransformError,
)
from liger_registry.handle import MEMO
from liger_registry.launch import NotLoaded

HIDDEN = 48


@pytest.fixture
def norm():
    return registry.get("rms_norm")


def leaves(*shape, dtype=torch.float32, weight=True):
    x = torch.randn(*shape, dtype=dtype, requires_grad=True)
    return x, torch.randn(shape[-1], dtype=dtype, requires_grad=True) if weight else None


def expected(x, w, dy, eps=1e-6):
    """Value and gradients by PyTorch in float64."""
    x64 = x.detach().double().requires_grad_()
    w64 = None if w is None else w.detach().double().requires_grad_()
    y = F.rms_norm(x64, x.shape[-1:], w64, eps)
    grads = torch.autograd.grad(y, [x64] if w is None else [x64, w64], dy.double())
    return y, *grads


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("shape", [(HIDDEN,), (1, HIDDEN), (5, HIDDEN), (2, 3, HIDDEN), (2, 2, 2, 3, HIDDEN)])
def test_values_and_gradients_are_those_of_pytorch_in_float64(norm, shape, weight):
    x, w = leaves(*shape, weight=weight)
    dy = torch.randn(shape)
    y = norm(x, w)
    grads = torch.autograd.grad(y, [x] if w is None else [x, w], dy)
    for got, right in zip((y, *grads), expected(x, w, dy), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("x_needs", [True, False])
@pytest.mark.parametrize("w_needs", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_only_what_is_asked_for_is_computed(norm, x_needs, w_needs, enabled):
    x, w = leaves(4, HIDDEN)
    x.requires_grad_(x_needs)
    w.requires_grad_(w_needs)
    with torch.set_grad_enabled(enabled):
        y = norm(x, w)
    assert y.requires_grad == (enabled and (x_needs or w_needs))
    if y.requires_grad:
        entry = y.grad_fn.entry
        with torch.no_grad():
            found = entry.backward(torch.ones_like(y), *y.grad_fn.saved_tensors)
        assert [g is not None for g in found] == [x_needs, w_needs]
        y.sum().backward()
        assert (x.grad is not None) == x_needs
        assert (w.grad is not None) == w_needs


def test_a_frozen_weight_and_a_trained_one_are_different_problems(norm):
    x, w = leaves(4, HIDDEN)
    frozen = norm.explain(x, w.detach())[1].problem
    trained = norm.explain(x, w)[1].problem
    assert frozen.flags["needs"] == "x"
    assert trained.flags["needs"] == "x,weight"


def test_backward_twice_gives_equal_gradients_and_writes_nobody_elses_memory(norm):
    x, w = leaves(6, HIDDEN)
    before = x.detach().clone(), w.detach().clone()
    y = norm(x, w)
    dy = torch.randn_like(y)
    held = dy.clone()
    first = torch.autograd.grad(y, [x, w], dy, retain_graph=True)
    second = torch.autograd.grad(y, [x, w], dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])
    assert torch.equal(dy, held)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(norm, reentrant):
    x, w = leaves(6, HIDDEN)
    plain = torch.autograd.grad(norm(x, w).square().sum(), [x, w])
    y = checkpoint(lambda a: norm(a, w).square().sum(), x, use_reentrant=reentrant)
    y.backward()
    assert torch.equal(x.grad, plain[0])
    assert torch.equal(w.grad, plain[1])


def test_selective_checkpointing_sees_one_operator(norm):
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    seen = []

    def policy(ctx, op, *args, **kwargs):
        seen.append(str(op))
        return CheckpointPolicy.MUST_SAVE if "rms_norm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    x, w = leaves(6, HIDDEN)
    plain = torch.autograd.grad(norm(x, w).square().sum(), [x, w])
    y = checkpoint(
        lambda a: norm(a, w).square().sum(),
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    got = torch.autograd.grad(y, [x, w])
    assert any("rms_norm_forward" in name for name in seen)
    assert all(torch.allclose(a, b) for a, b in zip(got, plain, strict=True))


def test_inference_mode(norm):
    x, w = leaves(6, HIDDEN)
    with torch.inference_mode():
        y = norm(x, w)
    assert not y.requires_grad
    assert torch.equal(y, norm(x, w))


def test_transforms_raise_by_name_and_never_give_a_number(norm):
    x, w = leaves(6, HIDDEN)
    fixed = w.detach()
    (first,) = torch.autograd.grad(norm(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedTransformError, match="double backward"):
        first.sum().backward()
    with pytest.raises(UnsupportedTransformError, match="vmap"):
        torch.func.vmap(lambda a: norm(a, fixed))(x.detach())
    with pytest.raises(UnsupportedTransformError, match="jvp"):
        torch.func.jvp(lambda a: norm(a, fixed), (x.detach(),), (x.detach(),))
    with pytest.raises(UnsupportedTransformError, match=r"torch\.func"):
        torch.func.grad(lambda a: norm(a, fixed).sum())(x.detach())
    with forward_ad.dual_level():
        for primal in (x, x.detach()):
            with pytest.raises(UnsupportedTransformError, match="jvp"):
                norm(forward_ad.make_dual(primal, torch.ones_like(x)), fixed)
        # Forward mode may be on for other tensors.
        torch.testing.assert_close(norm(x, fixed), norm.op.reference(x, fixed))


def test_create_graph_without_differentiating_again_is_no_error(norm):
    x, w = leaves(6, HIDDEN)
    plain = torch.autograd.grad(norm(x, w).square().sum(), [x, w])
    linked = torch.autograd.grad(norm(x, w).square().sum(), [x, w], create_graph=True)
    assert all(torch.equal(a, b.detach()) for a, b in zip(plain, linked, strict=True))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda f, x, w: f(x, torch.randn(3)), InvalidInputError, r"\(3,\)"),
        (lambda f, x, w: f(torch.randn(4, 0), None), InvalidInputError, "at least 1 wide"),
        (lambda f, x, w: f(torch.tensor(1.0), None), InvalidInputError, "last dimension"),
        (lambda f, x, w: f([1.0], w), InvalidInputError, "no tensor"),
        (lambda f, x, w: f(x.detach().to(torch.float8_e4m3fn), w), UnsupportedDtypeError, "float8_e4m3fn"),
        (lambda f, x, w: f(torch.ones(4, HIDDEN, dtype=torch.int64), None), UnsupportedDtypeError, "int64"),
        (lambda f, x, w: f(x, w.to("meta")), DeviceMismatchError, "weight on meta"),
        (lambda f, x, w: f(x, w, casting="bert"), UnsupportedOptionError, "'llama', 'gemma', 'none'"),
        (lambda f, x, w: f(x, w, eps=-1.0), UnsupportedOptionError, "below"),
        (lambda f, x, w: f(x, w, eps=float("nan")), UnsupportedOptionError, "NaN"),
        (lambda f, x, w: f(x, w, eps=torch.tensor(1e-6)), UnsupportedOptionError, "Tensor"),
        (lambda f, x, w: f(x, w, epsilon=1e-6), UnsupportedOptionError, "epsilon"),
        (lambda f, x, w: f(), InvalidInputError, "x of rms_norm is missing"),
        (lambda f, x, w: registry.get("rmsnorm"), UnknownOpError, "rms_norm"),
        (lambda f, x, w: registry.get("rms_norm", implementation="best"), UnknownImplementationError, "any:eager"),
        (
            lambda f, x, w: registry.get("rms_norm", implementation="eager", config={"block": 3}),
            ConfigOutsideSpaceError,
            "block",
        ),
    ],
)
def test_bad_input_says_what_is_wrong_and_how_to_get_out(norm, call, error, says):
    x, w = leaves(4, HIDDEN)
    with pytest.raises(error, match=says) as caught:
        call(norm, x, w)
    assert "\n" in str(caught.value)  # more than what: a reason, candidates or a way out


def test_every_option_acts(norm):
    x, w = leaves(4, HIDDEN, dtype=torch.bfloat16)
    plain = norm(x, w)
    assert not torch.equal(norm(x, w, eps=0.1), plain)
    assert not torch.equal(norm(x, w, offset=1.0), plain)
    assert not torch.equal(norm(x, w, casting="gemma"), plain)


def test_no_rows(norm):
    x, w = leaves(0, HIDDEN)
    y = norm(x, w)
    y.sum().backward()
    assert y.shape == (0, HIDDEN)
    assert torch.equal(w.grad, torch.zeros(HIDDEN))
    assert x.grad.shape == (0, HIDDEN)


def test_the_memo_is_bounded_and_new_lengths_are_right(norm):
    handle = registry.get("rms_norm", memory_budget=1 << 40)
    w = torch.randn(4)
    with torch.no_grad():
        for rows in range(1, MEMO + 40):
            handle(torch.empty(rows, 4), w)
    assert len(handle._memo) <= MEMO


def test_a_memo_entry_keeps_no_tensor_alive(norm):
    x, w = leaves(3, HIDDEN)
    norm(x, w).sum().backward()
    ghosts = weakref.ref(x), weakref.ref(w)
    del x, w
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None, None]


def test_handles_are_stable_and_survive_copying_and_pickling(norm):
    assert registry.get("rms_norm") is norm
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert other is norm
    pinned = registry.get("rms_norm", implementation="eager")
    again = pickle.loads(pickle.dumps(pinned))
    assert again.own_pins == pinned.own_pins


def test_a_launch_that_is_not_loaded_falls_back_to_plain_pytorch():
    def refuse(*tensors, **options):
        raise NotLoaded

    import dataclasses

    handle = registry.get("rms_norm", memory_budget=1 << 41)
    x, w = leaves(5, HIDDEN)
    handle(x, w)
    (key,) = handle._memo
    handle._memo[key] = dataclasses.replace(handle._memo[key], forward=refuse, backward=refuse)
    dy = torch.randn(5, HIDDEN)
    y = handle(x, w)
    grads = torch.autograd.grad(y, [x, w], dy)
    for got, right in zip((y, *grads), expected(x, w, dy), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5)


def test_a_default_device_does_not_cost_the_eager_face(norm):
    x, w = leaves(5, HIDDEN)
    with torch.device("cpu"):
        y = norm(x, w)
    assert type(y.grad_fn).__name__ == Fused.__name__ + "Backward"


def test_a_subclass_and_a_meta_tensor_take_the_library_face(norm):
    class Sub(torch.Tensor):
        pass

    x, w = leaves(5, HIDDEN)
    y = norm(x.detach().as_subclass(Sub), w.detach())
    assert isinstance(y, Sub)
    torch.testing.assert_close(y.as_subclass(torch.Tensor), norm(x, w).detach())
    meta = norm(torch.empty(5, HIDDEN, device="meta"), torch.empty(HIDDEN, device="meta"))
    assert meta.is_meta
    assert meta.shape == (5, HIDDEN)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mixed_dtypes_follow_the_models_formula(norm, autocast, x_dtype, w_dtype):
    x = torch.randn(5, HIDDEN, dtype=x_dtype, requires_grad=True)
    w = torch.randn(HIDDEN, dtype=w_dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        y = norm(x, w)
        right = norm.op.reference(x, w)
    assert y.dtype == right.dtype == torch.promote_types(x_dtype, w_dtype)
    torch.testing.assert_close(y, right, rtol=2e-2 if y.dtype.itemsize == 2 else 1e-5, atol=1e-2)
    y.sum().backward()
    assert x.grad.dtype == x_dtype
    assert w.grad.dtype == w_dtype


def test_non_contiguous_inputs_and_gradients(norm):
    w = torch.randn(HIDDEN, requires_grad=True)
    base = torch.randn(2, 4, 3, HIDDEN)
    for x in (
        base.transpose(1, 2),
        base[:, ::2],
        base.permute(3, 0, 1, 2).transpose(0, 3),
        base[..., ::2].repeat(1, 1, 1, 2),
    ):
        leaf = x.detach().requires_grad_()
        y = norm(leaf, w)
        for dy in (torch.ones(()).expand(y.shape), torch.randn(y.shape).transpose(0, 1).contiguous().transpose(0, 1)):
            grads = torch.autograd.grad(y, [leaf, w], dy, retain_graph=True)
            for got, right in zip((y, *grads), expected(leaf, w, dy), strict=True):
                torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-4)


def test_threads_share_a_handle(norm):
    errors = []

    def work(seed):
        try:
            for rows in range(1, 40):
                x = torch.full((rows, HIDDEN), float(seed + 1), requires_grad=True)
                y = norm(x, None)
                torch.testing.assert_close(y, torch.ones_like(y), rtol=1e-4, atol=1e-4)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_deterministic_mode_is_part_of_the_key(norm):
    x, w = leaves(5, HIDDEN)
    norm(x, w)
    size = len(norm._memo)
    torch.use_deterministic_algorithms(True)
    try:
        norm(x, w)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(norm._memo) == size + 1


def test_transforms_raise_after_a_hit_too(norm):
    x, w = torch.randn(6, HIDDEN), torch.randn(HIDDEN)
    norm(x, w)
    norm(x[0], w)
    with pytest.raises(UnsupportedTransformError, match="vmap"):
        torch.func.vmap(lambda a: norm(a, w))(x)
    with forward_ad.dual_level(), pytest.raises(UnsupportedTransformError, match="jvp"):
        norm(forward_ad.make_dual(x, torch.ones_like(x)), w)


def test_batched_gradients_raise_by_name(norm):
    x, w = leaves(3, HIDDEN)
    y = norm(x, w)
    with pytest.raises(UnsupportedTransformError, match="batched"):
        torch.autograd.grad(y, x, torch.randn(2, *y.shape), is_grads_batched=True)
    with pytest.raises(UnsupportedTransformError, match="batched"):
        torch.autograd.functional.jacobian(lambda a: norm(a, w.detach()), x, vectorize=True)


def test_a_function_mode_after_a_default_device_sees_the_operator(norm):
    class Watching(torch.overrides.TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x, w = leaves(5, HIDDEN)
    with torch.device("cpu"):
        norm(x, w)
    with Watching() as mode:
        y = norm(x, w)
    assert any("rms_norm_forward" in name for name in mode.seen)
    torch.testing.assert_close(y, norm(x, w))


def test_negated_views_and_zero_gradients(norm):
    x = torch.view_as_complex(torch.randn(3, HIDDEN, 2)).conj().imag
    w = torch.randn(HIDDEN)
    assert x.is_neg()
    plain = x.resolve_neg().clone()
    norm(plain, w)
    torch.testing.assert_close(norm(x, w), norm(plain, w))
    leaf = plain.requires_grad_()
    y = norm(leaf, w)
    dy = torch.view_as_complex(torch.randn(3, HIDDEN, 2)).conj().imag
    (got,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
    (right,) = torch.autograd.grad(y, leaf, dy.resolve_neg().clone(), retain_graph=True)
    torch.testing.assert_close(got, right)
    (zero,) = torch.autograd.grad(y, leaf, torch._efficientzerotensor(y.shape))
    assert torch.equal(zero, torch.zeros_like(zero))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
def test_layouts_that_are_no_strides_are_refused(norm):
    for x in (torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr(), torch.nested.nested_tensor([torch.ones(2, 4)])):
        with pytest.raises(InvalidInputError, match="no dense tensor"):
            norm(x, None)
