"""``liger-tune compile``: compile configs for GPUs that need not be there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from liger_registry.cli import _problems, _records, _render
from liger_registry.cli._errors import FAILED
from liger_registry.errors import InvalidInputError, TritonMissingError

if TYPE_CHECKING:
    from liger_registry.catalog import Catalog
    from liger_registry.compile import Compiled
    from liger_registry.errors import CompileError
    from liger_registry.records import LaunchRecord

DEVICES = ("a100", "h100", "h200", "mi300x")
MODELS = ("llama-3-8b", "qwen3-0.6b", "gemma-2-9b")
# Row counts are no part of a binary beyond their divisibility, which every bucket shares; but some implementations are
# for few rows, and some for many.
_TOKENS = (16, 8192)
# Progress moves by batches; within one, processes wait for the slowest compile.
_BATCH = 256


def compile_configs(
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help=_problems.MODELS_HELP)] = None,
    device: Annotated[
        list[str] | None, typer.Option("--device", metavar="DEVICE", help=f"Devices; by default {','.join(DEVICES)}.")
    ] = None,
    op: Annotated[list[str] | None, typer.Option("--op", metavar="OP", help="Only these operations.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", metavar="DTYPE", help="Instead of each model's own.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every config; the default.")] = False,
    sample: Annotated[
        int | None, typer.Option(metavar="N", help="N configs in all, spread evenly, the same every time.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(metavar="N", help="Compiling processes; by default one a core.")
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="One line a config, not one an implementation.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile configs for GPUs that need not be there.

    Every config of every Triton implementation, on aligned and on unaligned tensors, for the problems that the models
    pose; operations that they do not call by themselves are compiled at their sizes. Prints registers and spills a
    thread and shared memory a block. A config that does not compile, or does not fit its device, is an error: exit
    code 1. Results are kept in the cache directory.
    """
    if every and sample is not None:
        raise InvalidInputError("--all and --sample exclude each other", fix="give one of them")
    most = _problems.number(1 << 30 if sample is None else sample, "--sample", 1, 1 << 30)
    workers = _problems.number(processes if processes is not None else os.cpu_count() or 1, "--processes", 1, 1024)
    from liger_registry.architecture import Architecture
    from liger_registry.device import Device
    from liger_registry.launch import triton_available
    from liger_registry.runtime import registry

    if not triton_available():
        raise TritonMissingError("offline compiles need Triton", fix="pip install triton")
    devices = [Device.parse(name) for name in _render.items(device) or DEVICES]
    for where in devices:
        if where.vendor not in ("cuda", "rocm"):
            raise InvalidInputError(
                f"there is nothing to compile for {where.sku}",
                why="plain PyTorch and Triton's interpreter compile no kernels ahead",
                candidates=DEVICES,
                fix="name GPUs, which need not be there",
            )
    architectures = [Architecture.find(name) for name in models or MODELS]
    dtypes = _problems.check_dtypes(_render.items(dtype))
    problems = _problems.code_problems(registry.catalog, architectures, _TOKENS, ops=_render.items(op), dtypes=dtypes)
    found = list(_records.jobs(registry.catalog, problems, devices))
    chosen = _records.sampled(found, most)
    cache = registry.settings.cache_dir / "compiled"
    rows = _compile(registry.catalog, chosen, workers, cache, json)
    if json:
        _render.emit_json(rows)
    else:
        _print(rows, details)
        typer.echo(f"{len(chosen)} of {len(found)} configs, {len(rows)} kernels, {_failures(rows)} failed")
    if _failures(rows):
        raise typer.Exit(FAILED)


def _failures(rows: Sequence[dict[str, Any]]) -> int:
    return sum(1 for row in rows if row["error"])


def _compile(
    catalog: Catalog, jobs: Sequence[_records.Job], processes: int, cache: Path, quiet: bool
) -> list[dict[str, Any]]:
    from liger_registry.compile import target_of
    from liger_registry.compile_pool import CompilePool

    work: list[tuple[_records.Job, LaunchRecord]] = []
    rows: list[dict[str, Any]] = []
    for job in jobs:
        try:
            work += [(job, record) for record in _records.records_of(catalog.op(job.problem.op), job)]
        except Exception as error:  # a launch function may raise anything; it fails its config and no other
            rows.append(_row(job, "", None, f"cannot be recorded: {type(error).__name__}: {error}"))
    with CompilePool(processes) as pool, _render.progress(len(work), quiet) as advance:
        done = 0
        for device in dict.fromkeys(job.device for job, _ in work):
            mine = [pair for pair in work if pair[0].device == device]
            for start in range(0, len(mine), _BATCH):
                batch = mine[start : start + _BATCH]
                advance(done, device.sku)
                results = pool.compile([record for _, record in batch], target_of(device), cache)
                rows += [_result(job, record, found) for (job, record), found in zip(batch, results, strict=True)]
                done += len(batch)
    return rows


def _result(job: _records.Job, record: LaunchRecord, found: Compiled | CompileError) -> dict[str, Any]:
    from liger_registry.compile import fits
    from liger_registry.errors import CompileError

    if isinstance(found, CompileError):
        return _row(job, record.kernel, None, f"{found.what}: {found.why}")
    return _row(job, record.kernel, found, fits(found, job.device) or "")


def _row(job: _records.Job, kernel: str, compiled: Compiled | None, error: str) -> dict[str, Any]:
    return {
        "device": job.device.fingerprint,
        "op": job.problem.op,
        "problem": job.problem.to_json(),
        "implementation": job.implementation.id,
        "config": dict(job.config),
        "aligned": job.aligned,
        "kernel": kernel,
        "registers": compiled.registers if compiled else None,
        "spills": compiled.spills if compiled else None,
        "shared_memory": compiled.shared_memory if compiled else None,
        "error": error,
    }


def _print(rows: Sequence[dict[str, Any]], details: bool) -> None:
    def label(row: dict[str, Any]) -> tuple[str, ...]:
        problem = row["problem"]
        where = (row["device"], row["op"], problem["phase"], row["implementation"], row["kernel"].rpartition(":")[2])
        config = ",".join(f"{name}={value}" for name, value in row["config"].items())
        return (*where, config, "" if row["aligned"] else "unaligned") if details else where

    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(label(row), []).append(row)
    columns = ["device", "op", "phase", "implementation", "kernel", *(["config", ""] if details else [])]
    numbers = ("kernels", "registers", "spills", "shared", "failed")
    lines = [
        (
            *where,
            len(group),
            *(_most(group, name) for name in ("registers", "spills", "shared_memory")),
            _failures(group),
        )
        for where, group in groups.items()
    ]
    if lines:
        _render.table((*columns, *numbers), lines, right=numbers)
    for row in rows:
        if row["error"]:
            config = ",".join(f"{name}={value}" for name, value in row["config"].items())
            where = "" if row["aligned"] else " unaligned"
            typer.echo(f"failed: {row['device']} {row['op']} {row['implementation']}({config}){where}: {row['error']}")


def _most(group: Sequence[dict[str, Any]], name: str) -> object:
    return max((row[name] for row in group if row[name] is not None), default="-")
