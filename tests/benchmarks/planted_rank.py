"""A real rank with something planted in it: memory that is short, or a wrong operation; see ``test_scale_ranks.py``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks import scale_rank

trainer, patch = scale_rank.trainer, scale_rank.patch


def short(model, rank, batch, length, seed):
    """Memory is short on one rank alone, at one length of one mode."""
    step = trainer(model, rank, batch, length, seed)
    if rank.job.get("mode") != "hf" or length != 32 or rank.number != 1:
        return step

    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    return fail


def wrong(model, mode):
    """Ours has a norm that is off by a hundredth."""
    applied = patch(model, mode)
    if mode == "ours":
        model.model.norm.register_forward_hook(lambda module, given, output: output * 1.01)
    return applied


if os.environ["PLANTED"] == "short":
    scale_rank.trainer = short
else:
    scale_rank.patch = wrong
scale_rank.main()
