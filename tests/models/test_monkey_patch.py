"""The names of liger-kernel over the engine: signatures, with a model and before there is one."""

from __future__ import annotations

import gc
import inspect
import pickle
import weakref

import pytest
import torch
import transformers
from torch import nn

import liger_registry.transformers as faces
from liger_registry.errors import AdapterError
from liger_registry.transformers import Adapter, AutoLigerKernelForCausalLM, Binding, applied_to, monkey_patch
from liger_registry.transformers.engine import adapters as module
from liger_registry.transformers.engine.adapters import Adapters

SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


class Norm:
    def __init__(self, owner):
        self.owner = owner

    def __call__(self, x):
        return type(self.owner).forward(self.owner, x)


def find(model, enabled):
    for path, part in model.named_modules():
        if type(part).__name__.endswith("RMSNorm") and enabled["rms_norm"]:
            yield Binding("rms_norm", path, part, "forward", Norm(part))


@pytest.fixture(autouse=True)
def known(monkeypatch):
    found = Adapters()
    found.register(Adapter("norms", ("rms_norm",), find))
    for op in ("rope", "swiglu", "geglu", "layer_norm", "relu_squared", "cross_entropy", "fused_linear_cross_entropy"):
        found.register(Adapter(op, (op,), lambda model, enabled: ()))
    monkeypatch.setattr(module, "_loaded", found)
    return found


def llama(**changes):
    return transformers.LlamaConfig(**{**SMALL, **changes})


def count(model):
    return sum("forward" in part.__dict__ for part in model.modules())


def original():
    return transformers.PreTrainedModel.__dict__["post_init"]


@pytest.mark.parametrize("name", sorted(monkey_patch.FUNCTIONS))
def test_every_function_takes_what_liger_kernel_s_takes(name):
    function = getattr(faces, f"apply_liger_kernel_to_{name}")
    assert function.__name__ == f"apply_liger_kernel_to_{name}"
    parameters = inspect.signature(function).parameters
    assert parameters["model"].default is None
    for word in ("rope", "rms_norm", "swiglu", "geglu", "layer_norm", "cross_entropy", "fused_linear_cross_entropy"):
        if word in parameters:
            assert parameters[word].default in (True, False)
    assert pickle.loads(pickle.dumps(function)) is function


def test_orders_and_defaults_that_users_rely_on():
    assert list(inspect.signature(faces.apply_liger_kernel_to_llama).parameters) == [
        "rope",
        "cross_entropy",
        "fused_linear_cross_entropy",
        "rms_norm",
        "swiglu",
        "model",
    ]
    granite = inspect.signature(faces.apply_liger_kernel_to_granite).parameters
    assert granite["cross_entropy"].default is True
    assert granite["fused_linear_cross_entropy"].default is False
    assert list(inspect.signature(faces.apply_liger_kernel_to_llama4).parameters)[-1] == "layer_norm"
    assert "geglu" in inspect.signature(faces.apply_liger_kernel_to_gemma2).parameters


def test_the_list_of_types():
    assert len(monkey_patch.FUNCTIONS) == 45
    assert monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN["llama"] is faces.apply_liger_kernel_to_llama
    assert faces.MODEL_TYPE_TO_APPLY_LIGER_FN["qwen2_vl_text"] is faces.apply_liger_kernel_to_qwen2_vl
    with pytest.raises(AttributeError):
        _ = faces.apply_liger_kernel_to_nothing


def test_to_a_model():
    model = transformers.LlamaForCausalLM(llama())
    applied = faces.apply_liger_kernel_to_llama(model=model)
    assert count(model) == 3
    applied.revert()
    assert count(model) == 0
    faces.apply_liger_kernel_to_llama(rms_norm=False, model=model)
    assert count(model) == 0


def test_a_setting_of_none_is_off_as_it_is_for_liger_kernel():
    model = transformers.LlamaForCausalLM(llama())
    faces.apply_liger_kernel_to_llama(rms_norm=None, rope=None, model=model)
    assert count(model) == 0
    assert {"rms_norm", "rope", "cross_entropy"} == applied_to(model).left_out


def test_calls_add_up():
    model = AutoLigerKernelForCausalLM.from_config(llama())
    first = applied_to(model)
    assert faces._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False) is first
    assert faces.apply_liger_kernel_to_llama(model=model) is first
    with pytest.raises(AdapterError, match="already"):
        faces._apply_liger_kernel_to_instance(model=model, nonsense=True)
    assert applied_to(model) is first
    first.revert()
    faces.apply_liger_kernel_to_llama(rms_norm=False, swiglu=False, model=model)
    assert count(model) == 0
    second = faces.apply_liger_kernel_to_llama(rope=False, swiglu=False, model=model)
    assert count(model) == 3
    assert applied_to(model) is second
    assert second.left_out == {"swiglu", "cross_entropy"}
    second.revert()
    assert count(model) == 0


def test_both_losses_are_refused():
    with pytest.raises(AdapterError, match="cannot both"):
        faces.apply_liger_kernel_to_llama(cross_entropy=True)
    with pytest.raises(TypeError):
        faces.apply_liger_kernel_to_llama(geglu=True)


def test_before_the_model_exists_until_reverted():
    before = original()
    armed = faces.apply_liger_kernel_to_llama()
    try:
        assert original() is not before
        model = transformers.AutoModelForCausalLM.from_config(llama())
        assert count(model) == 3
        assert applied_to(model) is not None
        assert applied_to(model.model) is None  # what was applied while it was built was taken back
        assert [row.op for row in armed.report.applied()][1:] == ["rms_norm"] * 3
        assert "PreTrainedModel.post_init" in armed.report.rows[0].reason
        assert count(transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL))) == 0
    finally:
        armed.revert()
    assert original() is before
    assert count(transformers.LlamaForCausalLM(llama())) == 0
    assert count(model) == 3


def test_models_that_were_built_are_not_kept_alive():
    with faces.apply_liger_kernel_to_llama() as armed:
        model = weakref.ref(transformers.LlamaForCausalLM(llama()))
        gc.collect()
        assert model() is None
        assert armed.report.applied("rms_norm")


def test_a_part_that_the_user_applied_to_stays_theirs():
    with faces.apply_liger_kernel_to_mistral():
        inner = transformers.LlamaModel(llama())
        theirs = faces.apply(inner, rms_norm=False)
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL))
        model.extra = inner
    assert applied_to(inner) is theirs


def test_two_types_armed_at_once_end_apart():
    before = original()
    one, two = faces.apply_liger_kernel_to_llama(), faces.apply_liger_kernel_to_mistral(rms_norm=False)
    one.revert()
    assert original() is not before
    assert count(transformers.LlamaForCausalLM(llama())) == 0
    two.revert()
    two.revert()
    assert original() is before


def test_a_hook_that_was_wrapped_stays_and_does_nothing(monkeypatch):
    armed = faces.apply_liger_kernel_to_llama()
    ours = original()
    monkeypatch.setattr(transformers.PreTrainedModel, "post_init", lambda self: ours(self))
    armed.revert()
    assert count(transformers.LlamaForCausalLM(llama())) == 0
    again = faces.apply_liger_kernel_to_llama()
    assert count(transformers.LlamaForCausalLM(llama())) == 3
    again.revert()
    monkeypatch.undo()
    # The wrapper is gone: what it held goes with the next revert.
    faces.apply_liger_kernel_to_llama().revert()
    assert original() is not ours


def test_the_auto_class(tmp_path):
    model = AutoLigerKernelForCausalLM.from_config(llama(), rope=False)
    assert count(model) == 3
    assert type(model) is transformers.LlamaForCausalLM
    model.save_pretrained(tmp_path)
    loaded = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, rms_norm=True)
    assert count(loaded) == 3
    assert loaded.dtype is torch.bfloat16
    plain = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, rms_norm=False)
    assert count(plain) == 0
    ids = torch.arange(5)[None]
    assert torch.equal(plain(ids).logits, model(ids).logits)


def test_the_auto_class_takes_types_that_have_no_function():
    config = transformers.StableLmConfig(**SMALL)
    assert "stablelm" not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    assert isinstance(AutoLigerKernelForCausalLM.from_config(config), nn.Module)


def test_what_the_trainer_calls():
    model = transformers.LlamaForCausalLM(llama())
    assert faces._apply_liger_kernel_to_instance(model=model, rms_norm=True, geglu=True) is applied_to(model)
    assert count(model) == 3
    with pytest.warns(UserWarning, match="model_type"):
        assert faces._apply_liger_kernel_to_instance(nn.Linear(2, 2)) is None
    plain = transformers.LlamaForCausalLM(llama())
    with pytest.raises(AdapterError, match="nonsense"):
        faces._apply_liger_kernel_to_instance(plain, nonsense=True)
    with pytest.raises(AdapterError, match="swiglu"):  # asked for strictly where nothing is found
        faces._apply_liger_kernel_to_instance(plain, rope=False, strict=True, swiglu=True)
    armed = faces._apply_liger_kernel("llama", rms_norm=False)
    assert count(transformers.LlamaForCausalLM(llama())) == 0
    armed.revert()
    assert faces._apply_liger_kernel("") is None
