"""Small models learn real text along the same curve with and without the operations, in float32 and in bf16.

What training makes of rounding is measured: a plain model whose weights were moved by their last bit at the start.
"""

from __future__ import annotations

import pytest
import torch
import training

pytestmark = pytest.mark.filterwarnings("ignore")

SHORT, LONG = 12, 300
every_model = pytest.mark.parametrize("name", training.MODELS)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
# Relative to the loss, over the steps of the short run, where noise has not grown yet.
AT_ONCE = {torch.float32: 5e-6, torch.bfloat16: 5e-3}
# How much further apart long curves may be than those that noise alone drives apart, and what is noise in any case.
TIMES = 4.0
LEAST = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# Of the mean loss of the last 50 steps.
END = {torch.float32: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@every_model
@both_dtypes
def test_the_first_steps_are_the_same(name, dtype):
    steps = SHORT if dtype == torch.float32 else SHORT // 2
    plain, patched = (training.curve(name, steps, patched=p, dtype=dtype) for p in (False, True))
    assert plain[-1] < plain[0] - 0.5
    assert max(training.apart(patched, plain)) < AT_ONCE[dtype]


def test_another_formula_is_noticed():
    plain, other = training.curve("llama", SHORT), training.curve("llama", SHORT, rms_norm_eps=1e-4)
    assert max(training.apart(other, plain)) > 2 * AT_ONCE[torch.float32]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@every_model
@both_dtypes
def test_the_curves_are_the_same(name, dtype):
    plain, patched, nudged = (
        training.curve(name, LONG, dtype=dtype, **how) for how in ({}, {"patched": True}, {"nudged": True})
    )
    assert plain[-1] < 0.6 * plain[0]
    noise = max(*training.apart(nudged, plain), LEAST[dtype])
    assert max(training.apart(patched, plain)) < TIMES * noise
    end, ours, theirs = (training.mean_of_last(losses, 50) for losses in (plain, patched, nudged))
    assert abs(ours - end) < max(END[dtype] * end, TIMES * abs(theirs - end))
