"""The sizes of models that people train, as rows without targets: every layer's operation at the model's own widths.

Sizes come from the presets of ``liger_registry.architecture``. Batches are 4 x 2,048 tokens, as one GPU trains them; an
expert of a mixture sees its share of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cases import BACKWARD, BOTH, FORWARD, Case
from benchmarks.table import TABLE, Row
from liger_registry.architecture import Architecture

MODELS = ("llama-3-8b", "qwen3-0.6b", "gemma-2-9b", "mixtral-8x7b")
BATCH, LENGTH = 4, 2048


def cases(model: Architecture) -> Iterator[Case]:
    """What a model's layers call."""
    tokens = BATCH * LENGTH
    for op in ("rms_norm", "fused_add_rms_norm"):
        yield Case(op, (tokens, model.hidden), casting=model.norm_casting, offset=model.norm_offset)
    heads = (BATCH, LENGTH, model.heads, model.kv_heads, model.head_dim)
    yield Case("rope", heads)
    if model.qk_norm:
        yield Case("qk_norm_rope", heads, casting=model.norm_casting, offset=model.norm_offset)
        rows = tokens * model.heads
        yield Case("rms_norm", (rows, model.head_dim), casting=model.norm_casting, offset=model.norm_offset)
    gated = "swiglu" if model.activation == "silu" else "geglu"
    rows = tokens * model.experts_per_token // model.experts if model.experts else tokens
    yield Case(gated, (rows, model.intermediate))
    yield Case("fused_linear_cross_entropy", (tokens, model.hidden, model.vocab), softcap=model.softcap)


def rows(names: tuple[str, ...] = MODELS) -> tuple[Row, ...]:
    """The rows of some models, each once, without those that have targets already."""
    found: dict[str, Row] = {}
    there = {row.key for row in TABLE}
    for name in names:
        for case in cases(Architecture.preset(name)):
            for phase in (BOTH,) if case.linear else (FORWARD, BACKWARD):
                row = Row(case, phase, group=name)
                if row.key in found:
                    found[row.key] = Row(case, phase, group=f"{found[row.key].group}, {name}")
                elif row.key not in there:
                    found[row.key] = row
    return tuple(found.values())
