"""``python -m benchmarks warm``: tune what ``kernels`` measures, so that ours answers from tables."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.inputs import make
from benchmarks.models import rows as model_rows
from benchmarks.peers.ours import handle_of, options_of, pins_of, problems
from benchmarks.table import TABLE, chosen
from liger_registry import registry
from liger_registry.problem import SCHEME, Problem


def problems_of(case: Case, device: torch.device) -> list[Problem]:
    """What a case asks the registry: its scheme where there are several, the stages of composites, and its phases."""
    inputs = make(case, device)
    handle = handle_of(case, inputs)
    op = handle.op
    asked = problems(case, inputs, handle)
    found = [decision.problem for decision in pins_of(asked, registry.device).values()]
    # Stages come first: a composite is timed with what they have been given.
    found = [p for p in found if p.op != case.op] + [p for p in found if p.op == case.op]
    tensors, options = op.bind(inputs.tensors, options_of(case))
    if len(op.schemes_for(options)) > 1:
        needs = handle.needs(tensors)
        found.append(registry.problem_of(op, tensors, options, SCHEME, needs, handle.budget, "")[0])
    return found


def cases(only: Sequence[str] = (), models: bool = True, tiny: bool = False) -> list[Case]:
    """The cases of some rows, each once."""
    rows = chosen([*TABLE, *(model_rows() if models else ())], only)
    return list(dict.fromkeys(row.case.tiny() if tiny else row.case for row in rows))


def run(
    device: torch.device,
    asked: Iterable[Case],
    *,
    budget_s: float | None = None,
    force: bool = False,
    say: Callable[[str], object] = lambda text: print(text, flush=True),
) -> Any:
    """Tune the problems of some cases into the user's tables; what was tuned with the same code is not tuned again.

    Args:
        device: where.
        asked: the cases.
        budget_s: seconds after which nothing new is begun.
        force: measure anew what is known.
        say: told of each problem once.
    """
    wanted: dict[Problem, None] = {}
    for case in asked:
        wanted |= dict.fromkeys(problems_of(case, device))
    # Private stages before what is made of them, over all cases.
    ordered = sorted(wanted, key=lambda problem: not registry.op(problem.op).private)
    began, told = time.monotonic(), set[str]()
    say(f"{len(ordered)} problems")

    def show(progress: Any) -> None:
        if progress.problem.text not in told:
            told.add(progress.problem.text)
            say(f"[{time.monotonic() - began:5.0f} s, {progress.done + 1}/{len(ordered)}] {progress.problem.text}")

    return registry.tune(ordered, torch_device=device, budget_s=budget_s, force=force, progress=show)


def told(report: Any) -> str:
    """A report in one line: how many problems ended how."""
    counted = Counter(row.status for row in report.rows)
    ended = ", ".join(f"{count} {status}" for status, count in counted.most_common()) or "nothing to do"
    return f"{ended}; {report.measured} candidates in {report.seconds:.0f} s"
