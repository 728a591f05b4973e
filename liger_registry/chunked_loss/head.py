"""How an output head makes logits, and what its weight is where it is given as a module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_registry.chunked_loss._checks import check_choice, check_number, finite, positive
from liger_registry.errors import InvalidInputError, UnsupportedOptionError

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Head:
    """How logits are made of ``hidden @ weight.T + bias``, and what computing them may cost.

    Attributes:
        softcap: they become ``softcap * tanh(logits / softcap)``; None for no cap (Gemma 2 has 30).
        logit_scale: a factor on them, before the cap (Cohere's ``logit_scale``, the inverse of Granite's).
        temperature: what they are divided by at last.
        compact: ``on`` drops tokens that do not count before any matrix product, for which their number has to be known
            on the host, so that every operation over a head, such as a reference model's beside the policy's, waits for
            the device once; ``off`` never waits; ``auto`` drops them where that pays and nothing is being captured or
            compiled. Results are equal.
        memory_budget: bytes that may be allocated beyond results and gradients, None for the default. Less than the
            smallest slabs take is what these take.

    Raises:
        UnsupportedOptionError: a value that no logits can be made with.
    """

    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    compact: str = "auto"
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        def sized(value: float) -> bool:
            return positive(value) and finite(value)

        if self.softcap is not None:
            check_number("Head", "softcap", self.softcap, sized, "it bounds the logits", "pass None for no cap")
        check_number(
            "Head",
            "logit_scale",
            self.logit_scale,
            lambda value: value != 0 and finite(value),
            "nothing is left of logits times 0, nor of infinite ones",
            "pass 1.0",
        )
        check_number("Head", "temperature", self.temperature, sized, "logits are divided by it", "pass 1.0")
        check_choice("Head", "compact", self.compact, ("auto", "on", "off"))

    def options(self, ignore_index: int) -> dict[str, Any]:
        """The options of operations over a head: a cap before a division is a smaller cap of smaller logits."""
        return {
            "softcap": 0.0 if self.softcap is None else self.softcap / self.temperature,
            "scale": self.logit_scale / self.temperature,
            "ignore_index": ignore_index,
            "compact": self.compact,
        }


PLAIN = Head()


def applied(
    face: str, hidden: Tensor, weight: Tensor | nn.Module, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states (..., hidden), weight (vocab, hidden) and bias (vocab,), of which logits are the product and sum.

    A module may be ``torch.nn.Linear``, or PEFT's LoRA around one. The ``weight`` attribute of such a layer is that of
    the frozen layer inside, with which the adapter would be left out of loss and gradients. Its factors are appended to
    states and weight as further columns: added to the weight a young adapter would be rounded away, since half an ulp
    of a bf16 weight of 0.02 is 6e-5.

    Args:
        face: for messages.
        hidden: (..., hidden).
        weight: a tensor, or the head.
        bias: the bias of a head that is given as a tensor.

    Raises:
        InvalidInputError: a weight whose values lie elsewhere (sharded), or a bias beside a module.
        UnsupportedOptionError: a module that is not linear, or whose adapter is no sum of weights.
    """
    if not isinstance(weight, nn.Module):
        return hidden, _whole(face, "weight", weight), _whole(face, "bias", bias)
    if bias is not None:
        raise InvalidInputError(
            f"{face} got a bias beside a module", why="the module has its own", fix="pass one of them"
        )
    return _of_module(face, hidden, weight)


def _whole(face: str, name: str, tensor: Any) -> Any:  # noqa: ANN401
    """The tensor, if its values are here."""
    if hasattr(tensor, "full_tensor") or (hasattr(tensor, "ds_id") and tensor.numel() == 0):
        raise InvalidInputError(
            f"the {name} of {face} is sharded",
            why="its values are on several ranks, of which no loss over the whole vocabulary can be made",
            fix="call the loss where the head's parameters are gathered, as with deepspeed.zero.GatheredParameters "
            "or weight.full_tensor()",
        )
    return tensor


def _of_module(face: str, hidden: Tensor, module: nn.Module) -> tuple[Tensor, Tensor, Tensor | None]:
    saved = getattr(module, "modules_to_save", None)
    if isinstance(saved, nn.ModuleDict):  # PEFT's copies of a layer, one an adapter, beside the original
        names = [name for name in _active(module) if name in saved]
        if getattr(module, "disable_adapters", False) or not names:
            return _of_module(face, hidden, module.original_module)  # type: ignore[arg-type]
        return _of_module(face, hidden, saved[names[0]])
    base: Any = getattr(module, "base_layer", None)
    if isinstance(base, nn.Module):
        return _with_lora(face, hidden, module, base)
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise UnsupportedOptionError(
            f"{face} cannot use {type(module).__name__} as a head",
            why="its logits need not be hidden @ weight.T + bias",
            fix="pass the weight that they are made with, as a tensor",
        )
    return hidden, _whole(face, "weight", module.weight), _whole(face, "bias", module.bias)


def _active(module: Any) -> list[str]:  # noqa: ANN401
    found = getattr(module, "active_adapters", None) or getattr(module, "active_adapter", [])
    return [found] if isinstance(found, str) else list(found)


def _with_lora(
    face: str,
    hidden: Tensor,
    module: Any,  # noqa: ANN401
    base: nn.Module,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A frozen head beside its active LoRA adapters."""
    states, weight, bias = _of_module(face, hidden, base)
    if getattr(module, "disable_adapters", False) or getattr(module, "merged", False):
        return states, weight, bias
    factors = getattr(module, "lora_A", None), getattr(module, "lora_B", None)
    if not all(isinstance(f, nn.ModuleDict) for f in factors):
        raise UnsupportedOptionError(
            f"{face} cannot use {type(module).__name__} as a head",
            why="what it adds to the layer inside is not known to be a matrix",
            fix="merge the adapter into the head, or leave the head out of target_modules",
        )
    more, columns = [states], [weight]
    for name in _active(module):
        if name not in module.lora_A:
            continue
        dropout = module.lora_dropout[name] if name in module.lora_dropout else nn.Identity()
        drops = module.training and not isinstance(dropout, nn.Identity) and getattr(dropout, "p", 1.0) > 0
        variant = name in getattr(module, "lora_variant", {}) or bool(getattr(module, "use_dora", {}).get(name))
        if drops or variant:
            raise UnsupportedOptionError(
                f"{face} cannot use the adapter {name!r} of the head",
                why="it drops hidden states out before the product" if drops else "it is more than a sum of weights",
                fix="construct it with lora_dropout=0.0 and without variants such as DoRA, or leave the head out",
            )
        down, up = (_whole(face, "adapter", f[name].weight) for f in factors)  # type: ignore[index]
        scaling = float(module.scaling[name])
        low = nn.functional.linear(hidden, down.to(hidden.dtype))
        more.append((low * scaling).to(states.dtype))
        columns.append(up.to(weight.dtype))
        if module.lora_B[name].bias is not None:
            offset = module.lora_B[name].bias.to(weight.dtype) * scaling
            bias = offset if bias is None else bias + offset
    return torch.cat(more, -1), torch.cat(columns, 1), bias
