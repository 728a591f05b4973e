"""A model of the zoo as it is, and with the operations in it: everything that must not differ.

``compare(model_type)`` measures, ``Outcome`` judges. In float32 the loss and every gradient in training, the logits in
evaluation and greedily generated tokens are held against the unpatched model's, and the loss in bf16 against the
accuracy rule; afterwards the model is reverted, and has to be what it was.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from zoo import Unbuildable, inputs, quiet, small_model

from liger_registry.accuracy import judge

# Float32 results of a few layers that round at other places; the table tells the worst of all types.
LOSS = 2e-6
LOGITS = 5e-6
# Of a parameter's own gradient, and of the largest of the model: one that nearly cancels is noise alone.
GRADIENT, CANCELLED = 1e-4, 1e-6
NEW_TOKENS = 8
ROWS_IN_BF16 = 6


@dataclass
class Outcome:
    """What became of one type.

    Attributes:
        model_type, model_class, parameters: the model.
        unbuilt: why there is no such model here.
        plain: what the unpatched model cannot do by itself, and why; that is not compared.
        rows: of the report: operation, module, whether it was applied, reason, class.
        failed: what the patched model could not do that the plain one does.
        loss, logits, gradient: differences relative to the plain model's, and for the worst gradient its name.
        tokens: whether the same tokens were generated; None if the plain model generates none.
        bf16: what the accuracy rule says of the losses in bf16.
        materialised: places where computing and differentiating the loss made the logits be computed.
        calls: how often each operation was called for the loss.
        reverted: what was left after revert.
        seconds: how long it took.
        slack: how many times the differences allowed on the CPU are, where kernels sum in another order.
    """

    model_type: str
    model_class: str = ""
    parameters: int = 0
    unbuilt: str = ""
    plain: dict[str, str] = field(default_factory=dict)
    rows: list[tuple[str, str, bool, str, str]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    loss: float = 0.0
    logits: float = 0.0
    gradient: float = 0.0
    worst: str = ""
    tokens: bool | None = None
    bf16: str = ""
    bf16_passed: bool = True
    materialised: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    reverted: str = ""
    seconds: float = 0.0
    slack: float = 1.0

    @property
    def ops(self) -> set[str]:
        """The operations that the loss went through; a fused one only if it was computed without the logits."""
        without = {"fused_linear_cross_entropy"} if self.materialised else set()
        return {op for op in self.applied if self.calls.get(op)} - without

    @property
    def applied(self) -> set[str]:
        """The operations that the report says are in the model, reached by text or not."""
        return {row[0] for row in self.rows if row[2]}

    @property
    def differences(self) -> list[str]:
        """Everything that is not as it should be; empty for a type that is the same."""
        found = [f"{what} fails: {why}" for what, why in self.failed.items()]
        if not self.loss <= LOSS * self.slack:
            found.append(f"loss off by {self.loss:.1e}")
        if not self.logits <= LOGITS * self.slack:
            found.append(f"logits off by {self.logits:.1e}")
        if not self.gradient <= self.slack:
            found.append(f"gradient of {self.worst} off by {self.gradient:.1f} x what is allowed")
        if self.tokens is False:
            found.append("other tokens generated")
        if not self.bf16_passed:
            found.append(f"bf16 {self.bf16}")
        if self.reverted:
            found.append(f"after revert {self.reverted}")
        return found

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def compare(model_type: str, device: str = "cpu", slack: float = 1.0, **options: Any) -> Outcome:
    """Build the type, measure it plain, patched and reverted; never raises for what a model does."""
    outcome = Outcome(model_type, slack=slack)
    with quiet():
        try:
            model = small_model(model_type).to(device)
        except Unbuildable as error:
            outcome.unbuilt = str(error)
            return outcome
        outcome.model_class = type(model).__name__
        outcome.parameters = sum(p.numel() for p in model.parameters())
        plain = run(model, MEASURES, outcome.plain)
        before = {path: set(vars(module)) for path, module in model.named_modules()}
        patched, handle = patch(model, outcome, options)
        if handle is None:
            return outcome
        judged(outcome, plain, patched)
        handle.revert()
        outcome.reverted = left_over(model, before, plain, outcome)
        in_bf16(model_type, device, outcome, options)
    return outcome


def patch(model: nn.Module, outcome: Outcome, options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Apply, and measure what the plain model could do."""
    from liger_registry.transformers import apply

    try:
        handle = apply(model, **options)
    except Exception as error:
        outcome.failed["apply"] = told(error)
        return {}, None
    outcome.rows = [(r.op, r.module, r.applied, r.reason, r.kind) for r in handle.report]

    def watch(name: str) -> None:
        if name == "loss":
            outcome.materialised = dict(handle.report.materialised)
            outcome.calls = dict(calls)

    measures = {name: measure for name, measure in MEASURES.items() if name not in outcome.plain}
    with counted(outcome.applied) as calls:
        return run(model, measures, outcome.failed, watch), handle


@contextlib.contextmanager
def counted(ops: set[str]) -> Iterator[collections.Counter[str]]:
    """Count the calls of operations while the block runs."""
    from liger_registry import registry

    calls: collections.Counter[str] = collections.Counter()
    classes = {op: type(registry.get(op)) for op in ops}
    originals = {op: kind.__call__ for op, kind in classes.items()}

    def counting(op: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[op] += 1
            return originals[op](*args, **kwargs)

        return call

    for op, kind in classes.items():
        kind.__call__ = counting(op)
    try:
        yield calls
    finally:
        for op, kind in classes.items():
            kind.__call__ = originals[op]


def losses(model: nn.Module) -> dict[str, torch.Tensor]:
    """The loss in training, dropout and all, and the gradient of every parameter; twice, as steps follow each other.

    Raises:
        ArithmeticError: the second time gave another loss.
    """
    mode = model.training
    model.train()
    found = []
    try:
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(0)
            loss = model(**inputs(model)).loss
            loss.backward()
            found.append(loss.detach())
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    finally:
        model.zero_grad()
        model.train(mode)
    if not torch.equal(*found):
        raise ArithmeticError("another loss each time, for the same seed")
    return {"loss": found[0], **grads}


def logits(model: nn.Module) -> dict[str, torch.Tensor]:
    """Without labels, and with them, where they are left out until they are read."""
    given = inputs(model)
    torch.manual_seed(0)
    loud = model(**given).logits
    torch.manual_seed(0)
    with torch.no_grad():
        quiet_ones = model(**{k: v for k, v in given.items() if k != "labels"}).logits
    return {"with labels": loud.detach() * 1, "without labels": quiet_ones * 1}


def tokens(model: nn.Module) -> dict[str, torch.Tensor]:
    """Greedily, so that only the scores decide."""
    given = {k: v for k, v in inputs(model).items() if k not in ("labels", "use_cache")}
    asked = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    mode = model.training
    model.eval()
    try:
        torch.manual_seed(0)
        with torch.no_grad():
            return {"tokens": model.generate(**given, **asked)}
    finally:
        model.train(mode)


MEASURES: dict[str, Callable[[nn.Module], dict[str, torch.Tensor]]] = {
    "loss": losses,
    "logits": logits,
    "tokens": tokens,
}


def run(
    model: nn.Module,
    measures: dict[str, Callable[[nn.Module], dict[str, torch.Tensor]]],
    failed: dict[str, str],
    after: Callable[[str], None] = lambda name: None,
) -> dict[str, dict[str, torch.Tensor]]:
    """Each measure; those that raise go to ``failed``."""
    found = {}
    for name, measure in measures.items():
        try:
            found[name] = measure(model)
        except Exception as error:
            failed[name] = told(error)
        after(name)
    return found


def told(error: Exception) -> str:
    """An error in a line, with the innermost place."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename.rsplit('/', 2)[-1]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference by the norm of what is right; infinite for another shape or dtype."""
    if found.shape != exact.shape or found.dtype != exact.dtype or not torch.equal(found.isnan(), exact.isnan()):
        return math.inf
    finite = exact.isfinite()
    found, exact = found[finite].double(), exact[finite].double()
    size = exact.norm().item()
    return (found - exact).norm().item() / size if size else float(found.any())


def judged(outcome: Outcome, plain: dict[str, Any], patched: dict[str, Any]) -> None:
    """Hold the patched model's results against the plain one's."""
    if "loss" in plain and "loss" in patched:
        right, found = plain["loss"], patched["loss"]
        outcome.loss = relative(found["loss"], right["loss"])
        largest = max((g.double().norm().item() for n, g in right.items() if n != "loss"), default=0.0)
        for name in (right.keys() | found.keys()) - {"loss"}:
            if name not in right or name not in found:
                off = math.inf
            else:
                allowed = GRADIENT * right[name].double().norm().item() + CANCELLED * largest
                off = relative(found[name], right[name]) * right[name].double().norm().item() / max(allowed, 1e-30)
            if not off <= outcome.gradient:
                outcome.gradient, outcome.worst = off, name
    if "logits" in plain and "logits" in patched:
        outcome.logits = max(relative(patched["logits"][k], plain["logits"][k]) for k in plain["logits"])
    if "tokens" in plain and "tokens" in patched:
        outcome.tokens = torch.equal(plain["tokens"]["tokens"], patched["tokens"]["tokens"])


def left_over(model: nn.Module, before: dict[str, set[str]], plain: dict[str, Any], outcome: Outcome) -> str:
    """What is not as it was before ``apply``."""
    for path, module in model.named_modules():
        if names := sorted(set(vars(module)) ^ before.get(path, set())):
            return f"{path or 'the model'} keeps or lacks {', '.join(names)}"
    if "loss" in plain:
        again = run(model, {"loss": losses}, outcome.failed).get("loss")
        if again is None or not torch.equal(again["loss"], plain["loss"]["loss"]):
            return "another loss"
    return ""


def in_bf16(model_type: str, device: str, outcome: Outcome, options: dict[str, Any]) -> None:
    """The losses of some rows in bf16, plain and patched, against the same weights in float32."""
    from liger_registry.transformers import apply

    if "loss" in outcome.plain:
        return

    def several(model: nn.Module) -> torch.Tensor:
        found = []
        with torch.no_grad():
            for seed in range(ROWS_IN_BF16):
                torch.manual_seed(seed)
                found.append(model(**inputs(model, seed=seed, batch=1)).loss.float())
        return torch.stack(found)

    try:
        model = small_model(model_type, dtype=torch.bfloat16).to(device)
        exact = several(model.float())
        formula = several(model.bfloat16())
    except Exception as error:
        outcome.plain["bf16"] = told(error)
        return
    try:
        apply(model, **options)
        result = several(model)
    except Exception as error:
        outcome.failed["bf16"] = told(error)
        return
    exact = exact.double()
    verdict = judge("losses", result.bfloat16(), exact, formula.bfloat16(), exact)
    outcome.bf16, outcome.bf16_passed = str(verdict), verdict.passed


def counts(outcomes: list[Outcome]) -> dict[str, int]:
    """In how many types each operation was applied; ``gated`` for either kind of gated MLP."""
    found: collections.Counter[str] = collections.Counter()
    for outcome in outcomes:
        found.update(outcome.ops)
        found["gated"] += bool(outcome.ops & {"swiglu", "geglu"})
        found["compared"] += not outcome.unbuilt and "loss" not in outcome.plain
        found["differ"] += bool(outcome.differences)
    return dict(found)
