from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "tuning"))

import planted

from liger_registry.config import Config, ConfigSpace
from liger_registry.errors import UnknownImplementationError, VerificationError
from liger_registry.problem import BACKWARD
from liger_registry.testing import check_implementation, conformance_cases, problems_for

CATALOG = planted.catalog(planted.PLAIN, planted.PLAIN_BACKWARD, planted.BLOCKED, *planted.FAULTY.values())
FAULTS = [n for n in planted.FAULTY if n not in ("hangs", "aborts", "leaves")]


@pytest.mark.parametrize("case", conformance_cases("affine", "any:blocks", catalog=CATALOG, configs="all"), ids=str)
def test_as_a_plugin_author_writes_it(case):
    case()


def test_a_right_implementation_passes_in_all_phases_of_its_name():
    report = check_implementation("affine", "plain", catalog=CATALOG)
    assert not report.failed
    ids = "\n".join(report.passed)
    for part in (
        "any:plain-default-forward-", "any:plain-default-backward-", "hidden=1,rows=5", "hidden=3,rows=5",
        "hidden=1536,rows=5", "hidden=41,rows=0", "hidden=41,rows=1", "hidden=41,rows=261", "x=float16", "x=bfloat16",
        "needs=x\n", "needs=w\n",
        "layout-misaligned", "layout-transposed", "layout-scalar", "layout-strided", "layout-expanded", "few-units",
        "rows-70001", "rank-4", "rank-5", "-heuristic", "-declaration",
    ):  # fmt: skip
        assert part in ids


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name):
    with pytest.raises(VerificationError) as caught:
        check_implementation("affine", planted.FAULTY[name], catalog=CATALOG)
    assert "do not hold" in str(caught.value)
    assert f"any:{name}" in caught.value.why


@pytest.mark.parametrize(
    ("function", "case"),
    [(planted.first_rows, "rows-70001"), (planted.second_tile, "few-units"), (planted.dense_weight, "layout-strided")],
)
def test_the_case_that_a_fault_is_for(function, case):
    item = planted.implementation(function, "wrong")
    found = {c.id: c for c in conformance_cases("affine", item, catalog=CATALOG)}
    with pytest.raises(VerificationError):
        found[f"any:wrong-default-forward-{case}"]()
    for layout in ("guarded", "padded"):
        if case != "layout-strided" and layout != "guarded":
            found[f"any:wrong-default-forward-layout-{layout}"]()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"heuristic": lambda p, d: Config(block=7)}, "block=7 is not declared"),
        ({"heuristic": lambda p, d: {}["x"]}, "the heuristic raises KeyError"),
        (
            {"space": ConfigSpace(block=list(range(1, 66))), "heuristic": lambda p, d: Config(block=1)},
            "65 configs are legal",
        ),
        (
            {"space": ConfigSpace(gain=[1.0]), "heuristic": lambda p, d: Config(gain=1.0)},
            "names of the operation's options",
        ),
        ({"launch": "planted:not_there"}, "cannot be imported"),
        ({"scheme": "none"}, "has no scheme"),
    ],
)
def test_declarations_are_checked(changes, says):
    item = replace(planted.BLOCKED, **changes)
    cases = {c.id.rpartition("-")[2]: c for c in conformance_cases("affine", item, catalog=CATALOG, problems=[
        planted.problem(scheme=item.scheme)
    ])}  # fmt: skip
    faults = [*cases["declaration"].check(), *(cases["heuristic"].check() if "heuristic" in changes else [])]
    assert says in "; ".join(faults)


def test_given_problems_are_verified_at_their_proxies():
    wrong = planted.FAULTY["wrong_tail"]
    check_implementation("affine", wrong, catalog=CATALOG, problems=[planted.problem(hidden=256)])
    with pytest.raises(VerificationError, match="hidden=200"):
        check_implementation("affine", wrong, catalog=CATALOG, problems=[planted.problem(hidden=200)])


def test_problems_are_the_contracts_own():
    backward = problems_for(planted.AFFINE, "default", BACKWARD)
    assert {p.flags.get("needs") for p in backward} == {"x,w", "x", "w"}
    assert len(backward) == 4 * 7 + 2
    assert all(set(p.dtypes) == {"x", "w"} for p in backward)


def test_who_is_not_there():
    with pytest.raises(UnknownImplementationError, match="no implementation 'mine'"):
        conformance_cases("affine", "mine", catalog=CATALOG)
    with pytest.raises(ValueError, match="neither"):
        conformance_cases("affine", configs="some", catalog=CATALOG)


def test_an_implementation_for_another_device_has_no_cases():
    gpu = replace(planted.PLAIN, capability=replace(planted.PLAIN.capability, vendor="cuda"))
    assert conformance_cases("affine", gpu, catalog=CATALOG) == []


def test_portable_implementations_conform():
    for name in ("eager", "functional"):
        for case in conformance_cases("rms_norm", name):
            if "hidden=1536" not in case.id:
                case()
