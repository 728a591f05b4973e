"""Which entries of a table have outlived their use."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from liger_registry.errors import ConfigOutsideSpaceError, InvalidInputError, RegistryError, UnknownOpError
from liger_registry.problem import SCHEME
from liger_registry.table import Sample, Stored, Table

if TYPE_CHECKING:
    from liger_registry.dispatch import Dispatcher
    from liger_registry.plugins import PluginRecord

Reason = Callable[[Stored | Sample], str]
_UNITS = {"h": 1 / 24, "d": 1.0, "w": 7.0, "m": 30.0, "y": 365.0}


def why_unknown(catalog: Any, entry: Stored | Sample) -> str:  # noqa: ANN401 - a Catalog, whose module imports lazily
    """Why nothing that is installed can use an entry; empty if something can."""
    problem, choice = entry.problem, entry.choice
    try:
        if problem.phase == SCHEME:
            names = [f"scheme:{scheme.name}" for scheme in catalog.op(problem.op).schemes]
            return "" if choice.implementation in names else f"there is no {choice.implementation}"
        implementation = catalog.find(problem.op, problem.scheme, problem.phase, choice.implementation)
        implementation.space.parse(choice.config)
    except ConfigOutsideSpaceError as error:
        return f"a config of {choice.implementation} is outside its space: {error.why}"
    except UnknownOpError:
        return f"there is no operation {problem.op}"
    except (RegistryError, LookupError):
        return f"there is no {choice.implementation} in phase {problem.phase}"
    return ""


def unknown(catalog: Any, plugins: tuple[PluginRecord, ...]) -> Reason:  # noqa: ANN401
    """The reason of entries that nothing can use; those of plugins that are only not loaded now are kept."""
    absent = {record.distribution for record in plugins if record.status != "loaded"}

    def reason(entry: Stored | Sample) -> str:
        distribution = entry.provenance.package.split(" ")[0].split("==")[0]
        if absent and (not distribution or distribution in absent):
            return ""
        return why_unknown(catalog, entry)

    return reason


def stale(dispatcher: Dispatcher) -> Reason:
    """The reason of entries that another Triton, or code that has changed since, was measured with."""

    def reason(entry: Stored | Sample) -> str:
        return "" if entry.problem.phase == SCHEME else dispatcher.staleness(entry)  # type: ignore[arg-type]

    return reason


def older_than(text: str) -> Reason:
    """The reason of entries measured before ``text``: an age (``90d``, ``12w``) or a date (``2026-01-31``).

    Raises:
        InvalidInputError: it is neither.
    """
    why, border = "", ""
    try:
        if match := re.fullmatch(r"([0-9]{1,6})([hdwmy])", text):
            limit = datetime.now(timezone.utc) - timedelta(days=int(match[1]) * _UNITS[match[2]])
            border = limit.isoformat(timespec="seconds")[:19]
        elif re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
            border = date.fromisoformat(text).isoformat()
    except ValueError as error:
        why = str(error)
    except OverflowError:
        why = "the calendar does not go back so far"
    if not border:
        raise InvalidInputError(
            f"{text if len(text) <= 40 else text[:37] + '...'!r} is neither an age nor a date",
            why=why,
            candidates=("90d", "12w", "2026-01-31"),
            fix="write an age in hours, days, weeks, months or years, or a date, as the candidates are",
        )

    def reason(entry: Stored | Sample) -> str:
        when = entry.provenance.date
        return f"measured {when[:10] or 'at an unknown time'}" if when < border else ""

    return reason


def prune(table: Table, reasons: list[Reason]) -> tuple[Table, dict[str, list[Stored | Sample]]]:
    """The table without what any reason names, and what goes, by reason."""
    gone: dict[str, list[Stored | Sample]] = {}

    def keeps(entry: Stored | Sample) -> bool:
        why = next((text for reason in reasons if (text := reason(entry))), "")
        if why:
            gone.setdefault(why, []).append(entry)
        return not why

    decisions = {key: stored for key, stored in table.decisions.items() if keeps(stored)}
    samples = {key: sample for key, sample in table.samples.items() if keeps(sample)}
    return replace(table, decisions=decisions, samples=samples), gone
