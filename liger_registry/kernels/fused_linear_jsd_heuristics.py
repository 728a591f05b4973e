"""Slabs of ``fused_linear_jsd``: their sizes, what they cost in memory, and which are tried. Needs no torch.

Two slabs of logits are held at once, the student's and the teacher's. Bytes are counted by shape, beyond the outputs
and the gradients.
"""

from __future__ import annotations

from dataclasses import replace

from liger_registry.config import Config
from liger_registry.device import Device
from liger_registry.kernels.linear_heuristics import (
    ADDED_ROWS,
    MOST_ROUNDINGS,
    default_rows,
    pitch,
    size_of,
    stage_rows,
    wide_size,
)
from liger_registry.problem import Problem, budget_for

# Losses, labels and the rows that count, in bytes a row; copies in fp32 that a stage in PyTorch makes.
_VECTORS, _COPIES = 64, 9


def slab_bytes(problem: Problem, rows: int, accumulate: bool) -> int:
    """Bytes of an implementation over slabs of so many rows.

    Args:
        problem: with ``tokens``, ``hidden``, ``teacher_hidden`` and ``vocab``.
        rows: of a slab.
        accumulate: whether gradients are summed in a wider dtype than theirs.
    """
    tokens, hidden, vocab = int(problem.tokens), int(problem.hidden), int(problem.vocab)
    student, teacher = (size_of(problem.dtypes[n]) for n in ("student_input", "teacher_input"))
    wide = wide_size(problem.dtypes["student_input"])
    rows = min(rows, tokens)
    stage = _COPIES * min(rows, stage_rows(vocab, wide)) * vocab * wide
    found = rows * pitch(vocab) * (student + teacher) + stage + tokens * _VECTORS
    # Inputs that cannot be viewed as matrices, and the rows that count of a slab.
    found += (tokens + rows) * (hidden * student + int(problem.teacher_hidden) * teacher)
    if accumulate:
        found += (vocab + tokens) * hidden * wide + ADDED_ROWS * hidden * student
    return found


def default_budget(problem: Problem) -> int:
    """What the default slab takes, as a budget class, so that shapes nearby share a key."""
    held = problem.dtypes["student_input"] == "float16"
    cost = slab_bytes(problem, default_rows(int(problem.tokens)), held)
    return budget_for(cost)


def chunked_bytes(problem: Problem, config: Config) -> int:
    """Bytes of ``chunked``."""
    return slab_bytes(problem, int(config.slab_rows), config.sums == "float32")


def single_bytes(problem: Problem, config: Config) -> int:
    """Bytes of ``single``."""
    return slab_bytes(problem, int(problem.tokens), problem.dtypes["student_input"] == "float16")


def distinct(config: Config, problem: Problem, device: Device) -> bool:
    """Whether a slab is not all rows."""
    return int(config.slab_rows) < int(problem.tokens)


def few_roundings(config: Config, problem: Problem, device: Device) -> bool:
    """Whether the head's gradient is rounded no more often over the slabs than the call allows."""
    dtype = str(problem.dtypes["student_input"])
    if wide_size(dtype) == size_of(dtype):
        return bool(config.sums == "input")  # there is nothing wider
    if dtype == "float16" or problem.accumulate == "float32":
        return bool(config.sums == "float32")
    enough = int(config.slab_rows) * MOST_ROUNDINGS >= int(problem.tokens)
    return bool(config.sums == "float32") or problem.accumulate == "input" or enough


def heuristic_chunked(problem: Problem, device: Device) -> Config:
    """The default slab; the largest smaller one that fits the budget, with sums in fp32 where they are then needed."""
    budget, wanted = problem.flags.get("budget"), default_rows(int(problem.tokens))
    found = Config(slab_rows=128, sums="input")
    for rows in (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768):
        if rows > wanted or (rows > 128 and rows >= int(problem.tokens)):
            break
        config = Config(slab_rows=rows, sums="input")
        if not few_roundings(config, problem, device):
            config = config.having(sums="float32")
        if rows == 128 or not isinstance(budget, int) or chunked_bytes(problem, config) <= budget:
            found = config
    return found


def stage_problem(problem: Problem, rows: int) -> Problem:
    """The problem of ``logit_divergence`` on a slab of so many rows."""
    none = problem.dims.without(*problem.dims)
    student, teacher = (problem.dtypes[n] for n in ("student_input", "teacher_input"))
    gradient = bool(problem.flags.get("needs"))
    scale = "float64" if student == "float64" else "float32"
    rows = min(max(rows, 1), int(problem.tokens) or 1)
    return replace(
        problem,
        op="logit_divergence",
        scheme="default",
        phase="forward",
        dims=none.having(rows=1 << (rows - 1).bit_length(), vocab=problem.vocab),
        dtypes=none.having(student=student, teacher=teacher, scale=scale if student != "float16" else "none"),
        flags=none.having(divergence=problem.divergence, masked=problem.masked, gradient=gradient),
    )


def chunked_stages(problem: Problem, config: Config) -> dict[str, Problem]:
    """The stage of ``chunked``."""
    return {"divergence": stage_problem(problem, int(config.slab_rows))}


def single_stages(problem: Problem, config: Config) -> dict[str, Problem]:
    """The stage of ``single``."""
    return {"divergence": stage_problem(problem, int(problem.tokens))}
