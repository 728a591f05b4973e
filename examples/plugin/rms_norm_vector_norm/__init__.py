"""Two more implementations of ``rms_norm``; importing this imports neither torch nor Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from liger_registry import Capability, Config, ConfigSpace, Implementation

if TYPE_CHECKING:
    from liger_registry import Device, Problem

LIGER_REGISTRY_API = (1, 0)


def one_block_heuristic(problem: Problem, device: Device) -> Config:
    """One warp for every 1,024 elements of a row, within the space."""
    warps = next((w for w in (1, 2, 4, 8) if w * 1024 >= problem.hidden), 16)
    return Config(num_warps=warps)


def register(registry: Any) -> None:
    """Called once, on the first use of the registry."""
    registry.register(
        Implementation(
            op="rms_norm",
            phase="forward",
            name="vector_norm",
            launch="rms_norm_vector_norm.eager:forward",
            # In float64 the root and its square cost an ulp too many.
            capability=Capability(dtypes=("float32", "float16", "bfloat16")),
            doc="PyTorch with one fused reduction for the sum of squares",
        )
    )
    registry.register(
        Implementation(
            op="rms_norm",
            phase="forward",
            name="one_block",
            launch="rms_norm_vector_norm.triton_kernel:forward",
            space=ConfigSpace(num_warps=[1, 2, 4, 8, 16])
            .where(
                lambda c, p, d: c.num_warps * d.limits.warp_size <= p.hidden or c.num_warps == 1,
                "more threads than elements in a row",
            )
            .where(lambda c, p, d: p.hidden <= 32768, "a row does not fit one block"),
            heuristic=one_block_heuristic,
            capability=Capability(vendor="cuda", min_arch="sm_80", dtypes=("float32", "float16", "bfloat16")),
            doc="Triton, one program and one block a row",
        )
    )
