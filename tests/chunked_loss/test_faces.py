"""Names, arguments, defaults and what is returned, against facts of liger-kernel 0.8.5 and TRL 1.16."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import textwrap

import preference as p
import pytest
import torch

from liger_registry import chunked_loss
from liger_registry.chunked_loss import LinearPreferenceLoss, functional
from liger_registry.chunked_loss import cpo as cpo_formula
from liger_registry.chunked_loss import dpo as dpo_formula
from liger_registry.chunked_loss import kto as kto_formula
from liger_registry.chunked_loss import orpo as orpo_formula
from liger_registry.chunked_loss import simpo as simpo_formula
from liger_registry.chunked_loss.grpo import Policy
from liger_registry.runtime import registry

#: Arguments and defaults of liger-kernel 0.8.5, in order, without self and ctx.
LIGER = {
    "LigerFusedLinearCPOLoss.__init__": (
        "ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, compute_nll_loss=True, compiled=True, "
        "average_log_prob=False, chunk_size=1"
    ),
    "LigerFusedLinearCPOLoss.forward": ("lin_weight, _input, target, bias=None"),
    "LigerFusedLinearCosineSimilarityLoss.__init__": (
        "weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True, "
        "chunk_size=1024, return_soft_hard_loss=False"
    ),
    "LigerFusedLinearCosineSimilarityLoss.forward": (
        "student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias=None, "
        "teacher_bias=None"
    ),
    "LigerFusedLinearDPOLoss.__init__": (
        "ignore_index=-100, beta=0.1, alpha=1.0, compute_nll_loss=False, compiled=True, use_ref_model=True, "
        "average_log_prob=False, chunk_size=1, loss_type='sigmoid', label_smoothing=0.0, discopop_tau=0.05"
    ),
    "LigerFusedLinearDPOLoss.forward": (
        "lin_weight, _input, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None"
    ),
    "LigerFusedLinearGRPOLoss.__init__": (
        "beta=0.04, compiled=True, use_ref_model=True, chunk_size=1, epsilon_low=0.2, epsilon_high=0.2, "
        "loss_type='dapo', max_completion_length=None, importance_sampling_level='token', "
        "sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, temperature=1.0, delta=None, "
        "use_bias_correction_kl=False, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, "
        "vespo_lambda_neg=2.0"
    ),
    "LigerFusedLinearGRPOLoss.forward": (
        "_input, lin_weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None, "
        "old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, vllm_is_ratio=None, "
        "num_items_in_batch=None"
    ),
    "LigerFusedLinearJSDLoss.__init__": (
        "weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True, "
        "chunk_size=1024, return_soft_hard_loss=False"
    ),
    "LigerFusedLinearJSDLoss.forward": (
        "student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias=None, "
        "teacher_bias=None"
    ),
    "LigerFusedLinearKTOLoss.__init__": (
        "ignore_index=-100, beta=0.1, compiled=True, use_ref_model=False, average_log_prob=False, chunk_size=1"
    ),
    "LigerFusedLinearKTOLoss.forward": (
        "_input, lin_weight, target, bias=None, preference_labels=None, ref_input=None, ref_weight=None, "
        "ref_bias=None, kl=None"
    ),
    "LigerFusedLinearORPOLoss.__init__": (
        "ignore_index=-100, beta=0.1, compute_nll_loss=True, compiled=True, chunk_size=1"
    ),
    "LigerFusedLinearORPOLoss.forward": ("lin_weight, _input, target, bias=None, nll_target=None"),
    "LigerFusedLinearSimPOLoss.__init__": (
        "ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, compute_nll_loss=True, compiled=True, "
        "gamma=0.5, chunk_size=1"
    ),
    "LigerFusedLinearSimPOLoss.forward": ("lin_weight, _input, target, bias=None"),
    "liger_fused_linear_cpo": (
        "_input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, "
        "compute_nll_loss=True, compiled=True, average_log_prob=False, chunk_size=1"
    ),
    "liger_fused_linear_cosine": (
        "student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias, "
        "weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True, "
        "chunk_size=1024, return_soft_hard_loss=False"
    ),
    "liger_fused_linear_dpo": (
        "_input, weight, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None, ignore_index=-100, "
        "beta=0.1, compute_nll_loss=False, compiled=True, use_ref_model=True, average_log_prob=False, "
        "chunk_size=1, loss_type='sigmoid', label_smoothing=0.0, discopop_tau=0.05, alpha=1.0"
    ),
    "liger_fused_linear_grpo": (
        "_input, weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None, "
        "old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, beta=0.04, epsilon_low=0.2, "
        "epsilon_high=0.2, loss_type='dapo', max_completion_length=None, importance_sampling_level='token', "
        "sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, temperature=1.0, compiled=True, use_ref_model=True, "
        "chunk_size=1, vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, vespo_k_pos=2.0, "
        "vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0, num_items_in_batch=None"
    ),
    "liger_fused_linear_jsd": (
        "student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias, "
        "weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True, "
        "chunk_size=1024, return_soft_hard_loss=False"
    ),
    "liger_fused_linear_kto": (
        "_input, weight, target, preference_labels, bias=None, ref_input=None, ref_weight=None, ref_bias=None, "
        "kl=None, ignore_index=-100, beta=0.1, compiled=True, use_ref_model=True, average_log_prob=False, "
        "chunk_size=1"
    ),
    "liger_fused_linear_orpo": (
        "_input, weight, target, bias=None, ignore_index=-100, beta=0.1, compute_nll_loss=True, nll_target=None, "
        "compiled=True, chunk_size=1"
    ),
    "liger_fused_linear_simpo": (
        "_input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, "
        "compute_nll_loss=False, compiled=True, gamma=0.5, chunk_size=1"
    ),
}
#: Without a default there, where only a call by position is possible.
BY_POSITION = {"student_bias", "teacher_bias"}
MODULES = {
    "cosine_similarity_loss": "LigerFusedLinearCosineSimilarityLoss",
    "cpo_loss": "LigerFusedLinearCPOLoss",
    "dpo_loss": "LigerFusedLinearDPOLoss",
    "grpo_loss": "LigerFusedLinearGRPOLoss",
    "jsd_loss": "LigerFusedLinearJSDLoss",
    "kto_loss": "LigerFusedLinearKTOLoss",
    "orpo_loss": "LigerFusedLinearORPOLoss",
    "simpo_loss": "LigerFusedLinearSimPOLoss",
}


def found(name):
    owner, _, method = name.partition(".")
    function = getattr(getattr(chunked_loss, owner), method) if method else getattr(functional, owner)
    parameters = list(inspect.signature(function).parameters.values())
    parameters = parameters[1:] if method else parameters
    return [x for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD], [
        x for x in parameters if x.kind is x.KEYWORD_ONLY
    ]


@pytest.mark.parametrize("name", LIGER)
def test_arguments_are_those_of_liger_kernel(name):
    ours, more = found(name)
    spelled = [
        x.name if x.default is x.empty or (x.name in BY_POSITION and "." not in name) else f"{x.name}={x.default!r}"
        for x in ours
    ]
    assert ", ".join(spelled) == LIGER[name]
    assert all(x.default is not x.empty for x in more)  # what is more can be left out


@pytest.mark.parametrize("module", MODULES)
def test_modules_have_liger_kernels_names(module):
    home = importlib.import_module(f"liger_registry.chunked_loss.{module}")
    assert getattr(home, MODULES[module]) is getattr(chunked_loss, MODULES[module])


def test_every_name_resolves():
    for name in chunked_loss.__all__:
        assert getattr(chunked_loss, name) is not None
        assert name in dir(chunked_loss)
    with pytest.raises(AttributeError, match="nothing"):
        _ = chunked_loss.nothing


def test_importing_loads_neither_torch_nor_triton_nor_transformers():
    code = """
        import sys, liger_registry.chunked_loss
        assert not {"torch", "triton", "transformers"} & set(sys.modules)
        from liger_registry.chunked_loss import LigerFusedLinearDPOLoss, functional
        assert not {"triton", "transformers", "torch._dynamo"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], check=True, timeout=120)


# -- TRL's defaults: DPOConfig, CPOConfig, ORPOConfig, KTOConfig, GRPOConfig -------------------------------------------


def default(function, name):
    return inspect.signature(function).parameters[name].default


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (dpo_formula.dpo, "loss_type", "sigmoid"),
        (dpo_formula.dpo, "loss_weights", None),
        (dpo_formula.dpo, "beta", 0.1),
        (dpo_formula.dpo, "label_smoothing", 0.0),
        (dpo_formula.dpo, "discopop_tau", 0.05),
        (dpo_formula.dpo, "f_divergence_type", "reverse_kl"),
        (dpo_formula.dpo, "f_alpha_divergence_coef", 0.5),
        (chunked_loss.LigerFusedLinearDPOLoss, "ld_alpha", None),
        (chunked_loss.LigerFusedLinearDPOLoss, "use_weighting", False),
        (cpo_formula.cpo, "beta", 0.1),
        (cpo_formula.cpo, "label_smoothing", 0.0),
        (cpo_formula.cpo, "loss_type", "sigmoid"),
        (cpo_formula.cpo, "reward_alpha", 0.0),
        (chunked_loss.LigerFusedLinearCPOLoss, "alpha", 1.0),  # cpo_alpha
        (simpo_formula.simpo, "gamma", 0.5),
        (simpo_formula.simpo, "beta", 0.1),
        (orpo_formula.orpo, "beta", 0.1),
        (kto_formula.kto, "beta", 0.1),
        (kto_formula.kto, "desirable_weight", 1.0),
        (kto_formula.kto, "undesirable_weight", 1.0),
        (chunked_loss.LigerFusedLinearKTOLoss, "loss_type", "kto"),
        (Policy, "loss_type", "dapo"),
        (Policy, "importance_sampling_level", "token"),
        (Policy, "beta", 0.0),
        (Policy, "epsilon_low", 0.2),
        (Policy, "epsilon_high", 0.2),
        (Policy, "delta", None),
        (Policy, "use_bias_correction_kl", True),
        (Policy, "sapo_temperature_pos", 1.0),
        (Policy, "sapo_temperature_neg", 1.05),
        (Policy, "vespo_k_pos", 2.0),
        (Policy, "vespo_lambda_pos", 3.0),
        (Policy, "vespo_k_neg", 3.0),
        (Policy, "vespo_lambda_neg", 2.0),
        (chunked_loss.LigerFusedLinearGRPOLoss, "temperature", 1.0),
    ],
)
def test_defaults_are_those_of_trl(function, name, value):
    assert default(function, name) == value


def test_where_liger_kernels_defaults_differ_from_trls():
    """The classes of that name have liger-kernel's, the formulas TRL's."""
    face = chunked_loss.LigerFusedLinearGRPOLoss
    differ = {n for n in Policy.__dataclass_fields__ if default(face, n) != default(Policy, n)}
    assert differ == {"beta", "use_bias_correction_kl"}


# -- what is returned --------------------------------------------------------------------------------------------------


def test_functional_forms_by_position():
    m = p.model()
    labels, mask = torch.tensor([True, False] * 3), (m.target != p.IGNORED).long()
    ids, advantages = m.target.clamp(min=0), torch.linspace(-1, 1, 6)
    refs = (m.ref_hidden, m.ref_weight, m.ref_bias)
    rows = (m.hidden.flatten(0, 1), m.weight, m.ref_hidden.flatten(0, 1), m.ref_weight, m.target.flatten())
    calls = {
        "dpo": ((m.hidden, m.weight, m.target, m.bias, *refs, -100, 0.1, True), 7),
        "orpo": ((m.hidden, m.weight, m.target, m.bias, -100, 0.1, True, m.target, False, 2), 9),
        "cpo": ((m.hidden, m.weight, m.target, m.bias, -100, 0.1, 0.5, 0.1), 7),
        "simpo": ((m.hidden, m.weight, m.target, m.bias), 7),
        "kto": ((m.hidden, m.weight, m.target, labels, m.bias, *refs, torch.tensor(0.1)), 6),
        "grpo": ((m.hidden, m.weight, ids, mask, advantages, m.bias, None, None, *refs), 2),
        "jsd": ((*rows, m.bias, m.ref_bias), None),
        "cosine": ((*rows, m.bias, m.ref_bias), None),
    }
    for name, (args, count) in calls.items():
        result = getattr(functional, f"liger_fused_linear_{name}")(*args)
        loss = result if count is None else result[0]
        assert count is None or len(result[1]) == count
        assert loss.dim() == 0
        assert loss.requires_grad
        assert loss.dtype == torch.float32


def test_functional_forms_give_what_the_classes_give():
    m = p.model()
    loss, metrics = chunked_loss.LigerFusedLinearCPOLoss(alpha=0.5)(m.weight, m.hidden, m.target, m.bias)
    other, others = functional.liger_fused_linear_cpo(m.hidden, m.weight, m.target, m.bias, alpha=0.5)
    assert loss == other
    assert all(torch.equal(a, b) for a, b in zip(metrics, others, strict=True))
    # Their defaults differ here, as liger-kernel's do.
    loss, metrics = chunked_loss.LigerFusedLinearSimPOLoss()(m.weight, m.hidden, m.target, m.bias)
    other, others = functional.liger_fused_linear_simpo(m.hidden, m.weight, m.target, m.bias)
    torch.testing.assert_close(loss - metrics[4], other)
    assert others[4] == 0


# -- a loss of somebody else's -----------------------------------------------------------------------------------------


def test_a_loss_from_another_distribution(tmp_path, monkeypatch):
    """Imported like anything, it goes the way of gradients in forward by its name, in a compiled graph too."""
    (tmp_path / "somebodys_losses.py").write_text(
        textwrap.dedent("""
            import torch

            def squared(pairs, target=1.0):
                gap = pairs.chosen_logratios - pairs.rejected_logratios
                return (gap - target).square(), gap.detach()
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    squared = importlib.import_module("somebodys_losses").squared
    seen = []
    get = registry.get
    monkeypatch.setattr(registry, "get", lambda op, **told: seen.append(op) or get(op, **told))
    loss = LinearPreferenceLoss(squared, separable=True, average_log_prob=True, target=0.5)
    m = p.model()
    value, metrics = loss(m.weight, m.hidden, m.target, m.bias)
    assert seen == ["linear_sequence_loss"]
    exact = p.wide(m)
    tokens = p.logps(exact.hidden, exact.weight, exact.bias, exact.target)
    c, r = p.scores(tokens, exact.target, True).chunk(2)
    right = (c - r - 0.5).square().mean()
    torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metrics[5].double(), (c - r).detach(), rtol=1e-5, atol=1e-6)
    (mine,), (other,) = torch.autograd.grad(value, m.weight), torch.autograd.grad(right, exact.weight)
    torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["dpo", "aot", "orpo", "kto", "grpo"])
def test_one_graph(name):
    from preference_losses import LOSSES

    m = p.model()
    loss, metrics = LOSSES[name](m)
    compiled = torch.compile(LOSSES[name], fullgraph=True, backend="aot_eager")
    other, others = compiled(m)
    torch.testing.assert_close(loss, other)
    torch.testing.assert_close(metrics, others)
    grads = [torch.autograd.grad(x, p.leaves(m)) for x in (loss, other)]
    torch.testing.assert_close(*grads)
