"""``liger-tune warmup``: measure a model's problems on the device at hand and keep the choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from liger_registry.cli import _devices, _problems, _render, _report
from liger_registry.cli._errors import FAILED
from liger_registry.errors import InvalidInputError, RegistryError, TableError

if TYPE_CHECKING:
    from liger_registry.device import Device
    from liger_registry.problem import Problem
    from liger_registry.runtime import Registry
    from liger_registry.tuning.report import Progress, Row

# What is measured where nothing is asked for: widths of 1024 to 4096 and the head sizes of their norms.
MODELS = ("llama-3.2-1b", "llama-3-8b", "qwen3-0.6b", "qwen3-8b", "gemma-2-9b")
BATCH, SEQ = (1, 4), (2048, 4096)
# On a CPU, where calls that take too long are left out in any case, and where nobody waits for more than two minutes
# for what nobody asked for: what is not measured by then is left to the next run.
CPU_MODELS, CPU_BATCH, CPU_SEQ, CPU_BUDGET_S = ("qwen3-0.6b",), (1,), (128, 512), 100.0


def warmup(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help=_problems.MODELS_HELP),
    ] = None,
    batch: Annotated[
        list[str] | None, typer.Option(metavar="N", help="Batch sizes; repeat, or separate by commas.")
    ] = None,
    seq: Annotated[list[str] | None, typer.Option(metavar="N", help="Sequence lengths, likewise.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", metavar="DTYPE", help="Instead of each model's own.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="DEVICE", help="cuda:1, cpu or interpreter; by default the GPU, else the CPU."
        ),
    ] = None,
    op: Annotated[list[str] | None, typer.Option("--op", metavar="OP", help="Only these operations.")] = None,
    misses: Annotated[
        bool, typer.Option("--from-misses", help="What real runs asked for and no table answered.")
    ] = False,
    budget_s: Annotated[
        float | None, typer.Option("--budget-s", metavar="SECONDS", help="Begin nothing new after that time.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure anew what is known.")] = False,
    frozen: Annotated[bool, typer.Option("--frozen", help="Weights are frozen: gradients of inputs only.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure kernels for models and keep the choices.

    Without a model, widths of common models are measured; on a CPU those of a small one, for two minutes at most. What
    an earlier run measured with the same code is not measured again. Under torchrun the ranks share the work:
    torchrun --nproc-per-node N -m liger_registry.cli warmup.

    Exit code 1 if a problem is left undone: every candidate failed, or the time of --budget-s was up.
    """
    if budget_s is not None and not 0 < budget_s < math.inf:
        raise InvalidInputError(f"--budget-s {budget_s:g} is no time to measure in", fix="give seconds, such as 600")
    if misses and models:
        raise InvalidInputError("--from-misses and models exclude each other", fix="run it twice")
    _devices.use_interpreter(device)
    from liger_registry.runtime import registry

    where, place = _devices.present(device, registry)
    if problem := _devices.why_unwritable(registry.settings.cache_dir):
        raise TableError("what is measured could not be kept", why=problem)
    ops = [registry.catalog.op(name).name for name in _render.items(op)]
    if misses:
        problems = _missed(registry, where, ops)
    else:
        problems = _posed(registry, where, models or (), ops, batch, seq, dtype, frozen)
    if not (misses or json) and _render.rank() == 0:
        typer.echo(_announced(where, models or (), batch, seq))
    unasked = budget_s is None and not (models or misses) and where.vendor in ("cpu", "interpreter")
    budget_s = CPU_BUDGET_S if unasked else budget_s
    options = {"torch_device": place, "budget_s": budget_s, "force": force}
    with _render.progress(len(problems), json) as advance:

        def show(progress: Progress) -> None:
            advance(progress.done, f"{progress.problem.text} {progress.text}")

        rows, seconds = _tune(registry, problems, where, {**options, "progress": show})
    if _render.rank() == 0:
        _print(registry, where, rows, seconds, json)
    if any(row.status in _undone(timed=not unasked) for row in rows):
        raise typer.Exit(FAILED)


def _undone(timed: bool = True) -> tuple[str, ...]:
    """The statuses of problems left undone; ``timed`` counts those that the time did not suffice for."""
    from liger_registry.tuning.report import FAILED as NONE_PASSED
    from liger_registry.tuning.report import NOTHING, UNTUNED

    return (NONE_PASSED, NOTHING, UNTUNED) if timed else (NONE_PASSED, NOTHING)


def _sizes(device: Device, batch: Sequence[str] | None, seq: Sequence[str] | None) -> tuple[Sequence[int], ...]:
    """Batch sizes and sequence lengths: those asked for, else the device's."""
    slow = device.vendor in ("cpu", "interpreter")
    batches = _problems.counts(_render.items(batch), "--batch") or (CPU_BATCH if slow else BATCH)
    return batches, _problems.counts(_render.items(seq), "--seq") or (CPU_SEQ if slow else SEQ)


def _models(device: Device, models: Sequence[str]) -> Sequence[str]:
    return models or (CPU_MODELS if device.vendor in ("cpu", "interpreter") else MODELS)


def _announced(device: Device, models: Sequence[str], batch: Sequence[str] | None, seq: Sequence[str] | None) -> str:
    """What is about to be measured, in one line."""
    batches, lengths = _sizes(device, batch, seq)
    said = "" if models else "no model given: "
    names = _report.listed(_models(device, models))
    return f"{said}{names}, batch {_report.listed(batches)}, seq {_report.listed(lengths)}, on {device.fingerprint}"


def _posed(
    registry: Registry,
    device: Device,
    models: Sequence[str],
    ops: Sequence[str],
    batch: Sequence[str] | None,
    seq: Sequence[str] | None,
    dtype: Sequence[str] | None,
    frozen: bool,
) -> list[Problem]:
    from liger_registry.architecture import Architecture

    slow = device.vendor in ("cpu", "interpreter")
    batches, lengths = _sizes(device, batch, seq)
    dtypes = _problems.check_dtypes(_render.items(dtype))
    if not models and not dtypes and slow:
        dtypes = ["float32", "bfloat16"]
    if not models and not ops and slow:
        # One loss over 151,936 classes is held against float64 for longer than all norms together.
        ops = [op.name for op in registry.catalog.ops() if not op.by_name and not op.private and "vocab" not in op.dims]
    tokens = sorted({b * s for b in batches for s in lengths})
    _problems.size(str(tokens[-1]), "--batch times --seq", "write smaller ones")
    return _problems.model_problems(
        registry.catalog,
        [Architecture.find(name) for name in _models(device, models)],
        tokens,
        ops=ops,
        dtypes=dtypes,
        frozen=frozen,
        budget=registry.settings.memory_budget,
    )


def _missed(registry: Registry, device: Device, ops: Sequence[str]) -> list[Problem]:
    known = {op.name: op for op in registry.catalog.ops() if not ops or op.name in ops}
    found = [problem for place, problem in registry.misses.all() if place == device.fingerprint]
    return [problem for problem in found if problem.op in known and known[problem.op].has(problem)]


def _tune(
    registry: Registry, problems: Sequence[Problem], device: Device, options: dict[str, Any]
) -> tuple[list[Row], float]:
    """The rows of all ranks, in the order of the problems, and the seconds that the slowest took."""
    if _render.environ_number("WORLD_SIZE", 1) <= 1:
        report = registry.tune(problems, device, **options)
        return list(report.rows), report.seconds
    import torch.distributed as dist

    from liger_registry.tuning.distributed import tune_sharded

    dist.init_process_group("gloo")
    try:
        mine: tuple[tuple[Row, ...], float] | RegistryError
        try:
            shared = tune_sharded(
                problems, catalog=registry.catalog, device=device, store=registry.user_store, **options
            )
            mine = shared.rows, shared.seconds
        except RegistryError as error:  # told to the others first: they would wait for this rank's rows
            mine = error
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
    finally:
        dist.destroy_process_group()
    for answer in found:
        if isinstance(answer, RegistryError):
            raise answer
    order = {problem: n for n, problem in enumerate(problems)}
    rows = sorted((row for part, _ in found for row in part), key=lambda row: order.get(row.problem, len(order)))
    return rows, max(seconds for _, seconds in found)


def _print(registry: Registry, device: Device, rows: Sequence[Row], seconds: float, json: bool) -> None:
    root = registry.user_store.path(device, "x").parent
    if json:
        measured = sum(row.measured for row in rows)
        body = {
            "device": device.fingerprint,
            "seconds": round(seconds, 3),
            "measured": measured,
            "directory": str(root),
        }
        _render.emit_json({**body, "rows": [_json(row) for row in rows]})
        return
    _report.print_rows(rows, _undone())
    said = ", ".join(_report.counted(rows)) or "nothing to tune"
    count = _report.plural(len(rows), "problem")
    typer.echo(f"{count} on {device.fingerprint} in {seconds:.1f} s: {said}; tables in {root}")


def _json(row: Row) -> dict[str, Any]:
    def choice(value: Any) -> dict[str, Any] | None:  # noqa: ANN401 - a Choice or None
        return value and {"implementation": value.implementation, "config": dict(value.config)}

    return {
        "op": row.problem.op,
        **row.problem.to_json(),
        "status": row.status,
        "choice": choice(row.choice),
        "default": choice(row.default),
        "time_us": row.time_us,
        "default_us": row.default_us,
        "gain": row.speedup,
        "measured": row.measured,
        "reused": row.reused,
        "detail": row.detail,
    }
