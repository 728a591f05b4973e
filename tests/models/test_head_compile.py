"""Compiled models with a bound head: one graph, no logits in it, and the losses of the model as it was."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from functorch.compile import make_boxed_func
from heads import VOCAB, assert_same_gradients, batch, linear_head, pair
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from liger_registry.errors import LateReadError
from liger_registry.transformers.engine.deferred import DeferredLogits
from liger_registry.transformers.engine.headcall import untraced
from liger_registry.transformers.engine.traced import TracedLogits

# Dynamo, tracing the masks of transformers 4.57, warns of itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
OPERATION = "liger_registry.fused_linear_cross_entropy_forward"


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend that keeps the graphs, of Dynamo and of forward and backward, and runs them as they are."""

    def __init__(self):
        self.dynamo, self.traced = [], []

    def __call__(self, graph, inputs):
        self.dynamo.append(graph)

        def keep(traced, inputs):
            self.traced.append(traced)
            return make_boxed_func(traced.forward)

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, inputs)

    def calls(self):
        return [str(node.target) for graph in self.dynamo for node in graph.graph.nodes]

    def logits(self, tokens):
        """Nodes of forward or backward that give as many numbers as there are logits, or more, of a vocabulary."""
        found = []
        for graph in self.traced:
            for node in graph.graph.nodes:
                values = node.meta.get("val") if node.op == "call_function" else None
                for value in values if isinstance(values, (tuple, list)) else [values]:
                    if isinstance(value, torch.Tensor) and VOCAB in value.shape and value.numel() >= tokens * VOCAB:
                        found.append(str(node))
        return found


def compiled(model, **options):
    graphs = Graphs()
    return torch.compile(model, backend=graphs, fullgraph=True, **options), graphs


@pytest.mark.parametrize(
    ("name", "options"), [("llama", {}), ("gemma2", {}), ("granite", {"logits_scaling": 4.0}), ("phi", {})]
)
def test_one_graph_without_logits(name, options):
    plain, bound, counts = pair(name, **options)
    model, graphs = compiled(bound)
    inputs = batch(4, 60)
    torch.manual_seed(3)
    output = model(**inputs)
    output.loss.backward()
    assert len(graphs.dynamo) == 1
    assert graphs.calls().count(OPERATION) == 1
    assert not any("linear_cross_entropy" not in c and "cross_entropy" in c for c in graphs.calls())
    assert len(graphs.traced) == 2
    assert graphs.logits(4 * 60) == []
    torch.manual_seed(3)
    expected = plain(**inputs)
    expected.loss.backward()
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert_same_gradients(bound, plain)
    assert not counts


def ten_losses(run, model):
    """Those of ten steps of a model that is called as ``run``."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for seed in range(10):
        loss = run(**batch(seed=seed % 3)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_ten_steps_as_in_eager(name):
    plain, bound, counts = pair(name)
    model, graphs = compiled(bound)
    losses = ten_losses(plain, plain), ten_losses(model, bound)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < losses[0][0] - 0.5
    assert len(graphs.dynamo) == 1
    assert not counts


@pytest.mark.ci
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_ten_steps_with_inductor(name):
    plain, bound, counts = pair(name)
    model = torch.compile(bound)
    losses = ten_losses(plain, plain), ten_losses(model, bound)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert not counts


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x | {"num_items_in_batch": 7},
        lambda x: x | {"num_items_in_batch": torch.tensor(7)},
        lambda x: x | {"shift_labels": torch.stack([x["labels"], x["labels"]], -1)[..., 0]},
        lambda x: x | {"logits_to_keep": 5, "labels": x["labels"][:, -5:]},
        lambda x: x | {"attention_mask": torch.ones_like(x["labels"])},
        lambda x: x | {"return_dict": False},
    ],
)
def test_the_contract_of_the_loss(change):
    plain, bound, counts = pair(num_hidden_layers=1)
    model, graphs = compiled(bound)
    inputs = change(batch())
    found = []
    for run in (plain, model):
        output = run(**inputs)
        loss = output[0] if isinstance(output, tuple) else output.loss
        loss.backward()
        found.append(loss)
    assert OPERATION in graphs.calls()
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert_same_gradients(bound, plain)
    assert not counts


def test_lengths_do_not_compile_again_and_again():
    plain, bound, _ = pair(num_hidden_layers=1)
    model, graphs = compiled(bound)
    for length in (12, 17, 23, 31, 45):
        inputs = batch(length=length)
        torch.testing.assert_close(model(**inputs).loss, plain(**inputs).loss, rtol=1e-5, atol=1e-6)
    assert len(graphs.dynamo) <= 2


def test_autocast():
    plain, bound, counts = pair(num_hidden_layers=1)
    model, graphs = compiled(bound)
    found = []
    for run in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            output = run(**batch())
        output.loss.backward()
        found.append(output)
    assert OPERATION in graphs.calls()
    assert found[1].logits.dtype == found[0].logits.dtype
    torch.testing.assert_close(found[1].loss, found[0].loss, rtol=1e-3, atol=1e-3)
    assert_same_gradients(bound, plain, rtol=0.1)
    assert not counts


# -- without labels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["evaluation", "no_grad"])
def test_real_logits_where_no_loss_is_to_be_expected(how):
    plain, bound, counts = pair(num_hidden_layers=1)
    if how == "evaluation":
        plain.eval(), bound.eval()
    model, graphs = compiled(bound)
    with torch.set_grad_enabled(how != "no_grad"):
        output, expected = model(**batch()), plain(**batch())
    assert type(output.logits) is torch.Tensor
    torch.testing.assert_close(output.logits, expected.logits)
    torch.testing.assert_close(output.loss, expected.loss)
    assert OPERATION not in graphs.calls()
    assert not counts


def test_a_loss_of_ones_own_in_the_graph_and_outside():
    plain, bound, counts = pair(num_hidden_layers=1)
    inputs = batch()
    ids, labels = inputs["input_ids"], inputs["labels"][:, 1:].reshape(-1)

    def loss(model):
        logits = model(ids).logits
        return F.cross_entropy(logits[..., :-1, :].float().reshape(-1, VOCAB) / 0.7, labels)

    graphs = Graphs()
    inside = torch.compile(loss, backend=graphs, fullgraph=True)(bound)
    assert OPERATION in graphs.calls()
    model, graphs = compiled(bound)
    outside, expected = loss(model), loss(plain)
    assert OPERATION not in graphs.calls()
    for found in (inside, outside):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    (inside + outside).backward()
    (2 * expected).backward()
    assert_same_gradients(bound, plain)
    assert not counts


# -- what stands for the logits ---------------------------------------------------------------------------------------


def test_what_is_returned_acts_as_logits():
    plain, bound, counts = pair(num_hidden_layers=1)
    model, _ = compiled(bound)
    inputs = batch()
    with torch.no_grad():
        expected = plain(**inputs).logits
    logits = model(**inputs).logits
    assert isinstance(logits, TracedLogits)
    assert (logits.shape, logits.dtype, logits.device) == (expected.shape, expected.dtype, expected.device)
    assert (logits.size(-1), logits.dim(), logits.ndim, len(logits)) == (VOCAB, 3, 3, 2)
    assert (logits.numel(), logits.requires_grad, logits.is_floating_point()) == (expected.numel(), True, True)
    assert "lm_head" in repr(logits)
    assert isinstance(logits.float(), DeferredLogits)
    assert isinstance(logits[..., :-1, :].contiguous(), DeferredLogits)
    torch.testing.assert_close(logits[..., :-1, :].argmax(-1), expected[..., :-1, :].argmax(-1))
    assert not counts
    for read in (
        lambda z: z.detach().cpu().float().numpy(),
        lambda z: torch.softmax(z, -1),
        lambda z: (z - z.max(-1, keepdim=True).values).exp() + 1 - z / 2 - 2 * z,
        lambda z: torch.cat([z[0], torch.stack([z, z])[0, 1]]),
        lambda z: (z > 0) | (z == z),
        lambda z: torch.ones(VOCAB) * z + (-z),
        lambda z: list(z)[1],
        lambda z: z.tolist(),
    ):
        torch.testing.assert_close(read(logits.detach()), read(expected), rtol=1e-5, atol=1e-5)
    assert pickle.loads(pickle.dumps(logits)).shape == expected.shape
    assert type(pickle.loads(pickle.dumps(model(**inputs)))["logits"]) is torch.Tensor
    with pytest.raises(RuntimeError, match="deepcopy protocol"):
        copy.deepcopy(logits)


def test_gradients_flow_through_it():
    plain, bound, _ = pair("gemma2", num_hidden_layers=1)
    model, _ = compiled(bound)
    for run in (plain, model):
        output = run(**batch())
        (output.loss + output.logits.logsumexp(-1).square().mean()).backward()
    assert_same_gradients(bound, plain)


def test_read_too_late():
    _, bound, _ = pair(num_hidden_layers=1)
    model, _ = compiled(bound)
    optimizer = torch.optim.SGD(bound.parameters(), 0.1)
    early, late = model(**batch()), model(**batch())
    early.loss.backward()
    early.logits.sum()
    optimizer.step()
    early.logits.max()
    with pytest.raises(LateReadError):
        late.logits.max()
    model(**batch()).logits.max()


# -- operations in the graph ------------------------------------------------------------------------------------------

VIEWS = {
    "view": lambda z: z.view(-1, z.size(-1)),
    "reshape": lambda z: z.reshape((-1, 13)),
    "flatten": lambda z: z.flatten(0, 1),
    "shift": lambda z: z[..., :-1, :].contiguous().view(-1, 13),
    "slices": lambda z: z[:, 1:4:2].reshape(-1, 13),
    "select": lambda z: z[:, -1, :],
    "one": lambda z: z[0],
    "sequences": lambda z: z.transpose(1, 2),
    "permuted": lambda z: z.permute(0, 2, 1),
    "casts": lambda z: z.to(dtype=torch.float32).float().double().view(-1, 13),
    "to others": lambda z: z.to(z.device).type_as(torch.zeros(1)).view(-1, 13),
    "scaled": lambda z: (2 * z / 3).view(-1, 13),
    "softcap": lambda z: (torch.tanh(z / 3.0) * 3.0).view(-1, 13),
    "method": lambda z: ((z * 0.5).tanh() * 2.0).view(-1, 13),
}
REAL = {
    "argmax": lambda z: (z.view(-1, 13) + z.argmax(-1).view(-1, 1)) * 1.0,
    "second cap": lambda z: z.tanh().tanh().view(-1, 13),
    "negative cap": lambda z: (z.tanh() * -2.0).view(-1, 13),
    "down": lambda z: z.bfloat16().float().view(-1, 13),
    "classes": lambda z: z[..., :7].reshape(-1, 7),
    "added": lambda z: (z + 1 - z.mean()).view(-1, 13),
    "function": lambda z: torch.relu(z).view(-1, 13),
    "mask": lambda z: torch.where(torch.zeros(13, dtype=torch.bool), -1e9, z).view(-1, 13),
    "tensor factor": lambda z: (z * torch.tensor(0.5)).view(-1, 13),
    "flat": lambda z: z.flatten(1).view(-1, 13),
}


@pytest.mark.parametrize("name", [*VIEWS, *REAL])
def test_operations(name):
    plain, bound, counts = linear_head(bias=True)
    change = (VIEWS | REAL)[name]
    h = torch.randn(2, 5, 8, requires_grad=True)
    shape = list(change(plain(h)).shape)
    del shape[1 if len(shape) > 1 else 0]
    target = torch.randint(7, shape)

    def loss(layer, h):
        return F.cross_entropy(change(layer(h)), target, label_smoothing=0.1)

    graphs = Graphs()
    ours, theirs = torch.compile(loss, backend=graphs, fullgraph=True)(bound, h), loss(plain, h)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert (OPERATION in graphs.calls()) == (name in VIEWS)
    found, expected = (torch.autograd.grad(x, (h, m.weight, m.bias)) for x, m in ((ours, bound), (theirs, plain)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert not counts


def test_what_the_operation_does_not_take():
    plain, bound, _ = linear_head()
    h, spread = torch.randn(4, 8, requires_grad=True), torch.softmax(torch.randn(4, 13), -1)
    run = torch.compile(lambda m: F.cross_entropy(m(h), spread), backend="eager", fullgraph=True)
    torch.testing.assert_close(run(bound), F.cross_entropy(plain(h), spread))
    weighted = torch.rand(13) + 0.5

    criterion = nn.CrossEntropyLoss(weight=weighted, reduction="none")

    def loss(m):
        return criterion(m(h), torch.arange(4))

    torch.testing.assert_close(torch.compile(loss, backend="eager", fullgraph=True)(bound), loss(plain))


def test_a_head_with_hooks_gives_real_logits():
    plain, bound, _ = pair(num_hidden_layers=1)
    for model in (plain, bound):
        model.lm_head.register_forward_hook(lambda head, args, output: output * 2)
    model, graphs = compiled(bound)
    output = model(**batch())
    torch.testing.assert_close(output.loss, plain(**batch()).loss)
    assert OPERATION not in graphs.calls()
    assert type(output.logits) is torch.Tensor


@pytest.mark.filterwarnings("ignore")  # transformers keeps what it collects in a global
def test_export_gives_real_logits():
    plain, bound, _ = pair(num_hidden_layers=1)

    class Logits(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids, use_cache=False).logits

    ids = batch()["input_ids"]
    for strict in (False, True):
        exported = torch.export.export(Logits(bound), (ids,), strict=strict)
        torch.testing.assert_close(exported.module()(ids), plain(ids).logits)


def test_what_is_untraced_may_be_called_first_while_something_is_compiled():
    seen = []

    @untraced
    def one_more(x):
        seen.append(torch.compiler.is_dynamo_compiling())
        return x + 1

    compiled_code = torch.compile(lambda x: 2 * one_more(2 * x), backend="eager")
    for _ in range(2):
        assert compiled_code(torch.ones(2)).tolist() == [6.0, 6.0]
    assert seen == [False, False]
