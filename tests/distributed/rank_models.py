"""Tiny models, their global batch, and what one rank makes of it: the loss and gradients the others are held to."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from heads import VOCAB, small
from torch import Tensor, nn

ROWS, LENGTH = 8, 12
# A gradient may be this far from float64's, by the norm of each parameter's: so many times one rank's own error in the
# same dtype, and not less than the floor. Sums over ranks are in another order than on one.
TIMES, FLOOR = 4.0, 2e-5

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
}


@dataclass(frozen=True)
class Model:
    """A model of a test.

    Attributes:
        family: the type in transformers.
        head: what its head is: trainable, tied, frozen, or lora.
        layers: how many it has.
        kv_heads: and heads of keys.
    """

    family: str = "llama"
    head: str = "trainable"
    layers: int = 2
    kv_heads: int = 4

    def build(self) -> Any:
        """The model with its weights, the same on every rank, in training; without LoRA."""
        changes = {**FAMILIES[self.family], "num_hidden_layers": self.layers, "num_key_value_heads": self.kv_heads}
        model = small(self.family, tie_word_embeddings=self.head == "tied", use_cache=False, **changes)
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:  # far from the linear part of everything
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
                else:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        if self.head == "frozen":
            model.lm_head.weight.requires_grad_(False)
        return model

    def adapted(self, model: Any) -> Any:
        """The model with LoRA where its head is to have it, else the model."""
        if self.head != "lora":
            return model
        import peft

        torch.manual_seed(7)
        config = peft.LoraConfig(
            r=2, lora_alpha=4, lora_dropout=0.0, init_lora_weights=False, target_modules=["q_proj", "v_proj", "lm_head"]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft.get_peft_model(model, config).train()


def global_batch() -> dict[str, Tensor]:
    """Tokens and labels of all ranks; rows count different numbers of tokens, one of them none."""
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, : 2 * row % LENGTH] = -100
    labels[ROWS - 2] = -100
    return {"input_ids": ids, "labels": labels}


def counted(labels: Tensor) -> int:
    """How many tokens a loss of next tokens counts."""
    return int((labels[:, 1:] != -100).sum())


@dataclass(frozen=True)
class Reference:
    """What one rank gets: in float64, and how far the same in another dtype is from it."""

    loss: float
    gradients: dict[str, Tensor]
    errors: dict[str, float]
    loss_error: float


def clean(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    for part in ("_fsdp_wrapped_module.", "module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(part, "")
    return name


def run_once(model: Any, **inputs: Any) -> tuple[float, dict[str, Tensor]]:
    output = model(**inputs)
    output.loss.backward()
    return output.loss.item(), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


@functools.lru_cache(maxsize=64)
def reference(model: Model, dtype: torch.dtype = torch.float32) -> Reference:
    """The plain model over the whole batch on one rank."""
    made, inputs = model.adapted(model.build()), global_batch()
    lower = copy.deepcopy(made).to(dtype)
    if "moe" in model.family:
        made.set_experts_implementation("eager")  # PyTorch's grouped products have no float64
    loss, exact = run_once(made.double(), **inputs)
    own_loss, own = run_once(lower, **inputs)
    return Reference(loss, exact, distances(own, exact), abs(own_loss - loss) / abs(loss))


def distances(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """How far each gradient is, by norms; what hardly takes part is measured by the largest."""
    largest = max(float(g.norm()) for g in exact.values())
    found = {}
    for name, right in exact.items():
        given = gradients.get(name)
        scale = max(float(right.norm()), 1e-4 * largest)
        found[name] = math.inf if given is None or given.shape != right.shape else float((given - right).norm()) / scale
    return found


def held(model: Model, loss: float, gradients: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> list[str]:
    """What is wrong with a loss and gradients; empty if they are one rank's."""
    expected = reference(model, dtype)
    floor = FLOOR * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps / (1 if dtype == torch.float32 else 100)
    wrong = []
    error = abs(loss - expected.loss) / abs(expected.loss)
    if not error <= max(TIMES * expected.loss_error, floor):
        wrong.append(f"loss {loss}, not {expected.loss}")
    for name, off in distances(gradients, expected.gradients).items():
        limit = max(TIMES * expected.errors[name], floor)
        if not off <= limit:
            wrong.append(f"{name}: off by {off:.1e}, limit {limit:.1e}")
    if extra := set(gradients) - set(expected.gradients):
        wrong.append(f"gradients that one rank has not: {sorted(extra)}")
    return wrong


def whole(tensor: Tensor) -> Tensor:
    """A gradient, from all ranks, in float64."""
    gather = getattr(tensor, "full_tensor", None)
    full: Tensor = tensor if gather is None else gather()
    return full.double()


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Every gradient, whole; one flat tensor of FSDP has zeros for the frozen ones in it too."""
    trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad and p.grad is not None]
    return {clean(n): whole(p.grad) for n, p in trained}
