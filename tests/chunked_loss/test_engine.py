"""What the engine promises of every loss: nothing compiles, nothing transforms, memory by shape, settings as given."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import preference as p
import pytest
import torch
from linear_losses import Live
from preference_losses import EVERY, LOSSES, numbers

import liger_registry
from liger_registry import Device, registry
from liger_registry.chunked_loss import LinearPreferenceLoss, engine
from liger_registry.kernels.linear_heuristics import VOCAB_SLABS, vocab_slab_bytes
from liger_registry.ops.linear_sequence_loss import OP, described
from liger_registry.tuning.arguments import META, Arguments

ROOT = Path(liger_registry.__file__).parent
PATH = sorted(
    [
        *ROOT.glob("chunked_loss/*.py"),
        *ROOT.glob("kernels/group_*.py"),
        *ROOT.glob("kernels/linear_*.py"),
        *ROOT.glob("kernels/compact.py"),
        *ROOT.glob("portable/linear_*.py"),
        *ROOT.glob("portable/fused_linear_jsd.py"),
        *ROOT.glob("ops/*linear_*.py"),
        *ROOT.glob("ops/_sequence_loss_sizes.py"),
    ]
)
COMPILES = ("torch.compile", "torch.func", "torch._functorch", "functorch", "torch._dynamo", "torch.jit", "torch.vmap")


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names_in(source):
    """Dotted names and imported modules of a source, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield dotted(node), node.lineno
        elif isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{name.name}", node.lineno) for name in node.names)


def compiling(source):
    return [(name, line) for name, line in names_in(source) if any(f"{name}.".startswith(f"{c}.") for c in COMPILES)]


@pytest.mark.parametrize("path", PATH, ids=lambda path: path.name)
def test_nothing_names_a_compiler_or_a_transform(path):
    assert not compiling(path.read_text())


@pytest.mark.parametrize("line", ["torch.compile(f)", "import torch.func", "from torch import func", "torch.vmap(f)"])
def test_such_names_are_found(line):
    assert compiling(line)


@pytest.mark.ci
def test_no_loss_loads_a_compiler():
    """Forward and backward of every loss in a process of its own."""
    helpers = Path(__file__).parents[1] / "helpers"
    code = f"""
        import sys
        sys.path.insert(0, {str(helpers)!r})
        import torch
        import preference as p
        from liger_registry.chunked_loss import (
            LigerFusedLinearCosineSimilarityLoss, LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss,
            LigerFusedLinearJSDLoss, LigerFusedLinearKTOLoss, LigerFusedLinearORPOLoss, LinearDistillationLoss,
        )
        m = p.model()
        refs = m.ref_hidden, m.ref_weight, m.ref_bias
        ids, mask = m.target.clamp(min=0), (m.target >= 0).long()
        losses = [
            LigerFusedLinearORPOLoss()(m.weight, m.hidden, m.target, m.bias)[0],
            LigerFusedLinearDPOLoss()(m.weight, m.hidden, m.target, m.bias, *refs)[0],
            LigerFusedLinearDPOLoss(loss_type="aot")(m.weight, m.hidden, m.target, m.bias, *refs)[0],
            LigerFusedLinearKTOLoss()(m.hidden, m.weight, m.target, m.bias, mask[:, 0])[0],
            LigerFusedLinearGRPOLoss()(m.hidden, m.weight, ids, mask, torch.ones(6), m.bias, None, None, *refs)[0],
            *(
                loss(m.hidden, m.weight, m.ref_hidden, m.ref_weight, m.target, m.bias, m.ref_bias)
                for loss in (
                    LigerFusedLinearJSDLoss(),
                    LigerFusedLinearCosineSimilarityLoss(),
                    LinearDistillationLoss(lambda s, t: (s - t).square().mean(-1)),
                )
            ),
        ]
        for loss in losses:
            torch.autograd.grad(loss, p.leaves(m))
        found = {{"torch._dynamo", "torch._inductor"}} & set(sys.modules)
        assert not found, found
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=240)


# -- memory, by shape --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "vocab", "budget"),
    [
        (512, 16032, 128 << 20),
        pytest.param(512, 16032, 16 << 20, marks=pytest.mark.ci),  # less than any slab takes
        pytest.param(4096, 128256, None, marks=pytest.mark.ci),  # of 3.9 GiB of logits
        pytest.param(4096, 128256, 1 << 30, marks=pytest.mark.ci),
    ],
)
def test_one_pair_of_2_x_8192_tokens_stays_within_the_budget(hidden, vocab, budget):
    """Run on tensors without values, whose memory is counted by shape."""
    description, needs = described((16384, hidden, vocab, 16384), "bfloat16"), (True, True, False)
    if budget is None:
        budget = OP.budget(OP.problem(description, "forward", "grad_in_forward", needs))
    problem = OP.problem(description, "forward", "grad_in_forward", needs, budget)
    decision = registry.decide(problem, Device.parse("h200"))
    chosen, config = decision.implementation, decision.config
    told = {**OP.options_of(problem), "ways": 2, "length": 8192}
    tensors = Arguments.of(OP, problem, META).tensors
    with registry.stages_of():
        launch = chosen.bind(config, Device.parse("cpu"), told, needs, problem)
        with Live() as live:
            results = launch(*tensors)
    held = sum(t.untyped_storage().nbytes() for t in results if t is not None)
    assert held >= (16384 + vocab) * hidden * 2  # the gradients
    assert chosen.name == "vocab_slabs"
    declared = vocab_slab_bytes(problem, int(config.slabs))
    assert live.peak - held <= declared
    assert declared <= budget or config.slabs == VOCAB_SLABS[-1]
    assert declared < 16384 * vocab * 2 / 2  # half of what all logits take


# -- settings ----------------------------------------------------------------------------------------------------------


def scaled(pairs, nll_weight=1.0, weighting=1.0, shape=None, function=None):
    """A loss whose settings have the names that the engine uses itself."""
    factor = nll_weight * weighting * (1.0 if shape is None else sum(shape)) * (1.0 if function is None else 3.0)
    return -factor * (pairs.chosen - pairs.rejected)


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({}, 1.0),
        ({"nll_weight": 2.0, "weighting": 0.5}, 1.0),
        ({"nll_weight": 2.0}, 2.0),
        ({"shape": (1, 2)}, 3.0),  # JSON would make a list of it
        ({"shape": torch.tensor([2.0, 3.0])}, 5.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("separable", [True, False])
def test_settings_arrive_as_they_were_given(settings, factor, separable):
    m = p.model()
    loss, _ = LinearPreferenceLoss(scaled, separable=separable, **settings)(m.weight, m.hidden, m.target, m.bias)
    c, r = p.logps(m.hidden, m.weight, m.bias, m.target).sum(-1).chunk(2)
    torch.testing.assert_close(loss, -factor * (c - r).mean())


def test_what_json_would_change_goes_the_other_way(monkeypatch):
    seen, get = [], registry.get
    monkeypatch.setattr(registry, "get", lambda op, **told: seen.append(op) or get(op, **told))
    monkeypatch.setitem(sys.modules, "own_module", sys.modules[__name__])
    monkeypatch.setattr(scaled, "__module__", "own_module")
    m = p.model()
    for settings in ({"shape": [1, 2]}, {"shape": (1, 2)}, {"shape": torch.ones(2)}, {"nll_weight": float("nan")}):
        LinearPreferenceLoss(scaled, separable=True, **settings)(m.weight, m.hidden, m.target, m.bias)
    assert seen == ["linear_sequence_loss", "linear_logp", "linear_logp", "linear_logp"]


def test_a_function_that_is_defined_again_is_the_new_one(monkeypatch):
    """As in a notebook, whose module stays and whose functions change."""
    monkeypatch.setitem(sys.modules, "own_notebook", sys.modules[__name__])
    m = p.model()
    found = []
    for factor in (1.0, 2.0):

        def cell(pairs, factor=factor):
            return -factor * (pairs.chosen - pairs.rejected)

        cell.__module__, cell.__qualname__ = "own_notebook", "cell"
        monkeypatch.setattr(sys.modules[__name__], "cell", cell, raising=False)
        assert engine.path_of(cell) == "own_notebook:cell"
        found.append(LinearPreferenceLoss(cell, separable=True)(m.weight, m.hidden, m.target, m.bias)[0])
    torch.testing.assert_close(found[1], 2 * found[0])


@EVERY
def test_evaluation_computes_no_gradients(name, monkeypatch):
    """Without a graph the same number comes from the statistics alone."""
    from liger_registry.kernels import linear_rows, linear_slabs

    m = p.model()
    right = numbers(LOSSES[name], m)[0]
    monkeypatch.setattr(linear_rows, "gradient", None)
    monkeypatch.setattr(linear_slabs, "gradient", None)
    with torch.no_grad():
        loss, _ = LOSSES[name](m)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, right)
