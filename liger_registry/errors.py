"""The catalogue of errors: each says what happened, why, which candidates there are and the way out.

Every class is also the builtin exception a caller would catch without knowing this package. All of them pickle, because
they cross process borders: a worker that tunes on its own sends them to its parent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class RegistryError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        what: one sentence that names the thing at fault.
        why: the cause, where it is not obvious from ``what``.
        candidates: the values that would have been right.
        fix: the command or the change that gets the caller out.
    """

    def __init__(self, what: str, *, why: str = "", candidates: Iterable[object] = (), fix: str = "") -> None:
        self.what = what
        self.why = why
        self.candidates = tuple(str(candidate) for candidate in candidates)
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.candidates:
            lines.append(f"  candidates: {', '.join(self.candidates)}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.why, self.candidates, self.fix)


def _rebuild(kind: type[RegistryError], what: str, why: str, candidates: tuple[str, ...], fix: str) -> RegistryError:
    return kind(what, why=why, candidates=candidates, fix=fix)


class UnknownOpError(RegistryError, LookupError):
    """No operation of that name is registered."""


class UnknownImplementationError(RegistryError, LookupError):
    """The operation has no implementation of that name."""


class UnknownDeviceError(RegistryError, ValueError):
    """A device name that can neither be looked up nor detected."""


class UnsupportedDtypeError(RegistryError, TypeError):
    """A dtype the operation is not defined for."""


class UnsupportedOptionError(RegistryError, ValueError):
    """An option the operation does not have, or a value the option does not take."""


class InvalidInputError(RegistryError, ValueError):
    """Tensors whose shapes contradict the operation's contract."""


class UnsupportedShardingError(RegistryError, NotImplementedError):
    """An operation that cannot take tensors that are spread over ranks."""


class DeviceMismatchError(RegistryError, ValueError):
    """Tensors of one call that lie on different devices."""


class InvalidSpaceError(RegistryError, ValueError):
    """A config space that cannot be: an empty parameter, a value of a kind no table can hold."""


class ConfigOutsideSpaceError(RegistryError, ValueError):
    """A config that the implementation's declared space does not contain."""


class RegistrationError(RegistryError, ValueError):
    """An operation or implementation that cannot be registered as given."""


class RegistrationClashError(RegistrationError):
    """Two distributions registered the same (op, scheme, phase, vendor, name)."""


class PluginError(RegistryError, RuntimeError):
    """A plugin that failed to load, asked for by name."""


class NoImplementationError(RegistryError, RuntimeError):
    """Every candidate was rejected; ``why`` holds the trace."""


class StrictMissError(RegistryError, LookupError):
    """``LIGER_TUNE_MODE=strict`` and no table answers exactly."""


class TableError(RegistryError, OSError):
    """A table or cache directory that cannot be read or written."""


class TableInvalidError(RegistryError, ValueError):
    """A table whose content does not validate."""


class PlanError(RegistryError, ValueError):
    """A plan that does not validate on this rank, or ranks that disagree."""


class TuningBusyError(RegistryError, RuntimeError):
    """Another process is tuning on the same device."""


class MeasurementError(RegistryError, RuntimeError):
    """A candidate that could not be timed."""


class VerificationError(RegistryError, AssertionError):
    """A candidate whose results are wrong."""


class CompileError(RegistryError, RuntimeError):
    """A config that does not compile, or does not fit the device it was compiled for."""


class ModelConfigError(RegistryError, ValueError):
    """A model's ``config.json`` that cannot be read or says too little."""


class SettingError(RegistryError, ValueError):
    """An environment variable whose value cannot be understood."""


class TritonMissingError(RegistryError, ImportError):
    """Something that needs Triton was asked for where Triton is not installed."""


class ExtraMissingError(RegistryError, ImportError):
    """Something that needs an optional extra of this distribution was asked for where it is not installed."""


class UnsupportedTransformError(RegistryError, RuntimeError):
    """Double backward, ``vmap`` or forward-mode differentiation through a fused operation."""


class AdapterError(RegistryError, ValueError):
    """A model that does not take what was asked for."""


class LateReadError(RegistryError, RuntimeError):
    """Logits that were left out, asked for after the weights they would be computed from have changed."""


class DropInError(RegistryError, RuntimeError):
    """A command that cannot be run with this package's answers to ``import liger_kernel``."""


class NotOfferedError(RegistryError, AttributeError):
    """A name of liger-kernel that this package does not offer, accessed in ``liger_kernel``."""


class NotOfferedImportError(RegistryError, ImportError):
    """The same, imported."""


class RegistryWarning(UserWarning):
    """Base of every warning this package gives."""


class PluginWarning(RegistryWarning):
    """A plugin was left out; given once a plugin."""


class TableWarning(RegistryWarning):
    """A table or the cache directory could not be used; given once a path."""


class TuningWarning(RegistryWarning):
    """A measurement was noisy or incomplete."""
