"""``apply``: adapters are asked in order, bound on instances, reported, and taken out again."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from liger_registry.errors import AdapterError, PluginWarning, RegistrationError
from liger_registry.transformers import Adapter, Binding, Row, applied_to, apply
from liger_registry.transformers.engine import adapters as module
from liger_registry.transformers.engine.adapters import Adapters
from liger_registry.transformers.engine.binding import place


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


class Other(nn.Module):
    def forward(self, x):
        return x - 1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.other = Twice(), Twice(), Other()

    def forward(self, x):
        return self.other(self.second(self.first(x)))


class Sum:
    """A replacement that says that it ran."""

    def __init__(self, owner):
        self.owner, self.calls = owner, 0

    def __call__(self, x):
        self.calls += 1
        return x + x


def find_twice(model, enabled):
    for path, part in model.named_modules():
        if isinstance(part, Twice) and enabled["swiglu"]:
            if place(part) is None:
                yield Row("swiglu", path, False, "its forward was replaced", "Twice")
            else:
                yield Binding("swiglu", path, part, "forward", Sum(part), how="twice is a sum")
        elif isinstance(part, Other) and enabled["swiglu"]:
            yield Row("swiglu", path, False, "no known formula", "Other")


def find_nothing(model, enabled):
    return ()


OTHERS = (
    "rms_norm",
    "layer_norm",
    "rope",
    "geglu",
    "relu_squared",
    "cross_entropy",
    "fused_linear_cross_entropy",
    "extra",
)


@pytest.fixture
def known(monkeypatch):
    """Adapters of the tests' own in place of those installed."""
    found = Adapters()
    found.register(Adapter("twice", ("swiglu",), find_twice))
    found.register(Adapter("nothing", OTHERS, find_nothing))
    monkeypatch.setattr(module, "_loaded", found)
    return found


def state(model):
    return [(name, dict(part.__dict__)) for name, part in model.named_modules()]


def test_instances_change_and_change_back(known):
    model, plain = Model(), Model()
    before, forward = state(model), Twice.forward
    x = torch.arange(3.0)
    applied = apply(model)
    assert [row.module for row in applied.report.applied("swiglu")] == ["first", "second"]
    assert [(row.module, row.reason) for row in applied.report.skipped()] == [("other", "no known formula")]
    assert torch.equal(model(x), plain(x))
    assert model.first.forward.__self__.calls == 1
    assert Twice.forward is forward
    assert "forward" not in plain.first.__dict__
    assert applied_to(model) is applied
    applied.revert()
    applied.revert()
    assert state(model) == before
    assert applied_to(model) is None


def test_as_a_context_manager(known):
    model = Model()
    with apply(model) as applied:
        assert "forward" in model.first.__dict__
    assert "forward" not in model.first.__dict__
    assert len(applied.report.applied()) == 2


def test_the_report_prints_like_modules_in_one_line(known):
    report = apply(Model()).report
    assert len(report) == 3 == len(list(report))
    lines = str(report).splitlines()
    assert lines[0] == "Model"
    assert lines[2].split() == ["swiglu", "yes", "first", "and", "1", "more", "Twice", "twice", "is", "a", "sum"]
    assert lines[3].split()[:3] == ["swiglu", "no", "other"]
    assert repr(report) == "<Report of Model: swiglu x 2; 1 skipped>"


def test_what_is_left_out_is_not_looked_for(known):
    model = Model()
    assert len(apply(model, swiglu=False).report) == 0
    assert "forward" not in model.first.__dict__


def test_strict_raises_for_what_was_skipped_and_changes_nothing(known):
    model = Model()
    before = state(model)
    with pytest.raises(AdapterError, match="no known formula"):
        apply(model, strict=True)
    assert state(model) == before
    del model.other
    model.other = nn.Identity()
    apply(model, strict=True).revert()
    with pytest.raises(AdapterError, match="rope: nothing in the model computes it"):
        apply(model, rope=True, strict=True)


def test_without_strict_what_is_asked_for_may_be_missing(known):
    assert apply(Model(), rope=True).report.applied("rope") == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"swiglue": True}, "candidates: cross_entropy, extra, fused_linear_cross_entropy, geglu, layer_norm"),
        ({"cross_entropy": True, "fused_linear_cross_entropy": True}, "cannot both be applied"),
    ],
)
def test_keywords_are_checked(known, options, match):
    with pytest.raises(AdapterError, match=match):
        apply(Model(), **options)


def test_operations_without_an_adapter_are_reported(known):
    known._all.pop()
    report = apply(Model()).report
    orphans = {row.op for row in report.skipped() if row.reason == "no installed adapter looks for it"}
    assert orphans == {*OTHERS} - {"extra"}
    assert not apply(Model(), **dict.fromkeys({*OTHERS} - {"extra"}, False)).report.skipped("rope")
    with pytest.raises(AdapterError, match="rope at the model: no installed adapter"):
        apply(Model(), rope=True, swiglu=False, strict=True)


def test_only_models_are_taken(known):
    with pytest.raises(AdapterError, match="not str"):
        apply("llama")


def test_twice_is_refused_and_once_more_after_revert_is_not(known):
    model = Model()
    first = apply(model)
    with pytest.raises(AdapterError, match="already"):
        apply(model)
    first.revert()
    apply(model)


def test_an_adapter_that_raises_hides_no_other(known):
    def broken(model, enabled):
        yield Row("rope", "somewhere", False, "never seen")
        raise KeyError("attribute")

    known._all.insert(0, ("somebody", Adapter("broken", ("rope",), broken)))
    with pytest.warns(PluginWarning, match="adapter broken failed on Model: KeyError"):
        report = apply(Model()).report
    assert len(report.applied("swiglu")) == 2
    assert [row.reason for row in report.skipped("rope")] == ["adapter broken failed: KeyError: 'attribute'"]


def test_a_plugin_comes_before_ours_and_what_it_bound_is_not_reported_again(known):
    def first_only(model, enabled):
        yield Binding("swiglu", "first", model.first, "forward", Sum(model.first), how="the plugin's")

    known.stage("plugin", lambda adapters: adapters.register(Adapter("its", ("swiglu",), first_only)))
    report = apply(Model()).report
    assert [(row.module, row.reason) for row in report.applied()] == [
        ("first", "the plugin's"),
        ("second", "twice is a sum"),
    ]
    assert [row.module for row in report.skipped()] == ["other"]


def test_a_plugin_that_fails_to_register_leaves_nothing(known):
    def register(adapters):
        adapters.register(Adapter("its", ("swiglu",), find_nothing))
        adapters.register("no adapter")

    with pytest.raises(RegistrationError, match="no adapter"):
        known.stage("plugin", register)
    assert len(known.ordered) == 2
    with pytest.raises(RegistrationError, match="two adapters named twice"):
        known.register(Adapter("twice", (), find_nothing))


def test_copies_and_pickles_are_patched_and_revert_on_their_own(known):
    model = Model()
    apply(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert made.first.forward is not model.first.forward
        assert made.first.forward.__self__.owner is made.first
        applied_to(made).revert()
        assert "forward" not in made.first.__dict__
    assert "forward" in model.first.__dict__


def test_what_somebody_wrapped_later_is_left(known):
    model = Model()
    applied = apply(model)
    inner = model.first.forward
    model.first.forward = wrapper = lambda x: inner(x)
    applied.revert()
    assert model.first.forward is wrapper
    assert "replaced by somebody else" in applied.report.skipped()[-1].reason
    assert "forward" not in model.second.__dict__


def test_under_a_wrapper_of_accelerate_the_inner_forward_is_replaced(known):
    model = Model()
    old = model.first._old_forward = model.first.forward
    model.first.forward = lambda x: model.first._old_forward(x) + 1
    assert place(model.first) == "_old_forward"
    model.first._old_forward = lambda x: x
    assert place(model.first) is None
    model.first._old_forward = old
    wrapped_later = Model()
    applied = apply(wrapped_later, swiglu=None)
    ours = wrapped_later.first._old_forward = wrapped_later.first.forward
    wrapped_later.first.forward = lambda x: wrapped_later.first._old_forward(x)
    applied.revert()
    assert wrapped_later.first._old_forward is not ours
    assert torch.equal(wrapped_later(torch.ones(1)), Model()(torch.ones(1)))
