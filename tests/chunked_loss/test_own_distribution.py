"""A loss and an implementation of somebody else's, in a distribution that is installed as a user would install it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

PYPROJECT = """
    [build-system]
    requires = ["hatchling"]
    build-backend = "hatchling.build"

    [project]
    name = "somebodys-losses"
    version = "1.2"

    [project.entry-points."liger_registry.kernels"]
    somebodys_losses = "somebodys_losses:register"
"""
PACKAGE = '''
    """Two losses, and a way to compute any loss of groups."""

    LIGER_REGISTRY_API = (1, 0)


    def register(registry):
        from liger_registry import Implementation

        registry.register(
            Implementation(
                op="linear_sequence_loss",
                scheme="grad_in_forward",
                phase="forward",
                name="by_formula",
                launch="somebodys_losses.kernels:forward",
            )
        )
'''
LOSSES = '''
    """Functions of log-probabilities, masks and references."""

    import torch


    def margin(pairs, width=1.0):
        """A hinge on the difference of both log-ratios by length."""
        chosen = pairs.chosen_logratios / pairs.chosen_lengths.clamp_min(1)
        rejected = pairs.rejected_logratios / pairs.rejected_lengths.clamp_min(1)
        return torch.relu(width - (chosen - rejected)), (chosen > rejected).float().mean()


    def worst_token(logp, constants, *, weight=1.0):
        """Of each sequence the least likely token that counts."""
        counted = constants[0, ..., 0] > 0
        return -weight * logp[0].masked_fill(~counted, 0.0).min(-1).values
'''
KERNELS = '''
    """Plain PyTorch under a name of its own."""

    import os

    CALLS = []


    def forward(*inputs, device, needs, **options):
        from liger_registry import registry

        CALLS.append(options["function"])
        return registry.op("linear_sequence_loss").schemes[0].reference(*inputs, needs=needs, **options)
'''
USE = """
    import json
    import torch
    from liger_registry import registry
    from liger_registry.chunked_loss import LigerFusedLinearDPOLoss, LinearPreferenceLoss
    from somebodys_losses import kernels, losses

    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 6, 8, requires_grad=True), torch.randn(19, 8, requires_grad=True)
    target = torch.randint(19, (4, 6))
    target[:, :2] = -100
    refs = -torch.rand(4, 6)

    def gradients(loss):
        return [g.tolist() for g in torch.autograd.grad(loss, (hidden, weight))]

    def logps():
        logp = torch.log_softmax(hidden @ weight.t(), -1).gather(-1, target.clamp(min=0)[..., None]).squeeze(-1)
        return torch.where(target == -100, 0.0, logp)

    def pair(loss):
        return loss(weight, hidden, target, ref_logps=refs)

    own = LinearPreferenceLoss(losses.margin, use_ref_model=True, separable=True, width=2.0)
    value, metrics = pair(own)
    ratios = torch.where(target == -100, 0.0, logps() - refs).sum(-1) / 4
    right = torch.relu(2.0 - (ratios[:2] - ratios[2:])).mean()

    constants = (target != -100).float()[..., None]
    worst, _ = registry.get("linear_sequence_loss")(
        hidden, weight, target, constants, function="somebodys_losses.losses:worst_token",
        settings='{"weight": 0.5}', length=6,
    )
    least = -0.5 * logps().min(-1).values.sum()

    ours = pair(LigerFusedLinearDPOLoss())[0]
    with registry.use("linear_sequence_loss", {"forward": "by_formula"}):
        theirs = pair(LigerFusedLinearDPOLoss())[0]
        again = pair(own)[0]

    def close(a, b):
        pairs = zip((a, *torch.autograd.grad(a, (hidden, weight), retain_graph=True)),
                    (b, *torch.autograd.grad(b, (hidden, weight), retain_graph=True)))
        return all(torch.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in pairs)

    print(json.dumps({
        "plugins": {r.distribution: [r.status, r.version] for r in registry.plugins()},
        "own": close(value, right), "metric": metrics[5].item(), "worst": close(worst, least),
        "dpo": close(ours, theirs), "again": close(again, value), "calls": kernels.CALLS,
        "chosen": registry.get("linear_sequence_loss").explain(
            hidden, weight, target, constants, function="somebodys_losses.losses:worst_token", length=6
        )[0].decision.implementation.name,
    }))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A directory of its own that holds the installed distribution."""
    place = tmp_path_factory.mktemp("distribution")
    package = place / "source" / "somebodys_losses"
    package.mkdir(parents=True)
    files = {"__init__.py": PACKAGE, "losses.py": LOSSES, "kernels.py": KERNELS, "../pyproject.toml": PYPROJECT}
    for name, text in files.items():
        (package / name).write_text(textwrap.dedent(text))
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *flags, "--target", str(place / "site"), str(place / "source")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return place / "site"


def test_a_distribution_of_losses(site: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(site), "LIGER_TUNE_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(USE)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["plugins"]["somebodys-losses"] == ["loaded", "1.2"]
    assert all(found[name] for name in ("own", "worst", "dpo", "again"))
    assert 0 <= found["metric"] <= 1
    assert found["calls"] == ["liger_registry.chunked_loss.pairs:pair_terms"] * 2
    assert found["chosen"] != "by_formula"  # which nobody verified here
