"""Who is measured: ours in three states, PyTorch eager and compiled, and other packages; one file each.

A peer that cannot be imported, or that needs a GPU where there is none, is named in the results with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import torch

from benchmarks.cases import Case
from benchmarks.inputs import Call, Inputs

#: By name, in the order of tables: the module that has each.
MODULES = {
    "ours": "ours",
    "default": "ours",
    "other": "ours",
    "eager": "eager",
    "compile": "compiled",
    "liger": "liger",
    "quack": "quack",
    "cce": "cce",
    "trl": "trl",
}
#: The states of ours: chosen from the tables, without any table, and as tuned for another GPU.
STATES = ("ours", "default", "other")


@dataclass(frozen=True, slots=True)
class Peer:
    """A candidate.

    Attributes:
        name: in results.
        make: gives the call of a case, with the inputs of one as an example; None where it does not have it.
        distribution: what has to be installed; empty for what is there anyway.
        module: what has to be importable.
        gpu: whether it runs on GPUs alone.
    """

    name: str
    make: Callable[[Case, Inputs], Call | None]
    distribution: str = ""
    module: str = ""
    gpu: bool = False

    def absent(self, device: torch.device) -> str:
        """Why it cannot be measured on a device; empty if it can."""
        if self.distribution:
            try:
                metadata.version(self.distribution)
            except metadata.PackageNotFoundError:
                return "not installed"
        if self.gpu and device.type != "cuda":
            return "needs a GPU"
        if self.module:
            try:
                importlib.import_module(self.module)
            except Exception as error:  # a package that breaks while it is imported is as good as absent
                return f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return ""


def peers(names: tuple[str, ...] = tuple(MODULES)) -> dict[str, Peer]:
    """The peers of some names, absent ones included.

    Raises:
        ValueError: a name that is none.
    """
    found = {}
    for name in names:
        if name not in MODULES:
            raise ValueError(f"no peer is called {name!r}; they are {', '.join(MODULES)}")
        found[name] = importlib.import_module(f"benchmarks.peers.{MODULES[name]}").PEERS[name]
    return found


def present(found: dict[str, Peer], device: torch.device) -> tuple[dict[str, Peer], dict[str, str]]:
    """Those that can be measured, and of the others why not."""
    reasons = {name: peer.absent(device) for name, peer in found.items()}
    return (
        {name: peer for name, peer in found.items() if not reasons[name]},
        {name: why for name, why in reasons.items() if why},
    )
