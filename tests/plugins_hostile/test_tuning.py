"""Distributions whose kernels fail in every way while they are tuned: each fails alone, and a good one wins.

All are real distributions: the tuner and its worker find them by their entry points, as they would a user's.
"""

from __future__ import annotations

import pytest
from distributions import install, run

HOST = """
    import planted

    def register(registry):
        registry.register(planted.AFFINE)
        registry.register(planted.PLAIN)
"""
KERNEL = """
import os, signal, sys, time

import planted
import torch
from liger_registry import Config, ConfigSpace, Implementation


class Beyond(BaseException):
    pass


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


def launch(x, w, *, device, gain, **config):
    {body}


def register(registry):
    registry.register(Implementation("affine", "forward", "{module}", "{module}:launch"{fields}))
"""
# By distribution: the body of its launch function, and the status and text of the sample that a table then holds.
HOSTILE = {
    "raises": ("raise ValueError('planted')", "error", "ValueError: planted"),
    "raises-mutely": ("raise Mute()", "error", "Mute: <its text raised ValueError>"),
    "raises-beyond-exceptions": ("raise Beyond('planted')", "crash", "Beyond: planted"),
    "exits": ("sys.exit(0)", "crash", "exit code 0"),
    "leaves": ("os._exit(3)", "crash", "exit code 3"),
    "segfaults": ("os.kill(os.getpid(), signal.SIGSEGV)", "crash", "by signal 11"),
    "closes-everything": ("os.closerange(3, 4096)", "crash", "the worker ended"),
    "hangs": ("time.sleep(600)", "timeout", "not done after 3 s"),
    "spins": ("while True: pass", "timeout", "not done after 3 s"),
    "gives-nan": ("return (gain * x * w * float('nan'),)", "wrong", ""),
    "gives-another-shape": ("return ((gain * x * w)[..., :-1],)", "wrong", ""),
    "gives-another-dtype": ("return ((gain * x * w).double(),)", "wrong", ""),
    "gives-nothing": ("return None", "wrong", ""),
    "gives-too-much": ("return gain * x * w, x", "wrong", ""),
    "gives-its-input": ("x.mul_(gain).mul_(w); return (x,)", "wrong", ""),
}
# What fails before anything runs: by distribution, further fields of the implementation, and why it is no candidate.
REJECTED = {
    "thinks-forever": (", heuristic=lambda p, d: time.sleep(600)", "was not done after 2 s"),
    "counts-forever": (
        ", space=ConfigSpace(n=range(20000)).where(lambda c, p, d: time.sleep(0.01))"
        ", heuristic=lambda p, d: Config(n=1)",
        "was not done after 2 s",
    ),
    "thinks-wrongly": (", heuristic=lambda p, d: 1 / 0", "its heuristic raised ZeroDivisionError"),
    "names-no-config": (", heuristic=lambda p, d: 'x'", "which is no Config"),
}
TUNE = """
    import json, warnings

    from liger_registry import registry
    from liger_registry.tuning import candidates
    from liger_registry.tuning.worker import Limits
    import planted

    candidates.ASK_S = 2.0
    warnings.simplefilter("ignore")
    problem = planted.problem()
    report = registry.tune([problem], limits=Limits(candidate_s=3), clock_source="planted:clock")
    (row,) = report.rows
    found = registry.user_store.load(registry.device, "affine").samples_of(problem)
    tried = candidates.candidates(registry.catalog, problem, registry.device)
    print(json.dumps({
        "status": row.status,
        "choice": row.choice.implementation,
        "samples": {s.choice.implementation: [s.status, s.detail, s.provenance.package] for s in found},
        "rejected": {r.choice: r.reason for r in tried.rejected},
        "loaded": {r.distribution: [r.status, r.reason] for r in registry.plugins()},
    }))
"""


def source(name: str, body: str, fields: str = "") -> str:
    return KERNEL.format(body=body, module=name.replace("-", "_"), fields=fields)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What tuning beside all of them left."""
    site = tmp_path_factory.mktemp("site")
    install(site, "a-host", HOST)
    for name, (body, _, _) in HOSTILE.items():
        install(site, name, source(name, body))
    for name, (fields, _) in REJECTED.items():
        install(site, name, source(name, "return (gain * x * w,)", fields))
    install(site, "z-good", source("z-good", "planted.spend(10); return (gain * x * w,)"))
    return run(site, tmp_path_factory.mktemp("cache"), TUNE)[0]


@pytest.mark.ci
def test_one_that_is_right_is_chosen(seen):
    assert {status for status, _ in seen["loaded"].values()} == {"loaded"}
    assert (seen["status"], seen["choice"]) == ("tuned", "any:z_good")
    assert seen["samples"]["any:plain"][:2] == ["ok", ""]
    assert seen["samples"]["any:z_good"][:2] == ["ok", ""]


@pytest.mark.ci
@pytest.mark.parametrize("name", HOSTILE)
def test_each_fails_alone_and_is_named(seen, name):
    status, detail, package = seen["samples"][f"any:{name.replace('-', '_')}"]
    assert (status, package) == (HOSTILE[name][1], f"{name} 1.0")
    assert HOSTILE[name][2] in detail
    assert detail


@pytest.mark.ci
@pytest.mark.parametrize("name", REJECTED)
def test_what_fails_when_it_is_asked_is_no_candidate(seen, name):
    assert REJECTED[name][1] in seen["rejected"][f"any:{name.replace('-', '_')}"]
    assert f"any:{name.replace('-', '_')}" not in seen["samples"]
