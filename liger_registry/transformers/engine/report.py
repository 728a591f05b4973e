"""What an application did to a model, row by row, and how often the real logits had to be computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from liger_registry.errors import AdapterError


@dataclass(frozen=True, slots=True)
class Row:
    """One module and one operation.

    Attributes:
        op: the operation, as ``registry.get`` knows it.
        module: the module's path in the model, "" for the model itself.
        applied: whether the model now calls the operation there.
        reason: why not; where it is applied, how it was recognised.
        kind: the class of the module.
    """

    op: str
    module: str
    applied: bool
    reason: str
    kind: str = ""


class Report:
    """The rows of one application; iterates over them, and prints as a table with like modules in one line.

    Attributes:
        model: the class of the model.
        rows: one for each module and operation that was looked at.
        materialised: for each place of the caller's code ("file.py:12") how often it made the logits be computed that a
            fused loss had left out.
    """

    def __init__(self, model: str, rows: Iterable[Row] = ()) -> None:
        self.model = model
        self.rows: list[Row] = list(rows)
        self.materialised: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def applied(self, op: str | None = None) -> list[Row]:
        """The rows that were applied, of one operation or of all."""
        return [row for row in self.rows if row.applied and op in (None, row.op)]

    def skipped(self, op: str | None = None) -> list[Row]:
        """The rows that were not applied, of one operation or of all."""
        return [row for row in self.rows if not row.applied and op in (None, row.op)]

    def demand(self, ops: Sequence[str]) -> None:
        """Raise unless each of these operations was applied somewhere and left out nowhere.

        Raises:
            AdapterError: names each that was not, and why.
        """
        missing = []
        for op in ops:
            skipped = self.skipped(op)
            if skipped:
                missing += [f"{op} at {row.module or 'the model'}: {row.reason}" for row in skipped]
            elif not self.applied(op):
                missing.append(f"{op}: nothing in the model computes it")
        if missing:
            raise AdapterError(
                f"not everything that was asked for could be applied to {self.model}",
                why="; ".join(missing[:8]) + (f"; and {len(missing) - 8} more" if len(missing) > 8 else ""),
                fix="leave strict=True out, or pass False for these operations",
            )

    def __str__(self) -> str:
        groups: dict[tuple[str, bool, str, str], list[str]] = {}
        for row in self.rows:
            groups.setdefault((row.op, row.applied, row.kind, row.reason), []).append(row.module)
        lines = [("op", "applied", "modules", "class", "reason")]
        for (op, applied, kind, reason), modules in sorted(
            groups.items(), key=lambda item: (item[0][0], not item[0][1])
        ):
            first = modules[0] or "(the model)"
            where = first if len(modules) == 1 else f"{first} and {len(modules) - 1} more"
            lines.append((op, "yes" if applied else "no", where, kind, reason))
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        text = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]).rstrip()
            for line in lines
        ]
        text += [f"logits computed {count} x for {place}" for place, count in self.materialised.most_common()]
        return "\n".join([self.model, *text])

    def __repr__(self) -> str:
        applied = Counter(row.op for row in self.rows if row.applied)
        told = ", ".join(f"{op} x {count}" for op, count in sorted(applied.items())) or "nothing applied"
        return f"<Report of {self.model}: {told}; {len(self.skipped())} skipped>"
