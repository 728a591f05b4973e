"""``geglu`` in Triton; its launch functions are those of ``gated`` with this activation."""

from __future__ import annotations

from functools import partial

from liger_registry.kernels import gated

forward_flat = partial(gated.forward_flat, "gelu")
forward_rows = forward_persistent = partial(gated.forward_rows, "gelu")
backward_flat = partial(gated.backward_flat, "gelu")
backward_rows = backward_persistent = partial(gated.backward_rows, "gelu")
