"""Gated MLPs that go over a long sequence in parts and compute them again in backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from liger_registry.transformers._arguments import activation_of
from liger_registry.transformers._handles import call
from liger_registry.transformers._mlp import GatedMLP
from liger_registry.transformers.geglu import approximation_of
from liger_registry.transformers.swiglu import SILU

Tensor = torch.Tensor


class _Tiled(GatedMLP):
    """A gated MLP of which backward holds the intermediates of one part alone.

    Args:
        config: the model's, with ``hidden_size`` and ``intermediate_size``.
        num_shards: into how many parts the sequence is split; None for parts about as long as ``hidden_size``.
    """

    def __init__(self, config: Any, num_shards: int | None) -> None:  # noqa: ANN401
        super().__init__(config)
        self.num_shards = num_shards

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """The activation."""
        raise NotImplementedError

    def _part(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))
        return y

    def forward(self, x: Tensor) -> Tensor:
        """The layer of (..., tokens, hidden_size)."""
        shards = math.ceil(x.shape[-2] / x.shape[-1]) if self.num_shards is None else self.num_shards
        parts = x.chunk(max(1, shards), -2)
        # No random numbers in here whose state would have to be kept.
        done = [checkpoint(self._part, part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        return torch.cat(done, -2)


class LigerTiledSwiGLUMLP(_Tiled):
    """``LigerSwiGLUMLP`` in parts.

    Args:
        config: the model's, with ``hidden_size``, ``intermediate_size`` and ``hidden_act``.
        num_shards: into how many parts the sequence is split; None for parts about as long as ``hidden_size``.

    Raises:
        UnsupportedOptionError: the config names another activation than silu.
    """

    def __init__(self, config: Any, num_shards: int | None = None) -> None:  # noqa: ANN401
        super().__init__(config, num_shards)
        activation_of(type(self).__name__, config, SILU, ("hidden_act",))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """``silu(gate) * up``."""
        y: Tensor = call("swiglu", gate, up)
        return y


class LigerTiledGEGLUMLP(_Tiled):
    """``LigerGEGLUMLP`` in parts.

    Args:
        config: as of ``LigerGEGLUMLP``.
        num_shards: into how many parts the sequence is split; None for parts about as long as ``hidden_size``.

    Raises:
        UnsupportedOptionError: the config names another activation than a gelu.
    """

    def __init__(self, config: Any, num_shards: int | None = None) -> None:  # noqa: ANN401
        super().__init__(config, num_shards)
        self.approximate = approximation_of(type(self).__name__, config)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """``gelu(gate) * up``."""
        y: Tensor = call("geglu", gate, up, self.approximate)
        return y
