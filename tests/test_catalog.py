"""A distribution's registrations are committed whole or not at all, and clashes name both sides."""

from __future__ import annotations

import threading

import fakes
import pytest

from liger_registry import Capability, Catalog, ConfigSpace
from liger_registry.catalog import MOST
from liger_registry.errors import (
    RegistrationClashError,
    RegistrationError,
    UnknownImplementationError,
    UnknownOpError,
)
from liger_registry.plugins import PluginRecord
from liger_registry.problem import BACKWARD, FORWARD


def state(catalog):
    return [op.name for op in catalog.ops()], catalog.implementations("affine"), catalog.generation


def test_a_commit_shows_everything_at_once():
    catalog = Catalog()
    with catalog.stage("one") as staging:
        staging.register(fakes.make_op())
        staging.register(fakes.implementation("plain"))
        assert catalog.ops() == ()
        with pytest.raises(UnknownOpError):
            catalog.op("affine")
    assert catalog.op("affine").name == "affine"
    (plain,) = catalog.implementations("affine")
    assert plain.distribution == "one"
    assert catalog.generation == 1


@pytest.mark.parametrize(
    "bad",
    [
        fakes.implementation("plain"),
        fakes.implementation("other", scheme="no_such_scheme"),
        fakes.implementation("other", op="no_such_op"),
        fakes.implementation("two words"),
        fakes.implementation("other", space=ConfigSpace(gain=[1])),
        fakes.make_op(),
        fakes.make_op("second", schemes=()),
        "no item",
        fakes.Implementation,
        None,
    ],
    ids=lambda bad: repr(bad)[:40],
)
def test_a_registration_that_fails_leaves_nothing(bad):
    catalog = fakes.catalog()
    before = state(catalog)
    with pytest.raises((RegistrationError, UnknownOpError)), catalog.stage("half") as staging:  # noqa: PT012
        staging.register(fakes.make_op("third"))
        staging.register(fakes.implementation("third", op="third"))
        staging.register(fakes.implementation("extra"))
        staging.register(bad)
    assert state(catalog) == before


def test_an_exception_of_the_plugin_leaves_nothing():
    catalog = fakes.catalog()
    before = state(catalog)
    with pytest.raises(KeyboardInterrupt), catalog.stage("half") as staging:  # noqa: PT012
        staging.register(fakes.implementation("extra"))
        raise KeyboardInterrupt
    assert state(catalog) == before
    with catalog.stage("next") as staging:
        staging.register(fakes.implementation("extra"))


def test_a_clash_in_all_five_names_both_distributions():
    catalog = fakes.catalog(fakes.implementation("mine"))
    with pytest.raises(RegistrationClashError) as caught, catalog.stage("late-comer") as staging:
        staging.register(fakes.implementation("mine"))
    assert caught.value.why == "a-plugin and late-comer"
    assert "affine/default/forward/any/mine" in caught.value.what
    with pytest.raises(RegistrationClashError, match="liger-registry and late-comer"), catalog.stage("late-comer") as s:
        s.register(fakes.make_op())


def test_four_of_five_are_no_clash():
    catalog = fakes.catalog(fakes.implementation("mine"))
    with catalog.stage("late-comer") as staging:
        staging.register(fakes.implementation("mine", vendor="cuda"))
        staging.register(fakes.implementation("mine", BACKWARD))
        staging.register(fakes.implementation("mine2"))
    assert {"any:mine", "cuda:mine", "any:mine2"} <= {i.id for i in catalog.implementations("affine", phase=FORWARD)}


def test_a_registration_that_runs_away_ends():
    catalog = Catalog()
    with pytest.raises(RegistrationError, match=f"more than {MOST} items"), catalog.stage("endless") as staging:  # noqa: PT012
        staging.register(fakes.make_op())
        number = 0
        while True:
            number += 1
            staging.register(fakes.implementation(f"n{number}"))
    assert catalog.ops() == ()


def test_a_staging_inside_a_staging_loses_nothing_silently():
    catalog = fakes.catalog()
    with catalog.stage("outer") as outer:
        outer.register(fakes.implementation("outer"))
        with pytest.raises(RegistrationError, match="inner registers while outer does"), catalog.stage("inner"):
            pass
    assert catalog.find("affine", "default", FORWARD, "outer").distribution == "outer"


def test_a_staging_that_ended_takes_nothing_more():
    catalog = fakes.catalog()
    with catalog.stage("late") as staging:
        pass
    with pytest.raises(RegistrationError, match="late registers after"):
        staging.register(fakes.implementation("late"))
    assert "any:late" not in {i.id for i in catalog.implementations("affine")}


def test_threads_that_register_wait_for_one_another():
    catalog, failures = fakes.catalog(), []

    def register(number):
        try:
            with catalog.stage(f"thread-{number}") as staging:
                for name in range(20):
                    staging.register(fakes.implementation(f"t{number}_{name}"))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=register, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert len(catalog.implementations("affine")) % 20 == 5  # whole distributions only
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(catalog.implementations("affine")) == 5 + 160


def test_find():
    catalog = fakes.catalog()
    assert catalog.find("affine", "default", FORWARD, "cuda:tiled").id == "cuda:tiled"
    assert catalog.find("affine", "default", BACKWARD, "tiled").id == "cuda:tiled"
    with pytest.raises(UnknownImplementationError, match="several implementations 'tiled'") as caught:
        catalog.find("affine", "default", FORWARD, "tiled")
    assert caught.value.candidates == ("cuda:tiled", "rocm:tiled")
    with pytest.raises(UnknownImplementationError, match="no implementation 'tield'") as caught:
        catalog.find("affine", "default", FORWARD, "tield")
    assert "any:plain" in caught.value.candidates
    with pytest.raises(UnknownOpError, match="affine") as caught:
        catalog.implementations("afine")
    assert "liger-tune plugins" in caught.value.fix


def test_vendors_that_nobody_has_are_refused():
    with pytest.raises(RegistrationError, match="unknown vendor 'nvidia'"):
        fakes.catalog(fakes.implementation("mine", capability=Capability("nvidia")))


def test_errors_name_the_plugins_that_failed():
    catalog = fakes.catalog()
    for name in ("p", "affine"):
        with pytest.raises(UnknownImplementationError) as caught:
            catalog.find("affine", "default", FORWARD, name)
        assert caught.value.why == ""
    catalog.failed = (
        PluginRecord("kernels", "group", "p-dist", "1.2", "p:register", "failed", "ValueError: two\n  lines"),
        PluginRecord("more", "group", "q-dist", "3.4", "q:register", "disabled", "no API"),
    )
    text = (
        "plugin kernels of p-dist 1.2 is failed: ValueError: two lines; plugin more of q-dist 3.4 is disabled: no API"
    )
    with pytest.raises(UnknownImplementationError) as caught:
        catalog.find("affine", "default", FORWARD, "p")
    assert caught.value.why == text
    with pytest.raises(UnknownImplementationError) as caught:
        catalog.find("affine", "default", FORWARD, "tiled")
    assert caught.value.why == "name the vendor too"
    with pytest.raises(UnknownOpError) as unknown:
        catalog.op("theirs")
    assert unknown.value.why == text
