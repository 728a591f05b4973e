"""The example adapter, installed as a user would install it, on the model that comes with it."""

from __future__ import annotations

import pytest
from installed import EXAMPLES, install, run, run_tests

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A directory of its own that holds the installed adapter."""
    return install("adapter", tmp_path_factory.mktemp("adapter"))


LOOK = f"""
    import collections, json
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from liger_registry import registry
    from liger_registry.transformers import apply

    place = {str(EXAMPLES / "adapter" / "kestrel")!r}
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(place, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    ids = torch.randint(0, 128, (2, 12))
    plain = model(input_ids=ids, labels=ids).loss.item()
    handle = apply(model)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    print(json.dumps({{
        "plain": plain,
        "loss": loss.item(),
        "applied": collections.Counter(row.op for row in handle.report.applied()),
        "reasons": sorted({{row.reason.partition(":")[0] for row in handle.report.skipped()}}),
        "logits": sum(handle.report.materialised.values()),
    }}))
"""


def test_it_binds_what_is_not_seen_without_it(target, tmp_path):
    found = run(target, tmp_path, LOOK)
    assert found["applied"] == {"rms_norm": 5, "swiglu": 2, "fused_linear_cross_entropy": 2}
    assert found["logits"] == 0
    assert found["loss"] == pytest.approx(found["plain"], rel=1e-6)


def test_without_it_the_norm_and_the_loss_are_left_alone(target, tmp_path):
    found = run(target, tmp_path, LOOK, LIGER_PLUGINS="")
    assert found["applied"] == {"swiglu": 2, "fused_linear_cross_entropy": 1}
    assert found["reasons"] == ["forward of KestrelNorm is no known formula"]
    assert found["logits"] == 1
    assert found["loss"] == pytest.approx(found["plain"], rel=1e-6)


def test_its_own_tests(target, tmp_path):
    run_tests(target, tmp_path, "adapter")
