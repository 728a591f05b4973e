"""Heads that others wrap: PEFT, accelerate, DDP, FSDP, and hooks that gather weights as ZeRO does."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from heads import VOCAB, assert_same_gradients, batch, bind_head, linear_head, pair, small

from liger_registry.errors import AdapterError, LateReadError
from liger_registry.transformers.engine.binding import Binding
from liger_registry.transformers.engine.deferred import DeferredLogits
from liger_registry.transformers.engine.head import find_head

HELPERS = Path(__file__).parents[1] / "helpers"


def both(plain, bound, **inputs):
    found = []
    for model in (plain, bound):
        torch.manual_seed(3)
        output = model(**inputs)
        output.loss.backward()
        found.append(output)
    torch.testing.assert_close(found[1].loss, found[0].loss, rtol=1e-5, atol=1e-6)
    assert_same_gradients(bound, plain)
    return found[1]


# -- PEFT -------------------------------------------------------------------------------------------------------------

ADAPTERS = {
    "elsewhere": {"target_modules": ["q_proj", "v_proj"]},
    "on the head": {"target_modules": ["q_proj", "lm_head"]},
    "a copy of the head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "on the weight of the head": {"target_modules": ["q_proj"], "target_parameters": ["lm_head.weight"]},
    "some tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 4]}},
}
# Where what is added to logits, or to the weight before the first call, makes the loss need the real ones.
UNFUSED = {("on the head", "before"), ("on the head", "after"), ("on the weight of the head", "after")}


@pytest.mark.filterwarnings("ignore")  # PEFT warns of tied heads, and transformers of what PEFT asks it
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bound_when", ["before", "after"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_peft(name, bound_when, tied):
    peft = pytest.importorskip("peft")
    plain = small(tie_word_embeddings=tied)
    bound, counts = copy.deepcopy(plain), None
    if bound_when == "before":
        counts = bind_head(bound)
    wrapped = []
    for model in (plain, bound):
        torch.manual_seed(7)
        config = peft.LoraConfig(r=2, init_lora_weights=False, **ADAPTERS[name])
        wrapped.append(peft.get_peft_model(model, config).train())
    plain, bound = wrapped
    if bound_when == "after":
        found = find_head(bound, fused_linear_cross_entropy=True, cross_entropy=False)
        if any(isinstance(item, Binding) for item in found):
            counts = bind_head(bound)
        else:
            assert all(not row.applied and row.reason for row in found)
            assert (name, bound_when) in UNFUSED or (name, tied) == ("some tokens", True)
    both(plain, bound, **batch())
    if (name, bound_when) not in UNFUSED:
        assert not counts
    elif bound_when == "before":
        assert sum(counts.values()) == 1
        assert "peft" in next(iter(counts))


# -- hooks ------------------------------------------------------------------------------------------------------------


class Before(torch.autograd.Function):
    """An output, whose backward runs something first."""

    @staticmethod
    def forward(ctx, run, output):
        ctx.run = run
        return output.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.run()
        return None, grad


class After(Before):
    """An input, whose backward runs something last."""


class Partitioned:
    """Takes the weight away, and gives it back for the head's forward and backward, as ZeRO's third stage does."""

    def __init__(self, head):
        self.weight, self.whole, self.log = head.weight, head.weight.data, []
        head.register_forward_pre_hook(self.before_forward)
        head.register_forward_hook(self.after_forward)
        self.release()

    def gather(self):
        self.weight.data = self.whole
        self.log.append("gather")

    def release(self):
        self.weight.data = self.whole.new_empty(0)
        self.log.append("release")

    def before_forward(self, head, args):
        self.gather()
        return tuple(After.apply(self.release, a) for a in args)

    def after_forward(self, head, args, output):
        if not torch.is_grad_enabled():
            self.release()
            return output
        output = Before.apply(self.gather, output)
        self.release()
        return output


@pytest.mark.parametrize("read", ["loss", "logits", "both"])
def test_weights_that_are_gathered_by_hooks(read):
    plain, bound, counts = pair()
    shards = Partitioned(bound.lm_head)
    inputs = batch()
    for model in (plain, bound):
        output = model(**inputs)
        assert model is plain or shards.weight.numel() == 0
        value = output.loss if read != "logits" else 0.0
        if read != "loss":
            value = value + output.logits.float().logsumexp(-1).square().mean()
        value.backward()
    assert shards.weight.numel() == 0, "it was not released"
    shards.gather()
    assert_same_gradients(bound, plain)
    assert sum(counts.values()) == (read != "loss")


def test_weights_that_nobody_gathers_are_a_named_error():
    _, head, _ = linear_head()
    z = head(torch.randn(2, 5, 8))
    head.weight.data = torch.empty(0)
    with pytest.raises(LateReadError, match="have been freed"):
        z.sum()


def test_a_forward_that_was_replaced_is_a_named_error():
    _, head, _ = linear_head()
    z = head(torch.randn(2, 5, 8))
    head.forward = lambda x: x
    with pytest.raises(AdapterError, match=r"no longer reaches the forward(.|\n)*revert"):
        z.sum()


def test_hooks_of_users():
    """Hooks that keep outputs see logits, those that change inputs or outputs do so once."""
    plain, bound, counts = pair()
    seen = []
    for model in (plain, bound):
        model.lm_head.register_forward_pre_hook(lambda head, args: (args[0] * 0.5,))
        model.lm_head.register_forward_hook(lambda head, args, output: output * 3.0)
        model.lm_head.register_forward_hook(lambda head, args, output: seen.append(output))
    inputs = batch()
    output = both(plain, bound, **inputs)
    assert not counts
    expected = plain(**inputs).logits
    assert torch.equal(output.logits, expected)
    assert len(seen) == 3 + 1 + 1  # the plain model's, the bound one's and its loss's; computing them; and again
    torch.testing.assert_close(seen[1].computed(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(seen[2].computed().view_as(expected), expected, rtol=1e-5, atol=1e-5)


def test_a_hook_that_needs_the_logits_gets_them():
    plain, bound, counts = pair()
    for model in (plain, bound):
        model.lm_head.register_forward_hook(lambda head, args, output: output.softmax(-1).log())
    both(plain, bound, **batch())
    assert set(counts) == {f"{__file__}:{test_a_hook_that_needs_the_logits_gets_them.__code__.co_firstlineno + 3}"}


def test_gradient_hooks_of_wrappers_run_before_the_backward():
    plain, bound, counts = pair()
    order = []

    def pre_backward(grad):
        order.append(grad.shape)
        return grad

    pre_backward.__module__ = "torch.distributed.somewhere"
    bound.lm_head.register_forward_hook(lambda head, args, output: output.register_hook(pre_backward) and None)
    bound.lm_head.weight.register_hook(lambda grad: order.append("weight"))
    both(plain, bound, **batch())
    assert order == [(24, VOCAB), "weight"]
    assert not counts


# -- accelerate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound_when", ["before", "after"])
@pytest.mark.parametrize("offload", [False, True])
def test_accelerates_hooks(bound_when, offload):
    hooks = pytest.importorskip("accelerate.hooks")
    plain = small()
    bound, inputs = copy.deepcopy(plain), batch()
    counts = bind_head(bound) if bound_when == "before" else None
    weights = {name: tensor.clone() for name, tensor in bound.lm_head.state_dict().items()}
    hook = hooks.AlignDevicesHook("cpu", offload=offload, weights_map=weights if offload else None)
    hooks.add_hook_to_module(bound.lm_head, hook)
    counts = bind_head(bound) if bound_when == "after" else counts
    with torch.no_grad():
        expected, output = plain(**inputs), bound(**inputs)
        assert isinstance(output.logits, DeferredLogits)
        torch.testing.assert_close(output.loss, expected.loss)
        assert not counts
        assert torch.equal(output.logits, expected.logits)
    if not offload:
        both(plain, bound, **inputs)


def test_accelerator_with_mixed_precision():
    accelerate = pytest.importorskip("accelerate")
    plain, bound, counts = pair()
    accelerate.state.AcceleratorState._reset_state(True)  # one for the process, and a test before may have left its own
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    found = []
    for model in (plain, bound):
        model = accelerator.prepare(model)
        output = model(**batch())
        accelerator.backward(output.loss)
        found.append(output)
    assert not counts
    assert found[1].logits.dtype == found[0].logits.dtype == torch.float32
    torch.testing.assert_close(found[1].loss, found[0].loss, rtol=1e-3, atol=1e-3)
    assert_same_gradients(bound, plain, rtol=0.1)
    assert torch.equal(accelerator.gather_for_metrics(found[1].logits), found[0].logits)
    accelerate.state.AcceleratorState._reset_state(True)


def test_the_model_is_freed():
    _, bound, _ = pair()
    bound(**batch()).loss.backward()
    gone = weakref.ref(bound)
    del bound
    gc.collect()
    assert gone() is None


# -- ranks ------------------------------------------------------------------------------------------------------------


def ranks(tmp_path, kinds):
    path = os.pathsep.join([str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(HELPERS / "head_ranks.py")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meeting"), *kinds],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


# How, and whether the loss computes the logits.
WRAPPED = {
    "fsdp2:root": False,
    "fsdp2:head": False,
    "fsdp2:group": False,
    "fsdp2:resharded": False,
    "fsdp2:bf16": False,
    "fsdp2:head,own": False,
    "fsdp2:group,own": True,
    "fsdp2:resharded,own": True,
    "fsdp1:orig": False,
    "fsdp1:flat": False,
    "fsdp1:orig head": False,
    "fsdp1:flat head": False,
    "ddp:": False,
    "ddp:,own": False,
    "ddp:find_unused_parameters": False,
    "ddp:find_unused_parameters,own": True,
    "ddp:static_graph": False,
}


@pytest.mark.dist
@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["fsdp2", "fsdp1", "ddp"])
def test_two_ranks(tmp_path, name):
    kinds = [how for how in WRAPPED if how.startswith(name)]
    for found in ranks(tmp_path, kinds):
        assert list(found) == kinds
        for how, seen in found.items():
            for ours, theirs in seen["losses"]:
                assert ours == pytest.approx(theirs, rel=1e-3 if "bf16" in how else 1e-5), how
            assert all(ours == theirs for ours, theirs in seen["accuracy"]), how
            assert seen["gradients"][0] < (0.1 if "bf16" in how else 1e-4), how
            assert bool(seen["during"]) == WRAPPED[how], (how, seen["during"])
            assert seen["logits"] < 1e-2, how
            assert seen["through"] < (0.1 if "bf16" in how else 1e-3), how
