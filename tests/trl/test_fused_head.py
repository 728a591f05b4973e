"""TRL's fused head served from ``linear_logp``: the same fields, values and gradients as TRL's own."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, LlamaConfig, Qwen3Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

pytest.importorskip("trl", reason="TRL needs Python 3.11")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.trainer import utils
    from trl.trainer.utils import add_fused_lm_head

from liger_registry.errors import AdapterError
from liger_registry.transformers import AppliedToTRL, _handles, apply, apply_to_trl, trl

ALL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}
#: What the trainers of TRL ask for.
ASKED = {
    "sft": {"outputs": ("log_probs", "entropy", "is_top1")},
    "dpo": {"outputs": ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")},
    "kto": {"outputs": ("log_probs", "entropy", "mean_logits")},
    "grpo": {"outputs": ("log_probs", "entropy"), "temperature": 0.7, "cast_lm_head_to_fp32": True},
    "reference": {},
}


def counted(monkeypatch):
    """The operations that are called, in order."""
    seen = []

    class Handles(dict):
        def get(self, op):
            seen.append(op)
            return super().get(op)

    monkeypatch.setattr(_handles, "_handles", Handles())
    return seen


def near(mine, theirs, tolerance):
    """Equal within a tolerance of the size of the whole."""
    assert mine.dtype == theirs.dtype
    assert mine.shape == theirs.shape
    if mine.dtype == torch.bool:
        assert torch.equal(mine, theirs)
    else:
        error = (mine - theirs).double().norm().item()
        assert error <= tolerance * max(theirs.double().norm().item(), 1e-3 * math.sqrt(theirs.numel()))


def compare(mine, theirs, tolerance):
    """Fields that are there in both, or in neither."""
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        near(mine[name], value, tolerance[0] if isinstance(tolerance, tuple) else tolerance)


# -- the function -----------------------------------------------------------------------------------------------------


def inputs(dtype, bias, tokens=37):
    draw = torch.Generator().manual_seed(4)
    hidden = torch.randn(tokens, 24, generator=draw).to(dtype)
    weight = (torch.randn(VOCAB, 24, generator=draw) / 3).to(dtype)
    added = torch.randn(VOCAB, generator=draw).to(dtype) if bias else None
    return hidden, weight, added, torch.randint(VOCAB, (tokens,), generator=draw)


def ran(function, given, *options):
    """The fields, and the gradients by an upstream that differs from token to token, of both that have one."""
    leaves = [None if x is None else x.clone().requires_grad_() for x in given[:3]]
    fields = function.apply(*leaves, given[3], *options)
    upstream = torch.linspace(-1, 1, given[3].numel())
    total = (fields[0] * upstream).sum()
    if fields[1] is not None:
        total = total + (fields[1] * upstream.flip(0)).sum()
    total.backward()
    assert all(x is None or not x.requires_grad for x in fields[2:])
    return fields, [x.grad for x in leaves if x is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("softcap", "scale", "temperature"), [(None, 1.0, 1.0), (None, 0.5, 0.7), (4.0, 0.8, 1.3)])
def test_every_field_and_gradient(dtype, bias, softcap, scale, temperature):
    theirs = utils._ChunkedLogProbFunction
    given = inputs(dtype, bias)
    options = temperature, 16, softcap, scale, ALL
    right, right_grads = ran(theirs, given, *options)
    found, grads = ran(trl.Head(theirs), given, *options)
    tolerance = {torch.float32: 2e-6, torch.float64: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for name, mine, value in zip(("log_probs", *ALL), found, right, strict=True):
        if name != "is_top1":
            near(mine, value, tolerance)
        else:  # of logits that are rounded alike or almost so
            assert (mine != value).sum() <= (0 if dtype == torch.float32 else 1)
    for mine, value in zip(grads, right_grads, strict=True):
        near(mine, value, 2 * tolerance)


@pytest.mark.parametrize("asked", [(), *((name,) for name in ALL), ("log_probs", "is_top1", "entropy")], ids=str)
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_what_is_not_asked_for_is_none(asked, softcap):
    theirs = utils._ChunkedLogProbFunction
    given = inputs(torch.float32, False)
    right = theirs.apply(*given, 0.7, 16, softcap, 1.0, asked)
    found = trl.Head(theirs).apply(*given, 0.7, 16, softcap, 1.0, asked)
    for mine, value in zip(found, right, strict=True):
        assert (mine is None) == (value is None)
        if value is not None:
            near(mine, value, 2e-6)


def test_the_first_of_several_likeliest_tokens_counts():
    hidden, weight, _, _ = inputs(torch.float32, False, tokens=4)
    best = (hidden[0] @ weight.T).argmax()
    weight[best + 1 if best + 1 < VOCAB else best - 1] = weight[best]
    twins = sorted({int(best), int(best + 1 if best + 1 < VOCAB else best - 1)})
    for target, right in zip(twins, (True, False), strict=True):
        given = hidden[:1], weight, None, torch.tensor([target])
        options = 1.0, 16, None, 1.0, ("is_top1",)
        assert utils._ChunkedLogProbFunction.apply(*given, *options)[4].item() is right
        assert trl.Head(utils._ChunkedLogProbFunction).apply(*given, *options)[4].item() is right


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_it_computes_in_the_dtype_that_trl_does(dtype):
    given = inputs(torch.float32, True)
    with torch.autocast("cpu", dtype):
        right, right_grads = ran(utils._ChunkedLogProbFunction, given, 0.7, 16, None, 1.0, ("entropy", "mean_logits"))
        head = trl.Head(utils._ChunkedLogProbFunction)
        found, grads = ran(head, given, 0.7, 16, None, 1.0, ("entropy", "mean_logits"))
    exact, _ = ran(head, given, 0.7, 16, None, 1.0, ("entropy",))
    assert not torch.allclose(found[0], exact[0], rtol=1e-6)
    for mine, value in zip(found, right, strict=True):
        if value is not None:
            near(mine, value, 8e-3)
    for mine, value in zip(grads, right_grads, strict=True):
        near(mine, value, 1e-2)


def test_no_token_at_all_still_reaches_the_model():
    hidden, weight, bias, _ = inputs(torch.float32, True, tokens=0)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    found = trl.Head(utils._ChunkedLogProbFunction).apply(*leaves, torch.empty(0, dtype=torch.int64), 1.0, 16)
    assert all(x.shape == (0,) for x in found)
    found[0].sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in leaves)


def test_a_weight_that_zero_has_sharded_is_left_to_trl(monkeypatch):
    seen = counted(monkeypatch)
    hidden, weight, bias, target = inputs(torch.float32, True)
    weight.ds_status = "not available"
    options = 0.7, 16, None, 1.0, ALL
    found = trl.Head(utils._ChunkedLogProbFunction).apply(hidden, weight, bias, target, *options)
    right = utils._ChunkedLogProbFunction.apply(hidden, weight, bias, target, *options)
    assert all(map(torch.equal, found, right))
    assert not seen


# -- models -----------------------------------------------------------------------------------------------------------


def llama(**more):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more))


def gemma(**more):
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=3.0, attn_implementation="eager", **more))


def qwen(**more):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True, **more))


MODELS = {"llama": llama, "gemma": gemma, "tied": qwen}


def batch():
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (3, 13), generator=draw)
    labels = ids.masked_fill(torch.arange(13) < torch.tensor([[2], [5], [9]]), -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def step(model, **more):
    """Fields of one forward, and the gradients of what a policy's loss may be made of."""
    model.zero_grad()
    output = model(**batch(), **more, fused_lm_head=True)
    total = output.loss + (output.log_probs.exp() * torch.linspace(-1, 1, 12)).sum()
    if output.entropy is not None:
        total = total - 0.1 * output.entropy.sum()
    total.backward()
    fields = {name: value.detach() for name, value in output.items()}
    return fields, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(model, tolerance=3e-6, **more):
    """One model with TRL's own head, and the same with it served."""
    fields, grads = step(model, **more)
    with apply_to_trl(model) as handle:
        found, found_grads = step(model, **more)
    compare(found, fields, tolerance)
    compare(found_grads, grads, 3 * tolerance)
    again, _ = step(model, **more)
    assert all(torch.equal(again[name], value) for name, value in fields.items())
    return handle


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("make", MODELS)
def test_models_in_each_trainers_fields(make, asked, monkeypatch):
    model = MODELS[make]()
    add_fused_lm_head(model, **ASKED[asked])
    seen = counted(monkeypatch)
    handle = check(model)
    assert seen == ["linear_logp"]
    (row,) = handle.report
    assert (row.op, row.module, row.applied, row.kind) == ("linear_logp", "", True, type(model).__name__)
    assert ", ".join(ASKED[asked].get("outputs", ("log_probs",))) in row.reason


@pytest.mark.parametrize("asked", ["sft", "grpo"])
def test_models_in_bf16(asked):
    model = llama().bfloat16()
    add_fused_lm_head(model, **ASKED[asked])
    check(model, 1e-2)


def test_labels_that_are_shifted_already_and_the_count_of_items():
    model = llama()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    shifted = batch()["labels"].roll(-1, 1)[:, :12]

    def run():
        output = model(
            input_ids=batch()["input_ids"][:, :12], shift_labels=shifted, num_items_in_batch=7, fused_lm_head=True
        )
        return {name: value.detach() for name, value in output.items()}

    theirs = run()
    with apply_to_trl(model):
        compare(run(), theirs, 3e-6)


def test_all_labels_ignored():
    model = llama()
    add_fused_lm_head(model)
    with apply_to_trl(model):
        output = model(**{**batch(), "labels": torch.full((3, 13), -100)}, fused_lm_head=True)
        output.loss.backward()
    assert output.loss.item() == 0
    assert not output.log_probs.any()
    assert model.lm_head.weight.grad is not None
    assert not model.lm_head.weight.grad.any()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("asked", ["sft", "grpo"])
def test_under_peft(asked):
    peft = pytest.importorskip("peft")
    model = llama()
    add_fused_lm_head(model, **ASKED[asked])
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    handle = check(wrapped)
    (row,) = handle.report
    assert (row.module, row.kind) == ("base_model.model", "LlamaForCausalLM")
    _, grads = step(wrapped)
    assert len(grads) == 4


@pytest.fixture(name="accelerate")
def accelerate_fixture():
    """accelerate, which keeps one state a process, without what others left there and with nothing left to them."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    yield accelerate
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_accelerate_has_prepared(accelerate):
    """Its forward is under two wrappers by then, as that of a reference model is when a trainer is made."""
    model = llama()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    wrapper = prepared.__dict__["forward"]
    assert wrapper.__func__.__code__.co_name != "_fused_forward"
    check(prepared, 1e-2)
    assert prepared.__dict__["forward"] is wrapper
    # And one that is prepared while it is served, and reverted afterwards.
    other = llama()
    add_fused_lm_head(other)
    handle = apply_to_trl(other)
    prepared = accelerator.prepare_model(other)
    handle.revert()
    assert apply_to_trl(prepared).report.applied("linear_logp")


@pytest.mark.parametrize("order", ["before", "between", "after"])
def test_beside_an_application_to_the_layers(order):
    right, plain = llama(), llama()
    add_fused_lm_head(plain, **ASKED["sft"])
    fields, grads = step(plain)
    if order == "before":
        applied = apply(right)
    add_fused_lm_head(right, **ASKED["sft"])
    if order == "between":
        applied = apply(right)
    handle = apply_to_trl(right)
    if order == "after":
        applied = apply(right)
    found, found_grads = step(right)
    compare(found, fields, 1e-5)
    compare(found_grads, grads, 1e-4)
    assert applied.report.applied("rms_norm")
    with torch.no_grad():
        torch.testing.assert_close(right(**batch()).loss, plain(**batch()).loss)
        torch.testing.assert_close(right(**batch()).logits + 0, plain(**batch()).logits)
    assert handle.report.applied("linear_logp")


def test_generation_and_the_signature_stay():
    model = llama()
    add_fused_lm_head(model)
    ids = batch()["input_ids"][:, :4]
    asked = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    theirs, signature = model.generate(ids, **asked), inspect.signature(model.forward)
    with apply_to_trl(model):
        assert inspect.signature(model.forward) == signature
        assert torch.equal(model.generate(ids, **asked), theirs)


def test_a_copy_is_served_with_its_own_weights():
    model = llama()
    add_fused_lm_head(model)
    apply_to_trl(model)
    other = copy.deepcopy(model)
    torch.nn.init.normal_(other.lm_head.weight)
    plain = llama()
    plain.load_state_dict(other.state_dict())
    add_fused_lm_head(plain)
    compare(step(other)[0], step(plain)[0], 3e-6)


def test_all_models_of_a_trainer_and_nothing_else():
    policy, reference = llama(), gemma()
    for model in (policy, reference):
        add_fused_lm_head(model)
    before = utils._ChunkedLogProbFunction, dict(vars(utils)), LlamaForCausalLM.forward
    trainer = SimpleNamespace(model=policy, model_wrapped=policy, ref_model=reference, args=None, head=nn.Linear(2, 2))
    handle = apply_to_trl(trainer)
    assert isinstance(handle, AppliedToTRL)
    assert [(row.module, row.applied) for row in handle.report] == [("model", True), ("ref_model", True)]
    assert before == (utils._ChunkedLogProbFunction, dict(vars(utils)), LlamaForCausalLM.forward)
    assert "linear_logp" in repr(handle)
    with pytest.raises(AdapterError, match="applied to already"):
        apply_to_trl(trainer)
    handle.revert()
    handle.revert()
    assert all(trl.is_fused_forward(model.forward.__func__) for model in (policy, reference))


def test_nothing_to_serve():
    for nothing in (llama(), SimpleNamespace(model=nn.Linear(2, 2))):
        with pytest.raises(AdapterError, match="no fused head of TRL's"):
            apply_to_trl(nothing)


def test_another_function_of_trls_is_not_taken_for_this_one(monkeypatch):
    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            return (*(2 * x for x in kept.apply(*given)[:4]), kept.apply(*given)[4])

    kept = utils._ChunkedLogProbFunction
    model = llama()
    add_fused_lm_head(model)
    before = model.forward
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Other)
    handle = apply_to_trl(model)
    assert [row.applied for row in handle.report] == [False]
    assert "computes something else" in handle.report.rows[0].reason
    assert model.forward == before
    with pytest.raises(AdapterError, match="computes something else"):
        apply_to_trl(model, strict=True)


def test_a_head_that_zero_has_sharded_is_reported():
    model = llama()
    add_fused_lm_head(model)
    model.lm_head.weight.ds_status = "not available"
    (row,) = apply_to_trl(model).report
    assert (row.applied, row.reason) == (False, "ZeRO-3 gathers the head for TRL's function alone")


@pytest.mark.ci
def test_compiled():
    """One graph with the operation in it, as there is one with TRL's function."""
    model = llama()
    add_fused_lm_head(model, **ASKED["sft"])
    fields, grads = step(model)
    apply_to_trl(model)
    compiled = torch.compile(model, backend="aot_eager")
    model.zero_grad()
    output = compiled(**batch(), fused_lm_head=True)
    (output.loss + (output.log_probs.exp() * torch.linspace(-1, 1, 12)).sum() - 0.1 * output.entropy.sum()).backward()
    compare({name: value.detach() for name, value in output.items()}, fields, 3e-6)
    compare({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, grads, 1e-5)
