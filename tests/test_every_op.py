"""Promises that hold for every operation: whose memory may be written, which gradients are computed, what a transform
or a second backward does, and that each declared option counts. Right values come from float64 PyTorch."""

from __future__ import annotations

import copy
import itertools
import pickle

import every_op
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from liger_registry import registry
from liger_registry.errors import RegistryError, UnsupportedTransformError

ONE = every_op.calls()
ALL = every_op.calls(every=True)
HALF = every_op.calls("bfloat16", every=True)
OPS = every_op.public_ops()


def close(mine, right, inputs=()):
    """Within some ulps of the narrowest dtype that took part."""
    for a, b in zip(mine, right, strict=True):
        if a is None or b is None:
            assert a is None or not a.any()
            assert b is None or not b.any()
            continue
        floats = [t.dtype for t in (a, b, *inputs) if t is not None and t.is_floating_point()]
        dtype = min(floats, key=lambda d: d.itemsize, default=torch.float32)
        if dtype != torch.float32 and not a.is_floating_point():
            continue  # the best of two logits that are equal in that dtype
        limit = (64 if dtype == torch.float32 else 8) * torch.finfo(dtype).eps
        torch.testing.assert_close(a.double(), b.double(), rtol=limit, atol=limit, equal_nan=True)


def wide(inputs):
    return tuple(
        t.detach().double().requires_grad_(t.requires_grad) if t is not None and t.is_floating_point() else t
        for t in inputs
    )


@pytest.mark.parametrize("call", ALL, ids=str)
def test_values_and_gradients(call):
    inputs = call.inputs()
    exact = wide(inputs)
    mine, right = call.run(inputs), call.right(exact)
    close([y.detach() for y in mine], [y.detach() for y in right])
    close(every_op.gradients(call, mine, inputs), every_op.gradients(call, right, exact))


@pytest.mark.parametrize("call", ALL, ids=str)
def test_only_what_may_be_written_is_written(call):
    inputs = call.inputs()
    before = [None if t is None else t.detach().clone() for t in inputs]
    outputs = call.run(inputs)
    kept = [y.detach().clone() for y in outputs]
    roots = call.differentiable_outputs(outputs)
    grads = [torch.rand_like(y) for y in roots]
    copies = [g.clone() for g in grads]
    leaves = [t for t in inputs if t is not None and t.requires_grad]
    torch.autograd.grad(roots, leaves, grads, allow_unused=True)
    allowed = {name for name, option in call.op.overwrites.items() if call.options[option]}
    for spec, tensor, old in zip(call.op.inputs, inputs, before, strict=True):
        assert tensor is None or spec.name in allowed or torch.equal(tensor, old), spec.name
    assert all(torch.equal(a, b) for a, b in zip(grads, copies, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(outputs, kept, strict=True))


@pytest.mark.parametrize("call", ONE, ids=str)
def test_views_of_a_flat_buffer_and_what_lies_beside_them(call):
    whole = call.inputs(needs=False)
    buffers, views = [], []
    for tensor in whole:
        if tensor is None:
            views.append(None)
            continue
        buffer = torch.full((tensor.numel() + 14,), 77, dtype=tensor.dtype)
        buffer[7:-7] = tensor.reshape(-1)
        buffers.append(buffer)
        views.append(buffer[7:-7].view(tensor.shape))
    names = [i.name for i in call.op.inputs]
    needed = dict(zip(call.op.differentiable, call.op.needs(call.problem), strict=True))
    leaves = [v if v is None or not needed.get(n) else v.requires_grad_() for n, v in zip(names, views, strict=True)]
    outputs = call.run(leaves)
    inputs = call.inputs()
    assert all(torch.equal(a, b) for a, b in zip(outputs, call.run(inputs), strict=True))
    every_op.gradients(call, outputs, leaves)
    for buffer in buffers:
        assert (buffer[:7] == 77).all()
        assert (buffer[-7:] == 77).all()


@pytest.mark.parametrize("call", ALL, ids=str)
def test_backward_twice_gives_equal_gradients(call):
    if any(call.options[option] for option in call.op.overwrites.values()):
        inputs = call.inputs()
        outputs = call.run(inputs)
        every_op.gradients(call, outputs, inputs, retain=True)
        with pytest.raises((UnsupportedTransformError, RuntimeError)):
            every_op.gradients(call, outputs, inputs)
        return
    inputs = call.inputs()
    outputs = call.run(inputs)
    first = [None if g is None else g.clone() for g in every_op.gradients(call, outputs, inputs, retain=True)]
    for _ in range(2):
        again = every_op.gradients(call, outputs, inputs, retain=True)
        for a, b in zip(first, again, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("call", ONE, ids=str)
def test_two_calls_on_the_same_tensors_add_their_gradients(call):
    inputs = call.inputs()
    leaves = [t for t in inputs if t is not None and t.requires_grad]
    single = every_op.gradients(call, call.run(inputs), inputs)
    for outputs in (call.run(inputs), call.run(inputs)):
        roots = call.differentiable_outputs(outputs)
        generator = torch.Generator().manual_seed(9)
        torch.autograd.backward(roots, [torch.rand(y.shape, generator=generator).to(y.dtype) + 0.5 for y in roots])
    for leaf, grad in zip(leaves, single, strict=True):
        if grad is not None:
            torch.testing.assert_close(leaf.grad, 2 * grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", ONE, ids=str)
def test_only_the_gradients_that_are_asked_for(call):
    names = [i.name for i in call.op.inputs if i.differentiable]
    there = [n for n, need in zip(call.op.differentiable, call.op.needs(call.problem), strict=True) if need]
    full = call.inputs()
    right = dict(zip(there, every_op.gradients(call, call.run(full), full), strict=True))
    for count in range(1, len(there) + 1):
        for chosen in itertools.combinations(there, count):
            inputs = tuple(
                t if t is None or spec.name not in names else t.detach().requires_grad_(spec.name in chosen)
                for spec, t in zip(call.op.inputs, full, strict=True)
            )
            outputs = call.run(inputs)
            got = every_op.gradients(call, outputs, inputs)
            for name, grad in zip(chosen, got, strict=True):
                torch.testing.assert_close(grad, right[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", ALL, ids=str)
def test_without_gradients(call):
    inputs = call.inputs()
    right = call.run(inputs)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            outputs = call.run(inputs)
            assert not any(y.requires_grad for y in outputs)
            close(outputs, [y.detach() for y in right])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("call", ONE, ids=str)
def test_checkpointing(call, reentrant):
    inputs = call.inputs()
    right = every_op.gradients(call, call.run(inputs), inputs)
    again = call.inputs()
    outputs = checkpoint(lambda *tensors: call.run(tensors), *again, use_reentrant=reentrant)
    roots = call.differentiable_outputs(outputs)
    generator = torch.Generator().manual_seed(9)
    torch.autograd.backward(roots, [torch.rand(y.shape, generator=generator).to(y.dtype) + 0.5 for y in roots])
    leaves = [t for t in again if t is not None and t.requires_grad]
    close([leaf.grad for leaf in leaves], right)


@pytest.mark.parametrize("call", ONE, ids=str)
def test_transforms_are_refused_by_name(call):
    inputs = call.inputs()
    outputs = call.run(inputs)
    roots = call.differentiable_outputs(outputs)
    leaves = [t for t in inputs if t is not None and t.requires_grad]
    # Upstream gradients that ask for one too: of a linear operation nothing else depends on anything.
    upstream = [torch.ones_like(y).requires_grad_() for y in roots]
    grads = torch.autograd.grad(roots, leaves, upstream, create_graph=True, allow_unused=True)
    with pytest.raises(UnsupportedTransformError, match="double backward"):
        sum(g.sum() for g in grads if g is not None).backward()
    first = next(n for n, t in enumerate(inputs) if t is not None and t.requires_grad)

    def alone(tensor):
        return call.run((*inputs[:first], tensor, *inputs[first + 1 :]))[0]

    with pytest.raises(UnsupportedTransformError, match="vmap"):
        torch.func.vmap(alone)(inputs[first].detach().expand(2, *inputs[first].shape))
    with pytest.raises(UnsupportedTransformError, match="jvp"):
        torch.func.jvp(alone, (inputs[first].detach(),), (torch.ones_like(inputs[first]),))


@pytest.mark.parametrize("call", ONE, ids=str)
def test_compiled_in_one_graph(call):
    def step(*tensors):
        return call.run(tensors)

    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    inputs, again = call.inputs(), call.inputs()
    mine, right = compiled(*again), step(*inputs)
    close([y.detach() for y in mine], [y.detach() for y in right])
    close(every_op.gradients(call, mine, again), every_op.gradients(call, right, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("call", ALL, ids=str)
def test_compiled_by_inductor(call):
    def step(*tensors):
        return call.run(tensors)

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True)
    inputs, again = call.inputs(), call.inputs()
    mine, right = compiled(*again), step(*inputs)
    close([y.detach() for y in mine], [y.detach() for y in right])
    if not any(call.options[option] for option in call.op.overwrites.values()):
        close(every_op.gradients(call, mine, again), every_op.gradients(call, right, inputs))


@pytest.mark.parametrize("call", ONE, ids=str)
def test_library_operators(call):
    registry.get(call.op.name)
    for number, scheme in enumerate(call.op.schemes):
        if scheme not in call.op.schemes_for(call.options):
            continue
        name = f"{call.op.name}_forward" if number == 0 else f"{call.op.name}_{scheme.name}_forward"
        inputs = call.inputs()
        needs = [[t is not None and t.requires_grad for t in inputs]] if scheme.gradients else []
        arguments = (*inputs, *call.options.values(), *needs, "")
        torch.library.opcheck(getattr(torch.ops.liger_registry, name), arguments)


class Seen(TorchDispatchMode):
    """The names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("call", ALL, ids=str)
def test_no_value_is_read_by_the_host(call):
    """A read of a value is a synchronisation on a GPU; dropping ignored tokens is the one exemption."""
    inputs = call.inputs()
    changes = {"compact": "off"} if "compact" in call.options else {}
    handle = registry.get(call.op.name)
    call.run(inputs, **changes)
    entry = handle._memo[next(reversed(handle._memo))]
    with Seen() as seen, torch.no_grad():
        results = entry.run_forward(inputs)
    scheme_saved = results[entry.outputs :]
    outputs = results[: entry.outputs]
    grads = [
        None if y is None or not y.is_floating_point() or name in call.op.constant else torch.ones_like(y)
        for name, y in zip(call.op.outputs, outputs, strict=True)
    ]
    saved_outputs = [outputs[i] for i in entry.special.saved_outputs] if entry.special else []
    with seen, torch.no_grad():
        entry.run_backward(*grads, *[inputs[i] for i in entry.saved_inputs], *saved_outputs, *scheme_saved)
    reads = [
        n
        for n in seen.names
        if any(bad in n for bad in ("_local_scalar_dense", "nonzero", "aten.equal.", "is_nonzero"))
    ]
    assert not reads


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_option_changes_the_result_or_raises(op):
    """None is accepted and dropped; ``in_place`` and ``compact`` concern memory and time alone, by contract."""
    memory_alone = {"in_place", "compact", "accumulate"}
    variants = [c for c in (*ALL, *HALF) if c.op is op]
    for option in op.options:
        if option.name in memory_alone:
            continue
        others = option.choices or (
            (not option.default,)
            if option.kind is bool
            else (option.default * 2 + 0.37,)
            if option.kind is float
            else (2, 3)
        )
        changed = False
        for call, value in itertools.product(variants, others):
            if value == call.options[option.name]:
                continue
            inputs = call.inputs()
            options = {**call.options, option.name: value}
            try:
                mine = registry.get(op.name)(*inputs, **options)
            except RegistryError:
                changed = True
                continue
            mine = mine if isinstance(mine, tuple) else (mine,)
            base = call.run(inputs)
            if len(mine) != len(base) or any(
                a.shape != b.shape or not torch.equal(a, b) for a, b in zip(mine, base, strict=True)
            ):
                changed = True
                right = op.reference(*wide(inputs), **options)
                close(
                    [y.detach() for y in mine],
                    [y.detach() for y in (right if isinstance(right, tuple) else (right,))],
                    inputs,
                )
        assert changed, option.name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("call", [*every_op.calls(), *every_op.calls("bfloat16"), *every_op.calls("float16")], ids=str)
def test_autocast_gives_a_defined_result(call, dtype):
    """Inputs of linear layers are cast as autocast casts them; everything else is what it is without autocast."""
    inputs = call.inputs()
    with torch.autocast("cpu", dtype):
        mine = call.run(inputs)
    cast = tuple(
        t.detach().to(dtype).requires_grad_(t.requires_grad) if t is not None and spec.name in call.op.autocast else t
        for spec, t in zip(call.op.inputs, inputs, strict=True)
    )
    right = call.run(cast)
    for a, b in zip(mine, right, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    grads = every_op.gradients(call, mine, inputs)
    assert all(g is None or g.isfinite().all() for g in grads)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_handles_are_copied_and_pickled_as_themselves(op):
    handle = registry.get(op.name)
    assert copy.deepcopy(handle) is handle
    assert pickle.loads(pickle.dumps(handle)) is handle


@pytest.mark.parametrize("call", ONE, ids=str)
@pytest.mark.parametrize("change", ["sparse", "meta"])
def test_tensors_that_are_no_plain_ones_are_refused_after_a_call_of_their_shapes(call, change):
    inputs = call.inputs(needs=False)
    call.run(inputs)
    given = [n for n, tensor in enumerate(inputs) if tensor is not None]
    for n in given:
        if change == "meta" and len(given) == 1:
            continue
        odd = inputs[n].to("meta") if change == "meta" else inputs[n].to_sparse()
        with pytest.raises(RegistryError, match="different devices" if change == "meta" else "no dense tensor"):
            call.run((*inputs[:n], odd, *inputs[n + 1 :]))


@pytest.mark.parametrize("call", [call for call in ONE if call.op.autocast], ids=str)
def test_a_call_of_meta_tensors_alone_has_the_shapes(call):
    inputs = call.inputs(needs=False)
    found = call.run(tuple(t if t is None else t.to("meta") for t in inputs))
    assert [y.shape for y in found] == [y.shape for y in call.run(inputs)]
