"""One model changes and nothing else does: not torch, not transformers, not another model; and it changes back."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import zoo
from torch import nn

from liger_registry.transformers import apply

TYPES = ["llama", "gemma2", "mixtral", "gpt2", "deepseek_v3"]
every_type = pytest.mark.parametrize("model_type", TYPES)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def code():
    """What torch.nn and transformers consist of now: modules, and the classes in them, attribute by attribute."""
    names = [
        name
        for name in sys.modules
        if name in ("torch.nn", "torch.nn.functional") or name.startswith(("torch.nn.modules.", "transformers."))
    ]
    # The objects, not their ids: what lives cannot have its id taken over.
    found = {}
    for name in names:
        if not isinstance(sys.modules[name], types.ModuleType):
            continue
        own = vars(sys.modules[name])
        found[name] = dict(own)
        for kind in own.values():
            if isinstance(kind, type) and kind.__module__ == name:
                found[f"{name}.{kind.__qualname__}"] = dict(vars(kind))
    return found


# Written by Python itself: caches of abstract classes, and what was looked up or annotated first.
PYTHONS = {"_abc_impl", "__abstractmethods__", "__annotations__", "__annotations_cache__", "__weakref__"}


def changed(before, after):
    """The attributes that are not the object they were, in what was there before."""
    return [
        f"{place}.{name}"
        for place, own in before.items()
        for name in own.keys() | after[place].keys()
        if name not in PYTHONS and own.get(name) is not after[place].get(name)
    ]


def outline(model):
    """For each module everything that its ``__dict__`` holds, and its tables of parameters, buffers and modules."""
    found = {}
    for path, module in model.named_modules():
        own = vars(module)
        found[path] = {
            **own,
            **{f"{n}.{k}": v for n, table in own.items() if isinstance(table, dict) for k, v in table.items()},
        }
    return found


def same_outline(one, other):
    return one.keys() == other.keys() and all(
        own.keys() == other[path].keys() and all(value is other[path][name] for name, value in own.items())
        for path, own in one.items()
    )


def step(model):
    """A loss and its gradients, as bits."""
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(**zoo.inputs(model)).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def equal(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def close(one, other):
    return len(one) == len(other) and all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(one, other, strict=True)
    )


def is_plain(model):
    return not any("forward" in vars(module) for module in model.modules()) and not any(
        type(value).__module__.startswith("liger_registry")
        for module in model.modules()
        for value in vars(module).values()
    )


def generate(model):
    ids = zoo.inputs(model)["input_ids"]
    return model.generate(ids, max_new_tokens=3, do_sample=False)


@every_type
def test_torch_and_transformers_are_the_same_objects(model_type):
    with zoo.quiet():
        apply(zoo.small_model(model_type)).revert()  # what is imported on first use is there now
        model = zoo.small_model(model_type)
        step(model)
        generate(model)
        before = code()
        assert nn.functional is torch.nn.functional
        handle = apply(model)
        assert changed(before, code()) == []
        step(model)
        generate(model)
        assert changed(before, code()) == []
        handle.revert()
        assert changed(before, code()) == []


def test_a_change_of_code_would_be_noticed(monkeypatch):
    model = zoo.small_model("llama")
    before = code()
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, x: x)
    monkeypatch.setattr(nn.functional, "silu", lambda x: x)
    found = changed(before, code())
    assert any("LlamaRMSNorm.forward" in name for name in found)
    assert "torch.nn.functional.silu" in found


@every_type
def test_a_plain_model_built_later_is_plain(model_type):
    with zoo.quiet():
        expected = step(zoo.small_model(model_type))
        patched = zoo.small_model(model_type)
        apply(patched)
        step(patched)
        later = zoo.small_model(model_type)
        assert is_plain(later)
        assert not is_plain(patched)
        assert equal(step(later), expected)


@every_type
def test_revert_restores_every_attribute(model_type):
    with zoo.quiet():
        model = zoo.small_model(model_type)
        before, keys, shown = outline(model), list(model.state_dict()), repr(model)
        handle = apply(model)
        assert not same_outline(before, outline(model))
        assert list(model.state_dict()) == keys
        assert repr(model) == shown
        handle.revert()
        assert same_outline(before, outline(model))
        assert is_plain(model)


@every_type
def test_revert_after_training_and_generating_restores_the_results(model_type):
    with zoo.quiet():
        model = zoo.small_model(model_type)
        expected = step(model)
        generate(model)
        model.zero_grad()
        before = outline(model)
        with apply(model):
            step(model)
            generate(model)
            model.zero_grad()
        assert same_outline(before, outline(model))
        assert equal(step(model), expected)


def test_two_models_of_a_class_differ_freely():
    with zoo.quiet():
        expected = step(zoo.small_model("llama"))
        full, norms, plain = (zoo.small_model("llama") for _ in range(3))
        first = apply(full)
        others = ("fused_linear_cross_entropy", "cross_entropy", "swiglu", "rope", "fused_add_rms_norm")
        second = apply(norms, **dict.fromkeys(others, False))
        assert {row.op for row in second.report if row.applied} == {"rms_norm"}
        assert {row.op for row in first.report if row.applied} > {"rms_norm", "swiglu", "rope"}
        assert all(close(step(model), expected) for model in (full, norms, plain))
        patched = step(norms)
        first.revert()
        assert is_plain(full)
        assert equal(step(full), expected)
        assert equal(step(norms), patched)
        assert not is_plain(norms)
        second.revert()
        assert is_plain(norms)
        assert is_plain(plain)


def test_models_of_different_types_do_not_meet():
    with zoo.quiet():
        llama, gemma = zoo.small_model("llama"), zoo.small_model("gemma2")
        expected = step(llama), step(gemma)
        handle = apply(llama)
        assert is_plain(gemma)
        assert equal(step(gemma), expected[1])
        other = apply(gemma)
        handle.revert()
        assert close(step(gemma), expected[1])
        assert equal(step(llama), expected[0])
        other.revert()
        assert equal(step(gemma), expected[1])
