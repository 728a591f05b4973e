"""Verification at a problem's own sizes, which the contract's proxies are too small to stand for in every way.

What goes wrong beyond some number of rows (a grid that is too small, an offset of 32 bits, a fixed number of rows) is
right in every proxy. So whatever may be chosen runs once at its own sizes, and its results are held against the
reference in float64, which is computed in chunks of rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from liger_registry.accuracy import Verdict
from liger_registry.config import Config
from liger_registry.implementation import Implementation
from liger_registry.op import DimKind, Op
from liger_registry.problem import BACKWARD, Problem
from liger_registry.tuning.arguments import META, Arguments
from liger_registry.tuning.cases import Case, evaluate
from liger_registry.tuning.verify import Verification, bind_results, fault, judge_result, run_poisoned, shape_fault

if TYPE_CHECKING:
    from liger_registry.device import Device

    Span = tuple[int, int]

#: Elements of the widest input in a chunk. On a CPU its buffers stay below the size at which memory is mapped anew.
_CHUNK, _CPU_CHUNK = 1 << 23, 1 << 18
#: Seconds of one call on a CPU above which a sample of the rows is compared: float64 takes 30 times as long.
SLOW_S = 0.1
# Places in which rows are sampled, the first and the last among them, and rows in each.
_PLACES, _PLACE_ROWS = 9, 64


@dataclass(frozen=True, slots=True)
class Cut:
    """How the tensors of a problem are cut into rows.

    Attributes:
        dim: the dim that counts them.
        rows: how many there are.
        inputs: which inputs have rows, in order; the others, such as a weight, are the same for all of them.
        width: elements of the widest input in one row.
        sums: outputs and saved tensors that have no rows, and are sums over them.
    """

    dim: str
    rows: int
    inputs: tuple[bool, ...]
    width: int
    sums: tuple[str, ...] = ()

    @classmethod
    def of(cls, op: Op, problem: Problem) -> Cut | None:
        """How a problem is cut; None if its results are not those of its rows.

        It is cut along its one bucket dim if this is the first dimension of every output and saved tensor, and none
        of them sums over it. A gradient of an input without rows is then the sum of the chunks' gradients. Where the
        contract says how to (``Op.cut``), outputs and saved tensors may be such sums too.
        """
        names = [name for name, kind in op.dims.items() if kind is DimKind.BUCKET]
        scheme = op.scheme(problem.scheme)
        results = (*op.outputs, *scheme.saved)
        sums = any(names[0] in op.reduced.get(name, ()) for name in results) if len(names) == 1 else True
        if len(names) != 1 or (sums and op.cut is None):
            return None
        rows, options = int(getattr(problem, names[0])), op.options_of(problem)

        def shapes(count: int) -> list[torch.Size | None]:
            inputs = op.example(problem.having(**{names[0]: count}), META, 0, "random")
            told = {"needs": op.needs(problem)} if scheme.gradients else {}
            return [None if t is None else t.shape for t in (*inputs, *scheme.allocate(*inputs, **options, **told))]

        has_rows: list[bool] = []
        ours, taller = shapes(rows), shapes(rows + 1)
        for shape, other in zip(ours, taller, strict=True):
            has_rows.append(shape != other)
            if shape is not None and shape != other and (rows + 1, *shape[1:]) != other:
                return None
        count = len(op.inputs)
        width = max((math.prod(s[1:]) for s, cut in zip(ours, has_rows[:count], strict=False) if s and cut), default=1)
        alone = tuple(name for name, cut in zip(results, has_rows[count:], strict=True) if not cut)
        if alone and op.cut is None:
            return None
        return cls(names[0], rows, tuple(has_rows[:count]), max(width, 1), alone)

    def spans(self, elements: int) -> list[Span]:
        """All rows, in spans of about so many elements."""
        step = max(1, elements // self.width)
        return [(start, min(start + step, self.rows)) for start in range(0, self.rows, step)]

    def sample(self) -> list[Span]:
        """The first rows, the last, and some between."""
        last = max(0, self.rows - _PLACE_ROWS)
        starts = sorted({last * n // (_PLACES - 1) for n in range(_PLACES)})
        return [(start, min(start + _PLACE_ROWS, self.rows)) for start in starts]


class References:
    """The right results of one problem in chunks, which its candidates share, up to a number of bytes."""

    def __init__(self, max_bytes: int = 2 << 30) -> None:
        self._max = max_bytes
        self._bytes = 0
        self._problem: Problem | None = None
        self._chunks: dict[Span, Case] = {}

    def chunk(self, op: Op, problem: Problem, arguments: Arguments, cut: Cut | None, span: Span) -> Case:
        """The right results of a span of rows, of all of them if there is no cut."""
        if problem != self._problem:
            self.clear()
            self._problem = problem
        if span not in self._chunks:
            case = _chunk(op, problem, arguments, cut, span)
            if self._bytes + case.bytes > self._max:
                return case
            self._bytes += case.bytes
            self._chunks[span] = case
        return self._chunks[span]

    def clear(self) -> None:
        """Let go of everything held."""
        self._chunks.clear()
        self._problem, self._bytes = None, 0


def verify_whole(
    op: Op,
    implementation: Implementation,
    config: Config,
    problem: Problem,
    device: Device,
    arguments: Arguments,
    references: References | None = None,
    starting: Callable[[int], None] = lambda index: None,
) -> Verification:
    """Hold one call at the problem's own sizes against the reference.

    On a GPU, and on a CPU where one call takes no more than ``SLOW_S``, every element is compared. Elsewhere rows in
    a few places are, the first and the last among them, and no result may hold memory that nobody wrote.

    Args:
        op: the operation.
        implementation: the candidate.
        config: its config.
        problem: the problem.
        device: the device it is verified for.
        arguments: the problem's tensors.
        references: right results to share with other candidates of the same problem.
        starting: told the number of each chunk before it is compared.
    """
    cut = Cut.of(op, problem)
    mine = arguments.apart(op, problem)
    names, tensors, call, needs = bind_results(
        op, implementation, config, problem, device, mine.inputs, mine.grad_outputs, mine.saved
    )
    place = next(t.device for t in tensors if t is not None)
    began = time.perf_counter()
    results = run_poisoned(call, tensors, [], huge=False)
    on_cpu = place.type == "cpu"
    sampled = cut is not None and on_cpu and time.perf_counter() - began > SLOW_S
    spans = [(0, 0)]
    if cut is not None:
        spans = cut.sample() if sampled else cut.spans(_CPU_CHUNK if on_cpu else _CHUNK)
    references = references or References(0)
    label, verdicts, sums = f"{problem.dims.text} whole", list[Verdict](), dict[str, _Sum]()
    for index, span in enumerate(spans):
        starting(index)
        case = references.chunk(op, problem, arguments, cut, span)
        if index == 0 and (wrong := shape_fault(results, names, needs, case)):
            return Verification.of([fault(label, "results", wrong)])
        for name, result in zip(names, results, strict=True):
            if result is None:
                continue
            if cut is None or _has_rows(op, cut, name):
                if cut is not None and result.shape[:1] != (cut.rows,):
                    wrong = f"shape {tuple(result.shape)}, not that of {cut.rows} rows"
                    return Verification.of([fault(label, name, wrong)])
                part = result if cut is None else result[span[0] : span[1]]
                verdicts.append(judge_result(op, case, name, part))
            elif not sampled:
                sums.setdefault(name, _Sum(result)).add(case, name)
        if not all(v.passed for v in verdicts):
            return Verification.of(verdicts)
    verdicts += [
        judge_result(op, total.case(op, problem, label, name), name, total.result) for name, total in sums.items()
    ]
    if sampled:
        verdicts += [
            fault(label, name, "it holds memory that nobody wrote")
            for name, result in zip(names, results, strict=True)
            if result is not None and result.is_floating_point() and bool(result.isnan().any())
        ]
    return Verification.of(verdicts)


class _Sum:
    """A result that sums over the rows, and the right one as the sum of the chunks'."""

    def __init__(self, result: torch.Tensor) -> None:
        self.result = result
        self._truth: torch.Tensor | float = 0.0
        self._formula: torch.Tensor | float = 0.0
        self._squares: torch.Tensor | float = 0.0
        self._dtype = torch.float64

    def add(self, case: Case, name: str) -> None:
        self._dtype = case.formula[name].dtype
        self._truth = self._truth + case.truth[name]
        self._formula = self._formula + case.formula[name].double()
        # Rounding errors of chunks add as the root of the sum of squares.
        self._squares = self._squares + case.magnitude[name].square()

    def case(self, op: Op, problem: Problem, label: str, name: str) -> Case:
        truth, formula, squares = (torch.as_tensor(t) for t in (self._truth, self._formula, self._squares))
        size = torch.maximum(truth.abs(), squares.sqrt())
        formulas = {name: formula.to(self._dtype)}
        return Case(label, problem, {}, (), (), (), {name: truth}, formulas, {name: size}, ())


def _has_rows(op: Op, cut: Cut, name: str) -> bool:
    """Whether a result has rows: every output and saved tensor, and the gradient of an input that has."""
    inputs = zip((f"grad_{i.name}" for i in op.inputs), cut.inputs, strict=True)
    return dict(inputs).get(name, name not in cut.sums)


def _chunk(op: Op, problem: Problem, arguments: Arguments, cut: Cut | None, span: Span) -> Case:
    start, end = span
    scheme, options = op.scheme(problem.scheme), op.options_of(problem)
    inputs, grads, needs = arguments.inputs, arguments.grad_outputs, op.needs_of(problem)
    if cut is not None:
        if op.cut is not None:
            inputs, options = op.cut(inputs, options)  # type: ignore[assignment]
        cuts = zip(inputs, cut.inputs, strict=True)
        inputs = tuple(t[start:end] if t is not None and has_rows else t for t, has_rows in cuts)
        pairs = zip(op.outputs, grads, strict=False)
        grads = tuple(g if g is None or name in cut.sums else g[start:end] for name, g in pairs)
        problem = problem.having(**{cut.dim: end - start})
    backward = problem.phase == BACKWARD
    asked = grads if backward else None
    formula = evaluate(op, inputs, options, asked, scheme=scheme, needs=needs)
    truth = evaluate(op, inputs, options, asked, torch.float64, scheme, needs)
    wide = tuple(t.double() if t is not None and t.is_floating_point() else t for t in inputs)
    with torch.no_grad():
        if backward:
            wide_grads = tuple(None if g is None else g.double() for g in grads)
        else:  # sizes of outputs do not depend on gradients
            outputs = (truth.get(name) for name in op.outputs)
            wide_grads = tuple(
                y.new_ones(()).expand(y.shape) if y is not None and y.is_floating_point() else None for y in outputs
            )
        sizes = op.magnitude(wide, wide_grads, options)
    keep = dict(_kept(truth, backward))
    return Case(
        label=f"{problem.dims.text} whole" if cut is None else f"rows {start} to {end} of {cut.rows}",
        problem=problem,
        options=options,
        inputs=(),
        grad_outputs=(),
        saved=(),
        truth=keep,
        formula={name: formula[name] for name in keep},
        magnitude={name: sizes.get(name, value.abs()) for name, value in keep.items()},
        buffers=(),
    )


def _kept(results: Mapping[str, torch.Tensor], backward: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """What a phase is compared in: gradients, or everything else."""
    return ((name, value) for name, value in results.items() if name.startswith("grad_") is backward)
