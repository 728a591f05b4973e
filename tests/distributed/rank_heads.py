"""What ranks run of heads whose classes are spread over them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_registry.transformers import vocabulary_parallel_cross_entropy, vocabulary_parallel_logp
from liger_registry.transformers.engine.head import Counts, LogitsHead


class Largest(TorchDispatchMode):
    """The largest memory that an operation gave, in elements."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self.elements = max(self.elements, leaf.numel())
        return result


def bounds(vocab: int, world: int, rank: int) -> tuple[int, int]:
    """A rank's classes, as a DTensor spreads them: the last ranks may have fewer, and none."""
    size = -(-vocab // world)
    return min(rank * size, vocab), min((rank + 1) * size, vocab)


def problem(vocab: int, dtype: torch.dtype, tokens: int = 23, width: int = 16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    weight = torch.randn(vocab, width, generator=generator).to(dtype)
    bias = torch.randn(vocab, generator=generator).to(dtype)
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    target[:3] = torch.tensor([-100, 0, vocab - 1])
    return hidden, weight, bias, target


def against_float64(rank: int, world: int, vocab: int, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, float]:
    """How far the loss and the gradients of a head are from float64's, and from PyTorch's in its own dtype."""
    hidden, weight, bias, target = problem(vocab, dtype)
    first, last = bounds(vocab, world, rank)
    class_weight = torch.linspace(0.5, 2.0, vocab) if options.pop("weighted", False) else None
    softcap, scale = options.get("softcap", 0.0), options.get("scale", 1.0)
    upstream = torch.randn(target.shape, generator=torch.Generator().manual_seed(1))

    def run(convert: torch.dtype) -> list[torch.Tensor]:
        h, w, b = (t.clone().to(convert).requires_grad_() for t in (hidden, weight, bias))
        z = F.linear(h, w, b) * scale
        z = softcap * torch.tanh(z / softcap) if softcap else z
        z = z.to(torch.promote_types(convert, torch.float32))
        weights = None if class_weight is None else class_weight.to(z.dtype)
        loss = F.cross_entropy(z, target, weights, reduction=options.get("reduction", "mean"))
        (loss * upstream.to(loss.dtype)).sum().backward()
        return [loss.detach(), h.grad, w.grad, b.grad]

    exact, formula = run(torch.float64), run(dtype)
    h, w, b = (t.clone().requires_grad_() for t in (hidden, weight[first:last], bias[first:last]))
    loss = vocabulary_parallel_cross_entropy(
        h, w, target, vocab_start=first, bias=b, class_weight=class_weight, **options
    )
    (loss * upstream.to(loss.dtype)).sum().backward()
    slices = [slice(None), slice(None), slice(first, last), slice(first, last)]
    names = "loss", "hidden", "weight", "bias"
    found = {}
    for name, given, right, own, part in zip(
        names, (loss, h.grad, w.grad, b.grad), exact, formula, slices, strict=True
    ):
        given, right, own = (given.detach(), right[part], own[part]) if right.dim() else (given.detach(), right, own)
        size = float(right.norm()) + 1e-12
        # Against the formula's own error, with a few roundings for the other order of sums: those of a bias cancel.
        roundings = (16 if name == "bias" else 4) * torch.finfo(given.dtype).eps
        limit = 1.1 * float((own.double() - right).norm()) / size + roundings
        found[name] = float((given.double() - right).norm()) / size / limit if right.numel() else 0.0
    return found


def edges(rank: int, world: int) -> dict[str, Any]:
    """Nothing to count, a target that is nobody's, a confident token, and memory."""
    found: dict[str, Any] = {}
    hidden, weight, _, target = problem(40, torch.float32)
    first, last = bounds(40, world, rank)
    h, w = hidden.clone().requires_grad_(), weight[first:last].clone().requires_grad_()
    loss = vocabulary_parallel_cross_entropy(h, w, torch.full_like(target, -100), vocab_start=first)
    loss.backward()
    found["nothing"] = loss.item(), float(h.grad.abs().max()), float(w.grad.abs().max())
    wrong = target.clone()
    wrong[5] = 40
    found["nobody's"] = vocabulary_parallel_logp(hidden, weight[first:last], wrong, vocab_start=first).isnan().tolist()
    # Logits of which one is far above the others: log(1 - exp) in a difference of two sums would be 0.
    sure = torch.eye(40, 16)
    sure[:, 0] = 0
    sure[3, 0] = 20.0
    ones = torch.zeros(1, 16)
    ones[0, 0] = 1.0
    logp = vocabulary_parallel_logp(ones, sure[first:last], torch.tensor([3]), vocab_start=first)
    found["sure"] = logp.item()
    tokens, vocab = 512, 4096
    hidden, weight, _, target = problem(vocab, torch.float32, tokens)
    first, last = bounds(vocab, world, rank)
    h, w = hidden.requires_grad_(), weight[first:last].clone().requires_grad_()
    with Largest() as largest:
        vocabulary_parallel_cross_entropy(h, w, target, vocab_start=first).backward()
    found["elements"] = largest.elements / (tokens * vocab)
    return found


def colwise(rank: int, world: int, layout: str, read: str) -> dict[str, Any]:
    """A head under PyTorch's ColwiseParallel, plain and bound: its loss and gradients, and what was counted."""
    mesh = init_device_mesh("cpu", (world,))
    style = {
        "gathered": ColwiseParallel(output_layouts=Replicate()),
        "spread": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        "kept": ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
    }[layout]
    hidden, weight, bias, target = problem(41, torch.float32)
    found = []
    counts = Counts()
    for bound in (False, True):
        head = nn.Linear(16, 41)
        with torch.no_grad():
            head.weight.copy_(weight)
            head.bias.copy_(bias)
        parallelize_module(head, mesh, style)
        if bound:
            head.forward = LogitsHead(head, "lm_head", counts)
        h = hidden.clone().requires_grad_()
        logits = head(h)
        if layout == "spread" or read == "logits":
            full = logits.full_tensor() if isinstance(logits, DTensor) else logits
            loss = full.float().logsumexp(-1).square().mean() if read == "logits" else F.cross_entropy(full, target)
        elif layout == "kept":
            loss = F.cross_entropy(logits.to_local(), target)
        else:
            loss = F.cross_entropy(logits.float() * 0.5, target)
        loss.backward()
        grads = [h.grad, *[p.grad.full_tensor() for p in head.parameters()]]
        found.append([loss.detach(), *grads])
    plain, ours = found
    off = [float((a - b).norm() / b.norm()) for a, b in zip(ours, plain, strict=True)]
    return {"off": max(off), "counts": sum(counts.values()), "places": list(counts)}


def fsdp_and_colwise(rank: int, world: int) -> dict[str, Any]:
    """A head under FSDP2 and ColwiseParallel on a mesh of two dimensions, against one rank."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
    hidden, weight, bias, target = problem(40, torch.float32, tokens=24)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 40))
    single = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 40))
    with torch.no_grad():
        for m in (model, single):
            m[0].weight.copy_(weight[:16])
            m[0].bias.copy_(bias[:16])
            m[1].weight.copy_(weight)
            m[1].bias.copy_(bias)
    parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel(output_layouts=Replicate())})
    counts = Counts()
    model[1].forward = LogitsHead(model[1], "lm_head", counts)
    fully_shard(model[1], mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    place = mesh["data"].get_local_rank()
    rows = len(target) // mesh["data"].size()
    part = slice(place * rows, (place + 1) * rows)
    loss = F.cross_entropy(model(hidden[part]), target[part], reduction="sum") / int((target != -100).sum())
    (loss * mesh["data"].size()).backward()
    whole_loss = loss.detach().clone()
    dist.all_reduce(whole_loss, group=mesh["data"].get_group())
    expected = F.cross_entropy(single(hidden), target)
    expected.backward()
    pairs = [(whole_loss, expected.detach())]
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        pairs.append((ours.grad.full_tensor(), theirs.grad))
    return {"off": max(float((a - b).norm() / b.norm()) for a, b in pairs), "counts": dict(counts)}
