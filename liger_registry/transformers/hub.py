"""The hook that transformers has for kernels: its layers' names, answered by the registry's operations.

transformers marks layers and functions with names (``RMSNorm``, ``rotary_pos_emb`` ...), and the package ``kernels``
gives those of a model other forwards when it is loaded with ``use_kernels=True``, or kernelized. One call before that
lets ours be taken, in training too::

    from liger_registry.transformers import register_kernels

    register_kernels()
    model = AutoModelForCausalLM.from_pretrained(name, use_kernels=True)

Functions, such as ``rotary_pos_emb``, are replaced for every model of their modeling file: that is ``kernels``' way.
A name says nothing on what a class computes: each module is looked at when it is first called, as ``apply`` looks at
it, and what is not recognised computes as before. ``apply`` finds more, and reports it.
"""

from __future__ import annotations

import importlib
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from liger_registry.errors import ExtraMissingError, RegistryWarning
from liger_registry.transformers.engine import mlps, norms
from liger_registry.transformers.engine.adapters import Enabled
from liger_registry.transformers.engine.binding import Binding
from liger_registry.transformers.engine.plain_loss import LossFunction
from liger_registry.transformers.engine.report import Row
from liger_registry.transformers.engine.rotations import NotRotary
from liger_registry.transformers.engine.turning import turned

Tensor = torch.Tensor
Finder = Callable[[nn.Module, Enabled], Iterable["Binding | Row"]]

#: The devices, as the package ``kernels`` names them, that the registry has implementations for.
DEVICES = ("cpu", "cuda", "rocm")
# Where a module keeps what its forward became: a callable, or False where it stays as it is.
_FOUND = "_liger_registry_kernel"
_lock = threading.RLock()


def _bound(module: nn.Module, op: str, find: Finder) -> Any:  # noqa: ANN401
    """What an adapter would bind to a module; False if nothing."""
    with _lock:
        # What calls us is an attribute of the instance, and a module that has one is left alone.
        ours: dict[str, Any] = {
            name: module.__dict__.pop(name) for name in ("forward", "_old_forward") if name in module.__dict__
        }
        try:
            found = (item for item in find(module, {op: True}) if isinstance(item, Binding) and item.module is module)
            return next((item.replacement for item in found if item.attribute == "forward"), False)
        finally:
            module.__dict__.update(ours)


def _function(module: nn.Module, op: str, find: Finder) -> Any:  # noqa: ANN401
    """The function that a module was made of, with the operation in it; False if it is none."""
    made_of = inspect.getclosurevars(type(module).forward).nonlocals.get("func")
    try:
        return turned(made_of) if callable(made_of) else False
    except NotRotary:
        return False


def _call(
    module: nn.Module,
    op: str,
    find: Finder,
    look: Callable[[nn.Module, str, Finder], Any],
    *args: Any,
    **kwargs: Any,
) -> Any:  # noqa: ANN401
    """A module's forward with the operation in it, or its class's own."""
    found = module.__dict__.get(_FOUND)
    if found is None and not torch.compiler.is_compiling():  # reading code is nothing for a graph
        found = module.__dict__[_FOUND] = look(module, op, find)
    return found(*args, **kwargs) if found else type(module).forward(module, *args, **kwargs)


def _none(module: nn.Module, enabled: Enabled) -> Iterable[Binding | Row]:
    return ()


# The forwards are called with the model's modules as self: they have the parameters of what they replace, and these
# classes nothing but them. ``kernels`` checks both.
class RegistryRMSNorm(nn.Module):
    """Norms with the roundings that their own code has."""

    can_torch_compile = False
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The forward of a norm."""
        y: Tensor = _call(self, "rms_norm", norms.find, _bound, hidden_states)
        return y


class RegistrySwiGLUMLP(nn.Module):
    """Gated MLPs with silu."""

    can_torch_compile = False
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        """The forward of an MLP."""
        y: Tensor = _call(self, "swiglu", mlps.find, _bound, x)
        return y


class RegistryGeGLUMLP(nn.Module):
    """Gated MLPs with a gelu."""

    can_torch_compile = False
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        """The forward of an MLP."""
        y: Tensor = _call(self, "geglu", mlps.find, _bound, x)
        return y


class RegistryRotary(nn.Module):
    """Functions that turn queries and keys."""

    can_torch_compile = False
    has_backward = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """The function, with the order of its arguments."""
        turned_q, turned_k = _call(self, "rope", _none, _function, q, k, cos, sin, unsqueeze_dim)
        return turned_q, turned_k


class RegistryForCausalLMLoss(nn.Module):
    """The loss of causal language models, with the operation for its cross-entropy."""

    can_torch_compile = False
    has_backward = True

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The function, with the order of its arguments."""
        loss: Tensor = LossFunction(type(self).forward)(
            self, logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
        return loss


LAYERS: dict[str, type[nn.Module]] = {
    "RMSNorm": RegistryRMSNorm,
    "SwiGLUMLP": RegistrySwiGLUMLP,
    "GeGLUMLP": RegistryGeGLUMLP,
    "rotary_pos_emb": RegistryRotary,
    "ForCausalLMLoss": RegistryForCausalLMLoss,
}


@dataclass(frozen=True)
class Layer:
    """What ``kernels`` asks for a layer, in place of a repository on the hub.

    Attributes:
        layer_name: one of ``LAYERS``.
    """

    layer_name: str

    def load(self) -> type[nn.Module]:
        """The layer."""
        return LAYERS[self.layer_name]

    def __str__(self) -> str:
        return f"liger-registry, layer `{self.layer_name}`"


def kernel_mapping() -> dict[str, dict[str, dict[Any, Layer]]]:
    """Our layers by name, device and mode, as ``kernels.register_kernel_mapping`` and ``use_kernel_mapping`` take them.

    Raises:
        ExtraMissingError: the package ``kernels`` is not installed.
    """
    mode = _kernels().Mode
    return {
        name: {device: {mode.TRAINING: Layer(name), mode.INFERENCE: Layer(name)} for device in DEVICES}
        for name in LAYERS
    }


def register_kernels() -> dict[str, dict[str, dict[Any, Layer]]]:
    """Let ``kernels`` take our layers for transformers' names, also after transformers registers its own again.

    For names, devices and modes that we have none for, what transformers registers stays.

    Returns:
        What was registered, as of ``kernel_mapping``.

    Raises:
        ExtraMissingError: the package ``kernels`` is not installed.
    """
    kernels, ours = _kernels(), kernel_mapping()
    hub = importlib.import_module("transformers.integrations.hub_kernels")
    theirs = _theirs(hub)
    if theirs is None:
        warnings.warn(
            f"transformers cannot use the installed kernels {kernels.__version__} and has marked none of its layers: "
            f"{getattr(hub, '_MISSING_KERNELS_MESSAGE', 'another version is needed')}",
            RegistryWarning,
            stacklevel=2,
        )
        kernels.register_kernel_mapping(ours)
        return ours
    for name, devices in ours.items():
        there = theirs.setdefault(name, {})
        for device, modes in devices.items():
            known = there.get(device, {})
            there[device] = {**(known if isinstance(known, dict) else {kernels.Mode.FALLBACK: known}), **modes}
    hub.register_kernel_mapping_transformers()
    return ours


def _theirs(hub: ModuleType) -> dict[str, Any] | None:
    """The mapping that transformers registers whenever a model is kernelized; None where it has no use for kernels."""
    get = getattr(hub, "get_kernel_mapping_transformers", None)
    mapping: dict[str, Any] | None = get() if get is not None else getattr(hub, "_KERNEL_MAPPING", None)
    return mapping


def _kernels() -> Any:  # noqa: ANN401
    try:
        return importlib.import_module("kernels")
    except ImportError as error:
        raise ExtraMissingError(
            "the package kernels is not installed",
            why="transformers' hook for kernels is in there",
            fix="pip install kernels, in the version that transformers wants; apply(model) needs none",
        ) from error
