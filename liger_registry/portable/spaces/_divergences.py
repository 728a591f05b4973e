"""``jsd``, ``kl_div`` and ``tvd`` in PyTorch: what each implementation can do, and which configs it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_registry import Capability, Config, ConfigSpace, Implementation

if TYPE_CHECKING:
    from liger_registry import Device, Problem

# Buffers in the dtype of sums that a mixture's terms take at their peak; of the others a few less.
_BUFFERS = 7


def _width(problem: Problem) -> int:
    return 8 if "float64" in problem.dtypes.values() else 4


def _bytes(problem: Problem, config: Config) -> int:
    return _BUFFERS * int(problem.rows) * int(problem.vocab) * _width(problem)


def _slab_bytes(problem: Problem, config: Config) -> int:
    return _BUFFERS * int(config.slab_rows) * int(problem.vocab) * _width(problem)


def _slab(problem: Problem, device: Device) -> Config:
    # Processors share hundreds of MiB of cache with their neighbours, so 8 MiB are taken to be ours.
    cache = min(device.limits.l2_bytes or 8 << 20, 8 << 20)
    fits = [r for r in (4, 16, 64, 256) if r * problem.vocab * _width(problem) * _BUFFERS <= cache and r < problem.rows]
    return Config(slab_rows=max(fits, default=4))


def implementations(op: str) -> tuple[Implementation, ...]:
    """Both phases of an operation."""
    found: list[Implementation] = []
    for phase in ("forward", "backward"):
        launch = f"liger_registry.portable.divergences:{phase}_"
        found += [
            Implementation(
                op=op,
                phase=phase,
                name="eager",
                launch=launch + "eager",
                extra_bytes=_bytes,
                doc="the formula in PyTorch operations",
            ),
            Implementation(
                op=op,
                phase=phase,
                name="row_chunks",
                launch=launch + "row_chunks",
                # Below 2^18 elements all of it stays in the cache.
                space=ConfigSpace(slab_rows=[4, 16, 64, 256])
                .where(lambda c, p, d: p.rows * p.vocab >= 1 << 18, "all of it fits the cache")
                .where(lambda c, p, d: c.slab_rows == 4 or c.slab_rows < p.rows, "the slab holds more than there is"),
                heuristic=_slab,
                extra_bytes=_slab_bytes,
                # On a GPU each slab is a dozen launches, and there is no cache that it would have to fit.
                capability=Capability(vendor="cpu"),
                doc="the formula over slabs of rows whose buffers stay in the cache",
            ),
        ]
    return tuple(found)
