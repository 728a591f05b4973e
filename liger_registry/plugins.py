"""Entry points: how kernels, adapters and tables come in, ours by the same door as anybody's.

Scanned once. A plugin that cannot be imported, declares an unknown API or raises is recorded and warned of once; it
never hides the others, and what it had staged is dropped. One that hangs is ended after ``LOAD_S`` and recorded alike.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from liger_registry.errors import PluginError, PluginWarning
from liger_registry.foreign import deadline, told
from liger_registry.implementation import OWN_DISTRIBUTION
from liger_registry.sources import spec_of

if TYPE_CHECKING:
    from liger_registry.catalog import Catalog, Staging
    from liger_registry.settings import Settings

API = (1, 0)
#: How long a plugin may take to be imported and to register, in seconds.
LOAD_S = 60.0
KERNELS, ADAPTERS, TUNINGS = "liger_registry.kernels", "liger_registry.adapters", "liger_registry.tunings"
LOADED, FAILED, DISABLED = "loaded", "failed", "disabled"
NOT_NAMED = "LIGER_PLUGINS does not name its distribution"


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of one entry point.

    Attributes:
        name: the entry point's name.
        group: its group.
        distribution: the distribution that declares it.
        version: that distribution's version.
        value: what it names, ``module:function``.
        status: ``loaded``, ``failed`` or ``disabled``.
        reason: why it is not loaded.
    """

    name: str
    group: str
    distribution: str
    version: str
    value: str
    status: str
    reason: str = ""

    def error(self) -> PluginError:
        """What asking for this plugin by name raises."""
        return PluginError(
            f"plugin {self.name} of {self.distribution} {self.version} is {self.status}",
            why=self.reason,
            fix="mend or uninstall it; `liger-tune plugins` shows the state of all",
        )


@dataclass(frozen=True, slots=True)
class _Found:
    entry: metadata.EntryPoint
    distribution: str
    version: str

    def record(self, status: str, reason: str = "") -> PluginRecord:
        return PluginRecord(
            self.entry.name, self.entry.group, self.distribution, self.version, self.entry.value, status, reason
        )


def load_kernels(
    catalog: Catalog, settings: Settings, found: Iterable[_Found] | None = None
) -> tuple[PluginRecord, ...]:
    """Load every plugin of the group ``liger_registry.kernels`` into the catalogue, which learns which ones failed.

    Args:
        catalog: where it registers.
        settings: holds the allow-list.
        found: the entry points, instead of those of the installed distributions.
    """

    def stage(plugin: _Found) -> None:
        register: Callable[[Staging], None] = plugin.entry.load()
        with catalog.stage(plugin.distribution) as staging:
            register(staging)

    records = tuple(_load(plugin, settings, stage) for plugin in (scan(KERNELS) if found is None else found))
    catalog.failed = tuple(record for record in records if record.status != LOADED)
    return records


class Stages(Protocol):
    """What takes in the ``register`` of a distribution's adapters: whole, or not at all."""

    def stage(self, distribution: str, register: Callable[[Any], None]) -> None:
        """Run ``register`` with what it may register with."""


def load_adapters(adapters: Stages, settings: Settings) -> tuple[PluginRecord, ...]:
    """Load every plugin of the group ``liger_registry.adapters``."""

    def stage(plugin: _Found) -> None:
        adapters.stage(plugin.distribution, plugin.entry.load())

    return tuple(_load(plugin, settings, stage) for plugin in scan(ADAPTERS))


def tuning_roots(settings: Settings) -> tuple[tuple[Path, ...], tuple[PluginRecord, ...]]:
    """The directories of the packages of tables that distributions ship, and what became of every entry point."""
    roots: list[Path] = []

    def locate(plugin: _Found) -> None:
        # Neither the package nor one above it is imported: a table is data, and nothing of it runs.
        spec = spec_of(plugin.entry.module)
        if spec is None or not spec.submodule_search_locations:
            raise PluginError(f"{plugin.entry.module} is no package of tables")
        roots.append(Path(next(iter(spec.submodule_search_locations))))

    records = tuple(_load(plugin, settings, locate, declares_api=False) for plugin in scan(TUNINGS))
    return tuple(roots), records


def warn_of(records: Iterable[PluginRecord]) -> None:
    """Warn of every plugin that failed, or whose API does not fit; one that the user left out is no surprise.

    Apart from loading, because a warning may be an error where it is given, and must not hide the other plugins.
    """
    for record in records:
        if record.status != LOADED and record.reason != NOT_NAMED:
            whose = f"{record.group} plugin {record.name} of {record.distribution} {record.version}"
            warnings.warn(f"{whose} is {record.status}: {record.reason}", PluginWarning, stacklevel=2)


def warn_of_absent(settings: Settings) -> None:
    """Warn, once for all of them, of distributions that the allow-list names and that are not installed."""
    absent = [name for name in sorted(settings.plugins or ()) if not _is_installed(name)]
    if absent:
        names, verb = ", ".join(absent), "is" if len(absent) == 1 else "are"
        warnings.warn(
            f"LIGER_PLUGINS names {names}, which {verb} not installed: it takes the names of distributions, as "
            "`pip list` shows them; `liger-tune plugins` lists those there are",
            PluginWarning,
            stacklevel=2,
        )


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except (metadata.PackageNotFoundError, ValueError):
        return False
    return True


def scan(group: str) -> list[_Found]:
    """The entry points of a group, this distribution's first and its ``ops`` before what implements them."""
    found: dict[tuple[str, str, str], _Found] = {}
    for entry in metadata.entry_points(group=group):
        # A distribution whose metadata is damaged has no name.
        distribution = canonical((entry.dist.name if entry.dist is not None else None) or "unknown")
        version = (entry.dist.version if entry.dist is not None else "") or ""
        # An editable install beside a wheel lists the same entry point twice.
        found.setdefault((distribution, entry.name, entry.value), _Found(entry, distribution, version))
    return sorted(
        found.values(), key=lambda f: (f.distribution != OWN_DISTRIBUTION, f.entry.name != "ops", f.distribution)
    )


def canonical(name: str) -> str:
    """A distribution's name in the form that compares equal however it was spelt (PEP 503)."""
    from packaging.utils import canonicalize_name

    return str(canonicalize_name(name))


def _load(
    plugin: _Found, settings: Settings, action: Callable[[_Found], None], declares_api: bool = True
) -> PluginRecord:
    allowed = settings.plugins
    others = allowed is not None and plugin.distribution != OWN_DISTRIBUTION
    if others and plugin.distribution not in map(canonical, allowed or ()):
        return plugin.record(DISABLED, NOT_NAMED)
    own = plugin.distribution == OWN_DISTRIBUTION
    what = f"plugin {plugin.entry.name} of {plugin.distribution} {plugin.version}"
    try:
        with nullcontext() if own else deadline(LOAD_S, what):
            reason = _api_mismatch(plugin.entry.module) if declares_api else ""
            if reason:
                return plugin.record(DISABLED, reason)
            action(plugin)
            return plugin.record(LOADED)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may raise anything, and must not take the others with it
        return plugin.record(FAILED, told(error, catalogued=True))


def _api_mismatch(module: str) -> str:
    """Why the API that a plugin's module, or a package above it, declares does not fit; empty if it does."""
    importlib.import_module(module)
    for name in _upwards(module):
        declared = getattr(sys.modules.get(name), "LIGER_REGISTRY_API", None)
        if declared is None:
            continue
        if not (isinstance(declared, tuple) and len(declared) == 2 and all(type(n) is int for n in declared)):
            return f"it declares LIGER_REGISTRY_API = {declared!r}, which is no (major, minor)"
        if declared[0] != API[0] or declared[1] > API[1]:
            return f"it declares LIGER_REGISTRY_API = {declared}, this version offers {API}"
        return ""
    return f"it declares no LIGER_REGISTRY_API; write LIGER_REGISTRY_API = {API} into {module}"


def _upwards(module: str) -> Iterator[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]
