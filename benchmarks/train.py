"""``python -m benchmarks train``: whole training steps, each mode in a process of its own.

Liger's patch of one instance also changes the modeling module, so that a later plain model in the same process would be
no plain model. Tokens are random, the optimizer is fused AdamW, weights are bf16, attention is PyTorch's. The first
step is timed apart: it holds what is loaded and compiled. The peak is that of everything, weights and optimizer
included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.targets import Tally, Target

FILE = "train.json"
#: How a model is run. ``ours-low`` has a smaller memory budget; the last two compile the patched model.
MODES = ("hf", "compile", "liger", "ours", "ours-low", "liger-compile", "ours-compile")
USUAL = MODES[:5]
#: The budget of ``ours-low``: the class below the default of 32,768 tokens over 128,256 classes.
LOW_BUDGET = "2GiB"
#: Seconds a process may take.
TIMEOUT_S = 400


@dataclass(frozen=True, slots=True)
class Setup:
    """A model and how it is trained.

    Attributes:
        kind: the model type of transformers.
        config: its sizes.
        batch: sequences a step.
        length: tokens of each.
        checkpoint: whether activations are computed again.
        targets: what is asked of the modes' figures.
    """

    kind: str
    config: dict[str, Any]
    batch: int
    length: int
    checkpoint: bool
    targets: tuple[Target, ...]

    def tiny(self) -> Setup:
        """The same at sizes for a CPU."""
        small = {
            **self.config,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": 128,
        }
        return Setup(self.kind, small, 2, 16, self.checkpoint, self.targets)


def _faster(limit: float) -> Target:
    return Target("ours.tokens_s", limit, "liger.tokens_s", least=True)


def _peak(limit: float, mode: str = "ours") -> Target:
    return Target(f"{mode}.peak_gib", limit, "liger.peak_gib")


# After a warmup the first step may take two seconds longer than plain PyTorch's; a compiled patched model learns alike.
_ALWAYS = (Target("ours.first_s", 2.0, less="hf.first_s"), Target("ours-compile.loss_off", 0.1))
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
_QWEN = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
MODELS = {
    "llama-3-8b-8layers": Setup(
        "llama", _LLAMA, 8, 4096, True, (_faster(1.03), _peak(1.08), _peak(1.0, "ours-low"), *_ALWAYS)
    ),
    "qwen3-0.6b": Setup("qwen3", _QWEN, 4, 4096, False, (_faster(1.20), _peak(1.05), *_ALWAYS)),
    "qwen3-0.6b-small": Setup("qwen3", _QWEN, 1, 512, False, (Target("ours.ms", 0.75, "hf.ms"), *_ALWAYS)),
}


def one(model: str, mode: str, device: str, scale: str, steps: int) -> dict[str, Any]:
    """A mode in a process of its own: what the process says.

    Args:
        model: of ``MODELS``.
        mode: of ``MODES``.
        device: cuda or cpu.
        scale: full or tiny.
        steps: that are timed.
    """
    with tempfile.TemporaryDirectory() as place:
        target = Path(place) / "result.json"
        command = [sys.executable, "-m", "benchmarks.train_step", model, mode, device, scale, str(steps), str(target)]
        environment = {**os.environ, **({"LIGER_MEMORY_BUDGET": LOW_BUDGET} if mode == "ours-low" else {})}
        try:
            done = subprocess.run(
                command,
                cwd=record.ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"no result after {TIMEOUT_S} s"}
        if done.returncode or not target.exists():
            said = (done.stderr or done.stdout).strip().splitlines()
            return {"failed": said[-1][:300] if said else f"exit code {done.returncode}", "log": said[-30:]}
        found: dict[str, Any] = json.loads(target.read_text())
        return found


def figures(runs: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The numbers of all modes by ``mode.quantity``, and how far each mode's losses are from the plain model's."""
    found = {
        f"{mode}.{name}": float(result[name])
        for mode, result in runs.items()
        for name in ("tokens_s", "ms", "peak_gib", "first_s")
        if result.get(name) is not None
    }
    plain = runs.get("hf", {}).get("losses")
    for mode, result in runs.items():
        if plain and result.get("losses"):
            found[f"{mode}.loss_off"] = loss_off(result["losses"], plain)
    return found


def loss_off(losses: Sequence[float], plain: Sequence[float]) -> float:
    """The largest relative difference of losses step by step; infinite for what is no number."""
    pairs = list(zip(losses, plain, strict=False))
    found = max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs)
    return found if found == found and all(a == a for a, _ in pairs) else float("inf")


def judge(model: str, runs: dict[str, dict[str, Any]]) -> list[dict[str, object]]:
    """The verdicts on a model's targets."""
    return [target.judge(figures(runs).get).to_json() for target in MODELS[model].targets]


def ratios(runs: dict[str, dict[str, Any]]) -> str:
    """The modes beside the plain model, in one line."""
    plain = runs.get("hf", {}).get("tokens_s")
    told = []
    for mode, result in runs.items():
        if "failed" in result:
            told.append(f"{mode}: {result['failed']}")
            continue
        ratio = f" ({result['tokens_s'] / plain:.2f})" if plain else ""
        peak = "" if result.get("peak_gib") is None else f", {result['peak_gib']:.1f} GiB"
        first = f"first {result['first_s']:.1f} s"
        told.append(f"{mode} {result['tokens_s']:,.0f} tok/s{ratio}, {result['ms']:.1f} ms{peak}, {first}")
    return "; ".join(told)


def run(
    device: torch.device,
    out: Path,
    *,
    models: Sequence[str] = tuple(MODELS),
    modes: Sequence[str] = USUAL,
    scale: str = "full",
    steps: int = 6,
    say: Callable[[str], object] = lambda text: print(text, flush=True),
) -> dict[str, Any]:
    """Train each model in each mode and keep the results in ``out/train.json`` after each.

    What an earlier run left in that file for other models or modes of the same commit stays.

    Raises:
        ValueError: an unknown model or mode.
    """
    for given, known in ((models, MODELS), (modes, MODES)):
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(known)}")
    about = record.about(device, scale=scale)
    rows = _earlier(out / FILE, about)
    document = {"command": "train", "about": about, "rows": rows}
    for model in models:
        row = next((r for r in rows if r["model"] == model), None)
        if row is None:
            setup = MODELS[model] if scale == "full" else MODELS[model].tiny()
            row = {"model": model, "batch": setup.batch, "length": setup.length, "config": setup.config, "modes": {}}
            rows.append(row)
        for mode in modes:
            row["modes"][mode] = one(model, mode, device.type, scale, steps)
            row["figures"], row["targets"] = figures(row["modes"]), judge(model, row["modes"])
            words = [str(verdict["verdict"]) for r in rows for verdict in r.get("targets", ())]
            document["summary"] = {"targets": Tally.of(words).text}
            record.write(out / FILE, document)
            say(f"{model}: {ratios({mode: row['modes'][mode]})}")
        say(f"# {model}: {ratios(row['modes'])}")
        for verdict in row["targets"]:
            say(f"# {model}: {verdict['target']}: {verdict['text']}")
    return document


def _earlier(path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = record.read(path)
    same = all(found["about"].get(name) == about[name] for name in ("commit", "scale", "device", "versions"))
    rows: list[dict[str, Any]] = found["rows"] if same else []
    return rows
