"""Helpers for the tests of losses over a linear head: calls, right values, and memory counted by shape."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def head(tokens, hidden, vocab, dtype=torch.float32, bias=False, seed=0, grad=True, size=0.5):
    """Hidden states, weight, target and bias; every fifth token is ignored."""
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens,) if isinstance(tokens, int) else tokens
    made = [
        torch.randn(*shape, hidden, generator=generator).to(dtype),
        (torch.randn(vocab, hidden, generator=generator) * size).to(dtype),
        torch.randint(vocab, shape, generator=generator),
        torch.randn(vocab, generator=generator).to(dtype) if bias else None,
    ]
    made[2].view(-1)[3::5] = -100
    return [t.requires_grad_(grad) if t is not None and t.is_floating_point() else t for t in made]


def wide(tensors):
    """The same in float64, as new leaves."""
    return [t.detach().double().requires_grad_() if t is not None and t.is_floating_point() else t for t in tensors]


def error(value, right):
    """``||value - right|| / ||right||``."""
    value, right = value.detach().double(), right.detach().double()
    return ((value - right).norm() / right.norm().clamp_min(1e-300)).item()


class Live(TorchDispatchMode):
    """Counts the bytes of memory that was allocated within it and is alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.bytes = self.peak = 0
        self.known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self.known:
                    self.add(storage)
        return result

    def add(self, storage):
        key, size = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self.drop, key, size)

    def drop(self, key, size):
        self.known.discard(key)
        self.bytes -= size
