"""One rank of a data-parallel training of two models, a plain one and one with a bound head; prints what it saw.

Run as ``python head_ranks.py RANK MEETING KIND ...``, in two processes.
"""

from __future__ import annotations

import functools
import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from heads import VOCAB, batch, bind_head, small
from torch import nn
from torch.nn import functional as F

Build = Any


def fsdp2(kind: str) -> Build:
    """fully_shard of each layer, and of the head by itself, with the norm before it, or with the rest of the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (2,))
    options: dict[str, Any] = {"mesh": mesh}
    if kind == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)

    def build(model: Any) -> nn.Module:
        for layer in model.model.layers:
            fully_shard(layer, **options)
        if kind in ("head", "bf16"):
            fully_shard(model.lm_head, **options)
        elif kind == "group":
            fully_shard([model.model.norm, model.lm_head], **options)
        root = {"reshard_after_forward": True} if kind == "resharded" else {}
        return fully_shard(model, **options, **root)

    return build


def fsdp1(kind: str) -> Build:
    """The wrapper class, around the head too where the kind says so."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    def build(model: Any) -> nn.Module:
        wrapped = [*model.model.layers, *([model.lm_head] if "head" in kind else [])]
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: any(m is w for w in wrapped))
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params="orig" in kind, device_id=cpu)

    return build


def ddp(kind: str) -> Build:
    """DistributedDataParallel with one of its options."""
    options = {kind: True} if kind else {}
    return lambda model: nn.parallel.DistributedDataParallel(model, **options)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A gradient, whole."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(builder: Build, own_loss: bool) -> dict[str, Any]:
    """Three steps of both; the losses, accuracies, how far gradients are apart, and what computed logits."""
    models, counts = [], None
    for bound in (False, True):
        model = small()
        counts = bind_head(model) if bound else counts
        models.append(builder(model))
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in models]
    found: dict[str, Any] = {"losses": [], "accuracy": [], "gradients": []}
    for seed in range(3):
        inputs = batch(seed=10 * seed + dist.get_rank())
        ids, losses, accuracy = inputs["input_ids"], [], []
        for model in models:
            output = model(ids) if own_loss else model(**inputs)
            if own_loss:
                rows = output.logits[:, :-1].float().reshape(-1, VOCAB)
                loss = F.cross_entropy(rows, ids[:, 1:].reshape(-1))
            else:
                loss = output.loss
            accuracy.append((output.logits[:, :-1].argmax(-1) == ids[:, 1:]).float().mean().item())
            loss.backward()
            losses.append(loss.item())
        apart = 0.0
        for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            if theirs.grad is not None and theirs.grad.numel():
                grad = full(theirs.grad)
                apart = max(apart, float((full(ours.grad) - grad).abs().max() / (grad.abs().max() + 1e-6)))
        found["losses"].append(losses)
        found["accuracy"].append(accuracy)
        found["gradients"].append(apart)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found["during"] = dict(counts or {})
    inputs = batch(seed=77)
    with torch.no_grad():
        logits = [m(**inputs).logits.float() for m in models]
        found["logits"] = float((logits[1] - logits[0]).abs().max())
    through = []
    for model in models:
        value = model(**inputs).logits.float().logsumexp(-1).square().mean()
        value.backward()
        grads = [full(p.grad).float().reshape(-1) for p in model.parameters() if p.grad is not None]
        through.append(torch.cat([g for g in grads if g.numel()]))
    found["through"] = float((through[1] - through[0]).abs().max() / through[0].abs().max())
    return found


def main() -> None:
    """Join the other rank, train once for each kind, print."""
    rank, meeting, kinds = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    found = {}
    for how in kinds:
        name, _, rest = how.partition(":")
        kind, _, loss = rest.partition(",")
        builder = {"fsdp2": fsdp2, "fsdp1": fsdp1, "ddp": ddp}[name](kind)
        found[how] = train(builder, loss == "own")
    print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
