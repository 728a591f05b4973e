"""Preference, policy and distillation losses over an output head: time, memory and first call, beside liger-kernel and
TRL's fused head where they are installed.

Every candidate of a loss is timed in turn, forward and backward, on the same tensors, so that a drifting clock meets
all of them; the figure is the median. Extra memory is the peak of a step beyond what is there before it, gradients
included. The first call runs in a process of its own, in which nothing is compiled or loaded but what is imported.

    python benchmarks/preference.py [--losses orpo dpo ...] [--ignored 0 0.5 0.8] [--sequences 8] [--tokens 1024]
        [--hidden 4096] [--vocab 128256] [--rounds 10] [--no-first] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

OURS, LIGER, TRL = "ours", "liger-kernel", "TRL"
PAIRED = ("orpo", "cpo", "simpo", "dpo")
POLICIES = ("grpo", "gspo")
LOSSES = (*PAIRED, "kto", *POLICIES, "jsd", "cosine", "linear_logp")
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
OPTIONS = {"gspo": {"importance_sampling_level": "sequence"}, "kto": {"use_ref_model": True}}
# Products of one whole head that a loss takes at least: three for loss and gradients, one for a reference or teacher.
PRODUCTS = {"dpo": 4, "kto": 4, "grpo": 4, "gspo": 4, "jsd": 4, "cosine": 4, "linear_logp": 4}
GIB = 1 << 30
Step = Callable[[], Any]


class Data:
    """The tensors of all losses, of one size and one part of ignored tokens."""

    def __init__(self, told: argparse.Namespace, ignored: float) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, device=device, generator=generator) * scale).to(dtype)

        sequences, tokens = told.sequences, told.tokens
        self.hidden = random(sequences, tokens, told.hidden).requires_grad_()
        self.weight = random(told.vocab, told.hidden, scale=0.02).requires_grad_()
        self.ref_hidden, self.ref_weight = (
            random(sequences, tokens, told.hidden),
            random(told.vocab, told.hidden, scale=0.02),
        )
        self.target = torch.randint(told.vocab, (sequences, tokens), device=device, generator=generator)
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
    upstream = torch.linspace(0.5, 1.5, data.target.numel(), device=data.target.device).view(data.target.shape)
    if loss == "linear_logp":
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
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer import utils

    chunk, mask = utils._CHUNKED_LOGPROB_CHUNK_SIZE, data.target != -100

    def forward() -> torch.Tensor:
        rows, labels = data.hidden[mask], data.target[mask]
        found = ChunkedLogProbFunction.apply(rows, data.weight, None, labels, 1.0, chunk, None, 1.0, ())[0]
        return found.new_zeros(mask.shape).masked_scatter(mask, found)

    return forward


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(step: Step) -> float:
    """The time of one step, by events where there is a GPU."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def extra(step: Step) -> float:
    """GiB at the peak of a step beyond what was there."""
    if not torch.cuda.is_available():
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def product_ms(data: Data, rounds: int) -> float:
    """The time of one product of a whole head with the tokens that count, the unit of every bound."""
    rows = data.hidden.detach().flatten(0, 1)[: max(data.counted, 1)]
    out = rows.new_empty(min(2048, rows.shape[0]), data.weight.shape[0])

    def step() -> None:
        for start in range(0, rows.shape[0], out.shape[0]):
            part = rows[start : start + out.shape[0]]
            torch.mm(part, data.weight.detach().t(), out=out[: part.shape[0]])

    step()
    return statistics.median(milliseconds(step) for _ in range(rounds))


def first_call(told: argparse.Namespace, candidate: str, loss: str, ignored: float) -> float | None:
    """Seconds of the first step of a candidate in a fresh process."""
    sizes = [f"--{name}={getattr(told, name)}" for name in ("sequences", "tokens", "hidden", "vocab")]
    one = json.dumps([candidate, loss, ignored])
    done = subprocess.run(
        [sys.executable, __file__, *sizes, "--one", one], capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return float(done.stdout.split()[-1])


def one(told: argparse.Namespace) -> None:
    """Print the seconds of the first step of one candidate."""
    candidate, loss, ignored = json.loads(told.one)
    data = Data(told, ignored)
    step = step_of(candidate, loss, data)
    data.hidden @ data.weight[:128].t()  # the library of matrix products loads with anything
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    print(time.perf_counter() - start)


def measured(told: argparse.Namespace, loss: str, ignored: float) -> dict[str, Any]:
    """All candidates of one loss."""
    data = Data(told, ignored)
    steps: dict[str, Step] = {}
    for candidate in (OURS, LIGER, TRL):
        try:
            steps[candidate] = step_of(candidate, loss, data)
        except (ImportError, LookupError):
            continue
    for name in list(steps):
        try:
            for _ in range(3):
                steps[name]()
        except Exception as error:  # a peer that fails is reported, not the end
            print(f"{name} {loss}: {type(error).__name__}: {error}", file=sys.stderr)
            del steps[name]
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(told.rounds):
        names = list(steps)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(milliseconds(steps[name]))
    bound = PRODUCTS.get(loss, 3) * product_ms(data, 3)
    return {
        "loss": loss,
        "ignored": ignored,
        "bound_ms": bound,
        "candidates": {
            name: {
                "ms": statistics.median(times[name]),
                "extra_gib": extra(steps[name]),
                "first_s": first_call(told, name, loss, ignored) if told.first else None,
            }
            for name in steps
        },
    }


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    told = []
    for name in (OURS, LIGER, TRL):
        found = row["candidates"].get(name)
        if found is None:
            told.append("| |")
            continue
        first = "" if found["first_s"] is None else f", {found['first_s']:.1f} s"
        told.append(f"{found['ms']:.1f} ms, {found['extra_gib']:.2f} GiB{first} |")
    ours, liger = (row["candidates"].get(name, {}).get("ms") for name in (OURS, LIGER))
    peer = liger or row["candidates"].get(TRL, {}).get("ms")
    ratio = f"{ours / peer:.2f}" if ours and peer else ""
    return f"| {row['loss']} | {row['ignored']:.0%} | {row['bound_ms']:.1f} | {' '.join(told)} {ratio} |"


def main() -> None:
    """Measure, print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES)
    parser.add_argument("--ignored", nargs="+", type=float, default=[0.0, 0.5, 0.8])
    for name, size in (("sequences", 8), ("tokens", 1024), ("hidden", 4096), ("vocab", 128256), ("rounds", 10)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--no-first", dest="first", action="store_false")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    told = parser.parse_args()
    if told.one:
        one(told)
        return
    if torch.cuda.is_available():
        sizes = f"{told.sequences} x {told.tokens} tokens, hidden {told.hidden}, vocabulary {told.vocab}"
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {sizes}")
    print("| loss | ignored | products ms | ours | liger-kernel | TRL | ours / peer |\n|---|---|---|---|---|---|---|")
    rows = []
    for ignored in told.ignored:
        for loss in told.losses:
            rows.append(measured(told, loss, ignored))
            print(line(rows[-1]), flush=True)
    if told.json:
        told.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
