"""A callback for the ``Trainer`` of transformers and all that derive from it, TRL's among them.

    trainer = Trainer(model, ..., callbacks=[LigerRegistryCallback()])

It says what was applied to the model when training begins, and when it ends which problems of the run no table has a
measurement for, with the command that measures them. Asked to, it measures before the first step what is known then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from liger_registry.decision import HITS
from liger_registry.device import Device
from liger_registry.errors import ModelConfigError, RegistryError
from liger_registry.problem import SCHEME, Problem
from liger_registry.runtime import Registry, registry
from liger_registry.transformers.engine.apply import Applied, applied_to, apply

COMMAND = "liger-tune warmup --from-misses"


class LigerRegistryCallback(TrainerCallback):
    """Reports what the registry does in a run of a trainer, and applies and warms up if it is asked to.

    Args:
        apply: apply the operations to the model when training begins, if nothing was applied to it yet.
        warmup: measure, before the first step, what earlier runs on this device missed, and the problems that the
            model's config poses at the trainer's batch size; ranks share the work.
        seq: the sequence length of those problems; by default ``max_length`` of the trainer's arguments. Without one,
            misses alone are measured.
        budget_s: seconds after which nothing new is measured; None for no limit.
        say: takes each line of what is reported, on the main process alone.

    Attributes:
        applied: the handles of what was applied to the model.
        missed: the problems of this process that are recorded as missed and that no table answers; known when training
            ends.
    """

    def __init__(
        self,
        *,
        apply: bool = False,
        warmup: bool = False,
        seq: int | None = None,
        budget_s: float | None = 600.0,
        say: Callable[[str], None] = print,
    ) -> None:
        self.apply, self.warmup, self.seq, self.budget_s, self.say = apply, warmup, seq, budget_s, say
        self.applied: list[Applied] = []
        self.missed: list[Problem] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:  # noqa: ANN401
        """Apply and measure if asked to, and say what was applied."""
        said = self._said(state)
        if model is None:
            return
        handles = list(_handles(model))
        if self.apply and not handles:
            handles = [apply(_unwrapped(model))]
        self.applied = handles
        for handle in handles:
            said(_lined(str(handle.report)))
        if not handles:
            said("liger-registry: nothing was applied to the model; call apply(model) before the trainer is made")
        device = _device_of(model)
        if self.warmup:
            said(self._warm(args, model, device))

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:  # noqa: ANN401
        """Say what was missed, and how to measure it."""
        said = self._said(state)
        if model is None:
            return
        for handle in self.applied:
            if handle.report.materialised:
                said(_lined(f"logits were computed: {dict(handle.report.materialised)}"))
        device = _device_of(model)
        asked = set(registry._called(device))
        self.missed = [problem for problem in missed(registry, device) if problem in asked]
        if self.missed:
            count = f"{len(self.missed)} problems of this run are not measured on {device.fingerprint}"
            said(_lined(f"{count}; to measure them: {COMMAND}"))
        else:
            said(_lined(f"no problem of this run is left to measure on {device.fingerprint}"))

    def _said(self, state: Any) -> Callable[[str], None]:  # noqa: ANN401 - a TrainerState
        return self.say if getattr(state, "is_world_process_zero", True) else lambda text: None

    def _warm(self, args: Any, model: nn.Module, device: Device) -> str:  # noqa: ANN401
        """Measure; says what came of it. What cannot be measured does not end the run."""
        try:
            problems = list(dict.fromkeys([*missed(registry, device), *self._posed(args, model)]))
            rows = _tuned(problems, device, self.budget_s)
        except RegistryError as error:
            return _lined(f"not warmed up: {error}")
        counts: dict[str, int] = {}
        for row in rows:
            counts[row.status] = counts.get(row.status, 0) + 1
        told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "nothing to measure"
        return _lined(f"warmed up on {device.fingerprint}: {told}")

    def _posed(self, args: Any, model: nn.Module) -> list[Problem]:  # noqa: ANN401
        """The problems of the model's config at the trainer's batch size; none where the sequence length is unknown."""
        from liger_registry.architecture import Architecture
        from liger_registry.cli._problems import model_problems

        seq = self.seq or getattr(args, "max_length", None)
        config = getattr(_unwrapped(model), "config", None)
        if not isinstance(seq, int) or config is None:
            return []
        try:
            architecture = Architecture.from_config(config.to_dict(), config.model_type)
        except ModelConfigError:
            return []
        mixed = "bfloat16" if getattr(args, "bf16", False) else "float16" if getattr(args, "fp16", False) else ""
        dtype = mixed or str(next(model.parameters()).dtype).removeprefix("torch.")
        return model_problems(
            registry.catalog,
            [architecture],
            [args.per_device_train_batch_size * seq],
            dtypes=[dtype],
            frozen=hasattr(model, "peft_config"),
            budget=registry.settings.memory_budget,
        )


def missed(registry: Registry, device: Device) -> list[Problem]:
    """What runs have recorded as missed on a device, and no table has an answer to by now."""

    def answered(problem: Problem) -> bool:
        decide = registry.dispatcher.decide_scheme if problem.phase == SCHEME else registry.dispatcher.decide
        return decide(problem, device, trace=[]).source in HITS  # a traced question records nothing

    known = {op.name: op for op in registry.catalog.ops()}
    found = (problem for place, problem in registry.misses.all() if place == device.fingerprint)
    there = (problem for problem in found if problem.op in known and known[problem.op].has(problem))
    return [problem for problem in there if not answered(problem)]


def _tuned(problems: list[Problem], device: Device, budget_s: float | None) -> Iterable[Any]:
    """The rows of a tuning run, in which the ranks of a job share the work."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        rows: Iterable[Any] = registry.tune(problems, device, budget_s=budget_s).rows
        return rows
    from liger_registry.tuning.distributed import tune_sharded

    # Ranks on other file systems have other misses, and all have to name the same.
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, problems)
    union = dict.fromkeys(problem for each in everybodys for problem in each)
    report = tune_sharded(union, catalog=registry.catalog, device=device, store=registry.user_store, budget_s=budget_s)
    registry.forget()
    return report.rows


def _handles(model: nn.Module) -> Iterator[Applied]:
    """The handles of a model and of what it wraps."""
    seen: set[int] = set()
    for module in model.modules():
        handle = applied_to(module)
        if handle is not None and id(handle) not in seen:
            seen.add(id(handle))
            yield handle


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model of transformers within PEFT's."""
    inner = getattr(model, "get_base_model", None)
    found = inner() if callable(inner) else model
    return found if isinstance(found, nn.Module) else model


def _device_of(model: nn.Module) -> Device:
    return Device.of(next(model.parameters()).device, interpret=registry.settings.interpret)


def _lined(text: str) -> str:
    return f"liger-registry: {text}"
