"""Jobs of ranks that fail, for the harness' own tests."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def fine(rank, world, word):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return word, rank, world, total.item()


def raises(rank, world):
    if rank == 1:
        raise ValueError("planted")
    dist.barrier()


def dies(rank, world):
    if rank == 1:
        os._exit(7)
    dist.barrier()


def hangs(rank, world):
    if rank == 1:
        time.sleep(600)


def process(rank, world):
    return os.getpid()
