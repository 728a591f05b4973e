"""``rms_norm`` in PyTorch: what each implementation can do, and which configs it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_registry import Capability, Config, ConfigSpace, Implementation

if TYPE_CHECKING:
    from liger_registry import Device, Problem

FORWARD, BACKWARD = "forward", "backward"
_WIDTH = {"float64": 8}


def _has_fused_backward(config: Config, problem: Problem, device: Device) -> bool:
    if device.vendor not in ("cuda", "rocm"):
        return False
    from liger_registry.portable.rms_norm import FUSED

    return FUSED and len({problem.dtypes["x"], problem.dtypes["weight"]} - {"none"}) == 1


def _slab(problem: Problem, device: Device) -> Config:
    # Three fp32 buffers of a slab stay in the cache, where an operation costs a fifth of one that walks through fresh
    # pages: the forward of 4096 x 2048 in bf16 takes a third of the eager formula's time. Processors share hundreds of
    # MiB with their neighbours, so 8 MiB are taken to be ours.
    cache = min(device.limits.l2_bytes or 8 << 20, 8 << 20)
    fits = [rows for rows in (64, 256, 1024, 4096) if rows * problem.hidden * 12 <= cache and rows <= problem.rows]
    return Config(slab_rows=max(fits, default=64))


def _slab_bytes(problem: Problem, config: Config) -> int:
    return 3 * int(config.slab_rows) * int(problem.hidden) * _WIDTH.get(str(problem.dtypes["x"]), 4)


def _bytes(problem: Problem, config: Config) -> int:
    buffers = 3 if problem.phase == FORWARD else 4
    return buffers * int(problem.rows) * int(problem.hidden) * _WIDTH.get(str(problem.dtypes["x"]), 4)


def _implementations(phase: str) -> tuple[Implementation, ...]:
    launch = f"liger_registry.portable.rms_norm:{phase}_"
    eager = Implementation(
        op="rms_norm",
        phase=phase,
        name="eager",
        launch=launch + "eager",
        extra_bytes=_bytes,
        doc="the model family's formula in PyTorch operations",
    )
    functional = Implementation(
        op="rms_norm",
        phase=phase,
        name="functional",
        launch=launch + "functional",
        space=ConfigSpace()
        if phase == FORWARD
        else ConfigSpace().where(
            _has_fused_backward, "torch has a fused backward on GPUs alone, for x and weight of one dtype"
        ),
        extra_bytes=_bytes,
        doc="torch's own fused kernel, with the family's roundings around it",
    )
    row_chunks = Implementation(
        op="rms_norm",
        phase=phase,
        name="row_chunks",
        launch=launch + "row_chunks",
        # Below 2^20 elements all of it stays in the cache, and one pass over it is up to 2.7 times as fast.
        space=ConfigSpace(slab_rows=[64, 256, 1024, 4096])
        .where(lambda c, p, d: p.rows * p.hidden >= 1 << 20, "all of it fits the cache")
        .where(lambda c, p, d: c.slab_rows == 64 or c.slab_rows < p.rows, "the slab has more rows than there are"),
        heuristic=_slab,
        extra_bytes=_slab_bytes,
        # On a GPU each slab is a handful of launches, and there is no cache that it would have to fit.
        capability=Capability(vendor="cpu"),
        doc="the formula over slabs of rows that stay in the cache, in buffers that are used again",
    )
    return eager, functional, row_chunks


IMPLEMENTATIONS = (*_implementations(FORWARD), *_implementations(BACKWARD))
