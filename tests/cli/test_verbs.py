"""explain, verify, compile, plugins and doctor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import every_op
import pytest

from liger_registry import registry
from liger_registry.plugins import PluginRecord
from liger_registry.tuning.odd import problems_for

OPS = tuple(op.name for op in every_op.public_ops())
SIZES = ("--rows", 8, "--hidden", 32, "--dtype", "float32")


def test_explain_of_what_was_measured(warmed: Path, tune_json: Callable[..., Any]) -> None:
    table = next(warmed.glob("v1/*/*/*/rms_norm.json"))
    document = json.loads(table.read_text())
    del document["digest"]
    for sample in document["samples"]:
        sample["status"] = "ok"  # on a busy machine any of them may be noisy
    table.write_text(json.dumps(document))
    found = tune_json("explain", "rms_norm", *SIZES, "--device", "cpu")
    assert [e["problem"]["phase"] for e in found] == ["forward", "backward"]
    for explanation in found:
        assert explanation["decision"]["source"] == "exact"
        chosen = [c for c in explanation["candidates"] if c["verdict"] == "chosen"]
        assert len(chosen) == 1
        assert chosen[0]["time_us"] > 0
        lost = [c for c in explanation["candidates"] if c["verdict"] != "chosen"]
        assert lost
        assert all(c["time_us"] or c["reason"] for c in lost)


def test_explain_takes_every_way_of_naming(tune_json: Callable[..., Any]) -> None:
    ways = [
        (*SIZES, "--casting", "gemma"),
        ("--rows=8", "--hidden=32", "--casting=gemma", "--dtype", "float32"),
        ("--dim", "rows=8,hidden=32", "--flag", "casting=gemma", "--dtype", "x=float32,weight=float32"),
    ]
    problems = [[e["problem"] for e in tune_json("explain", "rms_norm", *way, "--device", "cpu")] for way in ways]
    assert problems[0] == problems[1] == problems[2]
    assert problems[0][0]["flags"] == {"casting": "gemma"}


def test_explain_for_a_device_that_is_not_there(tune_json: Callable[..., Any]) -> None:
    (found,) = tune_json("explain", "rms_norm", *SIZES, "--device", "h100", "--phase", "backward", "--needs", "x")
    assert found["device"] == "cuda/sm_90/h100-sxm-132"
    assert found["problem"]["flags"]["needs"] == "x"


def test_explain_is_for_the_interpreter_where_it_is_asked_for(
    tune_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LIGER_INTERPRET", "1")
    assert {e["device"].split("/")[0] for e in tune_json("explain", "rms_norm", *SIZES)} == {"interpreter"}
    monkeypatch.setenv("LIGER_INTERPRET", "0")
    assert {e["device"].split("/")[0] for e in tune_json("explain", "rms_norm", *SIZES)} == {"cpu"}


def test_explain_prints_every_tier_that_was_asked(tune: Callable[..., Any]) -> None:
    text = tune("explain", "rms_norm", *SIZES, "--device", "cpu", "--phase", "forward").stdout
    for tier in ("pinned", "plan", "exact", "stale", "near", "shipped", "sibling", "heuristic"):
        assert tier in text


@pytest.mark.parametrize("phase", ["forward", "backward", "scheme"])
@pytest.mark.parametrize("op", OPS)
def test_explain_of_every_operation(
    tune: Callable[..., Any], tune_json: Callable[..., Any], op: str, phase: str
) -> None:
    contract = registry.catalog.op(op)
    description = problems_for(contract, contract.schemes[0].name, "forward")[0]
    sizes = [f"{name}={n}" for name, n in description.dims.items()]
    dtypes = [f"{name}={dtype}" for name, dtype in description.dtypes.items()]
    pairs = (("--dim", sizes), ("--dtype", dtypes))
    given = [word for name, values in pairs for value in values for word in (name, value)]
    given += ["--device", "cpu", "--phase", phase]
    found = tune_json("explain", op, *given)
    several = len(contract.schemes) > 1
    assert bool(found) is (phase != "scheme" or several)
    text = tune("explain", op, *given).stdout
    for explanation in found:
        decision = explanation["decision"]
        assert f"-> {'scheme ' + decision['scheme'] if phase == 'scheme' else decision['implementation']}" in text
        assert any(tier["accepted"] for tier in explanation["tiers"])


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--rows", 8),
        (*SIZES, "--heads", 3),
        (*SIZES, "--phase", "sideways"),
        (*SIZES, "--needs", "y"),
        (*SIZES, "--casting", "olmo"),
        (*SIZES, "--device", "nothing"),
        (*SIZES, "--casting"),
        (*SIZES, "stray"),
        (*SIZES, "--dim", "rows"),
    ],
)
def test_explain_turns_down(arguments: tuple[object, ...], tune: Callable[..., Any]) -> None:
    assert tune("explain", "rms_norm", *arguments, code=2).stderr


def test_explain_names_what_it_does_not_know(tune: Callable[..., Any]) -> None:
    assert "'hiden'" in tune("explain", "rms_norm", "--rows", 4, "--hiden", 8, code=2).stderr
    text = tune("explain", "rms_norm", "--rows", "four", "--hidden", 8, code=2).stderr
    assert "--rows four is no positive integer" in text
    assert "comma" not in text


def test_verify(model: Path, tune: Callable[..., Any], tune_json: Callable[..., Any]) -> None:
    arguments = ("verify", "rms_norm", "--model", model, "--device", "cpu", "--dtype", "float32", "--configs", 1)
    rows = tune_json(*arguments)
    assert {row["phase"] for row in rows} == {"forward", "backward"}
    assert all(row["detail"] == "" and row["worst"] > 0 for row in rows)
    (eager,) = {row["implementation"] for row in tune_json(*arguments, "--implementation", "eager")}
    assert eager == "any:eager"
    assert "verified" in tune(*arguments, "--implementation", "any:eager").stdout


def test_verify_reports_a_wrong_implementation(
    model: Path, tune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from liger_registry.cli import verify

    def wrong(registry: Any, problem: Any, candidate: Any, config: Any, device: Any, *_: object) -> dict[str, Any]:
        row = {"device": "d", "op": problem.op, "phase": problem.phase, "problem": problem.text}
        return {**row, "implementation": candidate.id, "config": "", "worst": None, "detail": "y: error 1.0"}

    monkeypatch.setattr(verify, "_verify", wrong)
    result = tune("verify", "rms_norm", "--model", model, "--device", "cpu", "--dtype", "float32", code=1)
    assert "failed: any:eager() rms_norm/default/forward" in result.stdout


def test_an_implementation_that_raises_fails_alone(model: Path, tune_json: Callable[..., Any]) -> None:
    from liger_registry import runtime
    from liger_registry.cli.verify import _verify
    from liger_registry.config import Config
    from liger_registry.device import Device
    from liger_registry.implementation import Implementation
    from liger_registry.problem import Problem

    registry = runtime.Registry()
    (first, *_) = tune_json(
        "verify", "rms_norm", "--model", model, "--device", "cpu", "--dtype", "float32", "--configs", 1
    )
    op = registry.catalog.op("rms_norm")
    from liger_registry.cli._problems import described

    description = described(op, {"rows": "8", "hidden": "32"}, ["float32"], {})
    problem: Problem = op.problem(description, "forward", "default")

    def broken(*tensors: object, **parameters: object) -> None:
        raise RuntimeError("no luck\nsecond line")

    implementation = Implementation("rms_norm", "forward", "broken", broken)
    row = _verify(registry, problem, implementation, Config(), Device.parse("cpu"), "cpu", 0)
    assert row["detail"] == "RuntimeError: no luck"
    assert row.keys() == first.keys()


def test_verify_turns_down(tune: Callable[..., Any]) -> None:
    tune("verify", "no_such_op", code=2)
    tune("verify", "rms_norm", "--implementation", "no_such", "--device", "cpu", code=2)
    tune("verify", "rms_norm", "--device", "h100", code=2)


def test_plugins(tune: Callable[..., Any], tune_json: Callable[..., Any]) -> None:
    found = {(record["name"], record["status"]) for record in tune_json("plugins")}
    assert {("ops", "loaded"), ("portable", "loaded"), ("shipped", "loaded")} <= found
    assert "liger-registry" in tune("plugins").stdout


def test_a_plugin_that_failed_is_an_exit_code(tune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_registry import runtime

    record = PluginRecord(
        "theirs", "liger_registry.kernels", "their-kernels", "1.0", "m:f", "failed", "ImportError: no"
    )
    monkeypatch.setattr(runtime.Registry, "plugins", lambda self: (record,))
    assert "ImportError: no" in tune("plugins", code=1).stdout
    assert "[!!] all plugins load: theirs of their-kernels" in tune("doctor", code=1).stdout


def test_doctor(warmed: Path, tune: Callable[..., Any], tune_json: Callable[..., Any]) -> None:
    report = tune_json("doctor")
    assert {"Python", "platform", "liger-registry", "torch", "triton", "transformers"} <= set(report["versions"])
    assert any(device["fingerprint"].startswith("cpu/") for device in report["devices"])
    assert report["settings"]["environment"]["LIGER_TUNE_CACHE_DIR"] == report["settings"]["cache_dir"] == str(warmed)
    (user, *_) = report["tables"]
    assert user["kind"] == "user"
    assert [counts["decisions"] for counts in user["devices"].values()] == [6]
    assert all(not check["problem"] for check in report["checks"])
    text = tune("doctor").stdout
    assert "- torch: " in text
    assert "[ok] the cache directory can be written" in text
    for raw in ("[]", "()", "None", "False", "warp_size"):
        assert raw not in text
    assert "1 op, 6 decisions" in text


def test_doctor_finds_a_cache_that_cannot_be_written(cache: Path, tune: Callable[..., Any]) -> None:
    cache.write_text("")
    assert "[!!] the cache directory can be written" in tune("doctor", code=1).stdout


def test_doctor_names_files_that_were_set_aside(warmed: Path, tune: Callable[..., Any]) -> None:
    table = next(warmed.glob("v1/*/*/*/rms_norm.json"))
    table.with_name("rms_norm.json.bad").write_text("damaged")
    assert "set aside: " in tune("doctor").stdout


def test_compile_turns_down(tune: Callable[..., Any]) -> None:
    tune("compile", "--device", "nothing", code=2)
    tune("compile", "--op", "nothing", code=2)
    tune("compile", "--all", "--sample", 3, code=2)
    for device in ("cpu", "interpreter", "h100,cpu"):
        assert "nothing to compile for" in tune("compile", "--device", device, code=2).stderr


def test_compile_without_triton(tune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_registry import launch

    monkeypatch.setattr(launch, "triton_available", lambda: False)
    assert "need Triton" in tune("compile", code=5).stderr


def test_a_sample_is_spread_and_the_same_every_time() -> None:
    from liger_registry.cli._records import sampled

    found: list[Any] = list(range(100))
    chosen = sampled(found, 10, lambda job: 0)
    assert chosen == sampled(found, 10, lambda job: 0)
    assert len(set(chosen)) == 10
    assert {job % 2 for job in chosen} == {0, 1}
    assert min(chosen) < 10
    assert max(chosen) >= 90
    assert sampled(found, 1000, lambda job: 0) == found


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 20, 70, 99])
def test_every_implementation_has_its_share_of_a_sample(count: int) -> None:
    from liger_registry.cli._records import sampled

    sizes = {"a": 80, "b": 2, "c": 18}
    found: list[Any] = [(name, n) for name, size in sizes.items() for n in range(size)]
    chosen: list[Any] = sampled(found, count, lambda job: job[0])  # type: ignore[index]
    assert len(chosen) == len(set(chosen)) == count
    assert len({name for name, _ in chosen}) == min(count, 3)
    if count > 6:
        assert {n % 2 for _, n in chosen} == {0, 1}


def test_json_is_all_there_is_on_stdout(warmed: Path, tune: Callable[..., Any]) -> None:
    for verb in ("list", "plugins", "doctor"):
        json.loads(tune(verb, "--json").stdout)
