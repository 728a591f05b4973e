"""Deferred logits: what is recorded gives the fused loss, all else the model's own numbers, counted."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import numpy as np
import pytest
import torch
from heads import Sizes, linear_head
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from liger_registry.errors import AdapterError, LateReadError, RegistryWarning
from liger_registry.transformers.engine.deferred import DeferredLogits

VOCAB, WIDTH = 13, 8


def hidden(*shape, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (2, 5, WIDTH)), generator=generator).to(dtype).requires_grad_()


def targets(*shape, seed=2):
    found = torch.randint(VOCAB, shape or (2, 5), generator=torch.Generator().manual_seed(seed))
    found.view(-1)[::4] = -100
    return found


def grads(loss, *tensors):
    return torch.autograd.grad(loss, tensors)


def close(ours, theirs, **options):
    torch.testing.assert_close(ours, theirs, **({"rtol": 1e-5, "atol": 1e-6} | options))


# -- what never computes ----------------------------------------------------------------------------------------------


def test_metadata_computes_nothing():
    plain, head, counts = linear_head()
    h = hidden()
    d, real = head(h), plain(h)
    assert isinstance(d, torch.Tensor)
    for read in (
        lambda x: (x.shape, x.size(), x.size(-1), x.dim(), x.ndim, x.numel(), len(x), x.nelement()),
        lambda x: (x.dtype, x.device, x.layout, x.stride(), x.is_contiguous(), x.storage_offset()),
        lambda x: (x.requires_grad, x.is_leaf, x.is_floating_point(), x.is_complex(), x.is_cuda, x.is_sparse),
        lambda x: (x.is_quantized, x.itemsize, x.nbytes, x.element_size(), x.type(), x.get_device(), x.is_meta),
        lambda x: (torch.is_tensor(x), torch.is_floating_point(x), x.is_inference(), x._base, x.output_nr),
    ):
        assert read(d) == read(real)
    assert d.grad_fn is not None
    d.register_hook(lambda grad: None)
    d.retain_grad()
    assert "not computed" in repr(d)
    assert "lm_head" in str(d)
    assert [t.shape for t in (d.new_zeros(3), d.new_full((2, 2), 1.0), d.new_empty(1))] == [(3,), (2, 2), (1,)]
    assert not counts


CHAINS = {
    "float": lambda z: z.float(),
    "to": lambda z: z.to(torch.float32).to(z.device).to(device="cpu", dtype=torch.float32),
    "type_as": lambda z: z.type_as(torch.zeros(1)),
    "same": lambda z: z.contiguous().clone().view_as(z),
    "view": lambda z: z.view(-1, z.size(-1)),
    "reshape": lambda z: z.transpose(0, 1).reshape(-1, VOCAB),
    "flatten": lambda z: z.flatten(0, 1),
    "shift": lambda z: z[..., :-1, :].contiguous().view(-1, VOCAB),
    "slices": lambda z: z[:, 1:4:2],
    "ints": lambda z: z[0, 1:],
    "last": lambda z: z[:, -1, :],
    "whole classes": lambda z: z[:, :, :VOCAB],
    "index": lambda z: z[torch.tensor([1, 0, 1])],
    "two indices": lambda z: z[torch.tensor([1, 0]), torch.tensor([2, 3])],
    "index behind": lambda z: z[:, torch.tensor([1, 0, 1])],
    "mask": lambda z: z[torch.tensor([[True, False, True, True, False], [False, True, False, False, True]])],
    "mask of rows": lambda z: z[torch.tensor([False, True])],
    "index_select": lambda z: z.index_select(1, torch.tensor([0, 2])),
    "squeezed": lambda z: z.unsqueeze(1).squeeze(1).unsqueeze(0).squeeze(),
    "narrow": lambda z: z.narrow(1, 1, 2),
    "split": lambda z: z.split(2, dim=1)[2],
    "chunk": lambda z: z.chunk(2)[1],
    "unbind": lambda z: z.unbind(1)[3],
    "iterate": lambda z: list(z)[1],
    "transposed twice": lambda z: z.transpose(1, 2).permute(0, 2, 1),
    "t": lambda z: z[0].t().T,
    "expand": lambda z: z[:1].expand(3, -1, -1),
    "scaled": lambda z: z * 0.25,
    "divided": lambda z: 0.5 * z / 3,
    "0-dim factor": lambda z: z * torch.tensor(0.5),
    "softcap": lambda z: torch.tanh(z / 3.0) * 3.0,
    "softcap in float": lambda z: (z.float() / 3.0).tanh().mul(3.0),
    "scale and softcap": lambda z: torch.tanh(z * 0.7 / 2.0) * 2.0 * 1.5,
    "everything": lambda z: (torch.tanh(z / 2.0) * 2.0)[..., :-1, :].float().contiguous().view(-1, VOCAB),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_recorded_operations_reach_the_fused_loss(chain):
    plain, head, counts = linear_head(bias=True)
    h, apply = hidden(), CHAINS[chain]
    ours, theirs = apply(head(h)), apply(plain(h))
    assert isinstance(ours, DeferredLogits)
    assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
    target = targets(*theirs.shape[:-1])
    rows, flat = ours.reshape(-1, VOCAB), target.reshape(-1)
    loss = F.cross_entropy(rows, flat)
    expected = F.cross_entropy(theirs.reshape(-1, VOCAB), flat)
    assert not counts, "the logits were computed"
    close(loss, expected)
    assert loss.dtype == expected.dtype
    close(grads(loss, h, head.weight, head.bias), grads(expected, h, plain.weight, plain.bias))


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_operations_compute_what_they_would_have(chain, dtype):
    plain, head, counts = linear_head(bias=True, dtype=dtype)
    h, apply = hidden(dtype=dtype), CHAINS[chain]
    d = head(h)
    d.node.call._parts = 2 * h.numel()  # whole, not some rows alone: those are rounded as a product of their size is
    ours, theirs = apply(d), apply(plain(h))
    weights = torch.randn(theirs.shape)
    close(ours.computed(), theirs, rtol=0, atol=0)
    assert torch.equal(ours, theirs)
    assert sum(counts.values()) == 1
    mine = grads((ours.float() * weights).sum(), h, head.weight, head.bias)
    expected = grads((theirs.float() * weights).sum(), h, plain.weight, plain.bias)
    close(mine, expected, **({} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 1e-2}))
    assert sum(counts.values()) == 1


def test_some_rows_are_computed_alone():
    plain, head, counts = linear_head()
    h = hidden(2, 50, WIDTH)
    with Sizes() as sizes:
        last = (torch.tanh(head(h)[:, -1, :].float() / 2) * 2).computed()
    close(last, torch.tanh(plain(h)[:, -1] / 2) * 2)
    assert sizes.largest <= h.numel()
    assert sum(counts.values()) == 1


def entropy_in_chunks(logits, rows=5):
    """As trainers compute it for the sake of memory."""
    logs = (F.log_softmax(chunk, -1) for chunk in logits.reshape(-1, VOCAB).split(rows))
    return torch.cat([-(log.exp() * log).sum(-1) for log in logs])


def test_chunks_one_after_the_other_take_the_memory_of_one():
    plain, head, counts = linear_head()
    h = hidden(2, 50, WIDTH)
    with torch.no_grad():
        d, expected = head(h), entropy_in_chunks(plain(h))
        with Sizes() as sizes:
            found = entropy_in_chunks(d)
        close(found, expected)
        assert sizes.largest <= h.numel()
        assert d.node.call._logits is None
        assert sum(counts.values()) == 20
        entropy_in_chunks(d)
        close(entropy_in_chunks(d), expected)
    assert d.node.call._logits is not None, "many times all parts are more work than the whole"


def test_a_part_that_is_read_again_is_not_computed_again():
    _, head, counts = linear_head()
    part = head(hidden(2, 50, WIDTH))[:, -1]
    close(part.softmax(-1), part.exp() / part.exp().sum(-1, keepdim=True))
    assert sum(counts.values()) == 1


# -- the loss ---------------------------------------------------------------------------------------------------------

OPTIONS = [
    {},
    {"ignore_index": 3},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"weight": True},
    {"weight": True, "label_smoothing": 0.2, "reduction": "sum", "ignore_index": 1},
    {"size_average": False},
    {"reduce": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", ["rows", "sequences", "one"])
def test_options_of_cross_entropy(options, layout):
    plain, head, counts = linear_head()
    options = dict(options)
    if options.pop("weight", False):
        options["weight"] = torch.rand(VOCAB) + 0.5
    h, target = hidden(), targets()
    target = target.clamp(min=0) if "ignore_index" in options else target
    if layout == "rows":
        apply, target = (lambda z: z.view(-1, VOCAB)), target.view(-1)
    elif layout == "sequences":
        apply = lambda z: z.transpose(1, 2)  # noqa: E731
    else:
        apply, target = (lambda z: z[1, 2]), torch.tensor(5)
    with pytest.warns(UserWarning, match="size_average") if {"size_average", "reduce"} & {*options} else _quiet():
        expected = F.cross_entropy(apply(plain(h)), target, **options)
        loss = F.cross_entropy(apply(head(h)), target, **options)
    assert not counts
    close(loss, expected)
    up = torch.rand(loss.shape)
    close(grads((loss * up).sum(), h, head.weight), grads((expected * up).sum(), h, plain.weight))


def _quiet():
    import contextlib

    return contextlib.nullcontext()


def test_the_module_is_the_function():
    plain, head, counts = linear_head()
    h, target = hidden(), targets()
    loss = nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1)
    close(loss(head(h).view(-1, VOCAB), target.view(-1)), loss(plain(h).view(-1, VOCAB), target.view(-1)))
    close(loss(input=head(h).permute(0, 2, 1), target=target), loss(plain(h).permute(0, 2, 1), target))
    assert not counts


def test_a_bias_of_classes_added_later_is_part_of_the_loss():
    plain, head, counts = linear_head()
    h, target, bias = hidden(), targets(), torch.randn(1, VOCAB, requires_grad=True)
    loss = F.cross_entropy((head(h) + bias).view(-1, VOCAB), target.view(-1))
    expected = F.cross_entropy((plain(h) + bias).view(-1, VOCAB), target.view(-1))
    assert not counts
    close(loss, expected)
    close(grads(loss, h, head.weight, bias), grads(expected, h, plain.weight, bias))
    close((head(h) + bias)[0, :1].computed(), (plain(h) + bias)[0, :1])


LEFT_TO_PYTORCH = {
    "probabilities": lambda z: F.cross_entropy(z.view(-1, VOCAB), torch.full((10, VOCAB), 1 / VOCAB)),
    "classes elsewhere": lambda z: F.cross_entropy(z, torch.zeros(2, VOCAB, dtype=torch.int64)),
    "another function": lambda z: F.nll_loss(F.log_softmax(z.view(-1, VOCAB), -1), targets().view(-1)),
    "a second cap": lambda z: F.cross_entropy(z.tanh().tanh().view(-1, VOCAB), targets().view(-1)),
    "a negative cap": lambda z: F.cross_entropy((z.tanh() * -2.0).view(-1, VOCAB), targets().view(-1)),
    "a rounding": lambda z: F.cross_entropy(z.bfloat16().float().view(-1, VOCAB), targets().view(-1)),
    "some classes": lambda z: F.cross_entropy(z[..., :7].reshape(-1, 7), targets().view(-1).clamp(max=6)),
    "something added": lambda z: F.cross_entropy((z + torch.ones(2, 5, 1)).view(-1, VOCAB), targets().view(-1)),
    "classes as rows": lambda z: F.cross_entropy(z[0].t(), targets(VOCAB).clamp(max=4)),
}


@pytest.mark.parametrize("case", LEFT_TO_PYTORCH)
def test_what_the_fused_loss_does_not_take_is_computed_and_counted(case):
    plain, head, counts = linear_head()
    h, loss = hidden(), LEFT_TO_PYTORCH[case]
    ours, theirs = loss(head(h)), loss(plain(h))
    close(ours, theirs, rtol=0, atol=0)
    close(grads(ours, h, head.weight), grads(theirs, h, plain.weight))
    assert sum(counts.values()) == 1
    (where,) = counts
    assert where.startswith(f"{__file__}:")


@pytest.mark.parametrize(
    ("logits", "target", "options"),
    [
        (lambda z: z.view(-1, VOCAB), torch.zeros(9, dtype=torch.int64), {}),
        (lambda z: z.view(-1, VOCAB), torch.zeros(10, dtype=torch.int32), {}),
        (lambda z: z.view(-1, VOCAB), torch.zeros(10, dtype=torch.int64), {"reduction": "most"}),
        (lambda z: z.view(-1, VOCAB), torch.zeros(10, dtype=torch.int64), {"weight": torch.ones(4)}),
        (lambda z: z.view(-1, VOCAB), torch.zeros(10, dtype=torch.int64), {"label_smoothing": 2.0}),
        (lambda z: z.view(-1, 7), torch.zeros(10, dtype=torch.int64), {}),
    ],
)
def test_errors_are_pytorchs(logits, target, options):
    plain, head, _ = linear_head()
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        F.cross_entropy(logits(plain(hidden())), target, **options)
    with pytest.raises(type(theirs.value)) as ours:
        F.cross_entropy(logits(head(hidden())), target, **options)
    assert str(ours.value)[:40] == str(theirs.value)[:40]


def test_nothing_to_count_and_wrong_classes():
    _, head, _ = linear_head()
    h = hidden()
    loss = F.cross_entropy(head(h).view(-1, VOCAB), torch.full((10,), -100))
    assert loss == 0
    assert not any(g.any() for g in grads(loss, h, head.weight))
    assert F.cross_entropy(head(h).view(-1, VOCAB), torch.full((10,), VOCAB)).isnan()


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inside", [True, False])
def test_autocast(weight, inside):
    plain, head, counts = linear_head(bias=True, dtype=weight)
    h, target = hidden(), targets().view(-1)
    both = []
    for layer in (plain, head):
        with torch.autocast("cpu", torch.bfloat16):
            z = layer(h)
            loss = F.cross_entropy(z.view(-1, VOCAB), target) if inside else None
        if loss is None:
            loss = F.cross_entropy(z.float().view(-1, VOCAB), target)
        both.append((z, loss, grads(loss, h, layer.weight, layer.bias)))
    (real, expected, theirs), (deferred, loss, ours) = both
    assert not counts
    assert (deferred.dtype, loss.dtype) == (real.dtype, expected.dtype)
    assert [g.dtype for g in ours] == [g.dtype for g in theirs]
    close(loss, expected, rtol=1e-3, atol=1e-3)
    close(ours, theirs, rtol=5e-2, atol=3e-3)
    assert torch.equal(deferred, real)


def test_16_bit_heads_round_as_the_model_does():
    plain, head, counts = linear_head(dtype=torch.bfloat16)
    h, target = hidden(4, 40, WIDTH, dtype=torch.bfloat16), targets(4, 40).view(-1)
    loss = F.cross_entropy(head(h).float().view(-1, VOCAB), target)
    close(loss, F.cross_entropy(plain(h).float().view(-1, VOCAB), target), rtol=1e-6, atol=1e-6)
    assert F.cross_entropy(head(h).view(-1, VOCAB), target).dtype == torch.bfloat16
    assert not counts


def test_operands_that_do_not_fit_are_pytorchs_error():
    plain, head, _ = linear_head(dtype=torch.bfloat16)
    for layer in (plain, head):
        with pytest.raises(RuntimeError, match="dtype"):
            layer(hidden())
        with pytest.raises(RuntimeError, match="shape"):
            layer(hidden(2, WIDTH + 1, dtype=torch.bfloat16))
        with pytest.raises(TypeError):
            layer()


def test_loss_without_gradients_allocates_no_logits():
    _, head, counts = linear_head()
    h, target = hidden(4, 100, WIDTH), targets(4, 100)
    with torch.no_grad(), Sizes() as sizes:
        loss = F.cross_entropy(head(h).float()[:, :-1].reshape(-1, VOCAB), target[:, 1:].reshape(-1))
    assert not loss.requires_grad
    assert sizes.largest <= h.numel()
    assert not counts


def test_a_detached_loss_has_no_gradient():
    _, head, counts = linear_head()
    h = hidden()
    assert not F.cross_entropy(head(h).detach().view(-1, VOCAB), targets().view(-1)).requires_grad
    assert not F.cross_entropy(head(h).data.view(-1, VOCAB), targets().view(-1)).requires_grad
    assert not counts


# -- gradients through the logits -------------------------------------------------------------------------------------


def test_a_gradient_may_be_asked_of_the_logits_themselves():
    plain, head, counts = linear_head()
    h, target = hidden(), targets().view(-1)
    z, real = head(h), plain(h)
    leaf, other = z.detach().requires_grad_(), real.detach().requires_grad_()
    F.cross_entropy(leaf.view(-1, VOCAB), target).backward()
    F.cross_entropy(other.view(-1, VOCAB), target).backward()
    close(leaf.grad, other.grad)
    assert h.grad is None
    assert sum(counts.values()) == 1


def test_retain_grad_and_hooks_see_the_gradient_of_a_later_loss():
    plain, head, _ = linear_head()
    h, target, seen = hidden(), targets().view(-1), []
    gradient = []
    for layer in (plain, head):
        z = layer(h)
        z.retain_grad()
        z.register_hook(lambda grad: seen.append(grad) or grad * 2)
        F.cross_entropy(z.view(-1, VOCAB), target).backward()
        gradient.append((z.grad, layer.weight.grad))
    close(gradient[1], gradient[0])
    close(seen[1], seen[0])


def test_a_hook_after_the_loss_is_told_that_it_will_see_nothing():
    _, head, _ = linear_head()
    z = head(hidden())
    F.cross_entropy(z.view(-1, VOCAB), targets().view(-1))
    with pytest.warns(RegistryWarning, match="no gradient will reach the logits"):
        z.retain_grad()


class Scaled(torch.autograd.Function):
    """The identity, with another gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def test_functions_of_others_on_logits_keep_their_gradient():
    plain, head, counts = linear_head()
    h, target = hidden(), targets().view(-1)
    ours, theirs = (F.cross_entropy(Scaled.apply(layer(h)).view(-1, VOCAB), target) for layer in (head, plain))
    close(grads(ours, h, head.weight), grads(theirs, h, plain.weight))
    assert sum(counts.values()) == 1


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("around", ["loss", "head"])
def test_checkpointing(reentrant, around):
    plain, head, _ = linear_head()
    h, target = hidden(), targets().view(-1)

    def loss(layer, x):
        if around == "head":
            z = checkpoint(layer, x, use_reentrant=reentrant)
            return F.cross_entropy(z.view(-1, VOCAB), target)
        return checkpoint(lambda y: F.cross_entropy(layer(y).view(-1, VOCAB), target), x, use_reentrant=reentrant)

    found = []
    for layer in (plain, head):
        h.grad = None
        loss(layer, h).backward()
        found.append((h.grad, layer.weight.grad))
    close(found[1], found[0])


def test_backward_twice():
    plain, head, _ = linear_head()
    h = hidden()
    loss = F.cross_entropy(head(h).view(-1, VOCAB), targets().view(-1))
    first = torch.autograd.grad(loss, (h, head.weight), retain_graph=True)
    close(torch.autograd.grad(loss, (h, head.weight)), first, rtol=0, atol=0)
    value, expected = head(h).logsumexp(-1).sum(), plain(h).logsumexp(-1).sum()
    ours = torch.autograd.grad(value, h, create_graph=True)[0].square().sum()
    theirs = torch.autograd.grad(expected, h, create_graph=True)[0].square().sum()
    close(grads(ours, h, head.weight), grads(theirs, h, plain.weight))


def test_two_losses_of_one_logits():
    plain, head, counts = linear_head()
    h = hidden()
    found = []
    for layer in (plain, head):
        z = layer(h)
        loss = sum(F.cross_entropy(z[i], targets()[i]) for i in range(2)) + z.logsumexp(-1).square().mean()
        found.append((loss, grads(loss, h, layer.weight)))
    close(found[1], found[0])
    assert sum(counts.values()) == 1


def test_transforms_get_real_logits():
    plain, head, counts = linear_head()
    h = hidden().detach()
    close(torch.vmap(head)(h), plain(h))
    close(torch.func.jvp(head, (h,), (h,)), torch.func.jvp(plain, (h,), (h,)))
    close(torch.func.grad(lambda x: head(x).sum())(h), torch.func.grad(lambda x: plain(x).sum())(h))
    assert not counts


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_function_reads_deferred_logits():
    plain, head, _ = linear_head()
    h = hidden()
    read = torch.compile(lambda z: z.float().logsumexp(-1).square().sum(), backend="aot_eager")
    ours, theirs = read(head(h)), read(plain(h))
    close(ours, theirs)
    close(grads(ours, h, head.weight), grads(theirs, h, plain.weight))
    torch.compiler.reset()


# -- writing, copying, looking at memory ------------------------------------------------------------------------------


def test_writing_into_logits_reaches_their_views_and_nothing_else():
    found = []
    for layer in linear_head()[:2]:
        h = hidden()
        z = layer(h)
        copied, view = z * 1.0, z[0]
        z[:, :, 3] = -1e9
        z.mul_(0.5)
        z += 1
        loss = F.cross_entropy(z.view(-1, VOCAB), targets().view(-1))
        again = z.view(-1, VOCAB)
        again[0, 0] = 7.0
        found.append((loss, view.detach().clone(), copied.detach().clone(), z.detach().clone()))
        found[-1] += grads(loss + copied.sum() + z.square().mean(), h, layer.weight)
    close([x.computed() if isinstance(x, DeferredLogits) else x for x in found[1]], list(found[0]), rtol=1e-5)


def test_logits_as_an_argument_of_what_is_written_to():
    plain, head, _ = linear_head()
    h, room, index = hidden(), torch.zeros(2, 5, VOCAB), torch.tensor([[0], [1]])
    room[:, :2] = head(h)[:, :2].detach()
    close(room[:, :2], plain(h)[:, :2])
    assert torch.add(head(h), 1, out=None).shape == (2, 5, VOCAB)
    out = torch.empty(2, 5, VOCAB)
    with torch.no_grad():
        assert torch.exp(head(h), out=out) is out
    close(out, plain(h).exp())
    close(head(h)[:, 0].gather(-1, index), plain(h)[:, 0].gather(-1, index))


def test_changing_the_shape_in_place_is_a_named_error():
    _, head, _ = linear_head()
    with pytest.raises(AdapterError, match=r"in place(.|\n)*computed\(\)"):
        head(hidden()).squeeze_(0)


def test_copies_are_plain():
    plain, head, _ = linear_head()
    h, file = hidden(), io.BytesIO()
    real = plain(h).detach()
    torch.save({"logits": head(h)}, file)
    file.seek(0)
    for found in (
        torch.load(file)["logits"].detach(),
        pickle.loads(pickle.dumps(head(h).detach())),
        copy.deepcopy(head(h).detach()),
        copy.copy(head(h).detach()),
        torch.from_numpy(head(h).detach().numpy()),
        torch.from_numpy(np.asarray(head(h).detach())),
        torch.tensor(head(h).tolist()),
        head(h).computed().detach(),
        torch.from_dlpack(head(h).detach()),
        head(h).to(torch.float64).cpu().detach().float(),
    ):
        assert torch.equal(found, real)
        assert type(found) is torch.Tensor or isinstance(found, DeferredLogits)
    assert type(pickle.loads(pickle.dumps(head(h).detach()))) is torch.Tensor
    assert head(h).data_ptr() != 0
    assert head(h).untyped_storage().nbytes() == real.nbytes
    with pytest.raises(RuntimeError, match="deepcopy protocol"):
        copy.deepcopy(head(h))  # as of any tensor with a graph


def test_numbers_and_truth():
    plain, head, _ = linear_head()
    h = hidden()
    assert head(h)[0, 1, 2].item() == pytest.approx(plain(h)[0, 1, 2].item(), rel=1e-5)
    assert f"{head(h)[0, 0, 0].item():.3f}" == f"{plain(h)[0, 0, 0].item():.3f}"
    assert bool((head(h) == head(h)).all())
    assert float(head(h).detach().max()) == pytest.approx(float(plain(h).detach().max()), rel=1e-5)


def test_read_twice_computed_once():
    _, head, counts = linear_head()
    z = head(hidden())
    z.sum()
    z.float().max()
    z.view(-1, VOCAB).softmax(-1)
    assert sum(counts.values()) == 1
    assert z.is_computed


def test_nothing_is_kept_alive():
    _, head, _ = linear_head()
    h = hidden()
    z = head(h * 1)
    loss = F.cross_entropy(z.view(-1, VOCAB), targets().view(-1))
    call = weakref.ref(z.node.call)
    loss.backward()
    gc.disable()
    try:
        del z, loss
        assert call() is None, "only the garbage collector frees it"
    finally:
        gc.enable()


# -- token accuracy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predictions_are_not_read_from_logits(dtype):
    plain, head, counts = linear_head(dtype=dtype)
    h = hidden(4, 30, WIDTH, dtype=dtype)
    z, real = head(h), plain(h)
    with Sizes() as sizes:
        shifted = z[..., :-1, :].contiguous().float().argmax(dim=-1)
    assert sizes.largest <= h.numel()
    assert torch.equal(shifted, real[..., :-1, :].argmax(-1))
    assert torch.equal(torch.argmax(z, 2, keepdim=True), real.argmax(2, keepdim=True))
    assert torch.equal(z[0].t().argmax(0), real[0].t().argmax(0))
    assert not counts
    assert torch.equal(z.argmax(), real.argmax())
    assert torch.equal(z.argmax(1), real.argmax(1))
    assert torch.equal((torch.tanh(z / 2) * 2).argmax(-1), (torch.tanh(real / 2) * 2).argmax(-1))
    assert sum(counts.values()) == 1


# -- late reading -----------------------------------------------------------------------------------------------------


def step(*parameters):
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD(parameters, 0.1)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("read", [lambda z: z.sum(), lambda z: z.argmax(-1), lambda z: z.computed(), pickle.dumps])
def test_logits_read_after_a_step_raise(read):
    _, head, _ = linear_head()
    z = head(hidden())
    step(head.weight)
    with pytest.raises(LateReadError, match=r"read too late(.|\n)*before optimizer.step"):
        read(z)
    with pytest.raises(LateReadError):
        F.cross_entropy(z.view(-1, VOCAB), targets().view(-1))


def test_logits_computed_before_a_step_are_kept():
    plain, head, _ = linear_head()
    h = hidden()
    z = head(h)
    z.sum()
    step(head.weight)
    assert torch.equal(z.detach(), plain(h))


def test_a_step_of_others_does_no_harm():
    plain, head, _ = linear_head()
    h = hidden()
    z = head(h)
    other = step(nn.Parameter(torch.ones(3)))
    assert torch.equal(z, plain(h))
    z = head(h)
    for _ in range(20):
        other.step()
    with pytest.raises(LateReadError):  # not all of them are known any more
        z.sum()


def test_a_write_past_the_record_of_changes_is_not_seen():
    _, head, _ = linear_head()
    z, kept = head(hidden()), head(hidden())
    before = kept.computed()
    head.weight.data.mul_(2)
    assert torch.equal(kept, before)
    close(z.computed(), 2 * before)


def test_weights_and_hidden_states_written_by_hand():
    _, head, _ = linear_head()
    h = hidden()
    z = head(h)
    with torch.no_grad():
        head.weight.mul_(2)
    with pytest.raises(LateReadError, match="weights"):
        z.sum()
    h = hidden() * 1
    z = head(h)
    h.mul_(2)
    with pytest.raises(LateReadError, match="hidden states"):
        z.sum()


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "afterwards"])
@pytest.mark.parametrize("chain", [*CHAINS, "mT"])
def test_no_operation_computes_logits_of_inference_mode(chain, inside):
    plain, head, counts = linear_head(bias=True)
    apply = {**CHAINS, "mT": lambda z: z.mT.mT}[chain]
    with torch.inference_mode():
        h = hidden()
        z, right = head(h), plain(h)
    with torch.inference_mode(inside):
        ours, theirs = apply(z), apply(right)
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        target = targets(*theirs.shape[:-1]).flatten()
        loss = F.cross_entropy(ours.float().contiguous().flatten(0, -2), target)
        assert not counts, "the logits were computed"
        close(loss, F.cross_entropy(theirs.flatten(0, -2).float(), target))


def test_inference_mode():
    plain, head, counts = linear_head()
    with torch.inference_mode():
        h = hidden()
        z = head(h)
        close(
            F.cross_entropy(z.view(-1, VOCAB), targets().view(-1)),
            F.cross_entropy(plain(h).view(-1, VOCAB), targets().view(-1)),
        )
        assert not counts
    assert torch.equal(z + 0, plain(h.clone()))
