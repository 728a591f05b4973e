"""Small models with a bound head, for the tests of the adapters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_registry.transformers.engine.binding import Binding, bind
from liger_registry.transformers.engine.deferred import DeferredLogits
from liger_registry.transformers.engine.head import Counts, LogitsHead, find_head

VOCAB = 97


def linear_head(
    bias: bool = False, dtype: torch.dtype = torch.float32, width: int = 8, vocab: int = 13
) -> tuple[nn.Linear, nn.Linear, Counts]:
    """A plain head, the same one bound, and the counts of the latter."""
    plain = nn.Linear(width, vocab, bias=bias).to(dtype)
    bound, counts = copy.deepcopy(plain), Counts()
    bound.forward = LogitsHead(bound, "lm_head", counts)
    return plain, bound, counts


def bind_head(model: nn.Module, **wanted: bool) -> Counts:
    """Bind what ``find_head`` finds; returns the counts, which all heads share."""
    wanted = {"fused_linear_cross_entropy": True, "cross_entropy": False} | wanted
    bindings = [item for item in find_head(model, **wanted) if isinstance(item, Binding)]
    assert bindings, f"nothing was found in {type(model).__name__}"
    for binding in bindings:
        bind(binding)
    return getattr(bindings[0].replacement, "materialised", Counts())


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small(model_type: str = "llama", **changes: Any) -> Any:
    """A model of a type of transformers with random weights, in training."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[model_type](**{**SIZES, **changes})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().train()


def pair(model_type: str = "llama", **changes: Any) -> tuple[Any, Any, Counts]:
    """A plain model, the same one with a bound head, and the counts of the latter."""
    plain = small(model_type, **changes)
    bound = copy.deepcopy(plain)
    return plain, bound, bind_head(bound)


def batch(rows: int = 2, length: int = 12, vocab: int = VOCAB, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens, the first of each row not counted."""
    ids = torch.randint(3, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, : length // 3] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients there are; they are taken away."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradients(actual: nn.Module, expected: nn.Module, rtol: float = 1e-4) -> None:
    """Gradients equal but for rounding, on the scale of each tensor; and then none."""
    ours, theirs = gradients(actual), gradients(expected)
    assert ours.keys() == theirs.keys()
    largest = max(float(g.abs().max()) for g in theirs.values())
    for name, grad in theirs.items():
        scale = float(grad.abs().max()) + 1e-3 * largest
        assert float((ours[name] - grad).abs().max()) <= rtol * scale, name


class Sizes(TorchDispatchMode):
    """The largest memory that operations gave, in elements."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeferredLogits) and not leaf.is_meta:
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // leaf.itemsize)
        return result
