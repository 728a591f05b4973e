"""``fused_linear_jsd``: what each implementation can do, and which configs it has.

They run on every device: what differs between devices is their stage, which has implementations and a decision of its
own.
"""

from __future__ import annotations

from liger_registry import ConfigSpace, Implementation
from liger_registry.kernels import fused_linear_jsd_heuristics as h
from liger_registry.kernels.linear_heuristics import SLAB_ROWS, scale_bytes

_CHUNKED = (
    ConfigSpace(slab_rows=list(SLAB_ROWS), sums=["input", "float32"])
    .where(
        lambda c, p, d: c.slab_rows == min(SLAB_ROWS) or h.distinct(c, p, d),
        "a smaller slab holds all rows too",
    )
    .where(h.few_roundings, "the head's gradient would be rounded too often, or there is nothing wider to sum it in")
)
IMPLEMENTATIONS = (
    Implementation(
        op="fused_linear_jsd",
        scheme="grad_in_forward",
        phase="forward",
        name="chunked",
        launch="liger_registry.portable.fused_linear_jsd:forward_chunked",
        space=_CHUNKED,
        heuristic=h.heuristic_chunked,
        extra_bytes=h.chunked_bytes,
        stages=h.chunked_stages,
        doc="two slabs of some rows of logits, used again",
    ),
    Implementation(
        op="fused_linear_jsd",
        scheme="grad_in_forward",
        phase="forward",
        name="single",
        launch="liger_registry.portable.fused_linear_jsd:forward_single",
        extra_bytes=h.single_bytes,
        stages=h.single_stages,
        doc="all logits of both at once",
    ),
    Implementation(
        op="fused_linear_jsd",
        scheme="grad_in_forward",
        phase="backward",
        name="scale",
        launch="liger_registry.portable.fused_linear_jsd:backward_scale",
        extra_bytes=scale_bytes,
        doc="the gradients of the forward times the upstream gradient, in their own memory",
    ),
)
