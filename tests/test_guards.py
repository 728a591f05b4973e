"""The guard that answers for the call before: what it must see, and what a handle must see beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liger_registry import guards, registry
from liger_registry.errors import UnsupportedOptionError
from liger_registry.guards import make_guard, never
from liger_registry.handle import Handle


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 8, requires_grad=True), torch.randn(8)


OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows": lambda x: torch.randn(5, 8, requires_grad=True),
    "rank": lambda x: torch.randn(1, 4, 8, requires_grad=True),
    "strides": lambda x: torch.randn(8, 4).t().requires_grad_(),
    "dtype": lambda x: x.detach().half().requires_grad_(),
    "requires_grad": lambda x: x.detach(),
    "parameter": lambda x: torch.nn.Parameter(x.detach()),
    "device": lambda x: torch.randn(4, 8, device="meta", requires_grad=True),
    "negated": lambda x: torch._neg_view(x.detach()).requires_grad_(),
    "absent": lambda x: None,
    "no tensor": lambda x: 1.0,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_guard_sees(kind: str) -> None:
    x, w = tensors()
    guard = make_guard((x, w))
    assert guard(x, w)
    assert guard(torch.randn(4, 8, requires_grad=True), w)
    assert not guard(OTHERS[kind](x), w)


def test_a_guard_sees_modes_and_transforms() -> None:
    x, w = tensors()
    guard = make_guard((x, w))
    with Mode():
        assert not guard(x, w)
    seen: list[bool] = []
    torch.vmap(lambda row: (seen.append(guard(x, w)), row)[1])(torch.randn(2, 3))
    assert seen == [False]
    assert guard(x, w)


def test_a_guard_of_a_call_with_absent_tensors() -> None:
    x, w = tensors()
    guard = make_guard((x, None, w))
    assert guard(x, None, w)
    assert not guard(x, None, x)
    assert not guard(x, w, None)  # the caller sees that the second is there, the guard that the third is not


def test_a_torch_without_guards_goes_by_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(torch._C._dynamo.guards, "TensorGuards")
        assert make_guard(tensors()) is never


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> tuple[Handle, list[bool]]:
    """A handle of its own, and for each call whether the guard answered it."""
    handle = registry.get("rms_norm", implementation="eager")
    handle.forget()
    answers: list[bool] = []
    made = guards.make_guard

    def recording(of: Any) -> Callable[..., bool]:
        check = made(of)
        return lambda *args: answers.append(check(*args)) or answers[-1]

    monkeypatch.setattr("liger_registry.handle.make_guard", recording)
    return handle, answers


def test_the_call_before_is_answered_without_a_key(resolved: tuple[Handle, list[bool]]) -> None:
    handle, answers = resolved
    x, w = tensors()
    handle(x, w)
    assert answers == []
    handle(x, w)  # by its key, which leaves the guard
    handle(x, w)
    assert answers == [True]
    handle(x[:2].detach(), w)
    assert answers == [True, False]


CHANGES: dict[str, Callable[[Handle, torch.Tensor, torch.Tensor], object]] = {
    "an option": lambda handle, x, w: handle(x, w, eps=0.5),
    "no weight": lambda handle, x, w: handle(x),
    "offset": lambda handle, x, w: handle(x, w, offset=1.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_guard_does_not_see_is_seen(resolved: tuple[Handle, list[bool]], change: str) -> None:
    handle, _ = resolved
    x, w = tensors()
    for _ in range(3):
        plain = handle(x, w)
        other = CHANGES[change](handle, x, w)
        assert isinstance(other, torch.Tensor)
        assert not torch.allclose(plain, other)
    assert torch.equal(handle(x, w), plain)


def test_state_that_changes_between_calls_is_seen(resolved: tuple[Handle, list[bool]]) -> None:
    handle, _ = resolved
    x, w = tensors()
    for _ in range(3):
        assert handle(x, w).requires_grad
    with torch.no_grad():
        assert not handle(x, w).requires_grad
    with torch.inference_mode():
        assert handle(x, w).is_inference()
    assert handle(x, w).requires_grad
    known = len(handle._memo)
    torch.use_deterministic_algorithms(True)
    try:
        handle(x, w)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(handle._memo) == known + 1
    with registry.use("rms_norm", "functional"):
        handle(x, w)
    assert len(handle._memo) == known + 2
    with pytest.raises(UnsupportedOptionError):
        handle(x, w, 1e-6, 0.0, *range(9))
    with pytest.raises(UnsupportedOptionError):
        handle(x, w, nonsense=1)


@pytest.mark.parametrize("eps", [torch.tensor(1e-6, dtype=torch.float64), [1e-6]], ids=["a tensor", "a list"])
def test_an_option_that_equals_a_number_is_refused_each_time(resolved: tuple[Handle, list[bool]], eps: Any) -> None:
    handle, _ = resolved
    x, w = tensors()
    for _ in range(3):
        handle(x, w, eps=1e-6)
    for _ in range(2):
        with pytest.raises(UnsupportedOptionError, match="eps"):
            handle(x, w, eps=eps)


def test_what_was_forgotten_stays_forgotten(resolved: tuple[Handle, list[bool]]) -> None:
    handle, _ = resolved
    x, w = tensors()
    for _ in range(3):
        handle(x, w)
    handle.forget()
    assert handle._memo.last[0] is never
    handle(x, w)
    assert len(handle._memo) == 1
