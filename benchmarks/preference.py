"""``python -m benchmarks preference``: preference, policy and distillation losses over an output head.

Time, memory and first call, beside liger-kernel and TRL's fused head where they are installed. All candidates of a loss
are timed in turn, forward and backward, on the same tensors, so that a drifting clock meets all of them; the figure is
the median. Extra memory is the peak of a step beyond what is there before it, gradients included. The first call runs
in a process of its own, in which nothing is compiled or loaded but what is imported.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.ceilings import measure
from benchmarks.measure import short
from benchmarks.memory import extra_gib
from benchmarks.targets import Tally, Target, extra, times
from benchmarks.timing import Clock, clock_of, in_turn, synchronize

FILE = "preference.json"
OURS, LIGER, TRL = "ours", "liger", "trl"
CANDIDATES = (OURS, LIGER, TRL)
PAIRED = ("orpo", "cpo", "simpo", "dpo")
POLICIES = ("grpo", "gspo")
LOSSES = (*PAIRED, "kto", *POLICIES, "jsd", "cosine", "linear_logp")
IGNORED = (0.0, 0.5, 0.8)
CLASSES = {
    "orpo": "LigerFusedLinearORPOLoss",
    "cpo": "LigerFusedLinearCPOLoss",
    "simpo": "LigerFusedLinearSimPOLoss",
    "dpo": "LigerFusedLinearDPOLoss",
    "kto": "LigerFusedLinearKTOLoss",
    "grpo": "LigerFusedLinearGRPOLoss",
    "gspo": "LigerFusedLinearGRPOLoss",
    "jsd": "LigerFusedLinearJSDLoss",
    "cosine": "LigerFusedLinearCosineSimilarityLoss",
}
OPTIONS: dict[str, dict[str, Any]] = {"gspo": {"importance_sampling_level": "sequence"}, "kto": {"use_ref_model": True}}
#: Products of one whole head that a loss takes at least: three for loss and gradients, one for a reference or teacher.
PRODUCTS = {"dpo": 4, "kto": 4, "grpo": 4, "gspo": 4, "jsd": 4, "cosine": 4, "linear_logp": 4}
#: Seconds that the process of a first call may take.
FIRST_S = 300
Step = Callable[[], Any]


def targets_of(loss: str, ignored: float) -> tuple[Target, ...]:
    """What is asked of a loss with a part of its tokens ignored."""
    if loss not in PAIRED or ignored not in (0.0, 0.5):
        return ()
    if not ignored:
        return (times(LIGER, 0.85),)
    return times(LIGER, 0.55), extra(1.7), Target("ours.first_s", 1.5)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of all losses' tensors."""

    sequences: int = 8
    tokens: int = 1024
    hidden: int = 4096
    vocab: int = 128256


TINY = Sizes(4, 8, 16, 48)


class Data:
    """The tensors of all losses, of one size and one part of ignored tokens: the first ones of every sequence."""

    def __init__(self, sizes: Sizes, ignored: float, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, device=device, generator=generator) * scale).to(dtype)

        sequences, tokens = sizes.sequences, sizes.tokens
        self.hidden = random(sequences, tokens, sizes.hidden).requires_grad_()
        self.weight = random(sizes.vocab, sizes.hidden, scale=0.02).requires_grad_()
        self.ref_hidden = random(sequences, tokens, sizes.hidden)
        self.ref_weight = random(sizes.vocab, sizes.hidden, scale=0.02)
        self.target = torch.randint(sizes.vocab, (sequences, tokens), device=device, generator=generator)
        self.target[:, : int(ignored * tokens)] = -100
        self.mask = (self.target != -100).long()
        self.ids = self.target.clamp(min=0)
        self.labels = torch.arange(sequences, device=device) % 2 == 0
        self.advantages = torch.linspace(-1, 1, sequences, device=device)
        self.kl = torch.tensor(0.1, device=device)

    @property
    def counted(self) -> int:
        """How many tokens count."""
        return int(self.mask.sum())

    def arguments(self, loss: str) -> tuple[Any, ...]:
        """What the class of a loss is called with."""
        x, w, t, refs = self.hidden, self.weight, self.target, (self.ref_hidden, self.ref_weight)
        if loss in ("jsd", "cosine"):
            return x.flatten(0, 1), w, self.ref_hidden.flatten(0, 1), self.ref_weight, t.flatten()
        if loss == "kto":
            return x, w, t, None, self.labels, *refs, None, self.kl
        if loss in POLICIES:
            return x, w, self.ids, self.mask, self.advantages, None, None, None, *refs
        return (w, x, t, None, *refs) if loss == "dpo" else (w, x, t)


def step_of(candidate: str, loss: str, data: Data) -> Step:
    """Forward and backward of a loss by a candidate; ImportError or LookupError where it has none."""
    leaves = (data.hidden, data.weight)
    if loss == "linear_logp":
        upstream = torch.linspace(0.5, 1.5, data.target.numel(), device=data.target.device).view(data.target.shape)
        forward = logp_of(candidate, data)
        return lambda: torch.autograd.grad(forward(), leaves, upstream)
    if candidate == TRL:
        raise LookupError(f"TRL has no fused {loss}")
    package = {OURS: "liger_registry.chunked_loss", LIGER: "liger_kernel.chunked_loss"}[candidate]
    module = getattr(importlib.import_module(package), CLASSES[loss])(**OPTIONS.get(loss, {}))
    arguments = data.arguments(loss)

    def step() -> Any:
        found = module(*arguments)
        return torch.autograd.grad(found[0] if isinstance(found, tuple) else found, leaves)

    return step


def logp_of(candidate: str, data: Data) -> Step:
    """Per-token log-probabilities alone, as TRL's trainers take them."""
    if candidate == OURS:
        from liger_registry import registry

        return lambda: registry.get("linear_logp")(data.hidden, data.weight, data.target)
    if candidate == LIGER:
        raise LookupError("liger-kernel has no log-probabilities alone")
    import trl.kernels.chunked_logprob  # noqa: F401 - an ImportError belongs here, not in the first step

    from benchmarks.peers.trl import logp

    return lambda: logp(data.hidden, data.weight, data.target)


def product_step(data: Data) -> Step:
    """One product of a whole head with the tokens that count, the unit of every bound."""
    rows = data.hidden.detach().flatten(0, 1)[: max(data.counted, 1)]
    weight = data.weight.detach().t()
    out = rows.new_empty(min(2048, rows.shape[0]), weight.shape[1])

    def step() -> None:
        for start in range(0, rows.shape[0], out.shape[0]):
            part = rows[start : start + out.shape[0]]
            torch.mm(part, weight, out=out[: part.shape[0]])

    return step


def first_call(sizes: Sizes, device: torch.device, candidate: str, loss: str, ignored: float) -> float | None:
    """Seconds of the first step of a candidate in a fresh process, with caches of compiled kernels that are empty."""
    told = json.dumps([sizes.sequences, sizes.tokens, sizes.hidden, sizes.vocab, device.type, candidate, loss, ignored])
    command = [sys.executable, "-m", "benchmarks.preference", told]
    with tempfile.TemporaryDirectory() as empty:
        caches = {"TRITON_CACHE_DIR": f"{empty}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor"}
        options: dict[str, Any] = {"env": {**os.environ, **caches}, "cwd": record.ROOT, "timeout": FIRST_S}
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        except subprocess.TimeoutExpired:
            return None
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return float(done.stdout.split()[-1])


def first_here(told: str) -> float:
    """Seconds of the first step of what ``first_call`` named, in this process."""
    *sizes, place, candidate, loss, ignored = json.loads(told)
    data = Data(Sizes(*sizes), ignored, torch.device(place))
    step = step_of(candidate, loss, data)
    data.hidden @ data.weight[:128].t()  # the library of matrix products loads with anything
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start


def measured(
    sizes: Sizes, device: torch.device, clock: Clock, loss: str, ignored: float, rounds: int, first: bool
) -> dict[str, Any]:
    """All candidates of one loss."""
    data = Data(sizes, ignored, device)
    steps: dict[str, Step] = {}
    failed: dict[str, str] = {}
    for name in CANDIDATES:
        try:
            steps[name] = step_of(name, loss, data)
            steps[name]()
        except (ImportError, LookupError):
            steps.pop(name, None)
        except Exception as problem:  # a peer that fails is reported, not the end
            steps.pop(name, None)
            failed[name] = short(problem)
    seen = in_turn({name: clock.events(step) for name, step in steps.items()}, rounds)
    product = clock.events(product_step(data))
    figures = {"bound.ms": PRODUCTS.get(loss, 3) * statistics.median(product() for _ in range(3))}
    for name, step in steps.items():
        figures[f"{name}.ms"] = statistics.median(seen[name])
        figures[f"{name}.extra_gib"] = extra_gib(step)
        found = first_call(sizes, device, name, loss, ignored) if first else None
        if found is not None:
            figures[f"{name}.first_s"] = found
    verdicts = [target.judge(figures.get).to_json() for target in targets_of(loss, ignored)]
    return {"loss": loss, "ignored": ignored, "figures": figures, "failed": failed, "targets": verdicts}


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    figures, told = row["figures"], []
    for name in CANDIDATES:
        if (ms := figures.get(f"{name}.ms")) is None:
            told.append(row["failed"].get(name, ""))
            continue
        first = figures.get(f"{name}.first_s")
        began = "" if first is None else f", {first:.1f} s"
        memory = figures.get(f"{name}.extra_gib")
        took = "" if memory is None or math.isnan(memory) else f", {memory:.2f} GiB"
        told.append(f"{ms:.1f} ms{took}{began}")
    ours, peer = figures.get("ours.ms"), figures.get("liger.ms") or figures.get("trl.ms")
    ratio = f"{ours / peer:.2f}" if ours and peer else ""
    return f"| {row['loss']} | {row['ignored']:.0%} | {figures['bound.ms']:.1f} | {' | '.join(told)} | {ratio} |"


HEAD = "| loss | ignored | products ms | ours | liger-kernel | TRL | ours / peer |\n|---|---|---|---|---|---|---|"


def run(
    device: torch.device,
    out: Path,
    *,
    losses: Sequence[str] = LOSSES,
    ignored: Sequence[float] = IGNORED,
    sizes: Sizes | None = None,
    scale: str = "full",
    rounds: int = 10,
    first: bool = True,
    say: Callable[[str], object] = lambda text: print(text, flush=True),
) -> dict[str, Any]:
    """Measure the losses and keep the results in ``out/preference.json`` after each.

    Args:
        device: where.
        out: the directory of the results.
        losses: of ``LOSSES``.
        ignored: parts of the tokens.
        sizes: of the tensors; None for those of the scale.
        scale: full or tiny.
        rounds: samples of each candidate.
        first: whether the first call is timed too, in a process a candidate.
        say: told each line.

    Raises:
        ValueError: an unknown loss.
    """
    if unknown := [loss for loss in losses if loss not in LOSSES]:
        raise ValueError(f"no loss is called {unknown[0]!r}; they are {', '.join(LOSSES)}")
    sizes = sizes or (Sizes() if scale == "full" else TINY)
    clock, rows = clock_of(device), list[dict[str, Any]]()
    document: dict[str, Any] = {
        "command": "preference",
        "about": record.about(device, scale=scale),
        "ceilings": measure(clock, device).to_json(),
        "sizes": {name: getattr(sizes, name) for name in Sizes.__slots__},
        "rows": rows,
    }
    say(HEAD)
    for part in ignored:
        for loss in losses:
            rows.append(measured(sizes, device, clock, loss, part, rounds, first))
            if device.type == "cuda":
                torch.cuda.empty_cache()
            words = [str(verdict["verdict"]) for row in rows for verdict in row["targets"]]
            document["summary"] = {"targets": Tally.of(words).text}
            record.write(out / FILE, document)
            say(line(rows[-1]))
    say(f"# targets: {document['summary']['targets']}")
    return document


if __name__ == "__main__":
    print(first_here(sys.argv[1]))
