"""A registry over the fake operation that writes down what ran."""

from __future__ import annotations

import itertools
import sys

import fakes
import torch

from liger_registry import Registry
from liger_registry.problem import BACKWARD, FORWARD
from liger_registry.settings import Settings

X, W = torch.ones(4, 64), torch.ones(64)
# An operation is defined once a process in torch.library, so each registry has one of its own.
numbers = itertools.count()


def calls(log, name):
    """A pair of launch functions that write down that they ran."""

    def forward(x, w, **rest):
        log.append(name)
        return fakes.forward(x, w, **rest)

    def backward(dy, x, w, **rest):
        log.append(f"{name}-backward")
        return fakes.backward(dy, x, w, **rest)

    return forward, backward


def build(root, op_changes=None, **settings):
    """A registry over a fake operation, in which every launch is written into ``registry.log``."""
    log = []
    name = f"fake{next(numbers)}"
    own = []
    for kind in ("plain", "other"):
        forward, backward = calls(log, kind)
        own += [fakes.implementation(kind, op=name, launch=forward),
                fakes.implementation(kind, BACKWARD, op=name, launch=backward)]  # fmt: skip
    forward, _ = calls(log, "tiled")
    own.append(fakes.tiled(vendor="any", op=name, launch=forward))
    op = fakes.make_op(name, order={FORWARD: ("plain",), BACKWARD: ("plain",)}, **(op_changes or {}))
    registry = Registry(Settings(cache_dir=root / "cache", **settings), fakes.catalog(op=op, own=own))
    registry.log, registry.name = log, name
    return registry


def run(registry, *args, **kwargs):
    """What ran for a call of the plain handle."""
    registry.log.clear()
    registry.get(registry.name)(*args, **kwargs)
    return registry.log[-1]


def problem(registry, **fields):
    """The problem of a call with X and W."""
    handle = registry.get(registry.name)
    tensors, options = handle.op.bind((X, W), {})
    return registry.problem_of(handle.op, tensors, options, FORWARD, (False, False), None, **fields)[0]


def problem_of_norm(registry):
    op = registry.op("rms_norm")
    tensors, options = op.bind((X, W), {})
    return registry.problem_of(op, tensors, options, FORWARD, (False, False), None)[0]


def fake_tuner(monkeypatch, tune):
    monkeypatch.setitem(sys.modules, "liger_registry.tuning.tuner", type("Tuner", (), {"tune": staticmethod(tune)}))
