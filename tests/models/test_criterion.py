"""Compiled code that makes a ``CrossEntropyLoss`` as it runs: Dynamo's own way with it takes tensors alone."""

from __future__ import annotations

import copy

import pytest
import torch
from heads import VOCAB, assert_same_gradients, batch, linear_head
from torch import nn
from torch._dynamo.exc import Unsupported
from transformers import T5Config, T5ForConditionalGeneration

from liger_registry.transformers import apply

SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Helped(T5ForConditionalGeneration):
    """The criterion is made in a method that its forward calls."""

    def criterion(self, logits, labels):
        return nn.CrossEntropyLoss()(logits.view(-1, VOCAB), labels.view(-1))

    def forward(self, input_ids, labels):
        hidden = self.decoder(self._shift_right(labels), encoder_hidden_states=self.encoder(input_ids)[0])[0]
        logits = self.lm_head(hidden)
        return {"loss": self.criterion(logits, labels), "logits": logits}


class Kept(Helped):
    """The criterion is made once."""

    def __init__(self, config):
        super().__init__(config)
        self.loss = nn.CrossEntropyLoss()

    def criterion(self, logits, labels):
        return self.loss(logits.view(-1, VOCAB), labels.view(-1))


@pytest.mark.parametrize("kind", [T5ForConditionalGeneration, Helped, Kept])
def test_a_model_that_makes_its_criterion(kind):
    plain = kind(T5Config(vocab_size=VOCAB, decoder_start_token_id=0, **SIZES)).train()
    bound = copy.deepcopy(plain)
    handle = apply(bound)
    (row,) = handle.report.applied("fused_linear_cross_entropy")
    assert ("not in compiled code" in row.reason) == (kind is not Kept)
    model = torch.compile(bound, backend="aot_eager", fullgraph=True)
    for run in (plain, model):
        inputs = {name: value for name, value in batch().items() if name in ("input_ids", "labels")}
        run(**inputs)["loss"].backward()
    assert_same_gradients(bound, plain)
    assert not handle.report.materialised


def test_a_function_that_makes_one_of_a_models_logits():
    """It is told apart nowhere: Dynamo ends the graph before it, or raises where that is forbidden."""
    plain, bound, _ = linear_head(bias=True)
    h, target = torch.randn(4, 8, requires_grad=True), torch.arange(4)

    def loss(layer):
        return nn.CrossEntropyLoss()(layer(h).float(), target)

    found, expected = torch.compile(loss, backend="aot_eager")(bound), loss(plain)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(x, (h, m.weight)) for x, m in ((found, bound), (expected, plain))]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    torch.compiler.reset()
    with pytest.raises(Unsupported):
        torch.compile(loss, backend="eager", fullgraph=True)(bound)
