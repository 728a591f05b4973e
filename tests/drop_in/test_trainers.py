"""``use_liger_kernel`` of trainers, which import liger_kernel themselves, in programs that ``exec`` runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from under_exec import run

HERE = Path(__file__).parent / "trainers"
LAYERS = {"rms_norm": 5, "fused_add_rms_norm": 2, "rope": 2, "swiglu": 2}
HEAD = {"fused_linear_cross_entropy": 1}


def told(program: str, output: Path, *launcher: object) -> dict[str, Any]:
    text = run(*(launcher or (sys.executable,)), HERE / f"{program}.py", output)
    (line,) = (line for line in text.splitlines() if line.startswith("told "))
    return json.loads(line.removeprefix("told "))


def check(found: dict[str, Any], ops: dict[str, int]) -> None:
    assert found["ops"] == ops
    assert found["version"] == "0.8.5+liger.registry"
    assert len(set(found["plain"])) == 3
    # Losses are logged with four digits.
    assert found["patched"] == pytest.approx(found["plain"], rel=2e-4)


@pytest.mark.ci
def test_the_trainer_of_transformers_under_accelerate(tmp_path):
    """``liger-tune exec -- accelerate launch train.py``: the program is a child's child."""
    launcher = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")
    launcher = (*launcher, "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    found = told("hf", tmp_path, *launcher)
    assert found["launched"]
    check(found, {**LAYERS, **HEAD})


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL 1.16 needs Python 3.11")
@pytest.mark.parametrize(
    "program", [pytest.param("sft", marks=pytest.mark.ci), pytest.param("dpo", marks=pytest.mark.slow)]
)
def test_trainers_of_trl(program, tmp_path):
    """They have fused heads of their own, and leave liger-kernel's out."""
    check(told(program, tmp_path), LAYERS)
