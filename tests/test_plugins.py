"""Plugins come in through entry points; one that fails is recorded, warned of, and hides no other."""

from __future__ import annotations

import sys
import warnings
from importlib import metadata
from pathlib import Path

import fakes
import pytest

from liger_registry import Catalog, Registry
from liger_registry.errors import PluginError, PluginWarning
from liger_registry.implementation import OWN_DISTRIBUTION
from liger_registry.plugins import (
    DISABLED,
    FAILED,
    KERNELS,
    LOADED,
    TUNINGS,
    canonical,
    load_kernels,
    scan,
    tuning_roots,
    warn_of,
)
from liger_registry.runtime import build_catalog
from liger_registry.settings import Settings


@pytest.fixture
def installed(monkeypatch):
    """Plugins as if they were installed: what is added to the list is found beside nothing else."""
    before, entries = set(sys.modules), []

    def entry_points(*, group):
        return [e for e in entries if e.group == group]

    def add(register=None, distribution="some-plugin", module="some_plugin", api=(1, 0), **fields):
        if register is not None:
            fakes.module(module, api, register=register)
        entries.append(fakes.entry_point(f"{module}:register", distribution, **fields))

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    yield add
    for name in set(sys.modules) - before:
        if name.startswith(("some_", "own_", "another")):
            del sys.modules[name]


def register_op(staging):
    staging.register(fakes.make_op())


def load(**settings):
    catalog = Catalog()
    records = load_kernels(catalog, Settings(**settings))
    return catalog, {r.distribution: r for r in records}


def names(catalog):
    return [i.name for i in catalog.implementations("affine")]


def test_a_plugin_loads(installed):
    installed(register_op, OWN_DISTRIBUTION, "own_ops", name="ops")
    installed(lambda staging: staging.register(fakes.implementation("mine")), version="2.5")
    catalog, records = load()
    assert names(catalog) == ["mine"]
    record = records["some-plugin"]
    assert (record.status, record.version, record.value, record.group) == (
        LOADED,
        "2.5",
        "some_plugin:register",
        KERNELS,
    )
    assert catalog.implementations("affine")[0].distribution == "some-plugin"


def half_way(staging):
    staging.register(fakes.implementation("half"))
    raise ValueError("planted")


def clashing(staging):
    staging.register(fakes.implementation("half"))
    staging.register(fakes.make_op())


@pytest.mark.parametrize(
    ("register", "reason"),
    [
        (half_way, "ValueError: planted"),
        (clashing, "two distributions register the operation 'affine'"),
        (lambda staging: sys.exit("planted"), "SystemExit: planted"),
        (lambda staging: staging.register(3), "registers a int"),
        (lambda: None, "TypeError"),
        (3, "not callable"),
        (lambda staging: staging.nothing, "AttributeError"),
        (lambda staging: (_ for _ in ()).throw(RecursionError("deep")), "RecursionError: deep"),
    ],
)
def test_a_plugin_that_fails_hides_no_other_and_leaves_nothing(installed, register, reason):
    installed(register_op, OWN_DISTRIBUTION, "own_ops", name="ops")
    installed(register, "a-bad-one", "some_bad")
    installed(lambda staging: staging.register(fakes.implementation("good")), "z-good-one", "some_good")
    catalog, records = load()
    assert names(catalog) == ["good"]
    assert records["a-bad-one"].status == FAILED
    assert reason in records["a-bad-one"].reason
    assert records["z-good-one"].status == LOADED
    assert isinstance(records["a-bad-one"].error(), PluginError)
    assert reason in str(records["a-bad-one"].error())


def test_modules_that_cannot_be_imported(installed, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in {"some_exit": "raise SystemExit(3)", "some_syntax": "def x(:", "some_key": "{}['k']"}.items():
        tmp_path.joinpath(f"{name}.py").write_text(text)
        installed(distribution=name, module=name)
    installed(distribution="gone", module="some_module_that_is_not_there")
    _, records = load()
    assert {r.status for r in records.values()} == {FAILED}
    assert "SystemExit" in records["some-exit"].reason
    assert "SyntaxError" in records["some-syntax"].reason
    assert "KeyError" in records["some-key"].reason
    assert "No module named 'some_module_that_is_not_there'" in records["gone"].reason


def test_an_interrupt_is_no_failure(installed):
    def interrupted(staging):
        raise KeyboardInterrupt

    installed(interrupted)
    with pytest.raises(KeyboardInterrupt):
        load()


@pytest.mark.parametrize(
    ("api", "reason"),
    [
        (None, "declares no LIGER_REGISTRY_API; write LIGER_REGISTRY_API = (1, 0) into some_plugin"),
        ((2, 0), "this version offers (1, 0)"),
        ((0, 9), "this version offers (1, 0)"),
        ((1, 1), "this version offers (1, 0)"),
        ([1, 0], "no (major, minor)"),
        ("1.0", "no (major, minor)"),
        (1, "no (major, minor)"),
        ((1,), "no (major, minor)"),
        ((1, 0, 0), "no (major, minor)"),
        ((True, 0), "no (major, minor)"),
        ((1.0, 0), "no (major, minor)"),
    ],
)
def test_apis_that_do_not_fit(installed, api, reason):
    called = []
    installed(called.append, api=api)
    _, records = load()
    assert records["some-plugin"].status == DISABLED
    assert reason in records["some-plugin"].reason
    assert called == []


def test_the_api_may_be_declared_by_a_package_above(installed):
    fakes.module("some_package", (1, 0))
    installed(lambda staging: None, module="some_package.kernels", api=None)
    sys.modules["some_package"].__path__ = []
    assert load()[1]["some-plugin"].status == LOADED


# --- LIGER_PLUGINS ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "loaded"),
    [
        (None, {"Some.Plugin", "another"}),
        ((), set()),
        (("some-plugin",), {"Some.Plugin"}),
        (("SOME__plugin",), {"Some.Plugin"}),
        (("another", "no-such"), {"another"}),
    ],
)
def test_the_allow_list(installed, allowed, loaded):
    installed(register_op, "Liger_Registry", "own_ops", name="ops")
    installed(lambda staging: None, "Some.Plugin", "some_plugin")
    installed(lambda staging: None, "another", "another")
    _, records = load(plugins=None if allowed is None else frozenset(allowed))
    assert {n for n, r in records.items() if r.status == LOADED} == {OWN_DISTRIBUTION, *map(canonical, loaded)}
    for record in records.values():
        assert record.status in (LOADED, DISABLED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of(records.values())  # what the user left out is no surprise


def test_a_name_that_is_no_distribution_is_warned_of_once():
    registry = Registry(settings=Settings(plugins=frozenset({"no-such-plugin", "liger_registry", "pytest"})))
    with pytest.warns(PluginWarning, match="LIGER_PLUGINS names no-such-plugin, which is not installed") as told:
        assert registry.get("rms_norm")
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.get("layer_norm")
        assert Registry(settings=Settings(plugins=frozenset())).get("rms_norm")
        assert Registry(settings=Settings(plugins=frozenset({"PyTest"}))).get("rms_norm")
    with pytest.warns(PluginWarning, match="names no-such-a, no-such-b, which are not installed"):
        build_catalog(Settings(plugins=frozenset({"no-such-b", "no-such-a"})))


def test_a_plugin_that_is_left_out_is_not_imported(installed):
    installed(distribution="other", module="some_module_that_is_not_there")
    assert load(plugins=frozenset())[1]["other"].status == DISABLED


# --- warnings ---------------------------------------------------------------------------------------------------------


def test_one_warning_a_plugin(installed):
    installed(half_way, "one", "some_one")
    installed(lambda staging: None, "two", "some_two", api=(9, 0))
    installed(register_op, OWN_DISTRIBUTION, "own_ops", name="ops")
    with pytest.warns(PluginWarning) as caught:
        build_catalog(Settings())
    assert len(caught) == 2
    assert "plugin kernels of one 1.0 is failed: ValueError: planted" in str(caught[0].message)
    assert "plugin kernels of two 1.0 is disabled" in str(caught[1].message)


def test_a_registry_warns_once_and_works_even_where_warnings_are_errors(installed, tmp_path):
    installed(half_way, "one", "some_one")
    installed(register_op, OWN_DISTRIBUTION, "own_ops", name="ops")
    registry = Registry(Settings(cache_dir=tmp_path))
    with pytest.warns(PluginWarning, match="of one 1.0 is failed") as caught:
        registry.op("affine")
    assert len(caught) == 1
    registry.op("affine")
    assert [r.status for r in registry.plugins()] == [LOADED, FAILED]
    strict = Registry(Settings(cache_dir=tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PluginWarning):
            strict.op("affine")
        assert strict.op("affine").name == "affine"


def test_a_plugin_that_uses_the_public_registry_while_it_loads(installed, tmp_path):
    registry = Registry(Settings(cache_dir=tmp_path))
    installed(lambda staging: registry.register(fakes.implementation("mine")))
    installed(register_op, OWN_DISTRIBUTION, "own_ops", name="ops")
    with pytest.warns(PluginWarning, match="uses the registry while the registry loads"):
        registry.op("affine")
    assert names(registry.catalog) == []
    registry.register(fakes.implementation("mine"))
    assert names(registry.catalog) == ["mine"]


def test_asking_for_what_a_failed_plugin_has_names_the_plugin(installed, tmp_path):
    installed(half_way, "Some.Half", "some_half")
    installed(register_op, OWN_DISTRIBUTION, "own_ops", name="ops")
    registry = Registry(Settings(cache_dir=tmp_path))
    with pytest.warns(PluginWarning):
        assert [r.distribution for r in registry.catalog.failed] == ["some-half"]
    for ask in (
        lambda: registry.get("affine", implementation="half"),
        lambda: registry.get("affine", implementation={"backward": "half"}),
        lambda: registry.use("affine", "half").__enter__(),
        lambda: registry.get("theirs"),
    ):
        with pytest.raises(LookupError) as caught:
            ask()
        assert "kernels of some-half 1.0 is failed: ValueError: planted" in caught.value.why


def test_a_plugin_asked_for_by_name(installed, tmp_path):
    installed(half_way, "Some.Half", "some_half", name="half")
    installed(lambda staging: None, "a-good-one", "some_good", name="good")
    installed(lambda staging: None, "mixed", "some_mixed", name="one")
    installed(lambda staging: None, "mixed", "some_mixed_too", api=(9, 0), name="two")
    installed(register_op, OWN_DISTRIBUTION, "own_ops", name="ops")
    registry = Registry(Settings(cache_dir=tmp_path))
    with pytest.warns(PluginWarning):
        registry.plugins()
    for name in ("a-good-one", "A_Good.One", "good"):
        assert registry.plugin(name).value == "some_good:register"
    assert registry.plugin("one").status == LOADED
    for name, reason in {"Some.Half": "ValueError: planted", "half": "ValueError: planted", "mixed": "(9, 0)"}.items():
        with pytest.raises(PluginError) as caught:
            registry.plugin(name)
        assert reason in caught.value.why
    with pytest.raises(PluginError, match="no plugin is called 'gone'") as caught:
        registry.plugin("gone")
    assert {"some-half", "a-good-one", OWN_DISTRIBUTION} <= set(caught.value.candidates)


# --- scanning ---------------------------------------------------------------------------------------------------------


def test_operations_come_first_and_nothing_twice(installed):
    for distribution in ("b", "a", OWN_DISTRIBUTION):
        for name in ("kernels", "ops"):
            installed(distribution=distribution, name=name)
            installed(distribution=distribution, name=name)
    found = [(f.distribution, f.entry.name) for f in scan(KERNELS)]
    assert found == [
        (OWN_DISTRIBUTION, "ops"),
        (OWN_DISTRIBUTION, "kernels"),
        ("a", "ops"),
        ("b", "ops"),
        ("a", "kernels"),
        ("b", "kernels"),
    ]


def test_a_distribution_with_damaged_metadata(monkeypatch):
    entry = fakes.entry_point("some_plugin:register", None)
    monkeypatch.setattr(entry.dist, "read_text", lambda name: "", raising=False)
    bare = metadata.EntryPoint("x", "not a reference!", KERNELS)
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: [entry, bare])
    records = load_kernels(Catalog(), Settings())
    assert {r.distribution for r in records} == {"unknown"}
    assert {r.status for r in records} == {FAILED}


def test_what_is_installed_here_loads():
    catalog = Catalog()
    records = load_kernels(catalog, Settings(plugins=frozenset()))
    own = {r.name: r.status for r in records if r.distribution == OWN_DISTRIBUTION}
    assert own == dict.fromkeys(("ops", "portable", "cuda", "rocm"), LOADED)
    assert "rms_norm" in [op.name for op in catalog.ops()]


# --- tables -----------------------------------------------------------------------------------------------------------


def test_packages_of_tables_are_found_without_being_imported(installed, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "some_tables"
    package.mkdir()
    package.joinpath("__init__.py").write_text("raise RuntimeError('imported')")
    tmp_path.joinpath("some_module.py").write_text("")
    for module in ("some_tables", "some_module", "some_gone"):
        installed(distribution=module, module=module, group=TUNINGS)
    roots, records = tuning_roots(Settings())
    assert roots == (Path(package),)
    assert {r.distribution: r.status for r in records} == {
        "some-tables": LOADED,
        "some-module": FAILED,
        "some-gone": FAILED,
    }
    assert "some_tables" not in sys.modules
    roots, records = tuning_roots(Settings(plugins=frozenset()))
    assert roots == ()
    assert {r.status for r in records} == {DISABLED}


def test_the_shipped_tables_are_found():
    roots, _ = tuning_roots(Settings(plugins=frozenset()))
    assert [root.name for root in roots] == ["liger_registry_tunings"]
