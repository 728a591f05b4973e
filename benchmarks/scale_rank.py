"""One rank of ``python -m benchmarks scale``: ``python -m benchmarks.scale_rank JOB.json`` with ``RANK`` set.

The job says what is measured; what became of it is written line by line into ``rank<N>.jsonl`` beside the job, so that
whoever started the ranks knows each length's result as soon as it is there, and the last word of a rank that dies.

A model's lengths are run in one process, the shortest first: starting eight ranks and loading their libraries takes
longer than most lengths do. Between lengths everything is freed but the weights, which are filled anew, so that a
length gives the same figures whether others went before it or not. Nothing is run after an error: its process may hold
memory that nobody can free, and the other ranks wait in collectives that this one will not join.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.memory import GIB
from benchmarks.timing import synchronize
from benchmarks.train_step import patch

#: Seconds that the timed steps of a length may take, by the untimed one: at 32K a step takes more than half a minute.
TIMED_S = 40.0
#: Timed steps are at least so many.
LEAST = 2
#: Steps of the comparison with the plain model.
CHECK_STEPS = 3
#: Seconds after which its warmup begins nothing new.
WARM_S = 60.0
#: What says that memory was short, where an error of another kind says it: of CUDA, NCCL, Triton and cuBLAS.
SHORT_OF_MEMORY = ("out of memory", "cublas_status_alloc_failed", "cudnn_status_alloc_failed")


class Rank:
    """Where a rank stands, and its line to whoever started it.

    Attributes:
        number: which rank this is.
        world: how many there are.
        place: its device.
        job: what is asked.
    """

    def __init__(self, path: Path) -> None:
        self.job: dict[str, Any] = json.loads(path.read_text())
        self.number, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.directory = path.parent
        self._lines = path.parent / f"rank{self.number}.jsonl"
        self.place = torch.device("cpu")
        self.length: int | None = None

    def say(self, event: str, **what: Any) -> None:
        """Write down what happened."""
        with self._lines.open("a") as file:
            file.write(json.dumps({"event": event, "at": time.time(), "length": self.length, **what}) + "\n")

    def join(self) -> None:
        """Take the device, with its share of memory if there is a cap, and meet the other ranks."""
        backend = "gloo"
        if self.job["device"] == "cpu":
            torch.set_num_threads(1)
        if self.job["device"] == "cuda":
            backend, self.place = "nccl", torch.device("cuda", self.number)
            torch.cuda.set_device(self.place)
            if cap := self.job.get("cap_gib"):
                # Of what PyTorch's allocator takes; the context and NCCL's buffers, about 1 GiB, are beyond it.
                total = torch.cuda.get_device_properties(self.place).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, cap * GIB / total), self.place)
        dist.init_process_group(
            backend,
            store=dist.FileStore(str(self.directory / "meeting"), self.world),  # type: ignore[attr-defined]
            rank=self.number,
            world_size=self.world,
            timeout=timedelta(seconds=self.job["limit_s"]),
            device_id=self.place if backend == "nccl" else None,
        )

    def most(self, *values: float) -> list[float]:
        """The largest of all ranks' values, one by one."""
        given = torch.tensor(values, dtype=torch.float64, device=self.place)
        dist.all_reduce(given, dist.ReduceOp.MAX)
        return [float(value) for value in given]

    def mean(self, losses: list[torch.Tensor]) -> list[float]:
        """The means over the ranks, one by one."""
        given = torch.stack([loss.detach().double() for loss in losses])
        dist.all_reduce(given)
        return [float(value) / self.world for value in given]


def build(rank: Rank, config: dict[str, Any], dtype: torch.dtype, mode: str) -> tuple[Any, list[str]]:
    """The model in a mode, sharded by layer; its weights are the rank's shards alone, and hold nothing yet.

    Returns:
        The model, and which operations were applied how often.
    """
    transformers: Any = importlib.import_module("transformers")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    told = transformers.AutoConfig.for_model("llama", **config)
    told._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(told, dtype=dtype)
    model.config.use_cache = False
    model.train()
    # The rotary frequencies are no weights: they are computed where they are made, and cannot be on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(told)
    applied = patch(model, mode)
    # The name before transformers 5.2x; the one argument that both have is the dictionary.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    mesh = init_device_mesh(rank.place.type, (rank.world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=rank.place)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return model, applied


@torch.no_grad()
def fill(model: Any, rank: Rank) -> None:
    """Random weights, the same for every mode on as many ranks.

    Layers give outputs as large as their inputs, whatever the sizes, so that each of them matters to the loss.
    """
    for number, parameter in enumerate(model.parameters()):
        # A generator a shard: that of DTensors keeps one state for all of them, and there is none for the CPU.
        generator = torch.Generator(rank.place).manual_seed((number << 20) + rank.number)
        norm = parameter.dim() == 1
        mean, width = (1.0, 0.1) if norm else (0.0, parameter.shape[-1] ** -0.5)
        parameter.to_local().normal_(mean, width, generator=generator)


def trainer(model: Any, rank: Rank, batch: int, length: int, seed: int) -> Callable[[], torch.Tensor]:
    """One step of training on the same random tokens, with a new optimizer; it gives this rank's own loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    vocab = int(model.config.vocab_size)
    ids = torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed)).to(rank.place)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def free(model: Any) -> None:
    """Let go of gradients, and hand what is free back to the device."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed(model: Any, rank: Rank, batch: int, length: int, steps: int) -> dict[str, Any]:
    """Train at a length, and say what the slowest rank took and the fullest rank held.

    Returns:
        Tokens a second and GPU, milliseconds a step, GiB allocated and reserved at the peak (None on a CPU), seconds of
        the first step, timed steps, and the means of all steps' losses over the ranks.
    """
    fill(model, rank)
    free(model)
    step = trainer(model, rank, batch, length, seed=1 + rank.number)

    def clock(count: int) -> tuple[list[torch.Tensor], float]:
        synchronize()
        dist.barrier()
        start = time.perf_counter()
        found = [step() for _ in range(count)]
        synchronize()
        return found, time.perf_counter() - start

    losses, first = clock(1)
    # Untimed: the optimizer's state is there, and allocators settle. All ranks have to take as many steps.
    warm, took = clock(1)
    first, took = rank.most(first, took)
    count = max(LEAST, min(steps, int(TIMED_S / took)))
    more, took = clock(count)
    cuda = rank.place.type == "cuda"
    held = (torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB) if cuda else (0.0, 0.0)
    took, peak, reserved = rank.most(took / count, *held)
    return {
        "tokens_s": batch * length / took,
        "ms": took * 1e3,
        "peak_gib": peak if cuda else None,
        "reserved_gib": reserved if cuda else None,
        "first_s": first,
        "steps": count,
        "losses": rank.mean([*losses, *warm, *more]),
    }


def logits_made(model: Any) -> dict[str, int]:
    """How often what place made the logits be computed, which the fused loss leaves out; empty without a patch."""
    from liger_registry.transformers import applied_to

    applied = applied_to(model)
    return {} if applied is None else dict(applied.report.materialised)


def cells(rank: Rank) -> None:
    """A mode's lengths, the shortest first."""
    job = rank.job
    model, applied = build(rank, job["config"], torch.bfloat16, job["mode"])
    for length in job["lengths"]:
        rank.length = length
        rank.say("begin")
        found = timed(model, rank, job["batch"], length, job["steps"])
        if job["mode"].startswith("ours"):
            found["logits"] = logits_made(model)
        rank.say("result", **found, applied=applied)
        free(model)


def compared(rank: Rank, config: dict[str, Any], dtype: torch.dtype, length: int) -> dict[str, Any]:
    """The plain model's losses and ours from the same weights, on other tokens on each rank.

    Returns:
        By mode: the means of the losses of some steps over the ranks, and each rank's own loss on the same tokens with
        the weights after them, which differs between ranks that do not hold the same weights or run the same kernels.
    """
    found: dict[str, Any] = {}
    for mode in ("hf", "ours"):
        model, _ = build(rank, config, dtype, mode)
        fill(model, rank)
        step = trainer(model, rank, 1, length, seed=1 + rank.number)
        losses = rank.mean([step() for _ in range(CHECK_STEPS)])
        same: list[Any] = [None] * rank.world
        dist.all_gather_object(same, float(trainer(model, rank, 1, length, seed=0)()))
        found[mode] = {"losses": losses, "same": same}
        if mode == "ours":
            found["logits"] = logits_made(model)
        del step
        free(model)
        del model
    return found


def warmed(rank: Rank, config: dict[str, Any], length: int) -> dict[str, Any]:
    """Warm up a norm, each rank its share, and freeze.

    Returns:
        How many candidates each rank measured, and its plan's digest.
    """
    from liger_registry import registry
    from liger_registry.architecture import Architecture
    from liger_registry.cli._problems import model_problems
    from liger_registry.tuning.distributed import tune_sharded

    architecture = Architecture.from_config({"model_type": "llama", **config})
    # A problem a rank at least, so that none has only results of others.
    tokens = [length << n for n in range(rank.world)]
    problems = model_problems(registry.catalog, [architecture], tokens, ops=["rms_norm"], dtypes=["bfloat16"])
    options: dict[str, Any] = {"torch_device": rank.place, "budget_s": WARM_S}
    report = tune_sharded(
        problems, catalog=registry.catalog, device=registry.device, store=registry.user_store, **options
    )
    registry.forget()
    mine = {"measured": report.measured, "digest": registry.freeze().digest}
    found: list[Any] = [None] * rank.world
    dist.all_gather_object(found, mine)
    return {"measured": [one["measured"] for one in found], "digests": [one["digest"] for one in found]}


def check(rank: Rank) -> None:
    """Warm up, freeze, and compare ours under the plan with the plain model, in bf16 and in small fp32."""
    # Tables of a rank's own, and none of the user's: what the ranks exchange is then all that they have in common.
    os.environ["LIGER_TUNE_CACHE_DIR"] = str(rank.directory / f"tables{rank.number}")
    job = rank.job
    rank.say("begin")
    found = warmed(rank, job["config"], job["length"])
    found["bfloat16"] = compared(rank, job["config"], torch.bfloat16, job["length"])
    found["float32"] = compared(rank, job["small"], torch.float32, job["small_length"])
    rank.say("result", **found)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device's memory was short."""
    return isinstance(error, torch.OutOfMemoryError) or any(part in str(error).lower() for part in SHORT_OF_MEMORY)


def follow(parent: int) -> None:
    """End this process when the one that started it is gone, however that ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """Do the job, and end without the farewell of process groups, which would wait for ranks that are gone."""
    threading.Thread(target=follow, args=(os.getppid(),), daemon=True).start()
    rank = Rank(Path(sys.argv[1]))
    try:
        rank.join()
        {"cells": cells, "check": check}[rank.job["kind"]](rank)
    except Exception as error:
        traceback.print_exc()
        told = f"{type(error).__name__}: {error}".strip().splitlines()
        rank.say("oom" if out_of_memory(error) else "failed", text=told[0][:300])
    else:
        rank.say("done")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
