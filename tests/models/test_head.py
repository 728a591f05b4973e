"""The bound head of whole models: the same numbers, without logits; and the model stays what it was."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from heads import VOCAB, Sizes, assert_same_gradients, batch, bind_head, gradients, pair, small
from torch import nn
from torch.nn import functional as F

from liger_registry.errors import LateReadError
from liger_registry.transformers.engine.binding import Binding, bind, unbind
from liger_registry.transformers.engine.deferred import DeferredLogits
from liger_registry.transformers.engine.head import find, find_head

# Model types and what is special about them.
FAMILIES = {
    "llama": {},
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "gemma2": {},  # a cap
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "phi": {},  # a head with a bias
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},  # .contiguous()
    "bert": {"is_decoder": True},  # a head deeper inside
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},  # losses besides
}


def family(name, **changes):
    options = dict(FAMILIES[name])
    return options.pop("model_type", name), {**options, **changes}


def step(model, **inputs):
    torch.manual_seed(3)
    output = model(**inputs)
    output.loss.backward()
    return output


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_gradients_and_logits_are_the_models_own(name):
    model_type, options = family(name)
    plain, bound, counts = pair(model_type, **options)
    inputs = batch()
    expected, output = step(plain, **inputs), step(bound, **inputs)
    assert isinstance(output.logits, DeferredLogits)
    assert not counts, "the loss computed the logits"
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert_same_gradients(bound, plain)
    assert torch.equal(output.logits, expected.logits)
    assert (output.logits.shape, output.logits.dtype) == (expected.logits.shape, expected.logits.dtype)
    assert sum(counts.values()) == 1


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bf16_models(name):
    plain, bound, counts = pair(name)
    plain, bound, inputs = plain.bfloat16(), bound.bfloat16(), batch()
    expected, output = step(plain, **inputs), step(bound, **inputs)
    assert not counts
    assert output.loss.dtype == expected.loss.dtype
    torch.testing.assert_close(output.loss, expected.loss, rtol=2e-3, atol=1e-3)
    assert_same_gradients(bound, plain, rtol=0.1)
    assert torch.equal(output.logits, expected.logits)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x | {"num_items_in_batch": 7},
        lambda x: x | {"num_items_in_batch": torch.tensor(7)},
        lambda x: x | {"labels": None, "shift_labels": x["labels"].roll(-1, 1)},
        lambda x: x | {"shift_labels": torch.stack([x["labels"], x["labels"]], -1)[..., 0]},  # not contiguous
        lambda x: x | {"logits_to_keep": 5, "labels": x["labels"][:, -5:]},
        lambda x: x | {"logits_to_keep": torch.tensor([1, 5, 6]), "labels": x["labels"][:, 5:8]},
        lambda x: x | {"ignore_index": 3},
        lambda x: x | {"attention_mask": torch.ones_like(x["labels"]).tril()},
        lambda x: x | {"return_dict": False},
    ],
)
def test_the_contract_of_the_loss(change):
    plain, bound, counts = pair()
    inputs = batch()
    if "ignore_index" in change(inputs):
        inputs["labels"] = inputs["input_ids"]
    found = []
    for model in (plain, bound):
        output = model(**change(dict(inputs)))
        loss = output[0] if isinstance(output, tuple) else output.loss
        if loss is None:  # labels were None
            loss = model.loss_function(output.logits, None, VOCAB, shift_labels=change(dict(inputs))["shift_labels"])
        loss.backward()
        found.append(loss)
    assert not counts
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert_same_gradients(bound, plain)


def test_evaluation_for_the_loss_alone_builds_no_logits():
    _, bound, counts = pair()
    inputs = batch(4, 60)
    with Sizes() as sizes, torch.no_grad():
        loss = bound.eval()(**inputs).loss
    assert torch.isfinite(loss)
    assert sizes.largest < 4 * 60 * VOCAB
    assert not counts


def test_training_builds_no_logits():
    _, bound, counts = pair()
    inputs = batch(4, 60)
    with Sizes() as sizes:
        bound(**inputs).loss.backward()
    assert sizes.largest < 4 * 60 * VOCAB
    assert not counts


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    plain, bound, counts = pair()
    inputs = batch()
    for model in (plain, bound):
        name = "activation_checkpointing_enable"  # before transformers 5.2x gradient_checkpointing_enable
        enable = getattr(model, name, model.gradient_checkpointing_enable)
        options = inspect.signature(enable).parameters
        (keyword,) = (k for k in options if k.endswith("_kwargs"))
        enable(**{keyword: {"use_reentrant": reentrant}})
        model.enable_input_require_grads()
    torch.testing.assert_close(step(bound, **inputs).loss, step(plain, **inputs).loss)
    assert_same_gradients(bound, plain)
    assert not counts


def test_accumulating_and_retaining_the_graph():
    plain, bound, counts = pair()
    for model in (plain, bound):
        for seed in (1, 2):
            loss = model(**batch(seed=seed)).loss / 2
            loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(bound, plain)
    assert not counts


@pytest.mark.parametrize("sample", [False, True])
def test_generation_gives_the_same_tokens(sample):
    plain, bound, counts = pair()
    ids = batch(2, 5)["input_ids"]
    found = []
    for model in (plain.eval(), bound.eval()):
        torch.manual_seed(1)
        found.append(model.generate(ids, max_new_tokens=8, do_sample=sample, num_beams=1 if sample else 2))
    assert torch.equal(*found)
    assert not counts


def test_losses_of_a_trainer_of_ones_own():
    """Logits without labels, shifted and scaled outside of the model; accuracy and entropy of each step."""
    plain, bound, counts = pair()
    inputs = batch()
    found = []
    for model in (plain, bound):
        logits = model(inputs["input_ids"]).logits
        shifted, labels = logits[..., :-1, :].contiguous(), inputs["labels"][..., 1:]
        loss = F.cross_entropy(shifted.float().view(-1, VOCAB) / 0.7, labels.reshape(-1), reduction="none").mean()
        with torch.no_grad():
            accuracy = ((shifted.argmax(-1) == labels) & (labels != -100)).sum()
        loss.backward()
        found.append(torch.stack([loss.detach(), accuracy]))
    torch.testing.assert_close(found[1], found[0])
    assert_same_gradients(bound, plain)
    assert not counts
    with torch.no_grad():
        for model in (plain, bound):  # in chunks, as trainers do it for the sake of memory
            rows = model(inputs["input_ids"]).logits.reshape(-1, VOCAB).split(6)
            logp = torch.cat([-(F.log_softmax(r, -1).exp() * F.log_softmax(r, -1)).sum(-1) for r in rows])
            found.append(logp)
    torch.testing.assert_close(found[3], found[2])


def test_training_follows_the_plain_model():
    plain, bound, counts = pair("gemma2")
    losses = []
    for model in (plain, bound):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        losses.append([])
        for seed in range(5):
            output = step(model, **batch(seed=seed))
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(output.loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert not counts
    with pytest.raises(LateReadError):
        output.logits.max()


def test_autocast_outside_and_inside():
    plain, bound, counts = pair()
    found = []
    for model in (plain, bound):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(**batch())
        output.loss.backward()
        found.append(output)
    assert not counts
    assert found[1].logits.dtype == found[0].logits.dtype
    torch.testing.assert_close(found[1].loss, found[0].loss, rtol=1e-3, atol=1e-3)
    assert_same_gradients(bound, plain, rtol=0.1)


# -- other models -----------------------------------------------------------------------------------------------------

ENCODER_DECODERS = {
    "t5": ("T5Config", "T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1}),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    ),
}


@pytest.mark.parametrize("name", ENCODER_DECODERS)
@pytest.mark.parametrize("tied", [True, False])
def test_encoder_decoder_models(name, tied):
    import transformers

    config, model, sizes = ENCODER_DECODERS[name]
    heads = {} if name == "bart" else {"num_heads": 4}
    config = getattr(transformers, config)(
        vocab_size=VOCAB, tie_word_embeddings=tied, decoder_start_token_id=0, **sizes, **heads
    )
    torch.manual_seed(0)
    plain = getattr(transformers, model)(config).train()
    if name == "bart":
        plain.final_logits_bias.normal_()
    bound = copy.deepcopy(plain)
    counts, inputs = bind_head(bound), batch()
    for m in (plain, bound):
        m.eval()  # no dropout
    torch.testing.assert_close(step(bound, **inputs).loss, step(plain, **inputs).loss, rtol=1e-5, atol=1e-6)
    assert_same_gradients(bound, plain)
    assert not counts


def test_models_for_images_and_text():
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    text = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64}
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 16}
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=96, image_token_id=96)
    torch.manual_seed(0)
    plain = LlavaForConditionalGeneration(config).train()
    bound = copy.deepcopy(plain)
    (binding,) = find_head(bound, fused_linear_cross_entropy=True, cross_entropy=False)
    bind(binding)
    assert binding.path == "lm_head"
    inputs = batch(vocab=90)
    inputs["input_ids"][:, 1:5] = 96
    inputs["pixel_values"] = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(step(bound, **inputs).loss, step(plain, **inputs).loss, rtol=1e-5, atol=1e-6)
    assert_same_gradients(bound, plain)
    assert not binding.replacement.materialised


# -- what is found, and the instance ----------------------------------------------------------------------------------


def test_binding_and_taking_out_again():
    model = small()
    before = dict(model.lm_head.__dict__)
    names, text, signature = list(model.state_dict()), repr(model), inspect.signature(model.forward)
    (binding,) = find(model, {"fused_linear_cross_entropy": True, "cross_entropy": True})
    assert (binding.op, binding.path, binding.attribute) == ("fused_linear_cross_entropy", "lm_head", "forward")
    originals = (F.cross_entropy, nn.Linear.forward, nn.CrossEntropyLoss.forward, type(model).forward)
    bind(binding)
    assert (list(model.state_dict()), repr(model), inspect.signature(model.forward)) == (names, text, signature)
    assert isinstance(model(**batch()).logits, DeferredLogits)
    assert not isinstance(small()(**batch()).logits, DeferredLogits)
    assert (F.cross_entropy, nn.Linear.forward, nn.CrossEntropyLoss.forward, type(model).forward) == originals
    assert unbind(binding) == ""
    assert model.lm_head.__dict__ == before
    assert type(model(**batch()).logits) is torch.Tensor


def test_apply_and_its_report():
    from liger_registry.transformers import apply

    model, plain = small(), small()
    only = {"rms_norm": False, "layer_norm": False, "rope": False, "swiglu": False, "geglu": False}
    with apply(model, **only, fused_linear_cross_entropy=True) as applied:
        (row,) = applied.report.applied("fused_linear_cross_entropy")
        assert row.module == "lm_head"
        output = model(**batch())
        assert not applied.report.materialised
        output.logits.sum()
        (place,) = applied.report.materialised
        assert place.startswith(f"{__file__}:")
        again = copy.deepcopy(model)
        assert isinstance(again(**batch()).logits, DeferredLogits)
    torch.testing.assert_close(model(**batch()).loss, plain(**batch()).loss)


class Copying(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class Owner(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.lm_head = head

    def get_output_embeddings(self):
        return self.lm_head


def parametrised():
    head = nn.Linear(4, 5)
    nn.utils.parametrizations.weight_norm(head)
    return head


def replaced():
    head = nn.Linear(4, 5)
    head.forward = lambda x: x
    return head


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (Copying(4, 5), "the forward of Copying is not that of torch.nn.Linear"),
        (nn.Embedding(4, 5), "the forward of Embedding is not"),
        (parametrised(), "parametrised"),
        (replaced(), "replaced by somebody else"),
        (nn.Linear(4, 5).to(torch.float8_e4m3fn), "its weight is torch.float8_e4m3fn"),
    ],
)
def test_heads_that_are_left_alone(head, reason):
    (row,) = find_head(Owner(head), fused_linear_cross_entropy=True, cross_entropy=False)
    assert not isinstance(row, Binding)
    assert not row.applied
    assert reason in row.reason


def test_nothing_to_find():
    assert find_head(nn.Linear(3, 3), fused_linear_cross_entropy=True, cross_entropy=True) == []
    assert find_head(Owner(None), fused_linear_cross_entropy=True, cross_entropy=True) == []
    assert find_head(small(), fused_linear_cross_entropy=False, cross_entropy=False) == []


class Unfinished(nn.Linear):
    """A subclass that leaves the forward as it is."""


def test_a_subclass_with_the_same_forward():
    model = small()
    head = Unfinished(32, VOCAB, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    bind_head(model)
    assert isinstance(model(**batch()).logits, DeferredLogits)


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_the_model_are_bound_to_themselves(how):
    _, bound, _ = pair()
    if how == "deepcopy":
        again = copy.deepcopy(bound)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(bound))
    else:
        file = io.BytesIO()
        torch.save(bound, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    with torch.no_grad():
        again.lm_head.weight.mul_(2)
    inputs = batch()
    ours, theirs = again(**inputs), bound(**inputs)
    assert isinstance(ours.logits, DeferredLogits)
    assert ours.loss != theirs.loss
    ours.loss.backward()
    assert gradients(again)
    assert not gradients(bound)
    torch.testing.assert_close(ours.logits.detach() + 0, theirs.logits.detach() * 2)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_of_outputs_hold_plain_logits(how):
    plain, bound, _ = pair()
    with torch.no_grad():
        again = how(bound(**batch()))
        expected = plain(**batch())
    assert type(again.logits) is torch.Tensor
    assert torch.equal(again.logits, expected.logits)
    torch.testing.assert_close(again.loss, expected.loss)


def test_two_models_at_once():
    _, first, counts = pair()
    _, second, other = pair("gemma2")
    inputs = batch()
    a, b = first(**inputs), second(**inputs)
    (a.loss + b.loss).backward()
    a.logits.sum()
    assert (sum(counts.values()), sum(other.values())) == (1, 0)


# -- cross_entropy alone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_of_real_logits(dtype):
    plain = small().to(dtype)
    bound = copy.deepcopy(plain)
    (binding,) = find_head(bound, fused_linear_cross_entropy=False, cross_entropy=True)
    bind(binding)
    assert (binding.op, binding.path) == ("cross_entropy", "")
    for inputs in (batch(), batch() | {"num_items_in_batch": 5}):
        expected, output = step(plain, **inputs), step(bound, **inputs)
        assert type(output.logits) is torch.Tensor
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-6)
        assert_same_gradients(bound, plain, rtol=1e-4 if dtype is torch.float32 else 0.1)
    called = []
    original = binding.replacement.original
    binding.replacement.original = lambda z: called.append(F.cross_entropy(z, torch.ones(2, dtype=int)))
    bound.loss_function(torch.zeros(2, 3, requires_grad=True))
    assert "NllLoss" not in called[0].grad_fn.name()
    binding.replacement.original = original
    assert isinstance(pickle.loads(pickle.dumps(bound))(**batch()).loss, torch.Tensor)
    assert unbind(binding) == ""
    assert "_loss_function" not in bound.__dict__
    assert bound.loss_function is plain.loss_function


def test_cross_entropy_of_models_that_compute_it_themselves():
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=11))
    (row,) = find_head(model, fused_linear_cross_entropy=False, cross_entropy=True)
    assert "does not compute its loss by loss_function" in row.reason


def test_cross_entropy_where_the_head_cannot_be_bound():
    model = small()
    model.lm_head = Copying(32, VOCAB, bias=False)
    found = find_head(model, fused_linear_cross_entropy=True, cross_entropy=True)
    assert [(item.op, isinstance(item, Binding)) for item in found] == [
        ("fused_linear_cross_entropy", False),
        ("cross_entropy", True),
    ]
