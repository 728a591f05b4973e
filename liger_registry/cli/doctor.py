"""``liger-tune doctor``: what a bug report needs, and whether everything is in place."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from liger_registry.cli import _devices, _render, _report
from liger_registry.cli._errors import FAILED

if TYPE_CHECKING:
    from liger_registry.device import Device
    from liger_registry.runtime import Registry

_DISTRIBUTIONS = ("liger-registry", "torch", "triton", "transformers", "pytorch-triton-rocm", "liger-kernel")


def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print what a bug report needs, and check that all is in place.

    Versions, devices, settings, tables and plugins. Exit code 1 if a check fails.
    """
    from liger_registry.runtime import registry

    checks = list(_checks(registry))
    report: dict[str, Any] = {
        "versions": _versions(),
        "devices": [_device(device) for device in _all_devices(registry)],
        "settings": _settings(registry),
        "tables": [_store(kind, store) for kind, store in registry.stores()],
        "misses": len(registry.misses.all()),
        "plugins": [_render.fields(record) for record in registry.plugins()],
        "checks": [{"check": name, "problem": problem} for name, problem in checks],
    }
    if json:
        _render.emit_json(report)
    else:
        typer.echo("Copy the text below into your report.\n")
        typer.echo("\n".join(_lines(report)))
    if any(problem for _, problem in checks):
        raise typer.Exit(FAILED)


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version(), "platform": platform.platform()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in _DISTRIBUTIONS[:4]:
                found[name] = "not installed"
    import torch

    found["CUDA"] = torch.version.cuda or "none"
    found["HIP"] = torch.version.hip or "none"
    if torch.cuda.is_available() and torch.version.cuda and hasattr(torch._C, "_cuda_getDriverVersion"):
        found["CUDA driver"] = str(torch._C._cuda_getDriverVersion())
    return found


def _all_devices(registry: Registry) -> Iterator[Device]:
    import torch

    from liger_registry.device import Device

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield Device.of(torch.device("cuda", index))
    yield Device.of(torch.device("cpu"), interpret=registry.settings.interpret)


def _device(device: Device) -> dict[str, Any]:
    return {
        "fingerprint": device.fingerprint,
        "name": device.name,
        "index": device.index,
        "memory": device.memory_bytes,
        "limits": _render.fields(device.limits),
        "siblings": device.siblings,
    }


def _settings(registry: Registry) -> dict[str, Any]:
    settings = _render.fields(registry.settings)
    plugins = settings["plugins"]
    settings["plugins"] = "all" if plugins is None else sorted(plugins)
    settings["cache_dir"] = str(settings["cache_dir"])
    settings["table_dirs"] = [str(path) for path in settings["table_dirs"]]
    names = [name for name in os.environ if name.startswith(("LIGER_", "TRITON_")) or name == "CUDA_VISIBLE_DEVICES"]
    return {**settings, "environment": {name: os.environ[name] for name in sorted(names)}}


def _store(kind: str, store: Any) -> dict[str, Any]:  # noqa: ANN401 - a TableStore, which imports its parts lazily
    counts: dict[str, dict[str, int]] = {}
    undigested: list[str] = []
    for device in store.devices():
        for op in store.ops(device):
            table = store.load(device, op)
            seen = counts.setdefault("/".join(table.directory), {"ops": 0, "decisions": 0, "samples": 0})
            seen["ops"] += 1
            undigested += [] if table.digest else [op]
            seen["decisions"] += len(table.decisions)
            seen["samples"] += len(table.samples)
    bad = sorted(str(path) for path in Path(store.root).rglob("*.bad*")) if Path(store.root).is_dir() else []
    found = {"kind": kind, "root": str(store.root), "devices": counts, "set_aside": bad}
    return {**found, "without_digest": sorted(set(undigested))}


def _checks(registry: Registry) -> Iterator[tuple[str, str]]:
    """Each check's name and what is wrong; empty where nothing is."""
    yield "the cache directory can be written", _devices.why_unwritable(registry.settings.cache_dir)
    failed = [f"{r.name} of {r.distribution}: {r.reason}" for r in registry.plugins() if r.status == "failed"]
    yield "all plugins load", "; ".join(failed)
    yield "operations are registered", "" if registry.catalog.ops() else "none; is the distribution installed?"
    yield "Triton can be used where it is needed", _triton()
    missing = [str(path) for path in registry.settings.table_dirs if not path.is_dir()]
    yield "the directories of LIGER_TUNE_TABLES exist", ", ".join(missing)


def _triton() -> str:
    import torch

    from liger_registry.launch import triton_available, triton_version

    if not torch.cuda.is_available() or triton_available():
        return ""
    return (
        f"there is a GPU, and no usable Triton ({triton_version()}): only PyTorch implementations serve; install triton"
    )


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"- {name}: {version}" for name, version in report["versions"].items())
    yield f"- command: {' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}"
    for device in report["devices"]:
        yield f"- device: {device['fingerprint']} ({device['name']}, {_render.size(device['memory'])})"
        limits = [f"{name.replace('_', ' ')} {value:,}" for name, value in device["limits"].items() if value > 1]
        if limits:
            yield f"  limits: {', '.join(limits)}"
    for name, value in report["settings"].items():
        if name != "environment":
            yield f"- {name.replace('_', ' ')}: {_human(value)}"
    yield from (f"- {name}={value}" for name, value in report["settings"]["environment"].items())
    for store in report["tables"]:
        yield f"- {store['kind']} tables: {store['root']}"
        for device, counts in store["devices"].items():
            yield f"  {device}: " + ", ".join(
                _report.plural(count, name.removesuffix("s")) for name, count in counts.items()
            )
        yield from (f"  set aside: {path}" for path in store["set_aside"])
        if store["without_digest"]:
            ops = ", ".join(store["without_digest"])
            yield f"  without a digest, so whether they were changed cannot be told: {ops}"
    yield f"- recorded misses: {report['misses']}"
    for plugin in report["plugins"]:
        reason = f": {plugin['reason']}" if plugin["reason"] else ""
        yield f"- plugin {plugin['name']} of {plugin['distribution']} {plugin['version']}: {plugin['status']}{reason}"
    for check in report["checks"]:
        yield f"- [{'!!' if check['problem'] else 'ok'}] {check['check']}" + (
            f": {check['problem']}" if check["problem"] else ""
        )


def _human(value: object) -> str:
    if value is None or value == () or value == []:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return ", ".join("=".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in value)
    return str(value)
