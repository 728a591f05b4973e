"""TRL's fused head: per-token log-probabilities, as its trainers take them."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import IGNORED, Call, Inputs
from benchmarks.peers import Peer


def logp(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    """Log-probabilities of the targets, 0 where they do not count; hidden states of any leading dimensions."""
    head: Any = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    utils: Any = importlib.import_module("trl.trainer.utils")
    mask = target != IGNORED
    rows, labels = hidden[mask], target[mask]
    chunk = utils._CHUNKED_LOGPROB_CHUNK_SIZE
    found = head.apply(rows, weight, None, labels, 1.0, chunk, None, 1.0, ())[0]
    return found.new_zeros(mask.shape).masked_scatter(mask, found)


def make(case: Case, inputs: Inputs) -> Call | None:
    """The call of a case."""
    if case.op != "linear_logp":
        return None
    return logp


PEERS = {"trl": Peer("trl", make, "trl", "trl.kernels.chunked_logprob")}
