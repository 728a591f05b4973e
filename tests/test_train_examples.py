"""The examples of training: each learns what it learns without the kernels, and says that they were applied."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "examples" / "train"
NORMS, MLPS = 5, 2
LLAMA = {"rms_norm": 5, "fused_add_rms_norm": 2, "rope": 2, "swiglu": 2}
FUSED = {**LLAMA, "fused_linear_cross_entropy": 1}
UNFUSED = {**LLAMA, "cross_entropy": 1}
HEAD = {"linear_logp": 1}
#: What each example's reports say was applied, report by report.
EXAMPLES = {
    "accelerate_loop": [FUSED],
    "functional": [],
    "hf_trainer": [FUSED],
    "lightning_module": [FUSED],
    "plain_pytorch": [{"rms_norm": 5, "swiglu": 2}],
    "trl_cpo": [UNFUSED],
    "trl_dpo": [FUSED, FUSED, {"linear_logp": 2}],
    "trl_grpo": [FUSED, HEAD],
    "trl_kto": [FUSED, FUSED, {"linear_logp": 2}],
    "trl_orpo": [UNFUSED],
    "trl_sft": [FUSED, HEAD],
}
SECONDS = 120
# One of each family of trainers; the rest runs in the last tier.
CI = {"accelerate_loop", "functional", "hf_trainer", "lightning_module", "plain_pytorch", "trl_sft"}
NEEDS = {"lightning_module": "lightning", "accelerate_loop": "accelerate", "hf_trainer": "accelerate"}


def needed(name):
    package = NEEDS.get(name, "trl" if name.startswith("trl_") else None)
    if package is not None:
        pytest.importorskip(package, reason=f"the example needs {package}, which is not installed")


def example(name, monkeypatch):
    """An example as a module, beside what the examples share."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.delitem(sys.modules, "common", raising=False)
    spec = importlib.util.spec_from_file_location(f"train_example_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def applied(report):
    counts = {}
    for row in report.applied():
        counts[row.op] = counts.get(row.op, 0) + 1
    return counts


def test_every_example_is_listed():
    assert sorted(EXAMPLES) == sorted(path.stem for path in HERE.glob("*.py") if path.stem != "common")
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}.py`" in readme for name in EXAMPLES)


@pytest.mark.filterwarnings("ignore")  # of the trainers' own
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ci if name in CI else pytest.mark.slow) for name in EXAMPLES]
)
def test_losses_are_the_same_and_the_kernels_are_there(name, tmp_path, monkeypatch):
    needed(name)
    module = example(name, monkeypatch)
    plain = module.main(False, str(tmp_path / "plain"))
    began = time.monotonic()
    ours = module.main(True, str(tmp_path / "ours"))
    assert time.monotonic() - began < SECONDS
    assert plain.reports == []
    assert len(ours.losses) == len(plain.losses) == 4
    assert len(set(plain.losses)) == 4  # it learns
    assert ours.losses == pytest.approx(plain.losses, rel=1e-3, abs=2e-4)
    if name == "functional":
        (explanations,) = ours.reports
        assert [e.decision.source for e in explanations] == ["heuristic"] * 2
    else:
        assert [applied(report) for report in ours.reports] == EXAMPLES[name]
        for report in ours.reports:
            if report.model == "LlamaForCausalLM":
                assert not report.skipped()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs_from_the_command_line(name):
    needed(name)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, f"{name}.py"], cwd=HERE, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < SECONDS
    assert len(done.stdout.splitlines()[-1].removeprefix("losses: ").split()) == 4
