"""What runs under NVIDIA's compute-sanitizer: small calls of each implementation, and kernels that it must find fault
with. ``python tests/gpu/sanitized.py conform softmax,rope 240`` is a process of its own, which ``sanitize`` starts.

Inputs and right results are made on the CPU, so that hardly a kernel but ours runs on the GPU, where each is a hundred
times as slow. Tensors lie in allocations of their very size: without guards, a read beyond an end leaves all that is
allocated, where PyTorch's caching allocator is off.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import torch

from liger_registry import registry
from liger_registry.config import Config
from liger_registry.device import Device
from liger_registry.implementation import Implementation
from liger_registry.op import Op
from liger_registry.problem import Problem
from liger_registry.tuning.cases import Case, make_case
from liger_registry.tuning.odd import problems_for
from liger_registry.tuning.verify import call_of, judge_result

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU has no sanitizer, but tests of this module
DTYPES = ("bfloat16", "float32")
# Of a scheme, a phase and a dtype: each has its own sizes or flags.
PROBLEMS = 2
# Elements of the largest tensor.
MOST = 1 << 14


def exact(tensor: torch.Tensor | None, aligned: bool) -> torch.Tensor | None:
    """A tensor on the GPU, at the end of an allocation of its size; one element behind its beginning or at it."""
    if tensor is None:
        return None
    skip = 0 if aligned else 1
    flat = torch.empty(tensor.numel() + skip, dtype=tensor.dtype, device=DEVICE)[skip:]
    return flat.view(tensor.shape).copy_(tensor)


def moved(case: Case, aligned: bool) -> Case:
    """The case with its tensors on the GPU."""
    names = ("inputs", "grad_outputs", "saved")
    return replace(case, **{name: tuple(exact(t, aligned) for t in getattr(case, name)) for name in names})


def problems(op: Op, item: Implementation, device: Device) -> Iterator[Problem]:
    """A few small problems of the conformance suite, as different as they come."""
    there = [p for p in problems_for(op, item.scheme, item.phase) if item.capability.why_not(p, device) is None]
    for dtype in DTYPES:
        small = []
        for problem in there:
            sizes = [int(size) for size in problem.dims.values()]
            if dtype not in problem.dtypes.values() or set(problem.dtypes.values()) - {dtype, "none"}:
                continue
            inputs = op.example(problem, "meta", 0, "random")
            if 0 not in sizes and max(t.numel() for t in inputs if t is not None) <= MOST:
                small.append(problem)
        rng = Random(f"{op.name}/{dtype}")  # of all its implementations alike
        # The largest has several tiles and a tail.
        small.sort(key=lambda p: -max(int(size) for size in p.dims.values()))
        yield from small[:1] + rng.sample(small[1:], min(PROBLEMS - 1, max(0, len(small) - 1)))


def ways(item: Implementation, problem: Problem, device: Device, first: bool) -> list[tuple[Config, bool]]:
    """Configs, and whether tensors are aligned: the heuristic's; of the first problem another config and misaligned."""
    legal = [c for c in item.configs(problem, device) if item.why_illegal(c, problem, device) is None]
    proposed = item.propose(problem, device)
    if not isinstance(proposed, Config) or proposed not in legal:
        return []
    others = [c for c in legal if c != proposed]
    more = [(Random(problem.text).choice(others), True)] if others else []
    return [(proposed, True), *([(proposed, False), *more] if first else [])]


def conform(names: list[str], seconds: float) -> dict[str, object]:
    """Run the small calls of some operations, and judge the results on the CPU; stops when the time is over."""
    device, wrong, left = Device.default(), list[str](), list[str]()
    counts, ended = Counter[str](), time.monotonic() + seconds
    for name in names:
        op = registry.op(name)
        for item in registry.catalog.implementations(name):
            ours = item.capability.vendor == device.vendor or item.stages is not None
            if not (ours and item.proven):
                continue
            if time.monotonic() > ended:
                left.append(f"{name}/{item.phase} {item.id}")
                continue
            seen = set[object]()
            for problem in problems(op, item, device):
                case = make_case(op, op.scheme(item.scheme), problem, "random", 3, "cpu")
                for config, aligned in ways(item, problem, device, problem.dtypes not in seen):
                    seen.add(problem.dtypes)
                    counts["calls"] += 1
                    try:
                        wrong += one(op, item, config, moved(case, aligned), device)
                    except Exception as error:
                        if type(error).__name__ != "OutOfResources":
                            raise
                        counts["resources"] += 1
    return {"calls": counts["calls"], "resources": counts["resources"], "wrong": wrong[:20], "left": left}


def one(op: Op, item: Implementation, config: Config, case: Case, device: Device) -> list[str]:
    """One call, and what is wrong with its results."""
    names, tensors, call, _ = call_of(op, item, config, case, device)
    with torch.no_grad():
        results = call(*tensors)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    results = results if isinstance(results, tuple) else (results,)
    pairs = [(name, y.cpu()) for name, y in zip(names, results, strict=True) if y is not None]
    verdicts = [judge_result(op, case, name, y) for name, y in pairs]
    return [f"{item.id} ({config.text}) {case.problem.text} {v}" for v in verdicts if not v.passed]


# -- what must be found ------------------------------------------------------------------------------------------------


def beyond(distance: int) -> dict[str, object]:
    """Write behind the end of a tensor."""
    import faulty

    faulty.writes_beyond[(1,)](torch.empty(1000, device="cuda"), distance, BLOCK=128)
    torch.cuda.synchronize()
    return {"calls": 1, "wrong": []}


def race() -> dict[str, object]:
    """Have all threads of a program write one word of shared memory."""
    import faulty

    out = torch.zeros(128, dtype=torch.int32, device="cuda")
    faulty.shares_a_word[(1,)](out, BLOCK=128, num_warps=4)
    torch.cuda.synchronize()
    return {"calls": 1, "wrong": []}


def main(what: str, names: str = "", seconds: str = "240") -> None:
    """Run one thing, and print what became of it as the last line."""
    found: dict[str, object] = {"calls": 0, "wrong": []}
    # The device may be gone after a fault that was planted: that it was reported is what counts.
    with contextlib.ExitStack() as stack:
        if what != "conform":
            stack.enter_context(contextlib.suppress(RuntimeError))
        run = {"beyond": lambda: beyond(1 << 24), "behind": lambda: beyond(1000), "race": race}
        found = conform(names.split(","), float(seconds)) if what == "conform" else run[what]()
    print("SANITIZED " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
