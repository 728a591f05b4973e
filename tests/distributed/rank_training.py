"""What ranks run: one optimizer step's loss and gradients of a model that is distributed one way or another."""

from __future__ import annotations

import contextlib
import functools
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from rank_models import ROWS, Model, clean, counted, global_batch, gradients_of, held
from torch import Tensor, nn

from liger_registry.transformers import apply


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        model: what is trained.
        wrap: how it is distributed.
        patched: whether the registry's operations are applied.
        micro: how many micro-batches a step accumulates.
        checkpointing: whether activations are computed again.
    """

    model: Model
    wrap: str
    patched: bool = True
    micro: int = 1
    checkpointing: bool = False

    def __str__(self) -> str:
        parts = [self.model.family, self.model.head, self.wrap, "patched" if self.patched else "plain"]
        parts += [f"{self.micro} micro-batches"] if self.micro > 1 else []
        parts += ["checkpointing"] if self.checkpointing else []
        return ", ".join(parts)

    @property
    def dtype(self) -> torch.dtype:
        """In which layers compute."""
        return torch.bfloat16 if "bf16" in self.wrap else torch.float32


@dataclass(frozen=True)
class Found:
    """What a rank found wrong, how often logits were computed, and what was applied.

    Attributes:
        wrong: what differs from one rank.
        materialised: the report's count, by place.
        applied: the operations.
        skipped: why the head was left alone, "" if it was not.
    """

    wrong: list[str]
    materialised: dict[str, int]
    applied: set[str]
    skipped: str


def prepared(case: Case) -> tuple[Any, Any]:
    """The model, patched if it is to be and with LoRA if it has any, and the report."""
    model, applied = case.model.build(), None
    if case.model.head == "lora":
        model = case.model.adapted(model)  # before, so that the adapters see what they would double
    if case.patched:
        applied = apply(model)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if case.model.head == "lora":
            model.enable_input_require_grads()
    return model, applied


def found(case: Case, applied: Any, loss: float, gradients: dict[str, Tensor]) -> Found:
    """Hold loss and gradients against one rank's."""
    wrong = held(case.model, loss, gradients, case.dtype)
    if applied is None:
        return Found(wrong, {}, set(), "")
    report = applied.report
    skipped = "; ".join(row.reason for row in report.skipped("fused_linear_cross_entropy"))
    return Found(wrong, dict(report.materialised), {row.op for row in report.applied()}, skipped)


def shares(rank: int, world: int, micro: int) -> list[dict[str, Tensor]]:
    """A rank's rows of the batch, in micro-batches."""
    rows = ROWS // world
    mine = {name: t[rank * rows : (rank + 1) * rows] for name, t in global_batch().items()}
    parts = [t.chunk(micro) for t in mine.values()]
    return [dict(zip(mine, values, strict=True)) for values in zip(*parts, strict=True)]


def total(loss: Tensor, *, group: Any = None) -> float:
    """The sum over ranks."""
    loss = loss.detach().double().clone()
    dist.all_reduce(loss, group=group)
    return loss.item()


# -- data parallel -----------------------------------------------------------------------------------------------------


def ddp(case: Case, model: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model)


def _layers(model: Any) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]


def fsdp1(case: Case, model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    layers = _layers(model)
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: any(m is layer for layer in layers))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )


def fsdp2(case: Case, model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if "bf16" in case.wrap:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if "offload" in case.wrap:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for layer in _layers(model):
        fully_shard(layer, **options)
    if "head" in case.wrap:
        fully_shard(model.lm_head, **options)
    return fully_shard(model, **options)


WRAPPERS = {"ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2}


@contextlib.contextmanager
def unsynchronised(model: Any, last: bool) -> Any:
    """Without exchanging gradients, but in the last micro-batch."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
        yield
    elif last:
        yield
    else:
        with model.no_sync():
            yield


def data_parallel(rank: int, world: int, case: Case) -> Found:
    """Rows of the batch on each rank; the loss is a sum over the tokens that all ranks count."""
    late = case.wrap.endswith("late")
    model, applied = prepared(replace(case, patched=False) if late else case)
    wrapped = WRAPPERS[case.wrap.split()[0]](case, model)
    applied = apply(model) if late else applied
    items = counted(global_batch()["labels"])
    parts, loss = shares(rank, world, case.micro), torch.zeros(())
    for number, part in enumerate(parts):
        with unsynchronised(wrapped, number == len(parts) - 1):
            one = wrapped(**part, num_items_in_batch=torch.tensor(items)).loss
            loss = loss + one.detach().float()
            (one * world).backward()  # wrappers average over ranks
    if case.wrap.startswith("fsdp1"):
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
            gradients = gradients_of(wrapped)
    else:
        gradients = gradients_of(wrapped)
    return found(case, applied, total(loss), gradients)


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def zero(rank: int, world: int, case: Case) -> Found:
    """The same under DeepSpeed: stage 2 shards gradients, stage 3 weights too, which come for a module's own call."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    # Its own all-reduce through shared memory is compiled on first use, for a minute, where there is a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model, applied = prepared(case)
    stage = int(case.wrap[-1])
    config = {
        "train_micro_batch_size_per_gpu": ROWS // world // case.micro,
        "gradient_accumulation_steps": case.micro,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,  # nothing is so small that it stays whole
            "overlap_comm": False,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    names = {id(p): clean(n) for n, p in model.named_parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(trained, lr=0.0), config=config)
    items, loss = counted(global_batch()["labels"]), torch.zeros(())
    partitioned = [name for name, p in engine.module.named_parameters() if p.numel() == 0]
    for part in shares(rank, world, case.micro):
        one = engine(**part, num_items_in_batch=torch.tensor(items)).loss
        loss = loss + one.detach()
        engine.backward(one * world * case.micro)  # the engine averages over ranks and micro-batches
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    gradients = {names[id(p)]: safe_get_full_grad(p).double() for p in trained}
    result = found(case, applied, total(loss), gradients)
    if stage == 3 and not any("lm_head" in name or "embed" in name for name in partitioned):
        result.wrong.append("the head's weight was not partitioned")
    engine.destroy()
    return result
