"""The output head of a language model: finding it, and binding a forward that leaves the logits out.

The bound forward returns deferred logits (``deferred``), from which a loss is computed without the logits. So it serves
every model whose loss is PyTorch's cross-entropy of what its head gives, in its own code, in ``loss_function`` or in a
trainer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from liger_registry.handle import PLAIN
from liger_registry.transformers.engine.binding import Binding, place
from liger_registry.transformers.engine.deferred import defer
from liger_registry.transformers.engine.headcall import HeadCall
from liger_registry.transformers.engine.plain_loss import code_names, find_losses
from liger_registry.transformers.engine.report import Row
from liger_registry.transformers.engine.requests import take
from liger_registry.transformers.engine.spread import Forward, gathering_forward, local, rows_of, spread_of

FUSED, PLAIN_LOSS = "fused_linear_cross_entropy", "cross_entropy"
_HOW = "a linear output head; its logits are left out where a loss is all that is made of them"
_COMPILED = ", but not in compiled code, since the model makes its CrossEntropyLoss in each call"
_INFRA = tuple(torch._C._TorchDispatchModeKey.__members__.values())  # FakeTensor's, proxies', functionalisation's
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Counts(Counter[str]):
    """How often logits were computed, by the place that asked; copies of a head go on counting in the same."""

    def __deepcopy__(self, memo: object) -> Counts:
        return self


class LogitsHead:
    """The forward of a linear head that leaves its logits out.

    Args:
        module: the head.
        name: its path in the model.
        materialised: the counts of the report.
        owner: the model whose head it is.
        traceable: whether the logits may be left out of graphs too.
        around: the forward it takes the place of, where that is tensor parallelism's and not the class's own.
    """

    def __init__(
        self,
        module: nn.Linear,
        name: str,
        materialised: Counts,
        owner: nn.Module | None = None,
        traceable: bool = True,
        around: Forward | None = None,
    ) -> None:
        self.module, self.name, self.materialised = module, name, materialised
        self.owner, self.traceable, self.around = owner, traceable, around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Deferred logits; the real ones where a tensor without data cannot be, or is no use."""
        module = self.module
        if torch.compiler.is_compiling():
            if self.around is not None:
                return self.around(*args, **kwargs)
            from liger_registry.transformers.engine.traced import traced

            return traced(self, args, kwargs)
        hidden: Any = args[0] if args else kwargs.get("input")
        request = take(module)
        if request is not None:
            return request.answer(module, hidden)
        weight: Any = module.weight
        bias: Any = module.bias
        spread = None if type(weight) in PLAIN else spread_of(weight)
        if spread is not None:
            hidden, weight, bias = rows_of(hidden, spread, self.around is not None), local(weight), local(bias)
        dtype = _dtype(hidden, weight, bias) if len(args) + len(kwargs) == 1 else None
        if dtype is None:
            return self.around(*args, **kwargs) if self.around else type(module).forward(module, *args, **kwargs)
        call = HeadCall(module, self.name, self.materialised, hidden, dtype, module.weight.shape[0])
        call.outer, call.spread = self.outer(), spread
        own = type(weight) is nn.Parameter and module._parameters.get("weight") is weight
        if call.outer is module and not own and spread is None:
            call.derived = weight, bias
        return defer(call, weight, bias)

    def outer(self) -> nn.Module:
        """The module to call for the head's weights to be there: one that FSDP's first version put around it, or it."""
        found = self.module if self.owner is None else _embeddings(self.owner)
        return found if getattr(found, "_fsdp_wrapped_module", None) is self.module else self.module


def _dtype(hidden: object, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The dtype the logits of a call have; None if they are to be computed at once."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or _tracing():
        return None
    if type(hidden) not in PLAIN or type(weight) not in PLAIN or not (bias is None or type(bias) in PLAIN):
        return None
    assert isinstance(hidden, Tensor)
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or hidden.device != weight.device:
        return None
    if hidden.device.type == "meta" or hidden.numel() == 0:
        return None
    if not torch.is_grad_enabled() and (hidden.dim() == 1 or hidden.shape[-2] == 1):
        return None  # one token a sequence is generation, which wants it
    given = {t.dtype for t in (hidden, weight, bias) if t is not None}
    if torch.is_autocast_enabled(hidden.device.type) and torch.float64 not in given:
        given = {torch.get_autocast_dtype(hidden.device.type)}
    dtype = given.pop()
    return None if given or dtype not in _DTYPES else dtype  # operands that do not fit: PyTorch's own error


def _tracing() -> bool:
    """Whether operations are being written down rather than run."""
    if torch._C._is_tracing():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and any(torch._C._get_dispatch_mode(k) is not None for k in _INFRA)


def find(model: nn.Module, enabled: Mapping[str, bool]) -> Iterable[Binding | Row]:
    """The heads of a model, or its loss; see ``find_head``."""
    return find_head(
        model,
        fused_linear_cross_entropy=enabled.get(FUSED, True),
        cross_entropy=enabled.get(PLAIN_LOSS, True),
    )


def find_head(model: nn.Module, *, fused_linear_cross_entropy: bool, cross_entropy: bool) -> list[Binding | Row]:
    """What to bind of the output heads in a model, and why not where that is impossible.

    Args:
        model: a model of transformers, or a module with such models in it.
        fused_linear_cross_entropy: whether heads are to leave their logits out.
        cross_entropy: whether the models' losses may use the operation on real logits, where heads are left alone.
    """
    found: list[Binding | Row] = []
    counts = Counts()
    names = {id(module): name for name, module in model.named_modules()}
    owners = list(_owners(model))
    heads: dict[int, tuple[nn.Module, list[nn.Module]]] = {}
    for owner in owners if fused_linear_cross_entropy else ():
        for head in _linears(owner):
            heads.setdefault(id(head), (head, []))[1].append(owner)
    fused = False
    for head, theirs in heads.values():
        name, reason, around = names.get(id(head), ""), _why_not(head), gathering_forward(head)
        attribute = place(head) if around is None else "forward"
        if reason or attribute is None or not isinstance(head, nn.Linear):
            found.append(Row(FUSED, name, False, reason, type(head).__name__))
            continue
        criterion = any(_makes_criterion(type(owner)) for owner in theirs)
        bound = LogitsHead(head, name, counts, theirs[0], not criterion, around)
        found.append(Binding(FUSED, name, head, attribute, bound, _HOW + _COMPILED if criterion else _HOW))
        fused = True
    if cross_entropy and not fused:
        found += find_losses(owners, names)
    return found


def _makes_criterion(kind: type) -> bool:
    """Whether a model makes a ``CrossEntropyLoss`` in a method of its own, and not once in its construction.

    Dynamo has a way of its own with this class where it is made in the graph, which takes tensors alone.
    """
    methods: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        methods.update(vars(base))  # what is overridden does not run
    return any(callable(m) and name != "__init__" and code_names(m, "CrossEntropyLoss") for name, m in methods.items())


def _owners(model: nn.Module) -> Iterator[nn.Module]:
    """The models in a module that have an output head."""
    for module in model.modules():
        if callable(getattr(type(module), "get_output_embeddings", None)) and _embeddings(module) is not None:
            yield module


def _embeddings(owner: Any) -> Any:  # noqa: ANN401
    try:
        return owner.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None  # a model of another kind, whose method does not know it


def _linears(owner: nn.Module) -> list[nn.Module]:
    """The layers that give an owner's logits: its head, or those that a wrapper of it chooses from."""
    head = _embeddings(owner)
    saved = getattr(head, "modules_to_save", None)
    if isinstance(saved, nn.ModuleDict):  # PEFT: a copy of the head for each adapter, beside the original
        return [head.original_module, *saved.values()]
    if isinstance(head, (nn.ModuleList, list, tuple)):
        return [h for h in head if isinstance(h, nn.Module)]
    return [head] if isinstance(head, nn.Module) else []


def _why_not(head: nn.Module) -> str:
    """Why a head is left alone; "" if it need not be."""
    kind = type(head)
    if isinstance(getattr(head, "base_layer", None), nn.Module):
        return "its logits are the sum of a linear layer's and an adapter's"
    if not isinstance(head, nn.Linear) or kind.forward is not nn.Linear.forward:
        return f"the forward of {kind.__name__} is not that of torch.nn.Linear"
    if nn.utils.parametrize.is_parametrized(head):
        return "its weight is parametrised"
    weight = head._parameters.get("weight")
    if weight is None or (type(weight.data) is not Tensor and spread_of(weight) is None):
        return f"its weight is a {type(weight).__name__}"
    if weight.dtype not in _DTYPES:
        return f"its weight is {weight.dtype}"
    there = place(head) is not None or gathering_forward(head) is not None
    return "" if there else "its forward was replaced by somebody else"
