"""Errors to exit codes: a user error ends as its text on stderr and a code, never as a traceback."""

from __future__ import annotations

import errno
import warnings
from typing import Any

import typer
from typer.core import TyperGroup

from liger_registry.errors import (
    CompileError,
    ExtraMissingError,
    InvalidInputError,
    MeasurementError,
    NoImplementationError,
    PlanError,
    PluginError,
    RegistryError,
    RegistryWarning,
    StrictMissError,
    TableError,
    TableInvalidError,
    TritonMissingError,
    TuningBusyError,
    VerificationError,
)

OK, FAILED, USAGE, TABLE, BUSY, MISSING = 0, 1, 2, 3, 4, 5
EPILOG = (
    "Exit codes: 0 done; 1 something failed or is left undone; 2 usage: an argument, name or setting that cannot be "
    "used; 3 a table or directory that cannot be read, written or trusted; 4 another process is tuning on the device; "
    "5 Triton, a plugin or an extra that is needed is missing; 130 interrupted."
)
_CODES: tuple[tuple[type[RegistryError], int], ...] = (
    (TableError, TABLE),
    (TableInvalidError, TABLE),
    (TuningBusyError, BUSY),
    (TritonMissingError, MISSING),
    (PluginError, MISSING),
    (ExtraMissingError, MISSING),
    (CompileError, FAILED),
    (MeasurementError, FAILED),
    (VerificationError, FAILED),
    (NoImplementationError, FAILED),
    (StrictMissError, FAILED),
    (PlanError, FAILED),
    (InvalidInputError, USAGE),
)


def exit_code(error: RegistryError) -> int:
    """The exit code that an error ends the command with; what the user named wrongly is ``USAGE``."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), USAGE)


class Verbs(TyperGroup):
    """The verbs in the order in which they were added, with the catalogue's errors as text."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401 - a context of whichever click typer brings
        """The verbs as they were added, not by the alphabet."""
        return list(self.commands)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
        """Run a verb; a ``RegistryError`` becomes its text and an exit code."""
        try:
            return super().invoke(ctx)
        except RegistryError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(exit_code(error)) from None
        except OSError as error:
            if error.errno in (None, errno.EPIPE):  # a reader that went away is click's to deal with
                raise
            name = str(error.filename or "")
            shown = name if len(name) <= 80 else f"{name[:77]}..."
            typer.echo(f"error: {error.strerror}: {shown}\n  fix: name a place that can be used", err=True)
            raise typer.Exit(TABLE) from None


def show_warnings_as_lines() -> None:
    """Let this package's warnings read as one line, without the source line they were raised from."""
    usual = warnings.formatwarning

    def format_warning(message: Any, category: type[Warning], *where: Any, **more: Any) -> str:  # noqa: ANN401
        if issubclass(category, RegistryWarning):
            return f"warning: {message}\n"
        return usual(message, category, *where, **more)

    warnings.formatwarning = format_warning
