"""One mode of one model, in this process: ``python -m benchmarks.train_step MODEL MODE DEVICE SCALE STEPS FILE``."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import GIB
from benchmarks.timing import synchronize
from benchmarks.train import MODELS, Setup

#: Steps that are not timed, behind the first: the optimizer's state is made and allocators settle.
WARM = 2


def build(setup: Setup, device: str) -> Any:
    """The model with random weights, on the device from the start."""
    transformers: Any = importlib.import_module("transformers")

    config = transformers.AutoConfig.for_model(setup.kind, **setup.config)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config.use_cache = False
    model.train()
    return model


def patch(model: Any, mode: str) -> list[str]:
    """Apply what a mode applies; for ours, what the report says was applied, operation by operation."""
    if mode.startswith("liger"):
        importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model)
        return []
    if mode.startswith("ours"):
        from liger_registry.transformers import apply

        report = apply(model).report
        counted: dict[str, int] = {}
        for row in report.applied():
            counted[row.op] = counted.get(row.op, 0) + 1
        return [f"{op} x {count}" for op, count in counted.items()]
    return []


def run(model_name: str, mode: str, device: str, scale: str, steps: int) -> dict[str, Any]:
    """Train, and say tokens a second, milliseconds a step, the peak, the first step's time and the losses."""
    setup = MODELS[model_name] if scale == "full" else MODELS[model_name].tiny()
    torch.manual_seed(0)
    model = build(setup, device)
    applied = patch(model, mode)
    if mode.endswith("compile"):
        model.forward = torch.compile(model.forward, dynamic=False)
    if setup.checkpoint:
        # The name before transformers 5.2x; the one argument that both have is the dictionary.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    vocab = int(setup.config["vocab_size"])
    ids = torch.randint(vocab, (setup.batch, setup.length), generator=torch.Generator().manual_seed(1)).to(device)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    gc.collect()
    synchronize()
    start = time.perf_counter()
    losses = [step()]
    synchronize()
    first = time.perf_counter() - start
    losses += [step() for _ in range(WARM)]
    synchronize()
    start = time.perf_counter()
    losses += [step() for _ in range(steps)]
    synchronize()
    took = (time.perf_counter() - start) / steps
    return {
        "tokens_s": setup.batch * setup.length / took,
        "ms": took * 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None,
        "first_s": first,
        "losses": [float(loss) for loss in losses],
        "applied": applied,
    }


def main() -> None:
    """Run and write the result."""
    model, mode, device, scale, steps, target = sys.argv[1:]
    Path(target).write_text(json.dumps(run(model, mode, device, scale, int(steps))))


if __name__ == "__main__":
    main()
