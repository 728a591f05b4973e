"""The gated MLP with gelu, with the parameters of the models' own."""

from __future__ import annotations

from typing import Any

import torch

from liger_registry.transformers._arguments import activation_of
from liger_registry.transformers._handles import call
from liger_registry.transformers._mlp import GatedMLP

Tensor = torch.Tensor

# By their names in configs; all but gelu are the tanh approximation.
GELU = {"gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "gelu": "none"}


def approximation_of(face: str, config: Any) -> str:  # noqa: ANN401
    """``tanh``, or ``none`` where a config names the gelu of the error function.

    Raises:
        UnsupportedOptionError: the config names another activation.
    """
    return GELU[activation_of(face, config, GELU, ("hidden_activation", "hidden_act"))]


class LigerGEGLUMLP(GatedMLP):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))``, as of Gemma.

    liger-kernel takes the tanh approximation whatever the config says; here ``gelu`` is that of the error function.

    Args:
        config: the model's, with ``hidden_size``, ``intermediate_size``, and ``hidden_activation`` or ``hidden_act``;
            without either it is ``gelu_pytorch_tanh``.

    Raises:
        UnsupportedOptionError: the config names another activation than a gelu.
    """

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        super().__init__(config)
        self.approximate = approximation_of(type(self).__name__, config)

    def forward(self, x: Tensor) -> Tensor:
        """The layer of (..., hidden_size)."""
        y: Tensor = self.down_proj(call("geglu", self.gate_proj(x), self.up_proj(x), self.approximate))
        return y


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """``LigerGEGLUMLP`` for Gemma 4: twice as wide in layers that share keys and values, if the config says so.

    Args:
        config: as of ``LigerGEGLUMLP``, with ``use_double_wide_mlp``, ``num_hidden_layers``, ``num_kv_shared_layers``.
        layer_idx: the layer's; None for one that shares nothing.
    """

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:  # noqa: ANN401
        shared = getattr(config, "num_kv_shared_layers", 0) if getattr(config, "use_double_wide_mlp", False) else 0
        wide = layer_idx is not None and shared > 0 and layer_idx >= config.num_hidden_layers - shared
        GatedMLP.__init__(self, config, 2 * config.intermediate_size if wide else None)
        self.approximate = approximation_of(type(self).__name__, config)
