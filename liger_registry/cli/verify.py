"""``liger-tune verify``: hold implementations against the reference on the device at hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from liger_registry.cli import _devices, _problems, _render
from liger_registry.cli._errors import FAILED
from liger_registry.errors import UnknownImplementationError

if TYPE_CHECKING:
    from liger_registry.config import Config
    from liger_registry.device import Device
    from liger_registry.implementation import Implementation
    from liger_registry.problem import Problem
    from liger_registry.runtime import Registry

MODELS = ("qwen3-0.6b", "gemma-2-2b")
# The interpreter runs one element after the other, in effect: widths of a real model take minutes there.
_TINY = {
    "model_type": "qwen3",
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}


def verify(
    op: Annotated[str | None, typer.Argument(metavar="OP", help="One operation; all by default.")] = None,
    implementation: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only these, by name or vendor:name.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", help="cuda:1, cpu or interpreter; by default the one present."),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", metavar="MODEL", help="Whose sizes; model directories or presets.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", metavar="DTYPE", help="By default bfloat16 and float32.")
    ] = None,
    configs: Annotated[int, typer.Option(metavar="N", help="Configs an implementation, the heuristic's first.")] = 3,
    seed: Annotated[int, typer.Option(help="Fixes the inputs.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Hold implementations against the reference in float64.

    Inputs are random and adversarial; memory that nobody wrote is poisoned.

    Exit code 1 if one is wrong, raises, or if there was nothing to verify. Runs in this process: a kernel that crashes
    the device ends the command.
    """
    _problems.number(configs, "--configs", 1, 1 << 20)
    _problems.number(seed, "--seed", 0, (1 << 32) - 1)
    _devices.use_interpreter(device)
    from liger_registry.architecture import Architecture
    from liger_registry.runtime import registry

    where, place = _devices.present(device, registry)
    tiny = where.vendor == "interpreter" and not model
    names = _render.items(model) or (MODELS[:1] if place == "cpu" else MODELS)
    architectures = [Architecture.from_config(_TINY, "tiny")] if tiny else [Architecture.find(name) for name in names]
    dtypes = _problems.check_dtypes(_render.items(dtype)) or (["float32"] if tiny else ["bfloat16", "float32"])
    # An operation that no model calls by itself is verified only if it is named.
    find = _problems.code_problems if op else _problems.model_problems
    problems = find(registry.catalog, architectures, (4096,), ops=[op] if op else (), dtypes=dtypes)
    work = list(_candidates(registry, problems, where, _render.items(implementation), configs))
    rows = []
    with _render.progress(len(work), json) as advance:
        for done, (problem, candidate, config) in enumerate(work):
            advance(done, f"{candidate.id} {problem.text}")
            rows.append(_verify(registry, problem, candidate, config, where, place, seed))
    failed = [row for row in rows if row["detail"]]
    if json:
        _render.emit_json(rows)
    else:
        for row in failed:
            typer.echo(f"failed: {row['implementation']}({row['config']}) {row['problem']}: {row['detail']}")
        columns = ("device", "op", "phase", "implementation", "verified", "failed")
        _render.table(columns, _summary(rows), right=columns[-2:]) if rows else typer.echo("there is nothing to verify")
    if failed or not rows:
        raise typer.Exit(FAILED)


def _candidates(
    registry: Registry, problems: Sequence[Problem], device: Device, names: Sequence[str], count: int
) -> Iterator[tuple[Problem, Implementation, Config]]:
    catalog = registry.catalog
    known = {name for o in catalog.ops() for i in catalog.implementations(o.name) for name in (i.id, i.name)}
    for name in names:
        if name not in known:
            raise UnknownImplementationError(
                f"no operation has an implementation {name!r}", candidates=sorted(known), fix="name a candidate"
            )
    for problem in problems:
        if not problem.scheme:
            continue
        for implementation in catalog.implementations(problem.op, problem.scheme, problem.phase):
            if names and not {implementation.id, implementation.name} & set(names):
                continue
            if implementation.capability.why_not(problem, device) is not None:
                continue
            first = implementation.propose(problem, device)  # a text where a plugin's heuristic fails
            others = [config for config in implementation.configs(problem, device) if config != first]
            tried = [*([first] if not isinstance(first, str) else []), *others]
            legal = [c for c in tried if implementation.why_illegal(c, problem, device) is None]
            step = max(1, (len(legal) - 1) // max(1, count - 1))
            for config in [*legal[:1], *legal[1::step]][: max(1, count)]:
                yield problem, implementation, config


def _verify(
    registry: Registry,
    problem: Problem,
    implementation: Implementation,
    config: Config,
    device: Device,
    place: str,
    seed: int,
) -> dict[str, Any]:
    from liger_registry.tuning.verify import verify as hold

    row = {
        "device": device.fingerprint,
        "op": problem.op,
        "phase": problem.phase,
        "problem": problem.text,
        "implementation": implementation.id,
        "config": config.text,
        "worst": None,
        "detail": "",
    }
    try:
        found = hold(registry.catalog.op(problem.op), implementation, config, problem, device, place, seed=seed)
    except Exception as error:  # a candidate may raise anything; the others are verified all the same
        return {**row, "detail": f"{type(error).__name__}: {error}".partition("\n")[0][:500]}
    worst = max((v.error / v.error_limit for v in found.verdicts if v.error_limit), default=None)
    return {**row, "worst": worst, "detail": "" if found.passed else found.detail}


def _summary(rows: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    groups: dict[tuple[str, ...], list[bool]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("device", "op", "phase", "implementation"))
        groups.setdefault(key, []).append(not row["detail"])
    return [(*key, sum(passed), len(passed) - sum(passed)) for key, passed in groups.items()]
