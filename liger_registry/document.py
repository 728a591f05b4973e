"""Tables as JSON: one entry a line, sorted, every key field spelled out, so that a diff reads well.

Reading trusts nothing: what does not parse or validate is an error with a reason, and nothing is evaluated.
"""

from __future__ import annotations

import gc
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

from liger_registry import json_text
from liger_registry.config import Config, Fields
from liger_registry.digest import checked, sealed
from liger_registry.errors import TableError, TableInvalidError
from liger_registry.lines import Line, Lines
from liger_registry.problem import PHASES, SCHEME, Problem, scalar_fields
from liger_registry.table import OK, STATUSES, Choice, Directory, Provenance, Sample, Stored, Table, order

SCHEMA = 1
MAX_BYTES = 64 << 20
MAX_ENTRIES = 1_000_000
MAX_DETAIL = 1000
MAX_TEXT = 256
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_PROVENANCE = tuple(f.name for f in fields(Provenance))
_E = TypeVar("_E", Stored, Sample)


class NewerSchemaError(TableInvalidError):
    """A table that a newer version of this package wrote; it is not to be touched."""


def check_name(name: object, what: str) -> str:
    """``name`` if it can stand in a path.

    Raises:
        TableInvalidError: it cannot.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TableInvalidError(
            f"{str(name)[:80]!r} is no {what}", fix="use at most 64 letters, digits, '.', '_' and '-', no leading dot"
        )
    return name


# -- writing ---------------------------------------------------------------------------------------------------------


def render(table: Table, kept: tuple[Lines, Lines] | None = None, *, seal: bool = True) -> str:
    """The document of a table, in ASCII, ending in a newline.

    Args:
        table: the table.
        kept: lines of decisions and of samples in an earlier document of the same table.
        seal: whether it carries its digest; not within a document that carries one for all of it.

    Raises:
        TableInvalidError: the table holds what JSON or a table cannot.
    """
    known_decisions, known_samples = kept or (Lines(), Lines())
    try:
        head = (
            f'{{\n"schema": {SCHEMA},\n"op": {_dumps(table.op)},\n"directory": {_dumps("/".join(table.directory))},\n'
        )
        decisions = ",".join(f"\n{line}" for line in known_decisions.of(table.decisions.values(), _decision_line))
        samples = ",".join(f"\n{line}" for line in known_samples.of(table.samples.values(), _sample_line))
        text = f'{head}"device": {_dumps(dict(table.device))},\n"decisions": [{decisions}\n],\n'
        text += f'"samples": [{samples}\n]\n}}\n'
    except (ValueError, TypeError, RecursionError) as error:
        raise TableInvalidError(f"the table of {table.op} cannot be written as JSON", why=str(error)) from error
    text = sealed(text) if seal else text
    if len(text) > MAX_BYTES:
        raise TableInvalidError(f"the table of {table.op} would be larger than {MAX_BYTES >> 20} MiB")
    return text


_dumps: Callable[[Any], str] = json.JSONEncoder(allow_nan=False, check_circular=False).encode


def _decision_line(stored: Stored) -> Line:
    return (order(stored.problem), stored.protocol), _dumps(stored_json(stored))


def _sample_line(sample: Sample) -> Line:
    return (order(sample.problem), sample.protocol, _choice_order(sample.choice)), _dumps(sample_json(sample))


def stored_json(stored: Stored) -> dict[str, Any]:
    """A decision as JSON values, key fields first."""
    return {
        **stored.problem.to_json(),
        "protocol": stored.protocol,
        **_choice_json(stored.choice),
        "time_us": stored.time_us,
        "default": _choice_json(stored.default),
        "default_us": stored.default_us,
        "noise": stored.noise,
        "provenance": _provenance_json(stored.provenance),
    }


def sample_json(sample: Sample) -> dict[str, Any]:
    """A sample as JSON values, key fields first."""
    return {
        **sample.problem.to_json(),
        "protocol": sample.protocol,
        **_choice_json(sample.choice),
        "status": sample.status,
        "time_us": sample.time_us,
        "extra_bytes": sample.extra_bytes,
        "detail": _clean(sample.detail, MAX_DETAIL),
        "provenance": _provenance_json(sample.provenance),
    }


def _choice_json(choice: Choice) -> dict[str, Any]:
    return {"implementation": choice.implementation, "config": dict(choice.config)}


def _provenance_json(provenance: Provenance) -> dict[str, str]:
    texts = {name: _clean(getattr(provenance, name), MAX_TEXT) for name in _PROVENANCE}
    return {name: text for name, text in texts.items() if text or name in ("triton", "source")}


def _clean(text: str, limit: int) -> str:
    """Text from anywhere (an exception, a driver) as one printable line."""
    if len(text) <= limit and text.isprintable() and text == text.strip():
        return text
    line = "".join(c if c.isprintable() else "?" for c in " ".join(text[: 4 * limit].split()))
    return line[:limit].strip()


def _choice_order(choice: Choice) -> tuple[str, str]:
    return choice.implementation, _dumps(dict(choice.config))


# -- reading ---------------------------------------------------------------------------------------------------------


def parse(data: bytes | str, directory: Directory | None = None, op: str | None = None) -> Table:
    """The table of a document.

    An entry that does not validate is left out and named in ``Table.skipped``; of two entries of one key the later
    counts.

    Args:
        data: the document; bytes in UTF-8.
        directory: where the table was found, if it must name that place.
        op: the operation it must be of, if that is known.

    Raises:
        NewerSchemaError: a newer version of this package wrote it.
        TableInvalidError: it is no table, another device's or operation's, or changed since it was written.
        TableError: there is no memory to read it in.
    """
    with _few_collections(len(data)):
        return _parse(data, directory, op)


def _parse(data: bytes | str, directory: Directory | None, op: str | None) -> Table:
    document = _document(data)
    digest = checked(data, document)
    op_name = check_name(document.get("op"), "operation")
    place = document.get("directory")
    parts = place.split("/") if isinstance(place, str) else []
    if len(parts) != 3:
        raise TableInvalidError("the table names no vendor, arch and SKU", why=f"directory is {repr(place)[:80]}")
    vendor, arch, unit = (check_name(part, "part of a device's directory") for part in parts)
    if directory not in (None, (vendor, arch, unit)) or op not in (None, op_name):
        raise TableInvalidError(
            "the table belongs elsewhere", why=f"it is of {op_name} on {place}", fix="move it there, or delete it"
        )
    reader, skipped = _Reader(op_name), []
    decisions, samples = {}, {}
    for entry in _entries(document, "decisions"):
        try:
            stored = reader.stored(entry)
            decisions[stored.key] = stored
        except (TableInvalidError, AttributeError, TypeError) as error:
            skipped.append(f"decision: {_reason(error)}")
    for entry in _entries(document, "samples"):
        try:
            sample = reader.sample(entry)
            samples[sample.key] = sample
        except (TableInvalidError, AttributeError, TypeError) as error:
            skipped.append(f"sample: {_reason(error)}")
    return Table((vendor, arch, unit), op_name, _device(document), decisions, samples, tuple(skipped), digest)


def normal(entry: _E) -> _E:
    """An entry as it will be read back: texts cleaned, everything validated.

    Raises:
        TableInvalidError: no table can hold it.
    """
    reader = _Reader(entry.problem.op)
    try:
        if isinstance(entry, Stored):
            return reader.stored(json.loads(_dumps(stored_json(entry))))
        return reader.sample(json.loads(_dumps(sample_json(entry))))
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise TableInvalidError(
            f"no table can hold an entry of {entry.problem.op} with {entry.choice}", why=_reason(error)
        ) from error


@contextmanager
def _few_collections(size: int) -> Iterator[None]:
    # Everything a document allocates stays: looking for garbage in it is a third of the time of 50,000 entries.
    if paused := size > 1 << 20 and gc.isenabled():
        gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


def _document(data: bytes | str) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise TableInvalidError(f"the table is larger than {MAX_BYTES >> 20} MiB")
    try:
        document = json_text.loads(data)
    except (ValueError, RecursionError) as error:
        raise TableInvalidError("the table is no valid JSON", why=_reason(error)) from error
    except MemoryError as error:  # which says nothing of the table: it must not be set aside
        raise TableError(f"there is no memory to read {len(data):,} bytes in") from error
    if not isinstance(document, dict):
        raise TableInvalidError("the table is no JSON object")
    schema = document.get("schema")
    if type(schema) is int and schema > SCHEMA:
        raise NewerSchemaError(
            "a newer version of this package wrote the table",
            why=f"its schema is {schema if schema < 1 << 63 else 'huge'}, this version knows {SCHEMA}",
            fix="upgrade, or point LIGER_TUNE_CACHE_DIR elsewhere",
        )
    if type(schema) is not int or schema != SCHEMA:
        raise TableInvalidError("the table has no known schema", why=f"schema is {repr(schema)[:80]}")
    return document


def _reason(error: Exception) -> str:
    if isinstance(error, TableInvalidError):
        return f"{error.what}: {error.why}" if error.why else error.what
    return f"{type(error).__name__}: {str(error)[:200]}"


def _entries(document: Mapping[str, Any], name: str) -> list[Any]:
    entries = document.get(name)
    if not isinstance(entries, list) or len(entries) > MAX_ENTRIES:
        raise TableInvalidError(f"{name} of the table is no list of at most {MAX_ENTRIES:,} entries")
    return entries


def _device(document: Mapping[str, Any]) -> dict[str, Any]:
    device = document.get("device")
    try:
        if isinstance(device, dict) and len(_dumps(device)) <= 8192:
            return device
    except (ValueError, RecursionError):  # an infinity that was written as 1e999
        pass
    raise TableInvalidError("device of the table is no small JSON object")


class _Reader:
    """Validates entries. Fields, problems and choices repeat in a table, so each is validated once and shared."""

    __slots__ = ("choices", "fields_", "op", "problems", "provenances")

    def __init__(self, op: str) -> None:
        self.op = op
        self.fields_: dict[tuple[object, ...], Fields] = {}
        self.problems: dict[tuple[object, ...], Problem] = {}
        self.choices: dict[tuple[object, ...], Choice] = {}
        self.provenances: dict[tuple[object, ...], Provenance] = {}

    def stored(self, entry: dict[str, Any]) -> Stored:
        default = entry.get("default")
        if not isinstance(default, dict):
            raise TableInvalidError("default is no choice", why=repr(default)[:80])
        return Stored(
            self.problem(entry),
            self.choice(entry),
            _number(entry, "time_us"),
            self.choice(default),
            _number(entry, "default_us"),
            _number(entry, "noise"),
            _text(entry, "protocol"),
            self.provenance(entry.get("provenance")),
        )

    def sample(self, entry: dict[str, Any]) -> Sample:
        status, extra = entry.get("status"), entry.get("extra_bytes")
        if status not in STATUSES:
            raise TableInvalidError("status is none that is known", why=repr(status)[:80], candidates=STATUSES)
        if extra is not None and not (type(extra) is int and 0 <= extra < 1 << 63):
            raise TableInvalidError("extra_bytes is no size in bytes", why=repr(type(extra)))
        timed = status == OK or entry.get("time_us") is not None
        detail = entry.get("detail")
        if not isinstance(detail, str) or len(detail) > MAX_DETAIL or not detail.isprintable():
            raise TableInvalidError(f"detail is no line of at most {MAX_DETAIL} characters")
        return Sample(
            self.problem(entry),
            self.choice(entry),
            status,
            _number(entry, "time_us") if timed else None,
            extra,
            detail.strip(),
            _text(entry, "protocol"),
            self.provenance(entry.get("provenance")),
        )

    def problem(self, entry: dict[str, Any]) -> Problem:
        dims, dtypes, flags = self.fields(entry, "dims"), self.fields(entry, "dtypes"), self.fields(entry, "flags")
        # Fields are shared and live as long as this reader: their addresses stand for them.
        key = (entry.get("scheme"), entry.get("phase"), id(dims), id(dtypes), id(flags))
        found = self.problems.get(key)
        if found is None:
            # What Problem.from_json checks, without building every problem's fields anew: half of the time of a load.
            scheme, phase = entry.get("scheme"), entry.get("phase")
            if phase not in PHASES:
                raise TableInvalidError("phase is none that is known", why=repr(phase)[:80], candidates=PHASES)
            if scheme != "" or phase != SCHEME:
                check_name(scheme, "scheme")
            found = self.problems[key] = Problem(self.op, scheme or "", phase, dims, dtypes, flags)
        return found

    def choice(self, entry: dict[str, Any]) -> Choice:
        config = self.fields(entry, "config")
        key = (entry.get("implementation"), id(config))
        found = self.choices.get(key)
        if found is None:
            found = self.choices[key] = Choice(_text(entry, "implementation"), Config(config))
        return found

    def fields(self, entry: dict[str, Any], name: str) -> Fields:
        value = entry.get(name)
        if not isinstance(value, dict):
            raise TableInvalidError(f"{name} is no JSON object")
        # Types are in the key because 1, 1.0 and True are equal; an unhashable value raises TypeError.
        key = (name, *value.items(), *map(type, value.values()))
        found = self.fields_.get(key)
        if found is None:
            found = scalar_fields(value, name)
            if not all(map(_IN_BOUNDS.get(name, _in_bounds), found.values())):
                raise TableInvalidError(f"{name} has a value out of bounds", why=ascii(found.text)[:80])
            self.fields_[key] = found
        return found

    def provenance(self, value: object) -> Provenance:
        if not isinstance(value, dict):
            raise TableInvalidError("provenance is no JSON object")
        key = tuple(value.items())
        found = self.provenances.get(key)
        if found is None:
            # Stripped, as it would be written: an entry is the same however often it is read and written.
            optional = {name: _text(value, name, empty=True).strip() for name in _PROVENANCE if name in value}
            if not {"triton", "source"} <= optional.keys():
                raise TableInvalidError("provenance names no triton and source")
            found = self.provenances[key] = Provenance(**optional)
        return found


def _in_bounds(value: object) -> bool:
    if isinstance(value, str):
        # This also turns down lone surrogates, which JSON can spell and UTF-8 cannot.
        return value.isprintable()
    return math.isfinite(value) if isinstance(value, float) else not isinstance(value, int) or abs(value) < 1 << 63


_IN_BOUNDS: dict[str, Callable[[object], bool]] = {
    "dims": lambda value: type(value) is int and 0 < value < 1 << 63,
    "dtypes": lambda value: isinstance(value, str) and value.isprintable(),
}


def _text(entry: dict[str, Any], name: str, empty: bool = False) -> str:
    value = entry.get(name)
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable() or not (value or empty):
        raise TableInvalidError(f"{name} is no text of at most {MAX_TEXT} characters", why=ascii(value)[:80])
    return value


def _number(entry: dict[str, Any], name: str) -> float:
    value = entry.get(name)
    if type(value) not in (int, float) or not 0 <= value < 1e15:  # type: ignore[operator] # NaN fails it too
        raise TableInvalidError(f"{name} is no number from 0 on", why=repr(type(value)))
    return float(value)  # type: ignore[arg-type]
