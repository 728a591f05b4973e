"""What a registry is made of: settings, catalogue, plugins and tables, each put together on first use."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from liger_registry.catalog import Catalog, Staging
from liger_registry.decision import CLUSTER, SHIPPED_TABLES, USER, Source
from liger_registry.device import Device
from liger_registry.dispatch import Dispatcher
from liger_registry.errors import PluginError, RegistrationError
from liger_registry.implementation import Implementation
from liger_registry.misses import MissLog
from liger_registry.op import Op
from liger_registry.plan import Plan
from liger_registry.plugins import (
    LOADED,
    PluginRecord,
    canonical,
    load_kernels,
    tuning_roots,
    warn_of,
    warn_of_absent,
)
from liger_registry.problem import Problem
from liger_registry.settings import Settings
from liger_registry.store import TableStore

# What is registered in a running process, not by a distribution; it is selected only after verification, like a plugin.
HERE = "this process"


def build_catalog(settings: Settings | None = None) -> Catalog:
    """A catalogue with everything that the installed distributions register; what fails is left out with a warning."""
    catalog = Catalog()
    settings = settings or Settings.from_environ()
    warn_of(load_kernels(catalog, settings))
    warn_of_absent(settings)
    return catalog


class Assembly(ABC):
    """The parts of a registry.

    Args:
        settings: instead of what the environment says.
        catalog: instead of what the installed distributions register.
    """

    def __init__(self, settings: Settings | None = None, catalog: Catalog | None = None) -> None:
        self._given_settings, self._given_catalog = settings, catalog
        self._lock = threading.RLock()
        self._settings: Settings | None = settings
        self._dispatcher: Dispatcher | None = None
        self._records: tuple[PluginRecord, ...] = ()
        self._building = False
        self._misses: MissLog | None = None

    @property
    def settings(self) -> Settings:
        """What the environment said when this registry was first used."""
        if self._settings is None:
            self._settings = Settings.from_environ()
        return self._settings

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher over the catalogue and all tables."""
        if self._dispatcher is None:
            with self._lock:
                if self._dispatcher is None:
                    self._dispatcher = self._build()
                    warn_of(self._records)  # last, because a warning may be an error here
                    if self._given_catalog is None:
                        warn_of_absent(self.settings)
        return self._dispatcher

    def _build(self) -> Dispatcher:
        if self._building:
            raise RegistrationError(
                "a plugin uses the registry while the registry loads its plugins",
                fix="register into the argument of register(registry)",
            )
        catalog = self._given_catalog
        records: tuple[PluginRecord, ...] = ()
        if catalog is None:
            catalog, self._building = Catalog(), True
            try:
                records = load_kernels(catalog, self.settings)
            finally:
                self._building = False
        sources = [Source(USER, TableStore(self.settings.cache_dir))]
        sources += [Source(CLUSTER, TableStore(path, readonly=True)) for path in self.settings.table_dirs]
        shipped, found = tuning_roots(self.settings)
        sources += [Source(SHIPPED_TABLES, TableStore(path, readonly=True, trusted=True)) for path in shipped]
        self._records = (*records, *found)
        for target, _ in self.settings.pins:
            catalog.op(target.partition("/")[0])  # raises; a pin of an operation that is not there would do nothing
        return Dispatcher(catalog, sources, mode=self.settings.mode, on_miss=self._on_miss)

    @property
    def catalog(self) -> Catalog:
        """All operations and implementations."""
        return self.dispatcher.catalog

    @property
    def plan(self) -> Plan | None:
        """The frozen plan, if ``freeze`` was called."""
        return self.dispatcher.plan

    def stores(self) -> tuple[tuple[str, TableStore], ...]:
        """The stores of tables in the order in which they are searched, as ``(kind, store)``."""
        return tuple((source.kind, source.store) for source in self.dispatcher.sources)

    @property
    def user_store(self) -> TableStore:
        """The store that tuning writes to."""
        return self.dispatcher.sources[0].store

    @property
    def misses(self) -> MissLog:
        """What was asked for and no table answered exactly, earlier runs included."""
        if self._misses is None:
            self._misses = MissLog(self.settings.cache_dir / "misses.jsonl")
        return self._misses

    def plugins(self) -> tuple[PluginRecord, ...]:
        """What became of every entry point."""
        self.dispatcher  # noqa: B018 - loads them
        return self._records

    def plugin(self, name: str) -> PluginRecord:
        """What became of the plugin of that name: a distribution's, or else an entry point's.

        Raises:
            PluginError: it is not loaded, or there is none.
        """
        records = self.plugins()
        found = [r for r in records if r.distribution == canonical(name)] or [r for r in records if r.name == name]
        for record in found:
            if record.status != LOADED:
                raise record.error()
        if not found:
            raise PluginError(
                f"no plugin is called {name!r}",
                candidates=sorted({r.distribution for r in records}),
                fix="install it; `liger-tune plugins` shows the state of all",
            )
        return found[0]

    def op(self, name: str) -> Op:
        """The contract of an operation; UnknownOpError if there is none."""
        return self.catalog.op(name)

    def register(self, *items: Op | Implementation) -> None:
        """Register operations or implementations in this process, all or none of them.

        An implementation is selected automatically only after it passed verification on this device: tune it, or pin
        it.

        Raises:
            RegistrationError: an item contradicts itself or its contract.
            RegistrationClashError: it is there already.
        """
        with self.catalog.stage(HERE) as staging:
            for item in items:
                staging.register(item)
        self.forget()

    @contextmanager
    def stage(self, distribution: str) -> Iterator[Staging]:
        """A staging under a distribution's name; committed if the block ends without an exception."""
        with self.catalog.stage(distribution) as staging:
            yield staging
        self.forget()

    def reload(self) -> None:
        """Read the environment, the plugins and the tables anew; handles stay valid."""
        with self._lock:
            self._settings, self._dispatcher, self._misses = self._given_settings, None, None
            self._records = ()
            self.forget()

    @abstractmethod
    def forget(self) -> None:
        """Drop what was derived from the parts."""

    @abstractmethod
    def _on_miss(self, problem: Problem, device: Device) -> bool:
        """What a miss does; True if the tables may answer now."""
