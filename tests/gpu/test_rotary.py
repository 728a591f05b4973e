"""rope and qk_norm_rope on a GPU: the models' functions, layouts without copies, more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from liger_registry import registry
from liger_registry.ops.qk_norm_rope import OP

pytestmark = pytest.mark.gpu
NAMES = ("tokens", "heads")


def heads(count, batch=2, tokens=129, width=128, dtype=torch.bfloat16):
    return torch.randn(batch, tokens, count, width, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()


def tables(tokens=129, width=128, dtype=torch.bfloat16):
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device="cuda") / width)
    angles = torch.arange(tokens, device="cuda")[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)[None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def pinned(op, name):
    return registry.get(op, implementation={"forward": name, "backward": name})


@pytest.mark.parametrize("by_heads", [True, False])
@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_rope_is_the_models_bit_for_bit(name, dtypes, by_heads):
    ours, table = (getattr(torch, d) for d in dtypes)
    q, k = heads(32, dtype=ours), heads(8, dtype=ours)
    cos, sin = tables(dtype=table)
    right, found = apply_rotary_pos_emb(q, k, cos, sin), pinned("rope", name)(q, k, cos, sin)
    assert all(torch.equal(a, b) and a.stride() == x.stride() for a, b, x in zip(found, right, (q, k), strict=True))
    grads = [torch.randn(y.shape, device="cuda", dtype=y.dtype) for y in right]
    if not by_heads:
        grads = [g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads]
    before = [g.clone() for g in grads]
    for a, b in zip(torch.autograd.grad(found, (q, k), grads), torch.autograd.grad(right, (q, k), grads), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_backward_allocates_its_gradients_and_nothing_else(name):
    q, k = heads(32, 4, 1024), heads(8, 4, 1024)
    cos, sin = tables(1024)
    outputs = pinned("rope", name)(q, k, cos, sin)
    grads = [torch.randn(y.shape, device="cuda", dtype=y.dtype) for y in outputs]
    torch.autograd.grad(outputs, (q, k), grads, retain_graph=True)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    found = torch.autograd.grad(outputs, (q, k), grads)
    wanted = sum(g.numel() * g.element_size() for g in found)
    assert torch.cuda.max_memory_allocated() - start <= wanted + (1 << 20)


@pytest.mark.parametrize("name", NAMES)
def test_norm_and_rotation_are_the_models(name):
    q, k = heads(16), heads(8)
    norms = [Qwen3RMSNorm(128).to("cuda", torch.bfloat16) for _ in range(2)]
    for norm in norms:
        norm.weight.data.normal_(1, 0.2)
    cos, sin = tables()
    weights = [norm.weight for norm in norms]
    right = apply_rotary_pos_emb(norms[0](q), norms[1](k), cos, sin)
    found = pinned("qk_norm_rope", name)(q, k, *weights, cos, sin)
    for a, b in zip(found, right, strict=True):
        assert (a != b).float().mean() < 0.005  # a sum of squares in another order
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    grads = [torch.randn_like(y) for y in right]
    exact = [t.detach().double().requires_grad_() for t in (q, k, *weights)]
    truth = torch.autograd.grad(OP.reference(*exact, cos.double(), sin.double()), exact, [g.double() for g in grads])
    for a, b in zip(torch.autograd.grad(found, (q, k, *weights), grads), truth, strict=True):
        assert (a.double() - b).norm() <= 5e-3 * b.norm()


@pytest.mark.parametrize("name", NAMES)
def test_more_than_two_to_the_31_elements(name):
    tokens = (1 << 31) // (64 * 128) + 3
    q, k = heads(64, 1, tokens).detach(), heads(1, 1, tokens).detach()
    cos, sin = tables(tokens)
    q_out, k_out = pinned("rope", name)(q, k, cos, sin)
    for at in (0, tokens // 2, tokens - 1):
        one = slice(at, at + 1)
        right = apply_rotary_pos_emb(q[:, :, one], k[:, :, one], cos[:, one], sin[:, one])
        assert torch.equal(q_out[:, :, one], right[0])
        assert torch.equal(k_out[:, :, one], right[1])


def test_both_phases_are_captured_in_a_graph():
    op = registry.get("qk_norm_rope")
    tensors = [heads(16), heads(8), *(torch.ones(128, device="cuda").bfloat16().requires_grad_() for _ in range(2))]
    cos, sin = tables()
    grads = [torch.randn_like(t) for t in tensors[:2]]

    def step():
        return torch.autograd.grad(op(*tensors, cos, sin), tensors, grads)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        right = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
