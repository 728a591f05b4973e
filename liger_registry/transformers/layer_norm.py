"""Layer normalisation as a layer."""

from __future__ import annotations

import torch

from liger_registry.runtime import registry
from liger_registry.transformers._arguments import initial, refuse
from liger_registry.transformers.functional import liger_layer_norm

Tensor = torch.Tensor


class LigerLayerNorm(torch.nn.Module):
    """Layer normalisation over the last dimension.

    Args:
        hidden_size: the width.
        eps: added to the variance.
        bias: whether the bias starts as random numbers; there is one in any case, else of zeros.
        init_fn: ``ones`` or ``zeros``, what the weight starts as.
        impl: pins an implementation of this registry by name.
        mode: only None; liger-kernel's backends have modes, which are configs here.
        backend: the former name of ``impl``, which counts if that is None.

    Raises:
        UnsupportedOptionError: a value that is not supported.
        UnknownImplementationError: in ``forward``, no implementation of that name.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        impl: str | None = None,
        mode: str | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        refuse(
            type(self).__name__,
            "mode",
            mode,
            "which variant of a kernel runs is measured",
            "leave it out, or pin a config with registry.use('layer_norm', implementation, config)",
        )
        self.hidden_size = hidden_size
        self.eps = self.variance_epsilon = eps
        self.weight = initial(type(self).__name__, init_fn, hidden_size)
        self.bias = torch.nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))
        self.impl = backend if impl is None else impl
        self.mode = mode

    @property
    def backend(self) -> str | None:
        """The former name of ``impl``."""
        return self.impl

    @backend.setter
    def backend(self, value: str | None) -> None:
        self.impl = value

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise (..., hidden)."""
        if self.impl is None:
            return liger_layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)
        pinned = registry.get("layer_norm", implementation=self.impl)
        y: Tensor = pinned(hidden_states, self.weight, self.bias, self.variance_epsilon)
        return y

    def extra_repr(self) -> str:
        """The arguments."""
        return f"{self.hidden_size}, eps={self.eps}, impl={self.impl!r}, mode={self.mode!r}"
