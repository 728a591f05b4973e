"""What gated MLPs have in common."""

from __future__ import annotations

from typing import Any

import torch


class GatedMLP(torch.nn.Module):
    """The three layers of a gated MLP under their usual names and in their usual order.

    Args:
        config: the model's, with ``hidden_size`` and ``intermediate_size``.
        intermediate_size: instead of the config's.
        bias: whether the layers have biases.
    """

    def __init__(self, config: Any, intermediate_size: int | None = None, bias: bool = False) -> None:  # noqa: ANN401
        super().__init__()
        self.config = config
        self.hidden_size: int = config.hidden_size
        self.intermediate_size: int = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = torch.nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = torch.nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)
