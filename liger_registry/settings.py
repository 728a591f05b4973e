"""What the environment says, read once and validated.

Nothing on the path of a call reads the environment: the public registry holds one ``Settings``.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from liger_registry.errors import SettingError, TableWarning

MODES = ("lookup", "tune", "strict", "off")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_LARGEST = 1 << 63


@dataclass(frozen=True, slots=True)
class Settings:
    """The environment's choices.

    Attributes:
        mode: ``LIGER_TUNE_MODE``: lookup, tune (on a miss), strict (a miss raises) or off (no table is read).
        cache_dir: ``LIGER_TUNE_CACHE_DIR``, else the platform's user cache directory.
        table_dirs: ``LIGER_TUNE_TABLES``, read-only directories between the user cache and the shipped tables.
        plugins: ``LIGER_PLUGINS``, the distributions whose plugins may load; None allows all, empty none.
        memory_budget: ``LIGER_MEMORY_BUDGET`` in bytes; None leaves it to each operation.
        check: ``LIGER_CHECK``: calls hold their values, such as targets, against the contract, and wait for the device.
        interpret: ``LIGER_INTERPRET``: CPU tensors run Triton kernels through Triton's interpreter.
        pins: ``LIGER_PIN``, ``op/phase=implementation`` pairs; the phase may be left out.
    """

    mode: str = "lookup"
    cache_dir: Path = field(default_factory=lambda: _user_cache_dir())
    table_dirs: tuple[Path, ...] = ()
    plugins: frozenset[str] | None = None
    memory_budget: int | None = None
    interpret: bool = False
    check: bool = False
    pins: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """The settings that environment variables name; a ``TableWarning`` for each directory that is not there.

        Raises:
            SettingError: a value cannot be understood.
        """
        mode = environ.get("LIGER_TUNE_MODE", "lookup") or "lookup"
        if mode not in MODES:
            raise SettingError(
                f"LIGER_TUNE_MODE={_short(mode)!r} is no mode",
                candidates=MODES,
                fix="unset it, or set one of the candidates",
            )
        cache = environ.get("LIGER_TUNE_CACHE_DIR", "")
        tables = environ.get("LIGER_TUNE_TABLES", "")
        plugins = environ.get("LIGER_PLUGINS")
        budget = environ.get("LIGER_MEMORY_BUDGET", "")
        table_dirs = tuple(_path(part) for part in tables.split(os.pathsep) if part)
        for path in table_dirs:
            if not os.path.isdir(path):
                warnings.warn(f"LIGER_TUNE_TABLES names {path}, which is no directory", TableWarning, stacklevel=2)
        return cls(
            mode=mode,
            cache_dir=_path(cache) if cache else _user_cache_dir(),
            table_dirs=table_dirs,
            plugins=None if plugins is None else frozenset(p.strip() for p in plugins.split(",") if p.strip()),
            memory_budget=parse_bytes(budget) if budget else None,
            interpret=_flag(environ, "LIGER_INTERPRET"),
            check=_flag(environ, "LIGER_CHECK"),
            pins=parse_pins(environ.get("LIGER_PIN", "")),
        )


def parse_bytes(text: str) -> int:
    """A size in bytes: ``1610612736``, ``1.5GiB``, ``512M`` (powers of 1024).

    Raises:
        SettingError: not a size.
    """
    # No longer than any size there is: Python refuses to read integers of thousands of digits.
    match = re.fullmatch(r"\s*([0-9]{1,19})(?:\.([0-9]{1,19}))?\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    size = _LARGEST
    if match is not None:
        unit, part = _UNITS[match[3].lower()], match[2] or "0"
        size = int(match[1]) * unit + int(part) * unit // 10 ** len(part)
    if size >= _LARGEST:
        raise SettingError(
            f"LIGER_MEMORY_BUDGET={_short(text)!r} is no size in bytes",
            candidates=["1610612736", "1.5GiB", "512M"],
            fix="unset it, or write a size as the candidates are",
        )
    return size


def parse_pins(text: str) -> tuple[tuple[str, str], ...]:
    """The pins that ``op/phase=implementation`` pairs, separated by semicolons, name.

    Raises:
        SettingError: a pair without an equals sign or with an empty side.
    """
    pins = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        target, equals, implementation = (piece.strip() for piece in part.partition("="))
        op, slash, phase = target.partition("/")
        if not (op and equals and implementation) or (slash and phase not in ("forward", "backward")):
            raise SettingError(
                f"LIGER_PIN has a part {_short(part)!r} that is no pin",
                candidates=["rms_norm=eager", "rms_norm/backward=persistent"],
                fix="separate pins by semicolons",
            )
        pins.append((target, implementation))
    return tuple(pins)


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise SettingError(
            f"{_short(text)!r} is no directory",
            why=str(error),
            fix="write LIGER_TUNE_CACHE_DIR and LIGER_TUNE_TABLES in full",
        ) from None


def _flag(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise SettingError(
        f"{name}={_short(value)!r} is neither on nor off", candidates=["1", "0"], fix="unset it, or set a candidate"
    )


def _user_cache_dir() -> Path:
    import platformdirs  # 6 ms, wanted only where no directory is given

    return Path(platformdirs.user_cache_dir("liger-registry", appauthor=False))
