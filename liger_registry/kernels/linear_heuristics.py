"""Slabs of losses over a linear head: their sizes, what they cost in memory, and which are tried. Needs no torch.

``tokens`` rows of logits over ``vocab`` columns are never held at once, only a slab: some rows of all columns, or some
columns of all rows. Bytes are counted by shape, beyond the outputs and the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from liger_registry.problem import bucket, budget_for

if TYPE_CHECKING:
    from liger_registry.config import Config
    from liger_registry.device import Device
    from liger_registry.problem import Problem

#: Rows of the smallest slab that keeps a GPU's matrix products at full rate: 2,048 x 4,096 are two waves of tiles of
#: 128 x 256 on 132 units.
LEAST_ROWS = 2048
#: A gradient that is summed over slabs in 16 bits is rounded once a slab: its error grows with the square root of the
#: sum of the parts done so far. Four slabs cost it 1.6 times eager's error (H200, N 8192, H 512, V 32000) and up to 1.9
#: times (N 8192, V 128256); eight 1.75 to 2 times. Summed in fp32 it has eager's.
MOST_ROUNDINGS = 4
#: Bytes of a slab that are worth fewer roundings: 2,048 rows of 128,256 columns in 16 bits take 501 MiB. Of 32,000
#: columns they hold 8,192 rows.
USUAL_BYTES = 512 << 20
SLAB_ROWS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
VOCAB_SLABS = (1, 2, 4, 8, 16, 32, 64)
#: Columns of a slab of the vocabulary from which more do not make a product faster.
FULL_COLUMNS = 8192
#: Products that are added in another dtype than theirs go through a buffer of as many rows where the device has no
#: product that does it by itself.
ADDED_ROWS = 4096
#: Rows and columns of the fp32 blocks of which products are made on a CPU without any in 16 bits.
BLOCK = 2048
#: Bytes of the fp32 copies that a stage in PyTorch operations makes at once on a CPU, and how many copies of a slab
#: these are at most, with a cap, an entropy and a prediction.
STAGE_BYTES, STAGE_COPIES = 64 << 20, 6
#: Elements of a gradient that are scaled at once.
SCALED = 1 << 23
_SIZE = {"float64": 8, "float32": 4}
# Per-token vectors of statistics, their gradients and targets that are alive at once, in bytes a row; and what a stage
# that splits columns holds of a row, 64 parts of up to six statistics.
_VECTORS, _STAGE_ROW = 256, 2048


def size_of(dtype: object) -> int:
    """Bytes of one element."""
    return _SIZE.get(str(dtype), 2)


def wide_size(dtype: object) -> int:
    """Bytes of one element of the dtype of statistics."""
    return max(size_of(dtype), 4)


def scale_bytes(problem: Problem, config: Config) -> int:
    """Bytes of scaling the gradients that forward left: two wide copies of the elements that are scaled at once."""
    largest = max(int(problem.tokens), int(problem.vocab)) * int(problem.hidden)
    dtype = problem.dtypes.get("hidden") or problem.dtypes["student_input"]
    return 2 * wide_size(dtype) * min(SCALED, largest)


def pitch(columns: int) -> int:
    """Elements from one row of a slab to the next on a GPU, where odd ones would leave the products to slow kernels."""
    return -(-columns // 64) * 64


def default_rows(tokens: int) -> int:
    """Rows of a slab: no fewer than keep the products at full rate, and no more than four slabs."""
    return max(LEAST_ROWS, -(-tokens // MOST_ROUNDINGS))


def usual_rows(problem: Problem) -> int:
    """Rows of the slab of a loss whose head's gradient is summed over slabs: more than the default of few columns."""
    row = pitch(int(problem.vocab)) * size_of(problem.dtypes["hidden"])
    return max(
        default_rows(int(problem.tokens)), *(n for n in SLAB_ROWS if n == SLAB_ROWS[0] or n * row <= USUAL_BYTES)
    )


def slab_columns(vocab: int, slabs: int) -> int:
    """Columns of each of so many slabs of a vocabulary, in steps that keep the products' operands aligned."""
    columns = -(-vocab // slabs)
    step = 128 if columns >= 1024 else 8 if columns >= 64 else 1
    return min(-(-columns // step) * step, vocab)


def stage_rows(vocab: int, element: int) -> int:
    """Rows that a stage in PyTorch operations gets at once on a CPU."""
    return max(1, STAGE_BYTES // (STAGE_COPIES * vocab * element))


def _stage_bytes(rows: int, columns: int, hidden: int, element: int) -> int:
    """Bytes of a stage, or of the three blocks of a product: never both at once."""
    stage = STAGE_COPIES * min(rows, stage_rows(columns, element)) * columns
    sides = [min(side, BLOCK) for side in (rows, columns, hidden)]
    blocks = sides[0] * sides[1] + sides[1] * sides[2] + sides[2] * sides[0]
    return max(stage, blocks) * element + rows * _STAGE_ROW


def _common(problem: Problem, dtype: object) -> int:
    tokens, hidden, vocab = int(problem.tokens), int(problem.hidden), int(problem.vocab)
    # Per-token vectors; class weights and a bias' gradient in fp32; hidden states that cannot be viewed as a matrix.
    return tokens * _VECTORS + 3 * vocab * wide_size(dtype) + tokens * hidden * size_of(dtype)


def row_slab_bytes(problem: Problem, rows: int, accumulate: bool = False) -> int:
    """Bytes of implementations over slabs of rows.

    Args:
        problem: with ``tokens``, ``hidden`` and ``vocab``.
        rows: of a slab.
        accumulate: whether the head's gradient is summed in fp32 apart.
    """
    dtype = problem.dtypes["hidden"]
    hidden, vocab, element, wide = int(problem.hidden), int(problem.vocab), size_of(dtype), wide_size(dtype)
    rows = min(rows, int(problem.tokens))
    found = rows * pitch(vocab) * element + 2 * rows * hidden * element + _stage_bytes(rows, vocab, hidden, wide)
    if accumulate:
        found += vocab * hidden * wide + ADDED_ROWS * hidden * element
    return found + _common(problem, dtype)


def vocab_slab_bytes(problem: Problem, slabs: int) -> int:
    """Bytes of implementations over slabs of the vocabulary; arguments as of ``row_slab_bytes``."""
    dtype = problem.dtypes["hidden"]
    tokens, hidden, element, wide = int(problem.tokens), int(problem.hidden), size_of(dtype), wide_size(dtype)
    columns = slab_columns(int(problem.vocab), slabs)
    # The hidden states' gradient in fp32, a part of it in its own dtype, and the rows that count of it and of them.
    sums = tokens * hidden * wide + min(ADDED_ROWS, tokens) * hidden * element + 2 * tokens * hidden * element
    return (
        tokens * pitch(columns) * element + sums + _stage_bytes(tokens, columns, hidden, wide) + _common(problem, dtype)
    )


def row_budget(problem: Problem) -> int:
    """The default budget where slabs of rows are usual: what the default slab takes, or one of the vocabulary.

    It is rounded up to a budget class, so that shapes nearby share a key.
    """
    return budget_for(max(row_slab_bytes(problem, usual_rows(problem)), _vocab_default(problem)))


def vocab_budget(problem: Problem) -> int:
    """The default budget where slabs of the vocabulary are: what one of 8,192 columns takes, as a budget class."""
    return budget_for(_vocab_default(problem))


def why_not_untuned(problem: Problem, device: Device) -> str | None:
    """Why one slab of all rows is not taken unless it was measured: it needs more than slabs of rows do.

    The default budget may be that of slabs of the vocabulary, which of small ones is larger. A larger budget that the
    caller gave is there to be used.
    """
    budget = problem.flags.get("budget")
    if not isinstance(budget, int) or budget > row_budget(problem):
        return None
    cost = row_slab_bytes(problem, int(problem.tokens))
    most = max(USUAL_BYTES, row_slab_bytes(problem, usual_rows(problem)))
    if cost <= most or cost > budget:  # what is over the budget is no choice at all
        return None
    return f"it needs {cost:,} bytes, and is to be measured before it may take more than the {most:,} of usual slabs"


def _vocab_default(problem: Problem) -> int:
    wanted = -(-int(problem.vocab) // FULL_COLUMNS)
    return vocab_slab_bytes(problem, max((n for n in VOCAB_SLABS if n <= wanted), default=1))


def distinct_rows(config: Config, problem: Problem, device: Device) -> bool:
    """Whether a slab of rows is not all of them."""
    return int(config.slab_rows) < int(problem.tokens)


def distinct_columns(config: Config, problem: Problem, device: Device) -> bool:
    """Whether so many slabs of the vocabulary are other ones than fewer would be."""
    slabs = int(config.slabs)
    return slabs == 1 or slab_columns(int(problem.vocab), slabs) < slab_columns(int(problem.vocab), slabs // 2)


def few_roundings(config: Config, problem: Problem, device: Device) -> bool:
    """Whether a gradient summed over the slabs is rounded no more often than the call allows."""
    if wide_size(problem.dtypes["hidden"]) == size_of(problem.dtypes["hidden"]):
        return bool(config.sums == "input")  # there is nothing wider
    if problem.dtypes["hidden"] == "float16" or problem.accumulate == "float32":
        return bool(config.sums == "float32")
    wide = config.sums == "float32"
    return wide or problem.accumulate == "input" or int(config.slab_rows) * MOST_ROUNDINGS >= int(problem.tokens)


def within(problem: Problem, cost: int) -> bool:
    """Whether so many bytes are within the problem's budget."""
    budget = problem.flags.get("budget")
    return not isinstance(budget, int) or cost <= budget


def stage_flags(problem: Problem, **flags: bool) -> Mapping[str, bool]:
    """The flags of a stage's problem: those given, off where they are not."""
    names = ("weighted", "entropy", "predict", "in_place")
    return {"capped": bool(problem.softcapped), **dict.fromkeys(names, False), **flags}


def stage_problem(problem: Problem, phase: str, rows: int, columns: int, **flags: bool) -> Problem:
    """The problem of ``logit_statistics`` on a slab of a problem.

    Args:
        problem: the composite's.
        phase: of the stage.
        rows: of the slab.
        columns: of the slab.
        flags: those that are on.
    """
    from dataclasses import replace

    none = problem.dims.without(*problem.dims)
    class_weight = "none"
    if flags.get("weighted"):
        class_weight = wide_name(problem) if problem.dtypes.get("class_weight", "none") != "none" else "none"
    told = {"needs": "logits"} if phase == "backward" else {}
    return replace(
        problem,
        op="logit_statistics",
        scheme="default",
        phase=phase,
        dims=none.having(rows=bucket(max(rows, 1)), vocab=columns),
        dtypes=none.having(logits=problem.dtypes["hidden"], class_weight=class_weight),
        flags=none.having(**stage_flags(problem, **flags), **told),
    )


def wide_name(problem: Problem) -> str:
    """The dtype of statistics by name."""
    return "float64" if problem.dtypes["hidden"] == "float64" else "float32"
