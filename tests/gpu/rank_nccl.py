"""What a rank runs over NCCL: heads, whole models under data parallelism, norms over DTensors, plans and warmups."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from heads import batch, small
from torch import nn
from torch.nn import functional as F

from liger_registry import Device, Registry, registry
from liger_registry.config import Fields
from liger_registry.problem import Problem
from liger_registry.settings import Settings
from liger_registry.tuning.distributed import tune_sharded

# A gradient may be so far from float64's, in units of the plain model's own error, and not less than the floor.
TIMES, FLOOR = 4.0, 1e-5


def _distance(given: torch.Tensor, right: torch.Tensor) -> float:
    return float((given.double() - right).norm() / right.norm().clamp(min=1e-6))


def _step(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(**inputs).loss
    loss.backward()
    full = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
    return loss.item(), {_plain(n): g for n, g in full.items()}


def _plain(name: str) -> str:
    """A parameter's name without those of wrappers; the longer one ends as the other does."""
    return name.replace("_fsdp_wrapped_module.", "").replace("module.", "")


def _ddp(model: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model)


def _fsdp1(model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cuda", 0))


def _fsdp2(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS = {"ddp": _ddp, "fsdp1": _fsdp1, "fsdp2": _fsdp2}


def training(rank: int, world: int, family: str, wrap: str) -> dict[str, Any]:
    """One step of a patched model under a wrapper, in units of what the plain model's own step may be off."""
    from liger_registry.transformers import apply

    inputs = {name: t.cuda() for name, t in batch(4, 24).items()}
    exact_loss, exact = _step(small(family).double().cuda(), inputs)
    plain_loss, plain = _step(small(family).cuda(), inputs)
    model = small(family).cuda()
    applied = apply(model)
    loss, gradients = _step(WRAPPERS[wrap](model), inputs)
    limits = {n: max(TIMES * _distance(plain[n], g), FLOOR) for n, g in exact.items()}
    return {
        "loss": abs(loss - exact_loss) / max(TIMES * abs(plain_loss - exact_loss), FLOOR * exact_loss),
        "gradients": max(_distance(gradients[n], g) / limits[n] for n, g in exact.items()),
        "materialised": dict(applied.report.materialised),
        "ops": {row.op for row in applied.report.applied()},
    }


def head(rank: int, world: int, dtype: torch.dtype) -> dict[str, float]:
    """A head whose classes are spread over the group: loss and gradients in units of the formula's own error."""
    from liger_registry.transformers import vocabulary_parallel_cross_entropy

    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(200, 64, generator=generator).to("cuda", dtype)
    weight = torch.randn(1000, 64, generator=generator).to("cuda", dtype)
    target = torch.randint(1000, (200,), generator=generator).cuda()
    target[:9] = -100

    def formula(convert: torch.dtype) -> list[torch.Tensor]:
        h, w = (t.clone().to(convert).requires_grad_() for t in (hidden, weight))
        loss = F.cross_entropy(F.linear(h, w).to(torch.promote_types(convert, torch.float32)), target)
        return [loss.detach(), *torch.autograd.grad(loss, (h, w))]

    exact, own = formula(torch.float64), formula(dtype)
    h, w = (t.clone().requires_grad_() for t in (hidden, weight))
    loss = vocabulary_parallel_cross_entropy(h, w, target, vocab_start=0)
    given = [loss.detach(), *torch.autograd.grad(loss, (h, w))]
    pairs = zip(("loss", "hidden", "weight"), given, own, exact, strict=True)
    eps = torch.finfo(dtype).eps
    return {name: _distance(a, c) / (1.1 * _distance(b, c) + 4 * eps) for name, a, b, c in pairs}


def norm(rank: int, world: int) -> float:
    """rms_norm over DTensors on a mesh of GPUs, against the same over whole tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (world,))
    torch.manual_seed(2)
    x, weight = torch.randn(4, 24, 64, device="cuda"), torch.randn(64, device="cuda")
    found = []
    for spread in (True, False):
        given = [x, weight]
        if spread:
            given = [distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(weight, mesh, [Replicate()])]
        leaves = [t.detach().requires_grad_() for t in given]
        y = registry.get("rms_norm")(*leaves)
        y.square().sum().backward()
        found.append([t.full_tensor() if spread else t for t in (y.detach(), *(leaf.grad for leaf in leaves))])
    return max(_distance(a, b.double()) for a, b in zip(*found, strict=True))


def warm(rank: int, world: int, root: str) -> dict[str, Any]:
    """A sharded warmup of two problems and a frozen plan; then the same once more."""
    device = Device.default()
    fields = Fields(x="bfloat16", weight="bfloat16"), Fields(casting="llama")
    problems = [Problem("rms_norm", "default", "forward", Fields(rows=n, hidden=512), *fields) for n in (64, 512)]
    mine = Registry(Settings(cache_dir=Path(root)))
    reports = [tune_sharded(problems, catalog=mine.catalog, device=device, store=mine.user_store) for _ in range(2)]
    plan = mine.freeze()
    decided = [mine.decide(problem, device) for problem in problems]
    return {
        "measured": [report.measured for report in reports],
        "sources": [decision.source for decision in decided],
        "digest": plan.digest,
        "decisions": len(plan),
    }
