"""Distributions that fail in every way while they load: the rest goes on, and each one's report names it."""

from __future__ import annotations

import pytest
from distributions import install, run

# By distribution: the source of its module, and what the report must say. They load in alphabetical order, so that
# those that come after the worst show that the rest went on.
HOSTILE = {
    "a-missing": ("import no_such_module_anywhere\n", "No module named 'no_such_module_anywhere'"),
    "b-base-exception": (
        """
        class Stop(BaseException):
            pass

        def register(registry):
            raise Stop("planted")
        """,
        "Stop: planted",
    ),
    "c-cancelled": (
        """
        import asyncio

        def register(registry):
            raise asyncio.CancelledError("planted")
        """,
        "CancelledError: planted",
    ),
    "d-unprintable": (
        """
        class Mute(Exception):
            def __str__(self):
                raise ValueError("no text")

        def register(registry):
            raise Mute
        """,
        "Mute: <its text raised ValueError>",
    ),
    "e-loud": (
        """
        def register(registry):
            raise ValueError("\\x1b[2J\\x07" + "x" * 10_000_000)
        """,
        "ValueError: ?[2J?xxx",
    ),
    "f-endless-import": ("while True:\n    pass\n", "was not done after 3 s"),
    "g-endless-registration": (
        """
        import itertools

        from fakes import implementation

        def register(registry):
            for n in itertools.count():
                registry.register(implementation(f"n{n}", op="rms_norm"))
        """,
        "registers more than 20000 items",
    ),
    "h-endless-and-deaf": (
        """
        import itertools

        from fakes import implementation

        def register(registry):
            for n in itertools.count():
                try:
                    registry.register(implementation(f"n{n}", op="rms_norm"))
                except Exception:
                    pass
        """,
        "was not done after 3 s",
    ),
    "i-sleeps": (
        """
        import time

        def register(registry):
            try:
                time.sleep(1e6)
            except BaseException:
                time.sleep(1e6)
        """,
        "was not done after 3 s",
    ),
    "j-steals-an-operation": (
        """
        from fakes import implementation, make_op

        def register(registry):
            registry.register(implementation("decoy", op="rms_norm"))
            registry.register(make_op("rms_norm"))
        """,
        "liger-registry and j-steals-an-operation",
    ),
    "k-steals-an-implementation": (
        """
        from fakes import implementation

        def register(registry):
            registry.register(implementation("eager", op="rms_norm"))
        """,
        "liger-registry and k-steals-an-implementation",
    ),
    "l-astronomical": (
        """
        from liger_registry import ConfigSpace

        SPACE = ConfigSpace(**{f"p{n}": range(1, 1000) for n in range(20)})
        """,
        "more than 100,000 configs",
    ),
    "m-recursive": (
        """
        def register(registry):
            register(registry)
        """,
        "RecursionError",
    ),
    "n-lacks-its-function": ("", "has no attribute 'register'"),
    "o-leaves": ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
    "p-closes-the-door": (
        """
        from fakes import implementation

        def register(registry):
            registry.closed = True
            registry.register(implementation("late", op="rms_norm"))
        """,
        "after its registration ended",
    ),
    "q-registers-for-another": (
        """
        def register(registry):
            from liger_registry import registry as public

            with public.stage("liger-registry"):
                pass
        """,
        "uses the registry while the registry loads its plugins",
    ),
}
OUTDATED = {"r-too-new": "(2, 0)", "s-without-api": ""}
GOOD = """
    from fakes import implementation

    def register(registry):
        registry.register(implementation("good", op="rms_norm"))
"""
LOOK = """
    import json, sys, warnings

    import liger_registry.plugins as plugins

    plugins.LOAD_S = 3.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch
        from liger_registry import registry

        x, w = torch.randn(4, 8), torch.ones(8)
        handle = registry.get("rms_norm")
        right = torch.allclose(handle(x, w), registry.op("rms_norm").reference(x, w), atol=1e-6)
    print(json.dumps({
        "records": {r.distribution: [r.status, r.reason] for r in registry.plugins()},
        "warnings": [str(w.message) for w in caught if issubclass(w.category, plugins.PluginWarning)],
        "right": right,
        "foreign": sorted(i.name for i in registry.catalog.implementations("rms_norm") if not i.own),
        "owner": registry.catalog.find("rms_norm", "default", "forward", "any:eager").distribution,
        "chosen": handle.explain(x, w)[0].decision.implementation.own,
    }))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A directory with every hostile distribution, and two good ones that share the name of their entry point."""
    place = tmp_path_factory.mktemp("site")
    for name, (source, _) in HOSTILE.items():
        install(place, name, source)
    for name, api in OUTDATED.items():
        install(place, name, "def register(registry):\n    raise AssertionError('called')\n", api=api)
    install(place, "z-good", GOOD)
    install(place, "z-good-too", GOOD.replace('"good"', '"good_too"'))
    return place


@pytest.fixture(scope="module")
def seen(site, tmp_path_factory):
    """What a process beside all of them sees."""
    return run(site, tmp_path_factory.mktemp("cache"), LOOK)[0]


@pytest.mark.ci
def test_the_rest_goes_on(seen):
    statuses = {name: status for name, (status, _) in seen["records"].items()}
    assert statuses == {
        "liger-registry": "loaded",
        **dict.fromkeys(HOSTILE, "failed"),
        **dict.fromkeys(OUTDATED, "disabled"),
        "z-good": "loaded",
        "z-good-too": "loaded",
    }
    assert seen["right"]
    assert seen["chosen"]
    assert seen["foreign"] == ["good", "good_too"]
    assert seen["owner"] == "liger-registry"


@pytest.mark.ci
@pytest.mark.parametrize("name", HOSTILE)
def test_the_report_and_a_warning_name_the_culprit(seen, name):
    reason = seen["records"][name][1]
    assert HOSTILE[name][1] in reason
    assert len(reason) < 2500
    assert all(c.isprintable() or c == "\n" for c in reason)
    assert any(f"of {name} 1.0 is failed: " in warning for warning in seen["warnings"])


@pytest.mark.ci
def test_a_hang_is_announced_before_it_ends(seen):
    still = [w for w in seen["warnings"] if "still runs after 1.5 s" in w]
    told = {name for name in HOSTILE if any(f"of {name} " in w for w in still)}
    assert told >= {"f-endless-import", "h-endless-and-deaf", "i-sleeps"}
    # It ends by the number of what it registers, on a busy machine not before it is announced.
    assert told <= {"f-endless-import", "g-endless-registration", "h-endless-and-deaf", "i-sleeps"}


@pytest.mark.ci
def test_left_out_by_name_none_of_them_runs(site, tmp_path):
    seen, _ = run(site, tmp_path, LOOK, LIGER_PLUGINS="z-good")
    assert {status for status, _ in seen["records"].values()} == {"loaded", "disabled"}
    assert seen["records"]["f-endless-import"] == ["disabled", "LIGER_PLUGINS does not name its distribution"]
    assert seen["foreign"] == ["good"]
    assert seen["warnings"] == []


PLUGINS = """
    import sys

    import liger_registry.plugins as plugins

    plugins.LOAD_S = 3.0
    from typer.testing import CliRunner
    from liger_registry.cli import app

    done = CliRunner().invoke(app, ["plugins", "--json"])
    print(done.exit_code, file=sys.stderr)
    print(done.stdout.replace("\\n", " "))
"""


@pytest.mark.ci
def test_the_command_lists_them_all(site, tmp_path):
    rows, errors = run(site, tmp_path, PLUGINS)
    assert errors.splitlines()[-1] == "1"
    reasons = {row["distribution"]: row["reason"] for row in rows if row["status"] == "failed"}
    assert reasons.keys() == HOSTILE.keys()
    assert all(HOSTILE[name][1] in reason for name, reason in reasons.items())


# --- adapters ---------------------------------------------------------------------------------------------------------

ADAPTERS = {
    "a-raises": ("def register(adapters):\n    raise ValueError('planted')\n", "ValueError: planted"),
    "b-endless": (
        """
        import itertools

        from liger_registry.transformers import Adapter

        def register(adapters):
            for n in itertools.count():
                adapters.register(Adapter(f"n{n}", ops=("rms_norm",), find=lambda model, enabled: ()))
        """,
        "end the loop",
    ),
    "c-finds-without-end": (
        """
        import itertools

        from liger_registry.transformers import Adapter

        def register(adapters):
            adapters.register(Adapter("endless", ops=("rms_norm",), find=lambda model, enabled: itertools.count()))
        """,
        "",
    ),
}
APPLY = """
    import json, warnings

    import torch
    from liger_registry.plugins import PluginWarning
    from liger_registry.transformers.engine.adapters import adapters, look

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = adapters()
        endless = next(a for a in found.ordered if a.name == "endless")
        rows = look(endless, torch.nn.Linear(2, 2), {"rms_norm": True})
    print(json.dumps({
        "records": {r.distribution: [r.status, r.reason] for r in found.records},
        "rows": [row.reason for row in rows],
    }))
"""


@pytest.mark.ci
def test_adapters_that_fail_hide_no_other(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    for name, (source, _) in ADAPTERS.items():
        install(site, name, source, group="liger_registry.adapters")
    seen, _ = run(site, tmp_path / "cache", APPLY)
    assert {name: status for name, (status, _) in seen["records"].items()} == {
        "liger-registry": "loaded", "a-raises": "failed", "b-endless": "failed", "c-finds-without-end": "loaded",
    }  # fmt: skip
    assert all(ADAPTERS[name][1] in reason for name, (_, reason) in seen["records"].items() if name in ADAPTERS)
    assert seen["rows"] == [
        "adapter endless failed: adapter endless finds more than 1,000,000 things\n  fix: end the loop"
    ]
