"""PyTorch as it is."""

from __future__ import annotations

from benchmarks.inputs import formula
from benchmarks.peers import Peer

PEERS = {"eager": Peer("eager", lambda case, inputs: formula(case))}
