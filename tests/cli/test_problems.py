"""From models and texts to problem keys."""

from __future__ import annotations

import pytest

from liger_registry.architecture import Architecture
from liger_registry.catalog import Catalog
from liger_registry.cli import _problems
from liger_registry.errors import (
    InvalidInputError,
    UnknownOpError,
    UnsupportedDtypeError,
    UnsupportedOptionError,
)
from liger_registry.ops import rms_norm

QWEN = Architecture("m", "qwen3", hidden=32, heads=4, kv_heads=2, head_dim=16, vocab=9, norm="rms_norm", qk_norm=True)
GEMMA = Architecture("g", "gemma2", hidden=32, norm="rms_norm", norm_casting="gemma", norm_offset=1.0)


@pytest.fixture
def catalog() -> Catalog:
    found = Catalog()
    with found.stage("test") as staging:
        staging.register(rms_norm.OP)
    return found


def test_each_problem_once_and_in_order(catalog: Catalog) -> None:
    problems = _problems.model_problems(catalog, [QWEN, QWEN], [8, 8])
    assert len(problems) == len(set(problems)) == 6
    assert {(p.phase, p.rows, p.hidden) for p in problems} == {
        (phase, rows, hidden) for phase in ("forward", "backward") for rows, hidden in [(8, 32), (32, 16), (16, 16)]
    }
    assert [p.phase for p in problems[:2]] == ["forward", "backward"]


def test_tokens_are_buckets(catalog: Catalog) -> None:
    assert {p.rows for p in _problems.model_problems(catalog, [GEMMA], [5, 7, 8, 9])} == {8, 16}


def test_frozen_weights_need_no_gradient(catalog: Catalog) -> None:
    def needs(frozen: bool) -> set[str]:
        found = _problems.model_problems(catalog, [GEMMA], [8], frozen=frozen)
        return {p.needs for p in found if p.phase == "backward"}

    assert needs(False) == {"x,weight"}
    assert needs(True) == {"x"}


def test_dtypes_replace_the_models_own(catalog: Catalog) -> None:
    found = _problems.model_problems(catalog, [GEMMA], [8], dtypes=["float32", "float16"])
    assert {p.dtypes["x"] for p in found} == {"float32", "float16"}
    assert {p.dtypes["x"] for p in _problems.model_problems(catalog, [GEMMA], [8])} == {"bfloat16"}
    assert {p.casting for p in found} == {"gemma"}


def test_unknown_operation(catalog: Catalog) -> None:
    with pytest.raises(UnknownOpError):
        _problems.model_problems(catalog, [GEMMA], [8], ops=["nope"])


def test_a_budget_is_in_no_key_of_an_operation_without_one(catalog: Catalog) -> None:
    found = _problems.model_problems(catalog, [GEMMA], [8], budget=1 << 20)
    assert all("budget" not in p.flags for p in found)


def test_problems_are_those_that_a_call_poses(catalog: Catalog) -> None:
    import torch

    from liger_registry.runtime import Registry
    from liger_registry.settings import Settings

    registry = Registry(Settings(), catalog)
    x, weight = torch.empty(2, 5, 32, dtype=torch.bfloat16), torch.empty(32, dtype=torch.bfloat16)
    options = {"eps": 1e-6, "offset": 1.0, "casting": "gemma"}
    op = catalog.op("rms_norm")
    posed = {
        registry.problem_of(op, (x, weight), options, phase, (True, True), None)[0] for phase in ("forward", "backward")
    }
    assert posed == set(_problems.model_problems(catalog, [GEMMA], [10]))


def test_described_has_defaults_for_dtypes_and_options() -> None:
    found = _problems.described(rms_norm.OP, {"rows": "5", "hidden": "48"}, [], {})
    assert (dict(found.dims), dict(found.flags)) == ({"rows": 5, "hidden": 48}, {"casting": "llama"})
    assert dict(found.dtypes) == {"x": "bfloat16", "weight": "bfloat16"}


def test_described_takes_all_that_is_in_the_key() -> None:
    dims = {"rows": "5", "hidden": "48"}
    found = _problems.described(rms_norm.OP, dims, ["fp16", "weight=none"], {"casting": "gemma"})
    assert dict(found.dtypes) == {"x": "float16", "weight": "none"}
    assert found.flags["casting"] == "gemma"
    assert _problems.needs_of(rms_norm.OP, found, frozen=False) == (True, False)


@pytest.mark.parametrize(
    ("dims", "dtypes", "flags", "error"),
    [
        ({"rows": "5"}, [], {}, InvalidInputError),
        ({"rows": "5", "hidden": "0"}, [], {}, InvalidInputError),
        ({"rows": "-5", "hidden": "8"}, [], {}, InvalidInputError),
        ({"rows": "5", "hidden": "8", "vocab": "3"}, [], {}, InvalidInputError),
        ({"rows": "5", "hidden": "8"}, ["int8"], {}, UnsupportedDtypeError),
        ({"rows": "5", "hidden": "8"}, ["y=float32"], {}, UnsupportedDtypeError),
        ({"rows": "5", "hidden": "8"}, [], {"casting": "olmo"}, UnsupportedOptionError),
        ({"rows": "5", "hidden": "8"}, [], {"eps": "0.1"}, UnsupportedOptionError),
    ],
)
def test_described_turns_down(
    dims: dict[str, str], dtypes: list[str], flags: dict[str, str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        _problems.described(rms_norm.OP, dims, dtypes, flags)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "", "٣", "1" * 20])
def test_counts_are_positive_integers(text: str) -> None:
    with pytest.raises(InvalidInputError):
        _problems.counts([text], "--seq")
