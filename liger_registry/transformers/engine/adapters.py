"""Adapters: what looks for something in a model and says how to speed it up.

They come through the entry points of ``liger_registry.adapters``, ours (``builtin``) by the same door as anybody's. A
plugin's are asked first, so that they may bind what ours cannot see, or would see differently:

    LIGER_REGISTRY_API = (1, 0)

    def register(adapters):
        adapters.register(Adapter("my_model", ops=("rms_norm",), find=find))

    def find(model, enabled):                     # enabled: operation -> whether the user wants it
        for path, module in model.named_modules():
            if type(module).__name__ == "MyNorm" and enabled["rms_norm"]:
                yield Binding("rms_norm", path, module, "forward", MyForward(module), how="MyNorm of my_model")

Third-party code is as trusted as the package it came in; ``LIGER_PLUGINS`` names those that may load.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from liger_registry.errors import PluginWarning, RegistrationError
from liger_registry.foreign import told
from liger_registry.implementation import OWN_DISTRIBUTION
from liger_registry.plugins import PluginRecord, load_adapters, warn_of
from liger_registry.settings import Settings
from liger_registry.transformers.engine.binding import Binding
from liger_registry.transformers.engine.report import Row

# Loops that never end must end as an error, not as a full memory: of adapters, and of what one finds in a model.
MOST, MOST_FOUND = 10_000, 1_000_000
Enabled = Mapping[str, bool]
Finder = Callable[[nn.Module, Enabled], Iterable[Binding | Row]]


@dataclass(frozen=True, slots=True)
class Adapter:
    """One thing that looks through a model.

    Attributes:
        name: for reports.
        ops: the operations it may bind; the keywords of ``apply`` that concern it.
        find: ``(model, enabled)`` to bindings, and to rows for what it recognised and has to leave alone. It binds
            nothing itself, and neither changes the model nor imports modeling code.
    """

    name: str
    ops: tuple[str, ...]
    find: Finder


class Adapters:
    """The adapters of one distribution after the other, in the order they registered."""

    def __init__(self) -> None:
        self._all: list[tuple[str, Adapter]] = []
        self._distribution = OWN_DISTRIBUTION
        self.records: tuple[PluginRecord, ...] = ()

    def register(self, adapter: Adapter) -> None:
        """Add an adapter.

        Raises:
            RegistrationError: it is no Adapter, or its distribution has one of that name.
        """
        if not isinstance(adapter, Adapter):
            raise RegistrationError(
                f"{adapter!r} is no adapter",
                why="adapters are instances of liger_registry.transformers.Adapter",
                fix="register(Adapter(name, ops=(...), find=function))",
            )
        if len(self._all) >= MOST:
            raise RegistrationError(f"{self._distribution} registers the {MOST + 1}th adapter", fix="end the loop")
        if any(known == (self._distribution, adapter.name) for known in ((d, a.name) for d, a in self._all)):
            raise RegistrationError(
                f"{self._distribution} registers two adapters named {adapter.name}",
                fix="give one of them another name",
            )
        self._all.append((self._distribution, adapter))

    def stage(self, distribution: str, register: Callable[[Adapters], None]) -> None:
        """Run a plugin's ``register``; if it raises nothing of it stays."""
        before, self._distribution = list(self._all), distribution
        try:
            register(self)
        except BaseException:
            self._all = before
            raise
        finally:
            self._distribution = OWN_DISTRIBUTION

    @property
    def ordered(self) -> list[Adapter]:
        """Those of plugins first, ours last."""
        return [a for _, a in sorted(self._all, key=lambda entry: entry[0] == OWN_DISTRIBUTION)]

    @property
    def ops(self) -> list[str]:
        """Every operation that some adapter may bind."""
        return sorted({op for _, adapter in self._all for op in adapter.ops})


_lock = threading.Lock()
_loaded: Adapters | None = None


def adapters() -> Adapters:
    """Those of the installed distributions, loaded once."""
    global _loaded
    with _lock:
        if _loaded is None:
            found = Adapters()
            found.records = load_adapters(found, Settings.from_environ())
            _loaded = found
            warn_of(found.records)
    return _loaded


def look(adapter: Adapter, model: nn.Module, enabled: Enabled) -> list[Binding | Row]:
    """What one adapter finds; one that raises is reported, and does not keep others from finding."""
    try:
        found = list(itertools.islice(adapter.find(model, enabled), MOST_FOUND + 1))
        if len(found) > MOST_FOUND:
            raise RegistrationError(f"adapter {adapter.name} finds more than {MOST_FOUND:,} things", fix="end the loop")
        return found
    except Exception as error:
        text = told(error, catalogued=True)
        warnings.warn(f"adapter {adapter.name} failed on {type(model).__name__}: {text}", PluginWarning, stacklevel=4)
        return [Row(op, "", False, f"adapter {adapter.name} failed: {text}") for op in adapter.ops if enabled.get(op)]
