"""A model's rotary function with ``rope`` in the place of its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from liger_registry.transformers.engine.calls import call, takes
from liger_registry.transformers.engine.rotations import Case, NotRotary, Rotation, example, gathered, recognise

Tensor = torch.Tensor


class Ready(NamedTuple):
    """Heads as (batch, heads, tokens, head_dim), tables of rank 2 or 3, and how the call had them.

    Attributes:
        q, k, cos, sin: the tensors; k is None where the function was given one.
        wide: whether it rounds once.
        dim: where the heads were, from the end.
        rank: of the heads as given.
    """

    q: Tensor
    k: Tensor | None
    cos: Tensor
    sin: Tensor
    wide: bool
    dim: int
    rank: int


class Turned:
    """Called with exactly the arguments of a function, it gives what that one gives, through ``rope``.

    Sizes, dtypes and layouts that ``rope`` does not take as the function does are left to the function.

    Args:
        function: the model's own.
        rotation: what ``rope`` computes like it.
    """

    def __init__(self, function: Callable[..., Any], rotation: Rotation) -> None:
        self.function = function
        self.rotation = rotation
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __repr__(self) -> str:
        return f"<{self.__name__} as rope of {self.rotation.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """The turned heads, as the function returns them."""
        ready = self.ready(args, kwargs)
        if ready is None:
            return self.function(*args, **kwargs)
        cos, sin = self.rotation.pairs.tables(ready.cos, ready.sin)
        q_out, k_out = self._called(ready.q, ready.k, cos, sin, ready.wide)
        if ready.k is None and self.rotation.alone is not False:
            return before(q_out, ready)
        return before(q_out, ready), None if k_out is None else before(k_out, ready)

    def ready(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Ready | None:
        """A call's tensors as ``rope`` takes them, but for the pairs of columns; None if it is no case for it."""
        rotation = self.rotation
        roles = rotation.roles
        given = self._bound(args, kwargs)
        if given is None:
            return None
        q = given[roles.heads[0]]
        k = given.get(roles.heads[1]) if len(roles.heads) == 2 else None
        if not takes(q, *[given[name] for name in roles.tables]) or not (k is None or takes(k)):
            return None
        if len(roles.heads) == 2 and k is None and rotation.alone is None:
            return None
        if len(roles.tables) == 1 and not given[roles.tables[0]].is_complex():
            return None
        cos, sin = gathered(roles, given)
        wide = rotation.wide.get((q.dtype, cos.dtype))
        if wide is None or cos.dtype != sin.dtype or cos.requires_grad or sin.requires_grad or q.device != cos.device:
            return None
        dim, rank = self._heads_dim(q, cos, given), q.dim()
        if dim is None or (k is not None and (k.dtype != q.dtype or k.dim() != rank)):
            return None
        if cos.dim() == 4:
            if cos.shape[1] != 1:
                return None
            cos, sin = cos.squeeze(1), sin.squeeze(1)
        made = Ready(_as_batch(q, dim), None if k is None else _as_batch(k, dim), cos, sin, wide, dim, rank)
        return made if _fits(made, rotation) else None

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments by name; None if it would not take them, or a tensor is missing."""
        roles = self.rotation.roles
        names = roles.names
        if len(args) > len(names):
            return None
        given: dict[str, Any] = {names[n]: value for n, value in enumerate(args)}
        for name, value in kwargs.items():
            if name in given or name not in names:
                return None
            given[name] = value
        for name in (roles.heads[0], *roles.tables, *roles.needed):
            if name not in given:
                return None
        return given

    def _heads_dim(self, q: Tensor, cos: Tensor, given: dict[str, Any]) -> int | None:
        """Where the heads are, from the end; None for an order that ``rope`` does not know."""
        roles = self.rotation.roles
        if not roles.dim:
            return self.rotation.layouts.get((q.dim(), cos.dim()))
        dim = given.get(roles.dim, self.rotation.dim)
        if not isinstance(dim, int) or cos.dim() not in (2, 3) or q.dim() not in (3, 4) or cos.dim() >= q.dim():
            return None
        # An unsqueezed table has one dimension more than it has now.
        dim = dim - cos.dim() - 1 if dim >= 0 else dim
        return dim if dim in (-3, -2) else None

    def _called(
        self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, wide: bool
    ) -> tuple[Tensor, Tensor | None]:
        pairs = self.rotation.pairs
        options = pairs.options(wide)
        passed: list[Tensor] = []
        if pairs.last:
            width = cos.shape[-1] * 2 if pairs.half else cos.shape[-1]
            passed = [x[..., : x.shape[-1] - width] for x in (q, k) if x is not None]
            q, k = q[..., -width:], None if k is None else k[..., -width:]
        q_out, k_out = call("rope", pairs.heads(q), None if k is None else pairs.heads(k), cos, sin, **options)
        if passed:
            q_out = torch.cat((passed[0], q_out), -1)
            k_out = torch.cat((passed[1], k_out), -1) if k is not None else k_out
        return q_out, None if k is None else k_out


def _as_batch(x: Tensor, dim: int) -> Tensor:
    """Heads as (batch, heads, tokens, head_dim)."""
    x = x.unsqueeze(0) if x.dim() == 3 else x
    return x.transpose(1, 2) if dim == -2 else x


def before(x: Tensor, ready: Ready) -> Tensor:
    """Turned heads in the order in which the function was given them."""
    x = x.transpose(1, 2) if ready.dim == -2 else x
    return x.squeeze(0) if ready.rank == 3 else x


def _fits(ready: Ready, rotation: Rotation) -> bool:
    """Whether sizes are as in the comparison, where nothing is broadcast but over heads and the batch."""
    q, k, cos, sin = ready[:4]
    if cos.shape != sin.shape or cos.shape[-2] != q.shape[2]:
        return False
    if cos.dim() == 3 and cos.shape[0] != 1 and cos.shape[0] != q.shape[0]:
        return False
    if k is not None and (k.shape[0] != q.shape[0] or k.shape[2:] != q.shape[2:] or k.device != q.device):
        return False
    width = rotation.pairs.width(cos.shape[-1])
    if width == 0 or width % 2 or (rotation.pairs.first and cos.shape[-1] % 2):
        return False
    return width == q.shape[-1] or (rotation.pairs.partial and width < q.shape[-1])


# What holds its function stays with it; there are as many as modeling files were loaded.
_turned: dict[Callable[..., Any], Turned | str] = {}


def turned(function: Callable[..., Any]) -> Turned:
    """The function with ``rope`` in it; the same object for the same function.

    Raises:
        NotRotary: ``rope`` does not compute what it computes, or a first call gave something else.
    """
    if function not in _turned:
        try:
            _turned[function] = _confirmed(Turned(function, recognise(function)))
        except NotRotary as error:
            _turned[function] = error.reason
    found = _turned[function]
    if isinstance(found, str):
        raise NotRotary(found)
    return found


def _confirmed(made: Turned) -> Turned:
    """The same, once values and gradients of a call agree with the function's."""
    rotation = made.rotation
    ours = Turned(_refuse, rotation)
    order = next(iter(rotation.layouts.items()), ((4, 3), -3))
    case = Case(order[1], order[0], 1 if rotation.roles.dim else None)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        tables = torch.float32 if len(rotation.roles.tables) == 1 else dtype
        if (dtype, tables) not in rotation.wide:
            continue
        arguments = example(rotation.roles, rotation.pairs, case, (dtype, tables))
        expected, found = (_derived(function, rotation.roles.heads, arguments) for function in (made.function, ours))
        for a, b in zip(expected, found, strict=True):
            if a.shape != b.shape or a.dtype != b.dtype or (a - b).float().norm() > tolerance * a.float().norm():
                raise NotRotary("rope gave other numbers or gradients than it does")
    return made


def _refuse(*args: object, **kwargs: object) -> None:
    raise NotRotary("rope does not take what it takes")


def _derived(function: Callable[..., Any], heads: tuple[str, ...], arguments: dict[str, Any]) -> list[Tensor]:
    """What a function returns for these arguments, and the gradients of the heads."""
    with torch.inference_mode(False), torch.enable_grad(), _disable_current_modes():
        given = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
        leaves = [given[name].requires_grad_() for name in heads]
        results = function(**given)
        results = list(results) if isinstance(results, tuple) else [results]
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(x.shape, generator=generator, device="cpu").to(x.dtype) for x in results]
        return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, upstream)]
