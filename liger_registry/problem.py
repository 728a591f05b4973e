"""What a choice depends on: the problem key.

Row and token counts enter as log2 buckets named by their upper end, so that a new sequence length is never a new
problem; widths, vocabularies and head sizes enter exactly, because they are in the code that gets compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from liger_registry.config import Fields, Scalar, is_scalar
from liger_registry.errors import TableInvalidError

FORWARD, BACKWARD, SCHEME = "forward", "backward", "scheme"
PHASES = (FORWARD, BACKWARD, SCHEME)


def bucket(count: int) -> int:
    """The upper end of the log2 bucket that ``count`` falls into: 16384 -> 16384, 16385 -> 32768, 0 -> 1."""
    return 1 << max(count - 1, 0).bit_length()


def budget_class(budget: int) -> int:
    """What a key knows of a memory budget: quarters of powers of two, rounded down: 300 -> 256, 330 -> 320, 700 -> 640.

    Powers of two alone would halve the slab of whoever asks for a byte less than the next one.
    """
    step = 1 << max(budget.bit_length() - 3, 0)
    return max(budget // step * step, 1)


def budget_for(cost: int) -> int:
    """The smallest budget class that holds so many bytes: 256 -> 256, 257 -> 320, 700 -> 768.

    Rounded up to a power of two a default budget would leave nearly as much unused as it grants.
    """
    step = 1 << max((cost - 1).bit_length() - 3, 0)
    return max(-(-cost // step) * step, 1)


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: the hard part of a decision's key.

    Attributes:
        op: the operation's name.
        scheme: what passes from forward to backward; empty in phase ``scheme``, which chooses it.
        phase: ``forward``, ``backward`` or ``scheme``.
        dims: sizes by name; buckets at their upper end.
        dtypes: dtype names by tensor (``bfloat16``); ``none`` for an optional tensor that is absent.
        flags: options that change the code, the gradients that are needed, the memory-budget class.
    """

    op: str
    scheme: str
    phase: str
    dims: Fields
    dtypes: Fields
    flags: Fields

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - an int for a dim, a scalar for a flag
        if name.startswith("_"):
            raise AttributeError(name)
        for fields in (self.dims, self.flags):
            if name in fields:
                return fields[name]
        names = ", ".join([*self.dims, *self.flags])
        raise AttributeError(f"problem of {self.op} has no field {name!r}; there are: {names}")

    @property
    def text(self) -> str:
        """One canonical line, ``rms_norm/default/forward hidden=4096,rows=16384 weight=bfloat16,x=bfloat16 ...``."""
        where = f"{self.op}/{self.scheme or '*'}/{self.phase}"
        return " ".join(part for part in (where, self.dims.text, self.dtypes.text, self.flags.text) if part)

    def having(self, **dims: int) -> Problem:
        """The same problem with other sizes."""
        return replace(self, dims=self.dims.having(**dims))

    def to_json(self) -> dict[str, Any]:
        """The key as plain JSON objects, without the op, which names the file."""
        return {
            "scheme": self.scheme,
            "phase": self.phase,
            "dims": dict(self.dims),
            "dtypes": dict(self.dtypes),
            "flags": dict(self.flags),
        }

    @classmethod
    def from_json(cls, op: str, entry: Mapping[str, Any]) -> Problem:
        """The problem that a table entry names.

        Raises:
            TableInvalidError: a field is missing or of the wrong kind.
        """
        if not isinstance(entry, Mapping):
            raise TableInvalidError(f"entry of {op} is no JSON object")
        scheme, phase = entry.get("scheme"), entry.get("phase")
        if not isinstance(scheme, str) or phase not in PHASES:
            why = f"got {repr(scheme)[:80]} and {repr(phase)[:80]}"
            raise TableInvalidError(f"entry of {op} has no valid scheme and phase", why=why)
        dims = scalar_fields(entry.get("dims"), "dims")
        if not all(type(v) is int and 0 < v < 2**63 for v in dims.values()):
            raise TableInvalidError(f"entry of {op} has dims that are no positive integers", why=json.dumps(dict(dims)))
        dtypes = scalar_fields(entry.get("dtypes"), "dtypes")
        if not all(isinstance(v, str) for v in dtypes.values()):
            raise TableInvalidError(f"entry of {op} has dtypes that are no names", why=json.dumps(dict(dtypes)))
        return cls(op, scheme, phase, dims, dtypes, scalar_fields(entry.get("flags"), "flags"))


def scalar_fields(value: object, name: str) -> Fields:
    """``value`` as fields, if it is a JSON object of scalars with short names.

    Raises:
        TableInvalidError: it is not.
    """
    if not isinstance(value, Mapping) or len(value) > 64:
        raise TableInvalidError(f"{name} is no JSON object of at most 64 fields")
    fields: dict[str, Scalar] = {}
    for key, item in value.items():
        if not isinstance(key, str) or not key.isidentifier() or len(key) > 64:
            raise TableInvalidError(f"{name} has a field whose name is no identifier", why=repr(key)[:80])
        if not is_scalar(item) or (isinstance(item, str) and len(item) > 256):
            raise TableInvalidError(f"{name}.{key} is no JSON scalar", why=repr(item)[:80])
        fields[key] = item
    return Fields(fields)
