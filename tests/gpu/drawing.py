"""Random calls of random operations, each with what is right; for the soak.

Calls come in bursts. A burst keeps an operation, its flags, dtypes and exact sizes, implementations and configs, and
changes the number of rows, strides, alignment, options, values and which gradients are needed: a kernel that took a
second to compile then serves several calls. A seed and a burst's number fix all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from liger_registry.config import Config
from liger_registry.errors import RegistryError
from liger_registry.examples import STYLES
from liger_registry.implementation import Implementation
from liger_registry.op import DimKind, Op
from liger_registry.problem import BACKWARD, FORWARD, Problem
from liger_registry.tuning.cases import Case, make_case, marking, other_options
from liger_registry.tuning.odd import problems_for

CALLS = 8  # of a burst
DTYPES = {"bfloat16": 0.45, "float16": 0.25, "float32": 0.25, "float64": 0.05}
# Of inputs no matrix comes repeated: that is for gradients, as of `y.sum()`.
INPUTS = ("guarded", "guarded", "misaligned", "padded", "transposed", "strided", "expanded", "gapped")
GRADIENTS = ("guarded", "guarded", "misaligned", "padded", "transposed", "rows", "scalar")
# The base-2 logarithm of the widest; wider ones are in the conformance suite.
WIDEST = 17
# What a contract turns down raises one of these where it is asked about sizes that it does not know.
_TURNED_DOWN = (RegistryError, ValueError, RuntimeError, IndexError, AssertionError, TypeError, ZeroDivisionError)


@dataclass
class Call:
    """One call, and what is right.

    Attributes:
        op: the operation.
        case: its inputs, gradients and right results.
        needs: which differentiable inputs need a gradient.
        pins: the implementation and config of each phase; none for what the registry chooses.
        burst, number: where it comes from.
    """

    op: Op
    case: Case
    needs: tuple[bool, ...]
    burst: int
    number: int
    pins: dict[str, tuple[Implementation, Config]] = field(default_factory=dict)

    @property
    def overwritten(self) -> list[torch.Tensor]:
        """The inputs that it may write into."""
        there = dict(zip((i.name for i in self.op.inputs), self.case.inputs, strict=True))
        names = (name for name, option in self.op.overwrites.items() if self.case.options[option])
        return [t for name in names if (t := there[name]) is not None]

    def __str__(self) -> str:
        own = self.op.options_of(self.case.problem)
        options = {name: value for name, value in self.case.options.items() if value != own[name]}
        pins = [f"{phase} {item.id} ({config.text})" for phase, (item, config) in self.pins.items()]
        shape = next(tuple(t.shape) for t in self.case.inputs if t is not None)
        return " ".join(filter(None, (self.case.problem.text, self.case.label, f"{shape}", f"{options or ''}", *pins)))


_templates: dict[tuple[str, str, str], Mapping[str, Sequence[Problem]]] = {}


def templates(op: Op, scheme: str, phase: str) -> Mapping[str, Sequence[Problem]]:
    """The contract's own odd problems, by the dtype of their first tensor."""
    key = op.name, scheme, phase
    if key not in _templates:
        found: dict[str, list[Problem]] = {}
        for problem in problems_for(op, scheme, phase):
            found.setdefault(str(next(iter(problem.dtypes.values()))), []).append(problem)
        _templates[key] = found
    return _templates[key]


def accepts(op: Op, problem: Problem) -> bool:
    """Whether an example of these sizes is a call of this problem."""
    options = op.options_of(problem)
    try:
        inputs = op.example(problem, "meta", 0, "random")
        op.validate(inputs, options)
        found = op.describe(inputs, options)
    except _TURNED_DOWN:
        return False
    flags = problem.flags.without("needs", "budget")
    return (found.dims, found.dtypes, found.flags) == (problem.dims, problem.dtypes, flags)


def elements(op: Op, problem: Problem) -> int:
    """Of the largest tensor of a call, logits that are never whole among them."""
    inputs = op.example(problem, "meta", 0, "random")
    logits = int(problem.dims.get("tokens", 0)) * int(problem.dims.get("vocab", 0))
    return max(logits, *(t.numel() for t in inputs if t is not None))


class Burst:
    """A burst of calls.

    Args:
        ops: what to draw from.
        seed, number: fix it.
        device: torch's device.
        most: elements of the largest tensor.
    """

    def __init__(self, ops: Sequence[Op], seed: int, number: int, device: Any, most: int) -> None:
        self.number, self.device, self.most, self.seed = number, device, most, seed
        rng = self.rng = Random(f"{seed}/{number}")
        self.op = op = ops[rng.randrange(len(ops))]
        self.backward = bool(op.differentiable) and BACKWARD in op.order and rng.random() < 0.85
        self.backward = self.backward and any(s.backward or s.saved_inputs for s in op.schemes)
        scheme = rng.choice(op.schemes)
        there = templates(op, scheme.name, BACKWARD if self.backward else FORWARD)
        dtypes = [dtype for dtype in DTYPES if dtype in there]
        dtype = rng.choices(dtypes, [DTYPES[d] for d in dtypes])[0]
        self.template = self._sized(rng.choice(there[dtype]))

    def choice(self, what: str) -> Random:
        """A generator for one choice, the same for each call of the burst."""
        return Random(f"{self.seed}/{self.number}/{what}")

    def _sized(self, template: Problem) -> Problem:
        """The template with other exact sizes, if its contract takes any that are drawn."""
        op, rng = self.op, self.rng
        exact = [name for name, kind in op.dims.items() if kind is DimKind.EXACT and template.dims[name]]
        rows = {name: max(1, int(template.dims[name])) for name, kind in op.dims.items() if kind is DimKind.BUCKET}
        template = template.having(**rows)
        for attempt in range(16):
            if attempt % 2:  # contracts whose sizes divide each other take multiples
                dims = {name: int(template.dims[name]) * rng.randint(1, 9) for name in exact}
            else:
                dims = {name: max(1, round(2 ** rng.uniform(0, WIDEST))) for name in exact}
                dims = {name: n - n % 16 if n >= 16 and rng.random() < 0.5 else n for name, n in dims.items()}
            found = template.having(**dims)
            if accepts(op, found) and elements(op, found) <= self.most:
                return found
        return template

    def calls(self, pin: Callable[[Burst, Call], None]) -> Iterator[Call]:
        """The calls; ``pin`` is asked about each, and may give it implementations."""
        for number in range(CALLS):
            call = self._call(number, Random(f"{self.seed}/{self.number}/{number}"))
            pin(self, call)
            yield call

    def _call(self, number: int, rng: Random) -> Call:
        op, problem = self.op, self._rows(rng)
        scheme = op.scheme(problem.scheme)
        given = zip(op.inputs, op.example(problem, "meta", 0, "random"), strict=True)
        wanted = [spec.name for spec, x in given if spec.differentiable and x is not None]
        chosen = (
            set(wanted if rng.random() < 0.6 else rng.sample(wanted, rng.randint(1, len(wanted)))) if wanted else ()
        )
        needs = tuple(self.backward and name in chosen for name in op.differentiable)
        named = ",".join(name for name, need in zip(op.differentiable, needs, strict=True) if need)
        if op.takes_needs(problem.phase, problem.scheme):
            problem = replace(problem, flags=problem.flags.having(needs=named))
        style, seed = rng.choice((*STYLES, "random", "random")), rng.randrange(1 << 30)
        # Which of the inputs that are not in the key there are may depend on the seed.
        inputs = op.example(problem, "meta", seed, style)
        options, mark = self._options(inputs, problem, rng)
        lead = self._leading(inputs, problem, options, rng)
        layouts = rng.choice(INPUTS), rng.choice(GRADIENTS)

        def reshape(inputs: Any) -> Any:
            marked = inputs if mark is None else mark(inputs)
            return marked if lead is None else lead(marked)

        case = make_case(
            op, scheme, problem, style, seed, self.device, options=options, layouts=layouts, reshape=reshape,
            label=f"{style} {'/'.join(layouts)}",
        )  # fmt: skip
        return Call(op, case, needs, self.number, number)

    def _rows(self, rng: Random) -> Problem:
        """The problem with another number of rows: log-uniform, seldom none."""
        op, template = self.op, self.template
        names = [name for name, kind in op.dims.items() if kind is DimKind.BUCKET]
        one = max(1, elements(op, template.having(**dict.fromkeys(names, 64))) // 64)
        limit = max(1, round(2 ** rng.uniform(4, self.most.bit_length() - 1)) // one)
        rows = 0 if rng.random() < 0.02 else max(1, round(2 ** rng.uniform(0, limit.bit_length())))
        for count in (rows, rows - rows % 4, rows - rows % 64, rows - rows % 132):
            found = template.having(**dict.fromkeys(names, count))
            if accepts(op, found) and elements(op, found) <= self.most:
                return found
        return template

    def _options(self, inputs: Any, problem: Problem, rng: Random) -> tuple[dict[str, Any], Any]:
        """Options, some of which are not those of the contract's example, and what marks places by them."""
        own = self.op.options_of(problem)
        others = other_options(self.op, problem, inputs) if rng.random() < 0.6 else None
        if others is None:
            return dict(own), None
        mixed = {name: value if rng.random() < 0.6 else own[name] for name, value in others.items()}
        try:
            self.op.validate(inputs, mixed)
            same = self.op.describe(inputs, mixed).flags == self.op.describe(inputs, own).flags
        except _TURNED_DOWN:
            same = False
        options = mixed if same else others
        return dict(options), marking(self.op, own, options)

    def _leading(
        self, inputs: Any, problem: Problem, options: Mapping[str, Any], rng: Random
    ) -> Callable[[Any], Any] | None:
        """What gives the rows more than one dimension, where the contract takes that."""
        names = [name for name, kind in self.op.dims.items() if kind is DimKind.BUCKET]
        rows = int(problem.dims[names[0]])
        parts = [n for n in range(2, min(rows, 200)) if rows % n == 0]
        if len(names) != 1 or not parts or rng.random() < 0.5:
            return None
        part = rng.choice(parts)
        shape = (rows // part, part) if rng.random() < 0.7 else (1, rows // part, part)

        def reshape(inputs: Any) -> Any:
            return tuple(
                x.reshape(*shape, *x.shape[1:]) if x is not None and x.dim() and x.shape[0] == rows else x
                for x in inputs
            )

        shaped = reshape(inputs)
        try:
            self.op.validate(shaped, options)
            same = self.op.describe(shaped, options).dims == problem.dims
        except _TURNED_DOWN:
            same = False
        return reshape if same else None
