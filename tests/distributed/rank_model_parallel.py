"""What ranks run of models that are cut: by weights, by the sequence, by layers."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from rank_models import LENGTH, ROWS, counted, global_batch, gradients_of, held, whole
from rank_training import Case, Found, found, prepared, total
from torch import Tensor, nn
from torch.nn import functional as F

from liger_registry.transformers import apply

# -- tensor parallel ---------------------------------------------------------------------------------------------------


def loaded(case: Case, world: int) -> Any:
    """The model of a case as transformers loads it: each rank its part of the weights, by the model's own plan."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    places: list[Any] = [None]
    if dist.get_rank() == 0:
        places = [tempfile.mkdtemp(prefix="model-")]
        case.model.build().save_pretrained(places[0])
    dist.broadcast_object_list(places)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = DistributedConfig(tp_size=world, tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(places[0], distributed_config=config, dtype=torch.float32)
    dist.barrier()  # all have read it
    if dist.get_rank() == 0:
        shutil.rmtree(places[0])
    if case.model.head == "frozen":
        model.lm_head.weight.requires_grad_(False)
    return model.train()


def tensor_parallel(rank: int, world: int, case: Case) -> Found:
    """Every rank the whole batch; the head's classes are spread, and nobody gathers its logits."""
    model = loaded(case, world)
    applied = apply(model) if case.patched else None
    output = model(**global_batch())
    output.loss.backward()
    return found(case, applied, output.loss.item(), gradients_of(model))


def tensor_parallel_evaluation(rank: int, world: int, case: Case) -> dict[str, Any]:
    """A loaded model in evaluation, before and after apply and after revert: loss, logits, and tokens it generates."""
    model, batch, seen = loaded(case, world).eval(), global_batch(), []
    forward = model.lm_head.forward
    for step in ("plain", "applied", "reverted"):
        applied = apply(model) if step == "applied" else None
        with torch.no_grad():
            output = model(**batch)
            loss, before = output.loss.item(), dict(applied.report.materialised) if applied else {}
            predicted = output.logits.argmax(-1)
            logits = output.logits + 0.0
            tokens = model.generate(batch["input_ids"][:2, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
        seen.append((loss, predicted, logits, tokens, before))
        if applied is not None:
            applied.revert()
    plain, ours, reverted = seen
    return {
        "losses": [loss for loss, *_ in seen],
        "predicted": torch.equal(plain[1], ours[1]),
        "logits": float((ours[2] - plain[2]).abs().max()),
        "tokens": torch.equal(plain[3], ours[3]) and torch.equal(plain[3], reverted[3]),
        "materialised": ours[4],
        "restored": model.lm_head.forward is forward,
    }


def sequence_parallel_norms(rank: int, world: int, case: Case) -> Found:
    """PyTorch's own plan for Llama: between the products activations are spread by tokens, norms included."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (world,))
    model, applied = prepared(case)
    tokens, every = Shard(1), Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=every, output_layouts=tokens),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=every),
        },
    )
    for layer in model.model.layers:
        layer.input_layernorm = parallelize_module(layer.input_layernorm, mesh, SequenceParallel())
        layer.post_attention_layernorm = parallelize_module(layer.post_attention_layernorm, mesh, SequenceParallel())
        attention = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": tokens}, desired_input_kwarg_layouts={"hidden_states": every}
        )
        plan = {
            "self_attn": attention,
            **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            "self_attn.o_proj": RowwiseParallel(output_layouts=tokens),
            "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(every,)),
            **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
            "mlp.down_proj": RowwiseParallel(output_layouts=tokens),
        }
        parallelize_module(layer, mesh, plan)
    # The model sees its rank's tokens alone, and could not tell the places of all.
    output = model(**global_batch(), position_ids=torch.arange(LENGTH)[None].expand(ROWS, -1))
    output.loss.backward()
    return found(case, applied, output.loss.item(), gradients_of(model))


# -- sequence and context parallel -------------------------------------------------------------------------------------


class Gathered(torch.autograd.Function):
    """All ranks' tokens of a tensor, along its third dimension; backward sums what every rank made of them."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 2)[dist.get_rank()]


def gathering_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention of a rank's tokens to those of all ranks."""
    key, value = (Gathered.apply(t) for t in (key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    first = dist.get_rank() * query.shape[2]
    places = torch.arange(key.shape[2])
    allowed = places[None] <= places[first : first + query.shape[2], None]
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


def context_parallel(rank: int, world: int, case: Case) -> Found:
    """Each rank some tokens of every row: labels are shifted before they are cut, and tokens counted over all ranks."""
    from transformers import AttentionInterface

    AttentionInterface.register("gathering", gathering_attention)
    model, applied = prepared(case)
    model.set_attn_implementation("gathering")
    batch, size = global_batch(), LENGTH // world
    part = slice(rank * size, (rank + 1) * size)
    # The token after the last of a rank's is another rank's: a loss that shifts by itself would lose it.
    shifted = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    output = model(
        input_ids=batch["input_ids"][:, part],
        position_ids=torch.arange(LENGTH)[None, part].expand(ROWS, -1),
        labels=batch["labels"][:, part],
        shift_labels=shifted[:, part].contiguous(),  # transformers' own loss takes a view of it
        num_items_in_batch=torch.tensor(counted(batch["labels"])),
    )
    output.loss.backward()
    for parameter in model.parameters():
        if parameter.requires_grad:
            dist.all_reduce(parameter.grad)
    return found(case, applied, total(output.loss), gradients_of(model))


# -- pipelines ---------------------------------------------------------------------------------------------------------


class First(nn.Module):
    """The layers of a stage that is not the last: a model without a head."""

    def __init__(self, model: Any, start: int) -> None:
        super().__init__()
        self.model, self.start = model, start

    def forward(self, given: Tensor) -> Tensor:
        return self.model(**entered(self.model, given, self.start)).last_hidden_state


class Last(First):
    """The last layers, and the head."""

    def forward(self, given: Tensor) -> Tensor:
        return self.model(**entered(self.model.model, given, self.start)).logits


def entered(model: Any, given: Tensor, start: int) -> dict[str, Tensor]:
    """Tokens for the first stage, and for the others what the one before gave."""
    return {"inputs_embeds": given} if start else {"input_ids": given}


def pipeline(rank: int, world: int, case: Case) -> Found:
    """torch.distributed.pipelining with a stage a rank; all but the last have no head."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model = case.model.build()
    layers, each = list(model.model.layers), case.model.layers // world
    start, last = rank * each, rank == world - 1
    model.model.layers = nn.ModuleList(layers[start : start + each])
    if start:
        model.model.embed_tokens = nn.Identity()
    if not last:
        model.model.norm = nn.Identity()
    stage_model = Last(model, start) if last else First(model.model, start)
    applied = apply(stage_model) if case.patched else None
    batch, micro = global_batch(), 2
    items = counted(batch["labels"])
    shifted = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / items

    stage = PipelineStage(stage_model, rank, world, torch.device("cpu"))
    # Each micro-batch's loss has its share of all tokens already.
    schedule = ScheduleGPipe(stage, micro, loss_fn=loss_of, scale_grads=False)
    losses: list[Tensor] = []
    options: dict[str, Any] = {"return_outputs": False}
    if rank == 0:
        schedule.step(batch["input_ids"], **options)
    elif last:
        schedule.step(target=shifted, losses=losses, **options)
    else:
        schedule.step(**options)
    loss = torch.stack(losses).sum() if last else torch.zeros(())
    prefix = "" if last else "model."
    mine = {}
    for name, parameter in (model if last else model.model).named_parameters():
        if parameter.grad is not None:
            parts = (prefix + name).split(".")
            if "layers" in parts:
                place = parts.index("layers") + 1
                parts[place] = str(int(parts[place]) + start)
            mine[".".join(parts)] = whole(parameter.grad)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine)
    gradients = {name: grad for one in everyone for name, grad in one.items()}
    wrong = held(case.model, total(loss), gradients)
    if applied is None:
        return Found(wrong, {}, set(), "")
    report = applied.report
    if not last and report.applied("fused_linear_cross_entropy"):
        wrong.append("a stage without a head has one in its report")
    return Found(wrong, dict(report.materialised), {row.op for row in report.applied()}, "" if last else "no head")
