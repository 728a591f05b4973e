"""Gated MLPs with silu, with the parameters of the models' own."""

from __future__ import annotations

from typing import Any

import torch

from liger_registry.transformers._arguments import activation_of
from liger_registry.transformers._handles import call
from liger_registry.transformers._mlp import GatedMLP
from liger_registry.transformers.functional import liger_swiglu

Tensor = torch.Tensor

SILU = ("silu", "swish")


class LigerSwiGLUMLP(GatedMLP):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, as of Llama, Mistral and Qwen.

    Args:
        config: the model's, with ``hidden_size``, ``intermediate_size`` and ``hidden_act``.
        intermediate_size: instead of the config's.

    Raises:
        UnsupportedOptionError: the config names another activation than silu.
    """

    activations: tuple[str, ...] = ("hidden_act",)

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:  # noqa: ANN401
        super().__init__(config, intermediate_size)
        activation_of(type(self).__name__, config, SILU, self.activations)

    def forward(self, x: Tensor) -> Tensor:
        """The layer of (..., hidden_size)."""
        y: Tensor = self.down_proj(liger_swiglu(self.gate_proj(x), self.up_proj(x)))
        return y


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """``LigerSwiGLUMLP`` for the experts and the dense layers of Qwen3-MoE."""


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    """``LigerSwiGLUMLP`` for Muse Glimmer, whose config names the activation ``hidden_activation``."""

    activations = ("hidden_activation", "hidden_act")

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        super().__init__(config)


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """``LigerSwiGLUMLP`` for HunYuan, whose layers know their index."""

    def __init__(self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False) -> None:  # noqa: ANN401
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerBlockSparseTop2MLP(torch.nn.Module):
    """``w2(silu(w1(x)) * w3(x))``, an expert of Mixtral.

    Args:
        config: the model's, with ``hidden_size``, ``intermediate_size`` and ``hidden_act``.

    Raises:
        UnsupportedOptionError: the config names another activation than silu.
    """

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        super().__init__()
        activation_of(type(self).__name__, config, SILU, ("hidden_act",))
        self.ffn_dim = config.intermediate_size
        self.hidden_dim = config.hidden_size
        self.w1 = torch.nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = torch.nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = torch.nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer of (..., hidden_size)."""
        y: Tensor = self.w2(liger_swiglu(self.w1(x), self.w3(x)))
        return y


class LigerPhi3SwiGLUMLP(torch.nn.Module):
    """A gated MLP with one projection for gates and ups, as of Phi-3; they are not copied apart.

    Args:
        config: the model's, with ``hidden_size``, ``intermediate_size`` and ``hidden_act``.

    Raises:
        UnsupportedOptionError: the config names another activation than silu.
    """

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        super().__init__()
        activation_of(type(self).__name__, config, SILU, ("hidden_act",))
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        self.gate_up_proj = torch.nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer of (..., hidden_size)."""
        y: Tensor = self.down_proj(call("swiglu", self.gate_up_proj(x)))
        return y


class LigerFalconH1SwiGLUMLP(GatedMLP):
    """``down_proj(silu(gate_proj(x) * gate) * up_proj(x)) * down``, as of Falcon H1.

    Args:
        config: the model's, with ``hidden_size``, ``intermediate_size``, ``hidden_act``, ``mlp_multipliers``, the
            factors ``gate`` and ``down``, and ``mlp_bias``.

    Raises:
        UnsupportedOptionError: the config names another activation than silu.
    """

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        super().__init__(config, bias=bool(getattr(config, "mlp_bias", False)))
        activation_of(type(self).__name__, config, SILU, ("hidden_act",))
        gate, down = config.mlp_multipliers
        self.gate_multiplier = float(gate)
        self.down_multiplier = float(down)

    def forward(self, x: Tensor) -> Tensor:
        """The layer of (..., hidden_size)."""
        # The model multiplies behind down_proj, its bias included; without one the kernel can do it before.
        before, after = self.down_multiplier, 1.0
        if self.down_proj.bias is not None:
            before, after = after, before
        gated = call("swiglu", self.gate_proj(x), self.up_proj(x), self.gate_multiplier, before)
        y: Tensor = self.down_proj(gated)
        return y if after == 1.0 else y * after
