"""``linear_sequence_loss`` on AMD GPUs. Not run on one yet.

Its slabs are PyTorch's matrix products around ``logit_statistics``, on any device; what is left is a backward.
"""

from __future__ import annotations

from liger_registry import Capability, Config, ConfigSpace, Implementation

IMPLEMENTATIONS = (
    Implementation(
        op="linear_sequence_loss",
        scheme="grad_in_forward",
        phase="backward",
        name="scale_unless_one",
        launch="liger_registry.kernels.group_scale:backward_scale_unless_one",
        space=ConfigSpace(block=[2048, 4096, 8192], num_warps=[4, 8], programs_per_unit=[4, 8]).where(
            lambda c, p, d: int(c.block) <= 1024 * int(c.num_warps), "64 elements a thread spill"
        ),
        heuristic=lambda problem, device: Config(block=4096, num_warps=8, programs_per_unit=8),
        capability=Capability(vendor="rocm", min_arch="gfx90a", dtypes=("float32", "float16", "bfloat16")),
        doc="forward's gradients times the loss', in place, and untouched where that is 1",
    ),
)
