"""Every config of every implementation compiled for every architecture; and a fixed sample of them in CI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
# Beside the presets' widths (128, 256, 1024, 3584, 4096): one that is no power of two, and the wide ones.
WIDTHS = (41, 2048, 8192, 16384, 32768, 131072)


@pytest.fixture
def models(tmp_path):
    """The presets, and a ``config.json`` for each of the other widths."""
    paths = []
    for width in WIDTHS:
        path = tmp_path / f"width-{width}" / "config.json"
        path.parent.mkdir()
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 1, "vocab_size": 1000}
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"}
        path.write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
        paths.append(str(path))
    return ["llama-3-8b", "qwen3-0.6b", "gemma-2-9b", *paths]


def compile_verb(*arguments, timeout):
    """The rows that ``liger-tune compile --json`` prints; its cache outlives the test, keyed by kernel sources."""
    environ = {**os.environ, "LIGER_TUNE_CACHE_DIR": str(CHECKOUT / ".cache" / "compiled-configs")}
    command = [sys.executable, "-m", "liger_registry.cli", "compile", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=timeout, check=False)
    rows = json.loads(done.stdout)
    assert [row for row in rows if row["error"]] == []
    assert done.returncode == 0, done.stderr
    return rows


def check(rows, devices):
    assert {row["device"].split("/")[1] for row in rows} == devices
    assert {row["aligned"] for row in rows} == {True, False}
    implementations = {row["implementation"] for row in rows}
    assert {"cuda:persistent", "rocm:persistent", "cuda:column_split", "rocm:row"} <= implementations
    # A few spilled registers are a price that a config may pay; hundreds are a kernel that was cut wrongly.
    assert [row for row in rows if (row["spills"] or 0) > 256] == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_config_compiles_and_fits(models):
    rows = compile_verb("--all", "--device", "a100,h100,h200,mi300x", *models, timeout=2900)
    check(rows, {"sm_80", "sm_90", "gfx942"})
    assert len(rows) > 2000


@pytest.mark.ci
def test_a_stratified_sample_compiles_and_fits(models):
    check(
        compile_verb("--sample", "120", "--device", "a100,h200,mi300x", *models, timeout=280),
        {"sm_80", "sm_90", "gfx942"},
    )
