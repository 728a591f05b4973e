"""Small models trained on real text, plain and patched: where both go, step by step."""

from __future__ import annotations

import importlib.util
import inspect
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from zoo import quiet, small_model

BYTES = 256
ROWS, LENGTH = 4, 64
# The model of images sees one before each row: START, its merged patches, END.
IMAGE, VIDEO, START, END = 256, 257, 258, 259
PATCHES = (1, 4, 4)

SIZES = {"vocab_size": BYTES + 4, "max_position_embeddings": 2 * LENGTH}
TEXT = {**SIZES, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "initializer_range": 0.05}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "AutoModelForCausalLM", TEXT),
    "gemma2": ("gemma2", "AutoModelForCausalLM", {**TEXT, "query_pre_attn_scalar": 16, "sliding_window": 16}),
    "qwen3": ("qwen3", "AutoModelForCausalLM", TEXT),
    "qwen2_vl": (
        "qwen2_vl",
        "AutoModelForImageTextToText",
        {
            "text_config": {
                **TEXT,
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
                "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            },
            "vision_config": {"embed_dim": 32, "hidden_size": 64, "num_heads": 4, "depth": 2, "mlp_ratio": 2},
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "vision_start_token_id": START,
            "vision_end_token_id": END,
        },
    ),
}


def text() -> torch.Tensor:
    """Prose and code that Python brings along, as bytes: the same on every machine with that release."""
    found = b""
    for name in ("this", "textwrap", "statistics", "argparse", "difflib", "fractions"):
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        found += Path(str(spec.origin)).read_bytes()
    return torch.frombuffer(bytearray(found), dtype=torch.uint8).long()


def build(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any) -> nn.Module:
    """One of ``MODELS``, the same weights on every call, in training."""
    model_type, auto, own = MODELS[name]
    return small_model(model_type, auto=auto, dtype=dtype, **{**own, **changes}).to(device).train()


def batch(name: str, source: torch.Tensor, generator: torch.Generator, device: str) -> dict[str, Any]:
    """Rows of text from anywhere in it; for the model of images with an image before each."""
    starts = torch.randint(0, len(source) - LENGTH, (ROWS,), generator=generator)
    rows = torch.stack([source[s : s + LENGTH] for s in starts.tolist()])
    given: dict[str, Any] = {"input_ids": rows, "labels": rows, "use_cache": False}
    if name == "qwen2_vl":
        _, height, width = PATCHES
        front = torch.tensor([START, *[IMAGE] * (height * width // 4), END]).expand(ROWS, -1)
        given["input_ids"] = torch.cat([front, rows], 1)
        given["labels"] = torch.cat([torch.full_like(front, -100), rows], 1)
        # A pattern as bright as the first byte of its row, so that the model can learn to look. Patches that are alike
        # would leave the gradients of queries and keys to rounding, which AdamW makes as large as any.
        values = height * width, 3 * 2 * 4 * 4
        pattern = torch.randn(values, generator=torch.Generator().manual_seed(2))
        bright = (rows[:, 0].float() / 64 - 1)[:, None, None]
        given["pixel_values"] = (bright * pattern).reshape(-1, values[1])
        given["image_grid_thw"] = torch.tensor([PATCHES] * ROWS)
        given["mm_token_type_ids"] = (given["input_ids"] == IMAGE).int()
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}


def nudge(model: nn.Module) -> None:
    """Move half of all weights by their last bit: what comes of it is the noise that training has by itself."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            moved = torch.rand(parameter.shape, generator=generator) < 0.5
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * moved.to(parameter.device, parameter.dtype))


def curve(
    name: str,
    steps: int,
    patched: bool = False,
    nudged: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **changes: Any,
) -> list[float]:
    """The loss of each step of AdamW, over the same batches on every call; ``changes`` are of the config."""
    from liger_registry.transformers import apply

    with quiet():
        model = build(name, dtype, device, **changes)
        if nudged:
            nudge(model)
        if patched:
            handle = apply(model)
            ops = {row.op for row in handle.report if row.applied}
            assert {"fused_linear_cross_entropy", "rms_norm", "rope"} <= ops, handle.report
            assert ops & {"swiglu", "geglu"}, handle.report
        source, generator = text(), torch.Generator().manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        losses = []
        for _ in range(steps):
            given = batch(name, source, generator, device)
            if "pixel_values" in given:
                given["pixel_values"] = given["pixel_values"].to(dtype)
            loss = model(**{k: v for k, v in given.items() if k in accepted(model)}).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if patched:
            assert not handle.report.materialised, handle.report.materialised
    return torch.stack(losses).float().tolist()


def accepted(model: nn.Module) -> set[str]:
    """The keywords of a model's forward."""
    return set(inspect.signature(type(model).forward).parameters)


def apart(one: list[float], other: list[float]) -> list[float]:
    """How far two curves are from one another, step by step, relative to the loss."""
    return [abs(a - b) / abs(b) for a, b in zip(one, other, strict=True)]


def mean_of_last(losses: list[float], count: int) -> float:
    """The mean over the last steps: single steps differ by their batch."""
    last = losses[-count:]
    return math.fsum(last) / len(last)
