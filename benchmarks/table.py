"""The kernels that have targets: every operation, size and phase, and what is asked of it.

Targets were set from what a first, simple kernel and the best peer reached on one NVIDIA H200; they are ratios against
the bound and the peers of the same run. Rows without a target show where a model's own sizes stand (``models.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.cases import BACKWARD, BOTH, ERROR, FORWARD, Case
from benchmarks.targets import Target, extra, extra_of, own, share, times

#: The sizes of the error of a head's weight gradient against float64.
ERROR_SIZES = (8192, 512, 32000)
#: Rows of the slab that a small memory budget allows.
SMALL_SLAB = 512
#: Bytes that backward may hold beyond its gradients where it must not copy one, in GiB.
NO_COPY = 1e-3


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table.

    Attributes:
        case: the operation and its size.
        phase: forward, backward, both (forward and backward as one), or error (against float64).
        targets: what is asked of it.
        group: the models whose sizes these are; empty for the rows that have targets.
    """

    case: Case
    phase: str
    targets: tuple[Target, ...] = ()
    group: str = ""

    @property
    def key(self) -> str:
        """What the row is called in results and in targets of other rows."""
        return f"{self.case.op} {self.phase} {self.case.shape}" + (
            f" ({self.case.variant})" if self.case.variant else ""
        )


def _of(op: str, sizes: tuple[int, ...], phase: str, *targets: Target, **options: object) -> Row:
    return Row(replace(Case(op, sizes), **options), phase, targets)  # type: ignore[arg-type]


def _norms() -> Iterator[Row]:
    yield _of("rms_norm", (16384, 4096), FORWARD, share(0.95))
    for sizes, limit in (
        ((16384, 4096), 0.93),
        ((32768, 2048), 0.93),
        ((8192, 8192), 0.92),
        ((8192, 16384), 0.80),
        ((524288, 128), 0.88),
    ):
        yield _of("rms_norm", sizes, BACKWARD, share(limit))
    yield _of("fused_add_rms_norm", (16384, 4096), FORWARD, share(0.95))
    yield _of("fused_add_rms_norm", (16384, 4096), BACKWARD, share(0.90))
    yield _of("fused_add_rms_norm", (524288, 128), BACKWARD, share(0.80))
    yield _of("layer_norm", (16384, 4096), FORWARD, share(0.95))
    yield _of("layer_norm", (8192, 16384), FORWARD, share(0.95))
    yield _of("layer_norm", (16384, 4096), BACKWARD, share(0.90))
    yield _of("layer_norm", (524288, 128), BACKWARD, share(0.80))


def _elementwise() -> Iterator[Row]:
    for op, back in (("swiglu", 0.96), ("geglu", 1.0)):
        yield _of(op, (8192, 14336), FORWARD, share(0.97))
        yield _of(op, (8192, 14336), BACKWARD, share(back))
    heads = (4, 4096, 32, 8, 128)
    yield _of("rope", heads, FORWARD, share(0.95))
    yield _of("rope", heads, BACKWARD, share(0.93))
    yield _of("rope", heads, BACKWARD, Target("ours.backward_extra_gib", NO_COPY), turned=True)


def _losses() -> Iterator[Row]:
    yield _of("cross_entropy", (8192, 128256), BOTH, share(0.93))
    yield _of("cross_entropy", (8192, 128256), BOTH, share(1.02), in_place=True)
    yield _of("cross_entropy", (8192, 32000), BOTH, share(0.90))
    op = "fused_linear_cross_entropy"
    full = _of(op, (8192, 4096, 128256), BOTH, times("liger", 0.77), times("compile", 1.04), extra(1.6))
    yield full
    yield _of(op, full.case.sizes, BOTH, extra(1.17), times("liger", 0.82), slab_rows=SMALL_SLAB)
    yield _of(op, (16384, 4096, 128256), BOTH, times("liger", 0.86), times("compile", 1.01), extra(2.1))
    yield _of(op, (8192, 2048, 151936), BOTH, times("liger", 0.45), times("compile", 1.02), extra(1.25))
    yield _of(op, full.case.sizes, BOTH, own(full.key, 0.58), ignored=0.5)
    yield _of("linear_logp", full.case.sizes, BOTH, times("trl", 0.88), extra(1.7))
    for sizes in ((16384, 4096, 128256), (8192, 2048, 151936), (16384, 1024, 151936)):
        yield _of("linear_logp", sizes, BOTH, times("trl", 0.92), extra_of("trl", 0.6))
    for rows, limit in ((0, 1.5), (SMALL_SLAB, 4.0)):
        worst = Target("ours.weight_error", limit, "eager.weight_error")
        yield _of(op, ERROR_SIZES, ERROR, worst, slab_rows=rows)


#: All rows that have targets.
TABLE: tuple[Row, ...] = (*_norms(), *_elementwise(), *_losses())


def chosen(rows: Sequence[Row], only: Sequence[str]) -> list[Row]:
    """The rows of some operations, or of names that contain one of the words; all if there are none.

    Raises:
        ValueError: a word that chooses nothing.
    """
    for word in only:
        if not any(word in row.key for row in rows):
            raise ValueError(
                f"no row is called {word!r}; operations are {', '.join(sorted({r.case.op for r in rows}))}"
            )
    return [row for row in rows if not only or any(_matches(word, row) for word in only)]


def _matches(word: str, row: Row) -> bool:
    # The name of an operation chooses that one alone: cross_entropy is part of fused_linear_cross_entropy.
    return word == row.case.op or (word not in {r.case.op for r in TABLE} and word in row.key)
