"""``torch.nn.functional.linear_cross_entropy`` among the implementations of ``fused_linear_cross_entropy``.

It takes part in every warmup where torch has it (2.13), and is chosen only where it passed verification. With torch
2.13.0 that is nowhere: it rounds the loss to bf16, 2.6e-3 off, and subtracts a confident token's probability from 1,
which leaves gradients that are 10^4 roundings off in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_registry import Capability, Config, ConfigSpace, Implementation
from liger_registry.kernels import linear_heuristics as h

if TYPE_CHECKING:
    from liger_registry import Device, Problem

_BYTES = {"float32": 4, "float64": 8}


def _there(config: Config, problem: Problem, device: Device) -> bool:
    from liger_registry.portable.torch_linear_cross_entropy import available

    return available()


def _takes(config: Config, problem: Problem, device: Device) -> bool:
    return not (problem.softcapped or problem.scaled or problem.squared or problem.predict)


def _chunks(config: Config, problem: Problem, device: Device) -> bool:
    return not (config.chunked and problem.smoothed)


def _bytes(problem: Problem, config: Config) -> int:
    rows = min(int(problem.tokens), h.LEAST_ROWS) if config.chunked else int(problem.tokens)
    width = _BYTES.get(str(problem.dtypes["hidden"]), 2)
    # Logits, their log-softmax and its gradient, and one more head's gradient.
    return 3 * rows * int(problem.vocab) * width + int(problem.vocab) * int(problem.hidden) * 4


IMPLEMENTATIONS = (
    Implementation(
        op="fused_linear_cross_entropy",
        scheme="grad_in_forward",
        phase="forward",
        name="torch_linear_cross_entropy",
        launch="liger_registry.portable.torch_linear_cross_entropy:forward",
        space=ConfigSpace(chunked=[True, False])
        .where(_there, "the installed torch has no linear_cross_entropy; 2.13 brought it")
        .where(_takes, "it has no softcap, no scale, no z-loss and no predictions")
        .where(_chunks, "with label smoothing it takes all rows at once"),
        heuristic=lambda problem, device: Config(chunked=not problem.smoothed),
        extra_bytes=_bytes,
        capability=Capability(dtypes=("float32", "bfloat16")),
        proven=False,
        doc="torch.nn.functional.linear_cross_entropy",
    ),
)
