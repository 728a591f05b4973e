"""Root-mean-square normalisation as layers, with the defaults that model families' norms have."""

from __future__ import annotations

import torch

from liger_registry.transformers._arguments import check_choice, initial, refuse
from liger_registry.transformers.functional import liger_rms_norm

Tensor = torch.Tensor


class LigerRMSNorm(torch.nn.Module):
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)`` over the last dimension, in the dtype of x.

    Args:
        hidden_size: the width.
        eps: added to the mean of squares.
        offset: added to the weight.
        casting_mode: ``llama``, ``gemma`` or ``none``, the roundings.
        init_fn: ``ones`` or ``zeros``, what the weight starts as.
        in_place: without effect on results; nothing of the caller's is written.
        row_mode: True raises; which kernel runs is measured, not chosen here.
        elementwise_affine: whether there is a weight.

    Raises:
        UnsupportedOptionError: a value that is not supported.
    """

    weight: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        face = type(self).__name__
        check_choice(face, "casting_mode", casting_mode, ("llama", "gemma", "none"))
        refuse(
            face,
            "row_mode",
            row_mode or None,
            "which kernel is fastest for so many rows is measured",
            "leave it out, or pin an implementation with registry.use('rms_norm', 'row')",
        )
        weight = initial(face, init_fn, hidden_size)
        self.register_parameter("weight", weight if elementwise_affine else None)
        self.elementwise_affine = elementwise_affine
        self.variance_epsilon = eps
        self.offset = offset
        self.casting_mode = casting_mode
        self.in_place = in_place
        self.row_mode = row_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise (..., hidden)."""
        return liger_rms_norm(
            hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode, self.in_place
        )

    def extra_repr(self) -> str:
        """The arguments."""
        shape = None if self.weight is None else tuple(self.weight.shape)
        return (
            f"weight_shape={shape}, eps={self.variance_epsilon}, offset={self.offset}, in_place={self.in_place}, "
            f"row_mode={self.row_mode}"
        )


class LigerRMSNormForGemma(LigerRMSNorm):
    """``LigerRMSNorm`` with the defaults of Gemma: ``1 + weight``, all in fp32, a weight of zeros."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNorm):
    """``LigerRMSNorm`` with the defaults of Gemma 2."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma2):
    """``LigerRMSNorm`` with the defaults of Qwen3-Next, which are those of Gemma 2."""


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma2):
    """``LigerRMSNorm`` with the defaults of Muse Glimmer's centred norms, which are those of Gemma 2."""


class LigerRMSNormForGemma3(LigerRMSNorm):
    """``LigerRMSNorm`` with the defaults of Gemma 3, whose norms call the width ``dim``."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """``LigerRMSNorm`` with the defaults of Gemma 4: all in fp32, a weight of ones, or none.

    Args:
        dim: the width.
        eps: added to the mean of squares.
        offset: added to the weight.
        casting_mode: the roundings.
        init_fn: what the weight starts as.
        in_place: without effect on results.
        with_scale: whether there is a weight.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4):
    """``LigerRMSNorm`` with the defaults of Muse Glimmer, whose norms without a weight need no width."""

    def __init__(
        self,
        dim: int | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        if dim is None:
            # liger-kernel fails here too where there is a weight, but without saying why.
            refuse(type(self).__name__, "dim", "None" if with_scale else None, "a weight has a width", "pass the width")
            dim = 0
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, with_scale)


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """``LigerRMSNorm`` with the defaults of OLMo 2."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGlm4(LigerRMSNormForOlmo2):
    """``LigerRMSNorm`` with the defaults of GLM 4, which are those of OLMo 2."""
