"""liger-kernel's whole MLPs, whose products it fuses too; here those are the device library's."""

from __future__ import annotations

from typing import Any

from liger_registry.errors import UnsupportedOptionError
from liger_registry.transformers.swiglu import LigerFalconH1SwiGLUMLP, LigerSwiGLUMLP


class LigerMLP(LigerSwiGLUMLP):
    """``LigerSwiGLUMLP`` without an intermediate size of its own."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        super().__init__(config)


class LigerFalconH1MLP(LigerFalconH1SwiGLUMLP):
    """``LigerFalconH1SwiGLUMLP`` without biases.

    Raises:
        UnsupportedOptionError: the config asks for biases, or for another activation than silu.
    """

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        if getattr(config, "mlp_bias", False):
            raise UnsupportedOptionError(
                "LigerFalconH1MLP has no biases, the config's mlp_bias is True", fix="use LigerFalconH1SwiGLUMLP"
            )
        super().__init__(config)
