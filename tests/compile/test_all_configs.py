"""Every config of every implementation compiled for every architecture; and a fixed sample of them in CI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from liger_registry.device import Device
from liger_registry.problem import PHASES
from liger_registry.runtime import registry

CHECKOUT = Path(__file__).parents[2]
# Beside the presets' widths (128, 256, 1024, 3584, 4096): one that is no power of two, and the wide ones.
WIDTHS = (41, 4096, 8192, 16384, 131072)
NORMS = ("rms_norm", "fused_add_rms_norm", "layer_norm")
MODELS = ("llama-3-8b", "qwen3-0.6b", "gemma-2-9b")
ARCHITECTURES = {"a100": "sm_80", "h200": "sm_90", "mi300x": "gfx942"}
# Under pytest-xdist each of its workers runs a compile of its own.
PROCESSES = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


@pytest.fixture
def widths(tmp_path):
    """A ``config.json`` for each of the other widths."""
    paths = []
    for width in WIDTHS:
        path = tmp_path / f"width-{width}" / "config.json"
        path.parent.mkdir()
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 1, "vocab_size": 1000}
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"}
        path.write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
        paths.append(str(path))
    return paths


def compile_verb(*arguments, timeout):
    """The rows that ``liger-tune compile --json`` prints; its cache outlives the test, keyed by kernel sources."""
    environ = {**os.environ, "LIGER_TUNE_CACHE_DIR": str(CHECKOUT / ".cache" / "compiled-configs")}
    command = [sys.executable, "-m", "liger_registry.cli", "compile", "--json", *arguments]
    command += ["--processes", str(PROCESSES)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=timeout, check=False)
    rows = json.loads(done.stdout)
    assert [row for row in rows if row["error"]] == []
    assert done.returncode == 0, done.stderr
    return rows


def check(rows, architectures):
    assert {row["device"].split("/")[1] for row in rows} == architectures
    assert {row["aligned"] for row in rows} == {True, False}
    # A few spilled registers are a price that a config may pay; hundreds are a kernel that was cut wrongly.
    assert [row for row in rows if (row["spills"] or 0) > 256] == []


def with_kernels(vendor):
    """The ids of all Triton implementations that a backend registers, with their operation and phase."""
    return {
        (op.name, phase, implementation.id)
        for op in registry.catalog.ops()
        for scheme in op.schemes
        for phase in PHASES
        for implementation in registry.catalog.implementations(op.name, scheme.name, phase)
        if implementation.capability.vendor == vendor
    }


def compiled(rows):
    return {(row["op"], row["problem"]["phase"], row["implementation"]) for row in rows}


# One model and one of odd sizes: the same configs at a second model's sizes were 3,000 kernels more. A device has 4,800
# kernels for these two and 2,000 for the widths, of which two idle cores compile some 8 a second.
@pytest.mark.slow
@pytest.mark.timeout(10000)
@pytest.mark.parametrize("device", ARCHITECTURES)
def test_every_config_compiles_and_fits(device, widths):
    rows = compile_verb("--all", "--device", device, "qwen3-0.6b", widths[0], timeout=9900)
    check(rows, {ARCHITECTURES[device]})
    # Rows of these models are too narrow for several programs to share one of a norm's.
    kernels = with_kernels(Device.parse(device).vendor)
    assert kernels - compiled(rows) <= {(op, phase, name) for op, phase, name in kernels if op in NORMS}


@pytest.mark.slow
@pytest.mark.timeout(10000)
@pytest.mark.parametrize("device", ARCHITECTURES)
def test_every_config_of_a_norm_compiles_and_fits_at_every_width(device, widths):
    names = [part for op in NORMS for part in ("--op", op)]
    rows = compile_verb("--all", "--device", device, *names, *widths, timeout=9900)
    check(rows, {ARCHITECTURES[device]})
    assert {row["problem"]["dims"]["hidden"] for row in rows} == set(WIDTHS)
    assert compiled(rows) == {found for found in with_kernels(Device.parse(device).vendor) if found[0] in NORMS}


# One config at least of every implementation on every device, of which there are some 240.
@pytest.mark.ci
@pytest.mark.timeout(600)
def test_a_stratified_sample_compiles_and_fits(widths):
    rows = compile_verb("--sample", "260", "--device", ",".join(ARCHITECTURES), *MODELS, *widths, timeout=580)
    check(rows, set(ARCHITECTURES.values()))
    assert compiled(rows) == with_kernels("cuda") | with_kernels("rocm")
