"""Applying the registry's operations to one model, and taking them out again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import TracebackType

from torch import nn

from liger_registry.errors import AdapterError
from liger_registry.transformers.engine.adapters import Adapters, adapters, look
from liger_registry.transformers.engine.binding import Binding, bind, unbind
from liger_registry.transformers.engine.report import Report, Row

# Where a model keeps its handle; it goes with the model through copies and pickles.
_HANDLE = "_liger_registry"


def applied_to(model: nn.Module) -> Applied | None:
    """The handle of what was applied to this model; None if nothing was, or if it was reverted."""
    return model.__dict__.get(_HANDLE)


class Applied:
    """What an application did. As a context manager it is reverted at the end of the block.

    Attributes:
        report: what was applied where, and what was not and why.
        left_out: the operations that were not looked for.
    """

    def __init__(self, model: nn.Module, report: Report, left_out: Iterable[str] = ()) -> None:
        self.report = report
        self.left_out = frozenset(left_out)
        self._model = model
        self._bindings: list[Binding] = []

    def __repr__(self) -> str:
        return f"<Applied {self.report!r}>"

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.revert()

    def revert(self) -> None:
        """Give the model back what it had; a second time does nothing."""
        while self._bindings:
            binding = self._bindings.pop()  # the last first, since one may have been bound over another
            if left := unbind(binding):
                self.report.rows.append(Row(binding.op, binding.path, False, left, type(binding.module).__name__))
        if applied_to(self._model) is self:
            del self._model.__dict__[_HANDLE]

    def add(self, found: Iterable[Binding | Row]) -> None:
        """Bind what one adapter found; what an earlier one has bound already it need not report."""
        done = {(row.op, row.module) for row in self.report.applied()}
        for item in found:
            if isinstance(item, Binding):
                bind(item)
                self._bindings.append(item)
                self.report.rows.append(item.row)
                counter = getattr(item.replacement, "materialised", None)
                if isinstance(counter, Counter):
                    self.report.materialised = counter
            elif (item.op, item.module) not in done:
                self.report.rows.append(item)


def apply(
    model: nn.Module,
    *,
    rms_norm: bool | None = None,
    layer_norm: bool | None = None,
    rope: bool | None = None,
    swiglu: bool | None = None,
    geglu: bool | None = None,
    relu_squared: bool | None = None,
    cross_entropy: bool | None = None,
    fused_linear_cross_entropy: bool | None = None,
    strict: bool = False,
    **others: bool | None,
) -> Applied:
    """Let a model call the registry's operations wherever its code provably computes the same.

    Layers are recognised by what their code does and confirmed on random numbers, never by their names alone; what is
    not recognised stays as it is, and the report says why. Only this instance changes: its state dict, its hooks, its
    attention, its dtype and devices do not, and neither does any class or module of code.

    Args:
        model: any module; a model of transformers, or one wrapped by PEFT.
        rms_norm, layer_norm, rope, swiglu, geglu, relu_squared, cross_entropy, fused_linear_cross_entropy: for each
            operation None to use it where it is found, True to ask for it (which matters with ``strict``), False to
            leave it out. The two losses exclude each other; by default the fused one is used, and the other where that
            is impossible.
        strict: raise if anything that was found could not be applied, or anything that was asked for was not found.
        **others: the same for further operations that adapters bind (``fused_add_rms_norm`` ...).

    Returns:
        A handle with ``report`` and ``revert()``; ``with apply(model):`` reverts by itself.

    Raises:
        AdapterError: no module, a keyword that is no adapter's, both losses asked for, or a strict application that
            falls short, in which case the model is as before; a model that was applied to already.
    """
    known = adapters()
    asked = {
        "rms_norm": rms_norm,
        "layer_norm": layer_norm,
        "rope": rope,
        "swiglu": swiglu,
        "geglu": geglu,
        "relu_squared": relu_squared,
        "cross_entropy": cross_entropy,
        "fused_linear_cross_entropy": fused_linear_cross_entropy,
        **others,
    }
    _check(model, others, known)
    check_losses(cross_entropy, fused_linear_cross_entropy)
    enabled = {op: asked.get(op) is not False for op in {*known.ops, *asked}}
    if cross_entropy and fused_linear_cross_entropy is None:
        enabled["fused_linear_cross_entropy"] = False
    applied = Applied(model, Report(type(model).__name__), (op for op in enabled if not enabled[op]))
    orphans = [op for op in asked if enabled[op] and op not in known.ops]
    applied.add(Row(op, "", False, "no installed adapter looks for it", type(model).__name__) for op in orphans)
    try:
        for adapter in known.ordered:
            applied.add(look(adapter, model, enabled))
        if strict:
            report = applied.report
            report.demand([op for op in enabled if enabled[op] and (asked.get(op) or report.skipped(op))])
    except BaseException:
        applied.revert()
        raise
    model.__dict__[_HANDLE] = applied
    return applied


def _check(model: nn.Module, others: dict[str, bool | None], known: Adapters) -> None:
    if not isinstance(model, nn.Module):
        raise AdapterError(
            f"apply takes a model, not {type(model).__name__}",
            fix="build or load the model first, or call apply_liger_kernel_to_*() to have the next ones patched",
        )
    if applied_to(model) is not None:
        raise AdapterError(
            f"this {type(model).__name__} was applied to already",
            why="a second application would find the first one's code, not the model's",
            fix="revert() the first one: liger_registry.transformers.applied_to(model).revert()",
        )
    unknown = sorted(set(others) - set(known.ops))
    if unknown:
        raise AdapterError(
            f"apply takes no {', '.join(unknown)}",
            why="no adapter binds an operation of that name",
            candidates=[*known.ops, "strict"],
            fix="leave it out; `liger-tune plugins` shows what is installed",
        )


def check_losses(cross_entropy: bool | None, fused_linear_cross_entropy: bool | None) -> None:
    """Raise AdapterError where both losses are asked for."""
    if cross_entropy and fused_linear_cross_entropy:
        raise AdapterError(
            "cross_entropy and fused_linear_cross_entropy cannot both be applied",
            why="the fused loss takes the place of the other, and of the logits it would read",
            fix="pass fused_linear_cross_entropy=False with cross_entropy=True, or leave cross_entropy out",
        )
