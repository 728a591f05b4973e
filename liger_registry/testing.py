"""The conformance suite: what every implementation of an operation is held to, for authors of kernels.

In a test module of a plugin::

    from liger_registry.testing import conformance_cases

    @pytest.mark.parametrize("case", conformance_cases("rms_norm", "cuda:mine", device="cuda"), ids=str)
    def test_conformance(case):
        case()

Right values come from the contract's reference in float64. What autograd adds on top, such as second backwards, is the
library's own and is not asked of an implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from liger_registry.accuracy import Verdict
from liger_registry.config import Config
from liger_registry.device import Device
from liger_registry.errors import RegistryError, UnknownImplementationError, VerificationError
from liger_registry.examples import STYLES
from liger_registry.implementation import Implementation
from liger_registry.op import DimKind, Op
from liger_registry.problem import Problem
from liger_registry.tuning.cases import FEW
from liger_registry.tuning.odd import TALL, problems_for

if TYPE_CHECKING:
    import torch

    from liger_registry.catalog import Catalog

__all__ = ["ConformanceCase", "Report", "check_implementation", "conformance_cases", "problems_for"]

#: More than the second and third size of a grid may be, and no multiple of anything.
TALLEST = 70_001
LAYOUTS = ("misaligned", "padded", "transposed", "rows", "scalar", "strided", "expanded")
MOST_CONFIGS = 64


@dataclass(frozen=True, slots=True)
class ConformanceCase:
    """One thing an implementation is held to; calling it raises VerificationError if it does not hold.

    Attributes:
        id: such as ``any:eager-forward-bfloat16-hidden=41,rows=5``.
        check: what is wrong, one text a fault; none if nothing is.
    """

    id: str
    check: Callable[[], Sequence[str]] = field(repr=False)

    def __str__(self) -> str:
        return self.id

    def __call__(self) -> None:
        """Raise VerificationError if it does not hold."""
        faults = self.check()
        if faults:
            raise VerificationError(
                f"{self.id} does not conform", why="; ".join(faults)[:4000], fix="compare with Op.reference in float64"
            )


@dataclass(frozen=True, slots=True)
class Report:
    """What the cases found.

    Attributes:
        passed: ids of the cases that hold.
        failed: the errors of the others.
    """

    passed: tuple[str, ...]
    failed: tuple[VerificationError, ...]

    def raise_if_failed(self) -> None:
        """Raise one VerificationError with the lines of all cases that do not hold."""
        if self.failed:
            raise VerificationError(
                f"{len(self.failed)} of {len(self.failed) + len(self.passed)} conformance cases do not hold",
                why="\n".join(f"{error.what}: {error.why}" for error in self.failed),
            )


def check_implementation(
    op_name: str,
    implementation: Implementation | str,
    *,
    catalog: Any = None,  # noqa: ANN401
    device: str = "cpu",
    problems: Iterable[Problem] | None = None,
    configs: str = "sample",
) -> Report:
    """Hold an implementation against its operation's contract.

    Args:
        op_name: the operation.
        implementation: itself, registered or not, or its name or id, which stands for all phases that have it.
        catalog: a catalogue or a registry; by default the public registry.
        device: ``cpu``, ``cuda``, or ``interpreter`` in a process that was started with ``TRITON_INTERPRET=1``.
        problems: in place of those of ``problems_for``.
        configs: ``sample`` takes the heuristic's config and three others (on the interpreter the first alone), ``all``
            takes all.

    Raises:
        VerificationError: a case does not hold; ``why`` has the lines of all that do not.
        UnknownImplementationError: there is none of that name.
    """
    passed, failed = [], []
    for case in conformance_cases(
        op_name, implementation, catalog=catalog, device=device, problems=problems, configs=configs
    ):
        try:
            case()
        except VerificationError as error:
            failed.append(error)
        else:
            passed.append(case.id)
    report = Report(tuple(passed), tuple(failed))
    report.raise_if_failed()
    return report


def conformance_cases(
    op_name: str,
    implementation: Implementation | str | None = None,
    *,
    catalog: Any = None,  # noqa: ANN401
    device: str = "cpu",
    problems: Iterable[Problem] | None = None,
    configs: str = "sample",
) -> list[ConformanceCase]:
    """The cases of an implementation, or of all that can run on a device, for ``pytest.mark.parametrize``.

    The arguments are those of ``check_implementation``; cases run when they are called.
    """
    if configs not in ("sample", "all"):
        raise ValueError(f"configs={configs!r} is neither 'sample' nor 'all'")
    known = _catalog(catalog)
    op, place = known.op(op_name), Device.parse(device)
    given = None if problems is None else list(problems)
    found: list[ConformanceCase] = []
    for item in _named(known, op, implementation):
        torch_device = "cuda" if place.vendor in ("cuda", "rocm") else "cpu"
        suite = _Suite(op, item, place, torch_device, configs, [] if given is None else given)
        if given is None:
            suite.problems = [p for p in problems_for(op, item.scheme, item.phase) if suite.admits(p)]
        else:
            suite.problems = [p for p in given if (p.scheme, p.phase) == (item.scheme, item.phase) and suite.admits(p)]
        found += suite.cases(own_shapes=given is None)
    return found


def _catalog(given: Any) -> Catalog:  # noqa: ANN401
    if given is None:
        from liger_registry.runtime import registry

        given = registry
    found: Catalog = getattr(given, "catalog", given)
    return found


def _named(catalog: Catalog, op: Op, given: Implementation | str | None) -> list[Implementation]:
    if isinstance(given, Implementation):
        return [given]
    there = catalog.implementations(op.name)
    # What breaks the rule in places is asked for by name, to see where.
    found = [i for i in there if (given is None and i.proven) or given in (i.id, i.name)]
    if not found:
        raise UnknownImplementationError(f"{op.name} has no implementation {given!r}", candidates={i.id for i in there})
    return found


@dataclass(slots=True)
class _Suite:
    """The cases of one implementation on one device."""

    op: Op
    item: Implementation
    device: Device
    torch_device: str
    configs: str
    problems: list[Problem]

    @property
    def styles(self) -> tuple[str, ...]:
        """Of the inputs; a few on the interpreter, where a kernel takes 10^4 times as long as on a GPU."""
        return FEW if self.device.vendor == "interpreter" else STYLES

    def admits(self, problem: Problem) -> bool:
        return self.item.capability.why_not(problem, self.device) is None

    def cases(self, own_shapes: bool) -> Iterator[ConformanceCase]:
        if not self.problems:
            return  # it is for another device, or for no dtype that the contract has
        name = f"{self.item.id}-{self.item.scheme}-{self.item.phase}"
        yield ConformanceCase(f"{name}-declaration", self.declaration)
        yield ConformanceCase(f"{name}-heuristic", self.heuristic)
        for problem in self.problems:
            text = "-".join(filter(None, (problem.dims.text, problem.dtypes.text, problem.flags.text)))
            yield ConformanceCase(f"{name}-{text}", lambda p=problem: self.values(p, own_shapes))  # type: ignore[misc]
        if not own_shapes:
            return
        problem = self.middle()
        for layout in LAYOUTS:
            yield ConformanceCase(f"{name}-layout-{layout}", lambda x=layout, p=problem: self.layout(p, x))  # type: ignore[misc]
        for leading in ((2, 3, 5), (1, 2, 3, 5)):
            yield ConformanceCase(
                f"{name}-rank-{len(leading) + 1}",
                lambda x=leading, p=problem: self.rank(p, x),  # type: ignore[misc]
            )
        yield ConformanceCase(f"{name}-few-units", lambda p=problem: self.few_units(p))  # type: ignore[misc]
        if self.device.vendor != "interpreter":  # there so many rows take minutes
            yield ConformanceCase(f"{name}-rows-{TALLEST}", lambda p=problem: self.tall(p))  # type: ignore[misc]

    def middle(self) -> Problem:
        """A problem of middling size, in bf16 if that is taken."""
        if self.op.odd is not None:
            return self.problems[0]
        middle = [p for p in self.problems if set(p.dims.values()) == {5, 41}]
        return next((p for p in middle if "bfloat16" in p.dtypes.values()), middle[0] if middle else self.problems[0])

    # -- what is asked ---------------------------------------------------------------------------------------------

    def declaration(self) -> list[str]:
        """A phase, a name and a space that can be registered, a launch function, few enough configs."""
        try:
            self.item.check(tuple(o.name for o in self.op.options))
            self.op.scheme(self.item.scheme)
            self.item.function()
        except (RegistryError, LookupError) as error:
            return [" ".join(str(error).split())]
        counts = {p: sum(1 for _ in self.item.space.configs(p, self.device)) for p in self.problems}
        return [
            f"{p.text}: {count} configs are legal, the tuner tries {MOST_CONFIGS} at most"
            for p, count in counts.items()
            if count > MOST_CONFIGS
        ]

    def heuristic(self) -> list[str]:
        """A config for every problem that the capability admits, legal, and the same when asked again."""
        faults = []
        for problem in self.problems:
            if not any(True for _ in self.item.space.configs(problem, self.device)):
                continue  # nothing is legal here, so nothing can be named
            try:
                config = self.item.heuristic(problem, self.device)
                again = self.item.heuristic(problem, self.device)
            except Exception as error:
                faults.append(f"{problem.text}: the heuristic raises {type(error).__name__}: {error}")
                continue
            reason = self.item.why_illegal(config, problem, self.device)
            if reason is not None:
                faults.append(f"{problem.text}: the heuristic names ({config.text}): {reason}")
            elif again != config:
                faults.append(f"{problem.text}: the heuristic names ({config.text}), then ({again.text})")
        return faults

    def values(self, problem: Problem, own_shapes: bool) -> list[str]:
        """All styles of inputs, at the problem's own sizes if they are small, else at the contract's proxies."""
        from liger_registry.tuning.case_cache import CaseCache
        from liger_registry.tuning.verify import verify

        cache, faults = CaseCache(), []
        for config in self.chosen(problem):
            proxies: tuple[dict[str, int], ...] | None = ({},) if own_shapes else None
            faults += self.caught(
                config,
                lambda c=config, x=proxies: (
                    verify(  # type: ignore[misc]
                        self.op,
                        self.item,
                        c,
                        problem,
                        self.device,
                        self.torch_device,
                        proxies=x,
                        cache=cache,
                        styles=self.styles,
                    ).verdicts
                ),
            )
        return faults

    def layout(self, problem: Problem, layout: str) -> list[str]:
        """Inputs that are misaligned or not contiguous, and gradients; of inputs only vectors come repeated."""
        inputs = "guarded" if layout in ("rows", "scalar") else layout
        return self.one(problem, (inputs, layout), None, layout)

    def few_units(self, problem: Problem) -> list[str]:
        """Rows enough for two rounds and a tail of a persistent grid, on a device of few units."""
        from liger_registry.tuning.case_cache import CaseCache
        from liger_registry.tuning.verify import verify, walk_for

        problem, cache, faults = self.taller(problem, TALL), CaseCache(), []
        for config in self.chosen(problem):
            walk = walk_for(self.op, self.item, config, problem, self.device, [{}])
            faults += self.caught(
                config,
                lambda c=config, x=walk: (
                    verify(  # type: ignore[misc]
                        self.op, self.item, c, problem, self.device, self.torch_device, proxies=(), walk=x, cache=cache
                    ).verdicts
                ),
            )
        return faults

    def tall(self, problem: Problem) -> list[str]:
        """Many rows, each of which is compared."""
        import torch

        from liger_registry.tuning.arguments import Arguments
        from liger_registry.tuning.whole import References, verify_whole

        problem, references, faults = self.taller(problem, TALLEST), References(), []
        arguments = Arguments.of(self.op, problem, torch.device(self.torch_device))
        for config in self.chosen(problem):
            faults += self.caught(
                config,
                lambda c=config: (
                    verify_whole(  # type: ignore[misc]
                        self.op, self.item, c, problem, self.device, arguments, references
                    ).verdicts
                ),
            )
        return faults

    def taller(self, problem: Problem, rows: int) -> Problem:
        return problem.having(**{n: rows for n, kind in self.op.dims.items() if kind is DimKind.BUCKET})

    def rank(self, problem: Problem, leading: tuple[int, ...]) -> list[str]:
        """Inputs of more dimensions, where the contract takes them."""
        rows = 1
        for size in leading:
            rows *= size
        names = [n for n, kind in self.op.dims.items() if kind is DimKind.BUCKET]
        if len(names) != 1:
            return []
        taller = problem.having(**{names[0]: rows})

        def reshape(inputs: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
            return tuple(
                x.reshape(*leading, *x.shape[1:]) if x is not None and x.dim() == 2 and x.shape[0] == rows else x
                for x in inputs
            )

        options = self.op.options_of(taller)
        try:
            inputs = reshape(self.op.example(taller, "cpu", 0, "random"))
            self.op.validate(inputs, options)
            if self.op.describe(inputs, options).dims != taller.dims:
                return []
        except (RegistryError, ValueError, RuntimeError, IndexError):
            return []
        return self.one(taller, ("guarded", "guarded"), reshape, f"rank {len(leading) + 1}")

    # -- how it is asked -------------------------------------------------------------------------------------------

    def one(
        self, problem: Problem, layouts: tuple[str, str], reshape: Callable[[Any], Any] | None, label: str
    ) -> list[str]:
        from liger_registry.tuning.cases import make_case
        from liger_registry.tuning.verify import run_case

        scheme, faults = self.op.scheme(self.item.scheme), []
        case = make_case(
            self.op, scheme, problem, "tail", 3, self.torch_device, layouts=layouts, reshape=reshape, label=label
        )
        for config in self.chosen(problem):
            faults += self.caught(
                config,
                lambda c=config: run_case(self.op, self.item, c, case, self.device),  # type: ignore[misc]
            )
        return faults

    def chosen(self, problem: Problem) -> list[Config]:
        from liger_registry.tuning.candidates import cap

        legal = [
            c
            for c in self.item.space.configs(problem, self.device)
            if self.item.why_illegal(c, problem, self.device) is None
        ]
        if not legal:
            return []
        most = 1 if self.device.vendor == "interpreter" else 4
        return legal if self.configs == "all" else cap(legal, self.item.heuristic(problem, self.device), most=most)

    def caught(self, config: Config, run: Callable[[], Sequence[Verdict]]) -> list[str]:
        label = f"({config.text}) " if config else ""
        try:
            return [f"{label}{verdict}" for verdict in run() if not verdict.passed]
        except Exception as error:
            return [f"{label}raises {type(error).__name__}: {error}"]
