"""TRL's fused head, with its numbers from the operation ``linear_logp``.

TRL's trainers (SFT, DPO, KTO, GRPO, RLOO) give a model a forward that returns log-probabilities of tokens in place of
logits, from a function of TRL's own. One call lets the operation compute them, for the models of one trainer::

    trainer = DPOTrainer(...)
    handle = apply_to_trl(trainer)
    trainer.train()

The fields are those that TRL asks for, with TRL's gradients: log-probabilities and entropy are the operation's, whether
the label is the likeliest token follows from its ``argmax``, and the mean of the logits, which is linear, from the mean
row of the head. What neither is linear nor an output of the operation, ``log_sum_sq_probs`` and the mean of capped
logits, has no gradient and stays TRL's, in a pass of its own.

This is for the head; ``apply(model)`` is for the layers, and goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from liger_registry.errors import AdapterError
from liger_registry.transformers._handles import call
from liger_registry.transformers.engine.rebuild import CannotRebuild, rebuild
from liger_registry.transformers.engine.report import Report, Row

OP = "linear_logp"
# The module and the name of TRL's forward, and the global name under which it looks up what computes its fields.
_HOME, _FORWARD, _FUNCTION = "trl.trainer.utils", "_fused_forward", "_ChunkedLogProbFunction"
_SERVED = "_liger_registry_served"
# Where a module keeps its forward, and where accelerate keeps those that it put something over.
_ATTRIBUTES = ("forward", "_original_forward", "_old_forward")
Fields = tuple[Tensor | None, ...]
Exchange = Callable[[FunctionType], FunctionType | None]


class AppliedToTRL:
    """What was done to a trainer's models. As a context manager it is reverted at the end of the block.

    Attributes:
        report: which models' heads are served, and which are not and why.
    """

    def __init__(self, trainer: object) -> None:
        self.report = Report(type(trainer).__name__)
        self._modules = list(_modules(trainer))
        self._made: dict[FunctionType, FunctionType] = {}
        self._refused: set[FunctionType] = set()

    def __repr__(self) -> str:
        return f"<AppliedToTRL {self.report!r}>"

    def __enter__(self) -> AppliedToTRL:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.revert()

    def revert(self) -> None:
        """Let TRL's function compute again; a second time does nothing."""
        back = {made: theirs for theirs, made in self._made.items()}
        self._made = {}
        if back:
            self._exchange(lambda path, module, function: back.get(function))

    def serve(self) -> None:
        """Exchange each of TRL's forwards for one that asks the operation, and report it."""
        self._exchange(self._served)

    def _exchange(self, exchange: Callable[[str, nn.Module, FunctionType], FunctionType | None]) -> None:
        for path, module in self._modules:
            own = module.__dict__
            for attribute in own.keys() & set(_ATTRIBUTES):
                own[attribute] = exchanged(own[attribute], partial(exchange, path, module))

    def _served(self, path: str, module: nn.Module, function: FunctionType) -> FunctionType | None:
        if not is_fused_forward(function) or function in self._refused:
            return None
        if function not in self._made:
            kind = type(module).__name__
            try:
                made = self._made[function] = served(function, module)
                self.report.rows.append(Row(OP, path, True, f"TRL's fused head: {_asked(made)}", kind))
            except CannotRebuild as error:
                self._refused.add(function)
                self.report.rows.append(Row(OP, path, False, error.reason, kind))
        return self._made.get(function)


def apply_to_trl(trainer: object, *, strict: bool = False) -> AppliedToTRL:
    """Let the fused heads of a TRL trainer's models compute with ``linear_logp``.

    Only the models of this trainer change, and neither a class nor a module of TRL's does. Call it as soon as the
    trainer is made; models under PEFT, and those that accelerate has prepared, are looked into.

    Args:
        trainer: a trainer of TRL, or a model that ``trl.trainer.utils.add_fused_lm_head`` was called for.
        strict: raise if a fused head cannot be served.

    Returns:
        A handle with ``report`` and ``revert()``; ``with apply_to_trl(trainer):`` reverts by itself.

    Raises:
        AdapterError: nothing in there has a fused head of TRL's, or all are served already; with ``strict`` also if one
            cannot be served, in which case the models are as before.
    """
    applied = AppliedToTRL(trainer)
    applied.serve()
    if not applied.report.rows:
        raise AdapterError(
            f"this {type(trainer).__name__} has no fused head of TRL's to serve",
            why="it was applied to already, or computes logits, as TRL's ORPOTrainer and CPOTrainer do",
            fix="call it once, with a trainer of TRL 1.16 for SFT, DPO, KTO, GRPO or RLOO; for others use apply(model)",
        )
    if strict and applied.report.skipped():
        applied.revert()
        applied.report.demand([OP])
    return applied


def _modules(trainer: object) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a model, or in all models that a trainer has, each once with its path."""
    roots = {"": trainer} if isinstance(trainer, nn.Module) else dict(vars(trainer))
    seen: set[nn.Module] = set()
    for root, model in roots.items():
        if isinstance(model, nn.Module):
            for path, module in model.named_modules(memo=seen):
                yield ".".join(filter(None, (root, path))), module


def exchanged(value: Any, exchange: Exchange, seen: set[int] | None = None) -> Any:  # noqa: ANN401
    """A function or method, exchanged if ``exchange`` gives another for it.

    Where it is wrapped, as accelerate wraps the forwards of the models that it prepares, the wrapper stays and what it
    holds is exchanged.
    """
    seen = set() if seen is None else seen
    if isinstance(value, MethodType):
        inner = exchanged(value.__func__, exchange, seen)
        return value if inner is value.__func__ else MethodType(inner, value.__self__)
    if isinstance(value, (type, nn.Module)) or not callable(value) or id(value) in seen:
        return value
    if isinstance(value, FunctionType):
        if (other := exchange(value)) is not None:
            return other
    elif "__wrapped__" not in getattr(value, "__dict__", {}):
        return value  # no wrapper
    seen.add(id(value))
    for cell in getattr(value, "__closure__", None) or ():
        held = _contents(cell)
        if (other := exchanged(held, exchange, seen)) is not held:
            cell.cell_contents = other
    for name, held in list(vars(value).items()):
        if (other := exchanged(held, exchange, seen)) is not held:
            vars(value)[name] = other
    return value


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was put there yet
        return None


def is_fused_forward(function: FunctionType) -> bool:
    """Whether it is the forward of TRL's fused head, and still computes with TRL's function."""
    code, names = function.__code__, function.__globals__
    return (
        code.co_name == _FORWARD
        and names.get("__name__") == _HOME
        and _FUNCTION in names
        and _SERVED not in function.__dict__
    )


def served(function: FunctionType, module: nn.Module) -> FunctionType:
    """TRL's forward built again with the operation in it.

    Raises:
        CannotRebuild: TRL's function computes something else than what it is known for, the head's weight is sharded by
            ZeRO-3, or the forward cannot be built again.
    """
    theirs = function.__globals__[_FUNCTION]
    if not agrees(theirs):
        raise CannotRebuild(f"{_FUNCTION} of this release of TRL computes something else")
    head = getattr(module, "get_output_embeddings", lambda: None)()
    if head is not None and _sharded(head.weight):
        raise CannotRebuild("ZeRO-3 gathers the head for TRL's function alone")
    # As it is defined: TRL has given it the name and the attributes of the model's own forward.
    bare = FunctionType(function.__code__, function.__globals__, _FORWARD, function.__defaults__, function.__closure__)
    bare.__kwdefaults__ = function.__kwdefaults__
    bare.__qualname__ = f"add_fused_lm_head.<locals>.{_FORWARD}"
    made = rebuild(bare, {_FUNCTION: Head(theirs)})
    assert isinstance(made, FunctionType)
    made.__name__, made.__qualname__, made.__doc__ = function.__name__, function.__qualname__, function.__doc__
    made.__module__ = function.__module__
    made.__dict__.update(function.__dict__)  # __wrapped__ too, by which generate() knows the model's arguments
    made.__dict__[_SERVED] = True
    return made


def _asked(function: FunctionType) -> str:
    """The fields that a fused head gives."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    outputs = _contents(cells["outputs"]) if "outputs" in cells else None
    return ", ".join(map(str, outputs)) if isinstance(outputs, (tuple, list)) else "log_probs"


def _sharded(weight: Tensor) -> bool:
    return hasattr(weight, "ds_status")


class Head:
    """Stands in the place of TRL's autograd function.

    Args:
        theirs: that function, for what the operation does not compute.
    """

    def __init__(self, theirs: Any) -> None:  # noqa: ANN401 - a class of TRL's
        self.theirs = theirs

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ) -> Fields:
        """The fields of each token, in TRL's order; None for those not asked for.

        Args:
            hidden: (tokens, hidden).
            weight: (vocab, hidden).
            bias: (vocab,), or None.
            targets: (tokens,), int64, each a class.
            temperature: what logits are divided by, behind the cap.
            chunk_size: of TRL's passes over the vocabulary.
            final_logit_softcapping: caps the scaled logits by a tanh; None for none.
            logit_scale: a factor on the logits, before the cap.
            outputs: the fields asked for besides the log-probabilities.

        Returns:
            log-probabilities, entropy, ``log(sum(p * p))``, mean logit, all (tokens,) in fp32, and (tokens,) of bool
            whether the target has the largest logit, the first of several and before the cap.
        """
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        options = final_logit_softcapping, logit_scale, outputs
        if dtype == torch.float64 or _sharded(weight):
            fields: Fields = self.theirs.apply(hidden, weight, bias, targets, temperature, chunk_size, *options)
            return fields
        softcap = 0.0 if final_logit_softcapping is None else final_logit_softcapping / temperature
        scale = logit_scale / temperature
        x, rows = hidden.to(dtype), weight.to(dtype)
        added = None if bias is None else bias.to(dtype)
        entropic, likeliest = "entropy" in outputs, "is_top1" in outputs
        with torch.autocast(kind, enabled=False):
            found = call(
                OP,
                x,
                rows,
                targets,
                added,
                softcap=softcap,
                scale=scale,
                return_entropy=entropic,
                return_argmax=likeliest,
            )
        given = iter((found,) if isinstance(found, Tensor) else found)
        log_probs = next(given)
        entropy = next(given) if entropic else None
        is_top1 = next(given) == targets if likeliest else None
        linear = "mean_logits" in outputs and not softcap
        mean = mean_logits(x, rows, added, scale) if linear else None
        left = tuple(name for name in outputs if name == "log_sum_sq_probs" or (name == "mean_logits" and not linear))
        squares = None
        if left:
            with torch.no_grad():
                _, _, squares, capped, _ = self.theirs.apply(
                    hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, left
                )
            mean = mean if linear else capped
        return log_probs, entropy, squares, mean, is_top1


@torch.no_grad()
def mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The mean over the vocabulary of ``scale * (hidden @ weight.T + bias)``, (tokens,) in fp32, without the logits."""
    with torch.autocast(hidden.device.type, enabled=False):
        mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
        return scale * (mean if bias is None else mean + bias.mean(dtype=torch.float32))


@torch.no_grad()
def agrees(theirs: Any) -> bool:  # noqa: ANN401 - a class of TRL's
    """Whether TRL's function computes what ``Head`` takes it for, on random numbers on the CPU."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*size, generator=draw) for size in ((7, 5), (11, 5), (11,)))
    targets = torch.randint(11, (7,), generator=draw)
    z = 3.0 * torch.tanh(0.8 * (hidden @ weight.T + bias) / 3.0) / 0.7
    logs = z.log_softmax(-1)
    right = (
        logs.gather(-1, targets[:, None])[:, 0],
        -(logs.exp() * logs).sum(-1),
        (2 * logs).exp().sum(-1).log(),
        z.mean(-1),
        z.argmax(-1) == targets,
    )
    try:
        found = theirs.apply(
            hidden, weight, bias, targets, 0.7, 4, 3.0, 0.8, ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        )
        return all(torch.allclose(a.float(), b.float(), atol=1e-5) for a, b in zip(found, right, strict=True))
    except Exception:  # whatever another release says to these arguments
        return False
