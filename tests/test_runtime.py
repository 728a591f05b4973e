"""The public object: handles, pins, memos, and what several threads see of them."""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading

import fakes
import pytest
import torch
from fake_registry import W, X, build, calls, fake_tuner, problem, problem_of_norm, run

import liger_registry
from liger_registry import Config, Registry, runtime
from liger_registry.decision import USER
from liger_registry.errors import (
    ConfigOutsideSpaceError,
    RegistrationClashError,
    UnknownImplementationError,
    UnknownOpError,
    UnsupportedOptionError,
)
from liger_registry.problem import FORWARD
from liger_registry.settings import Settings


@pytest.fixture
def make(tmp_path):
    """A maker of registries over a fake operation."""
    return functools.partial(build, tmp_path)


# --- handles ----------------------------------------------------------------------------------------------------------


def test_handles_are_stable(make):
    registry = make()
    handle = registry.get(registry.name)
    assert registry.get(registry.name) is handle
    assert registry.get(registry.name, memory_budget=None) is handle
    assert registry.get(registry.name, memory_budget=10) is not handle
    assert registry.get(registry.name, memory_budget=10) is registry.get(registry.name, memory_budget=10)
    registry.register(fakes.implementation("new", op=registry.name))
    assert registry.get(registry.name) is handle
    assert torch.equal(handle(X, W, 2.0), 2 * X * W)


def test_public_names():
    assert liger_registry.registry is liger_registry.registry
    assert liger_registry.get("rms_norm") is liger_registry.registry.get("rms_norm")
    assert liger_registry.registry.public
    assert not Registry().public
    again = pickle.loads(pickle.dumps(liger_registry.get("rms_norm")))
    assert again is liger_registry.get("rms_norm")
    pinned = pickle.loads(pickle.dumps(liger_registry.get("rms_norm", implementation="eager", memory_budget=7)))
    assert (pinned.own_pins, pinned.budget) == ((("rms_norm", "eager", None),), 7)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        liger_registry.nothing  # noqa: B018
    assert set(liger_registry.__all__) <= set(dir(liger_registry))


def test_unknown_names(make):
    registry = make()
    with pytest.raises(UnknownOpError, match="there is no operation 'rms_nrom'"):
        registry.get("rms_nrom")
    for wrong in (
        {"implementation": "gone"},
        {"implementation": {"forward": "gone"}},
        {"implementation": {"up": "plain"}},
        {"config": {"block": 32}},
    ):
        with pytest.raises(UnknownImplementationError):
            registry.get(registry.name, **wrong)
    with pytest.raises(ConfigOutsideSpaceError):
        registry.get(registry.name, implementation="tiled", config={"block": 7})
    with pytest.raises(UnknownImplementationError), registry.use(registry.name, "gone"):
        pass


@pytest.mark.parametrize("budget", [-1, 1.5, "1G", True])
def test_a_budget_is_a_number_of_bytes(make, budget):
    registry = make()
    with pytest.raises(UnsupportedOptionError, match="memory_budget"):
        registry.get(registry.name, memory_budget=budget)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"implementation": "tiled", "config": {"block": [64]}}, ConfigOutsideSpaceError),
        ({"implementation": "tiled", "config": {"block": {}}}, ConfigOutsideSpaceError),
        ({"implementation": "tiled", "config": {1: 2, "block": 64}}, ConfigOutsideSpaceError),
        ({"implementation": "tiled", "config": [("block", 64)]}, ConfigOutsideSpaceError),
        ({"config": {"block": [64]}}, UnknownImplementationError),
        ({"implementation": ["plain"]}, UnknownImplementationError),
        ({"implementation": 7}, UnknownImplementationError),
        ({"implementation": {"forward": ["plain"]}}, UnknownImplementationError),
        ({"implementation": {1: "plain"}}, UnknownImplementationError),
    ],
)
def test_what_cannot_be_hashed_or_is_no_name_is_an_error_of_the_catalogue(make, wrong, error):
    registry = make()
    with pytest.raises(error) as caught:
        registry.get(registry.name, **wrong)
    assert caught.value.fix
    if "implementation" in wrong:
        with pytest.raises(error), registry.use(registry.name, **wrong):
            pass


# --- pins -------------------------------------------------------------------------------------------------------------


def test_pins_by_argument_and_use(make):
    registry = make()
    assert run(registry, X, W) == "plain"
    registry.get(registry.name, implementation="other")(X, W)
    assert registry.log[-1] == "other"
    with registry.use(registry.name, "tiled"):
        assert run(registry, X, W) == "tiled"
        with registry.use(registry.name, "other"):
            assert run(registry, X, W) == "other"
            registry.get(registry.name, implementation="plain")(X, W)
            assert registry.log[-1] == "plain"
        assert run(registry, X, W) == "tiled"
    assert run(registry, X, W) == "plain"
    with pytest.raises(ZeroDivisionError), registry.use(registry.name, "other"):
        1 / 0  # noqa: B018
    assert run(registry, X, W) == "plain"


@contextlib.contextmanager
def handle_of(root, pin):
    """A handle under a pin of the environment's, whose use raises."""
    with pytest.raises(UnknownImplementationError) as caught:
        yield caught, Registry(Settings(cache_dir=root, pins=(pin,))).get("rms_norm")


def test_the_environments_pins(tmp_path):
    settings = Settings(cache_dir=tmp_path, pins=(("rms_norm/forward", "eager"),))
    registry = Registry(settings)
    handle = registry.get("rms_norm")
    assert handle.explain(X, W)[0].decision.source == "pinned"
    with registry.use("rms_norm", "functional"):
        assert handle.explain(X, W)[0].decision.implementation.name == "functional"
    with handle_of(tmp_path, ("rms_norm/forward", "nope")) as (caught, handle):
        handle(X, W)
    assert caught.value.what.startswith("LIGER_PIN=rms_norm/forward=nope: ")
    assert "any:eager" in caught.value.candidates
    assert "LIGER_PIN" in caught.value.fix
    with handle_of(tmp_path, ("rms_norm", "nope")) as (caught, handle):
        handle.explain(X, W)
    assert caught.value.what.startswith("LIGER_PIN=rms_norm=nope: ")
    # A pin of the caller's own is none of the environment's.
    registry = Registry(Settings(cache_dir=tmp_path, pins=(("rms_norm", "nope"),)))
    assert registry.get("rms_norm", implementation="eager")(X, W).shape == X.shape
    with pytest.raises(UnknownOpError, match="rms_nrom"):
        Registry(Settings(cache_dir=tmp_path, pins=(("rms_nrom", "eager"),))).get("rms_norm")


def test_a_pin_in_one_thread_is_not_seen_in_another(make):
    registry, seen = make(), []
    with registry.use(registry.name, "other"):
        thread = threading.Thread(target=lambda: seen.append(run(registry, X, W)))
        thread.start()
        thread.join()
    assert seen == ["plain"]


def test_pins_by_phase_and_with_a_config(make):
    registry = make()
    x = X.clone().requires_grad_()
    handle = registry.get(registry.name, implementation={"backward": "other"})
    handle(x, W).sum().backward()
    assert registry.log == ["plain", "other-backward"]
    found = registry.get(registry.name, implementation="tiled", config={"block": 64}).explain(X, W)[0].decision
    assert (found.implementation.name, found.config.block, found.source) == ("tiled", 64, "pinned")


def test_a_config_may_be_of_any_vendor_that_has_the_name(make):
    registry = make()
    space = fakes.ConfigSpace(waves=[1, 2])
    registry.register(
        fakes.implementation("both", op=registry.name, vendor="cuda", space=fakes.SPACE),
        fakes.implementation("both", op=registry.name, vendor="rocm", space=space),
    )
    handle = registry.get(registry.name, implementation="both", config={"waves": 2})
    assert handle.own_pins[0][2] == Config(waves=2)


# --- memos ------------------------------------------------------------------------------------------------------------


def test_a_new_registration_is_not_chosen_but_seen(make):
    registry = make()
    handle = registry.get(registry.name)
    assert run(registry, X, W) == "plain"
    forward, _ = calls(registry.log, "mine")
    registry.register(fakes.implementation("mine", op=registry.name, launch=forward))
    assert run(registry, X, W) == "plain"
    assert not registry.catalog.find(registry.name, "default", FORWARD, "mine").own
    with registry.use(registry.name, "mine"):
        assert run(registry, X, W) == "mine"
    # Verified and measured on this device: it wins on merit, as soon as the memo is dropped.
    wanted = problem(registry)
    hashed = {"source": fakes.source_hash(forward)}
    entry, sample = (kind(wanted, "any:mine", None, **hashed) for kind in (fakes.stored, fakes.sample))
    registry.user_store.record(fakes.CPU, registry.name, [entry], [sample])
    assert run(registry, X, W) == "plain"
    registry.forget()
    assert run(registry, X, W) == "mine"
    assert registry.get(registry.name) is handle
    with pytest.raises(RegistrationClashError):
        registry.register(
            fakes.implementation("more", op=registry.name), fakes.implementation("mine", op=registry.name)
        )
    assert "any:more" not in {i.id for i in registry.catalog.implementations(registry.name)}


def test_tune_forgets(make, monkeypatch):
    registry = make()
    assert run(registry, X, W) == "plain"
    wanted = problem(registry)

    def tune(problems, *, catalog, device, store, **options):
        (asked,) = problems
        found = catalog.find(registry.name, "default", FORWARD, "other")
        entry = fakes.stored(asked, "any:other", None, source=fakes.source_hash(found.launch))
        store.record(device, registry.name, [entry])
        return options

    fake_tuner(monkeypatch, tune)
    # A worker could not load what this registry was given.
    assert registry.tune(iter([wanted]), budget_s=3) == {"budget_s": 3, "isolate": False}
    assert run(registry, X, W) == "other"
    assert registry.get(registry.name).explain(X, W)[0].decision.source == "exact"


def test_only_what_is_installed_is_tuned_in_a_worker(tmp_path, monkeypatch):
    registry = Registry(Settings(cache_dir=tmp_path, plugins=frozenset()))
    fake_tuner(monkeypatch, lambda problems, **options: options["isolate"])
    wanted = [problem_of_norm(registry)]
    assert registry.tune(wanted) is True
    registry.register(fakes.implementation("mine", op="rms_norm"))
    assert registry.tune(wanted) is False
    assert registry.tune(wanted, isolate=True) is True


def test_what_this_process_registered_is_verified_and_competes(tmp_path):
    registry = Registry(Settings(cache_dir=tmp_path, plugins=frozenset()))

    def forward(x, weight, *, device, **options):
        return registry.op("rms_norm").schemes[0].reference(x, weight, **options)

    registry.register(fakes.implementation("mine", op="rms_norm", launch=forward))
    wanted = problem_of_norm(registry)
    registry.tune([wanted])
    statuses = {
        s.choice.implementation: s.status for s in registry.user_store.load(fakes.CPU, "rms_norm").samples_of(wanted)
    }
    assert statuses["any:mine"] in ("ok", "noisy")
    assert statuses["any:eager"] in ("ok", "noisy")
    assert registry.dispatcher._verified(
        registry.catalog.find("rms_norm", "default", FORWARD, "mine"), wanted, fakes.CPU
    )


def test_a_decision_of_before_does_not_outlive_forget(make):
    registry = make()
    registry.get(registry.name)
    wanted, decide = problem(registry), registry.dispatcher.decide

    class Slow:
        """While the first decision is under way, the memos are dropped."""

        def __getattr__(self, name):
            return getattr(registry._real, name)

        def decide(self, *args):
            found = decide(*args)
            registry.forget()
            return found

    registry._real, registry._dispatcher = registry._dispatcher, Slow()
    registry.decide(wanted, fakes.CPU)
    assert registry._memo == {}
    registry.get(registry.name)(X, W)
    assert registry.get(registry.name)._memo == {}


class Racing(dict):
    """A dictionary that another thread changes while somebody looks for its first key."""

    def __iter__(self):
        if not getattr(self, "raced", False):
            self.raced = True
            raise RuntimeError("dictionary changed size during iteration")
        return super().__iter__()


def test_memos_are_bounded_and_survive_races(make, monkeypatch):
    monkeypatch.setattr(runtime, "MEMO", 3)
    registry = make()
    registry._memo = Racing()
    wanted = [problem(registry).having(rows=1 << n) for n in range(6)]
    for one in wanted:
        registry.decide(one, fakes.CPU)
    assert [key[1] for key in dict.keys(registry._memo)] == wanted[3:]
    registry.decide(wanted[-1], fakes.CPU)
    assert len(registry._memo) == 3


def test_the_problems_that_were_called_are_kept_apart_and_bounded(make, monkeypatch):
    monkeypatch.setattr(runtime, "CALLED", 3)
    registry = make()
    for rows in (1, 2, 4, 8, 2):
        registry.get(registry.name)(torch.ones(rows, 64), W)
        registry.forget()
    # In the order of their last calls; the oldest went.
    assert [p.rows for p in registry._called(fakes.CPU)] == [4, 8, 2]
    assert registry._called(fakes.H100) == []
    registry.explain(problem(registry).having(rows=64), fakes.CPU)
    registry.decide(problem(registry).having(rows=64), fakes.CPU)
    assert len(registry._called(fakes.CPU)) == 3


def test_deterministic_mode_is_part_of_the_memo(make):
    registry = make()
    forward, _ = calls(registry.log, "random")
    # Registered as this distribution's own, so that it is first.
    with registry.stage("liger-registry") as staging:
        staging.register(fakes.implementation("aaa", op=registry.name, launch=forward, deterministic=False))
    with registry.use(registry.name, "aaa"):
        assert run(registry, X, W) == "random"
        torch.use_deterministic_algorithms(True)
        with pytest.raises(RuntimeError, match="not deterministic"):
            run(registry, X, W)
        torch.use_deterministic_algorithms(False)
        assert run(registry, X, W) == "random"


# --- threads ----------------------------------------------------------------------------------------------------------


def in_threads(count, work):
    """Run work in threads that start together; what they returned and what they raised."""
    barrier, found, failures = threading.Barrier(count), [], []

    def guarded():
        try:
            barrier.wait()
            found.append(work())
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, failures


def test_sixteen_threads_that_get_first(tmp_path):
    registry = Registry(Settings(cache_dir=tmp_path, plugins=frozenset()))

    def work():
        handle = registry.get("rms_norm")
        return id(handle), id(registry.dispatcher), handle(X, W).sum().item()

    found, failures = in_threads(16, work)
    assert failures == []
    assert len(found) == 16
    assert len(set(found)) == 1


def test_sixteen_threads_with_an_operation_that_torch_does_not_know_yet(make):
    registry = make()
    found, failures = in_threads(16, lambda: registry.get(registry.name)(X, W).sum().item())
    assert failures == []
    assert found == [256.0] * 16


def test_calls_while_others_register(make):
    registry, failures = make(), []
    stop = threading.Event()

    def call():
        rows = 0
        while not stop.is_set():
            rows = rows % 64 + 1
            try:
                assert torch.equal(registry.get(registry.name)(X[:1].expand(rows, 64), W), X[:1].expand(rows, 64))
                registry.explain(problem(registry), fakes.CPU)
            except Exception as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(50):
        registry.register(fakes.implementation(f"n{number}", op=registry.name))
        registry._called(fakes.CPU)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []


def test_stores_and_parts(make, tmp_path):
    registry = make(table_dirs=(tmp_path / "cluster",))
    kinds = [kind for kind, _ in registry.stores()]
    assert kinds == ["user", "cluster", "shipped"]
    assert registry.stores()[0] == (USER, registry.user_store)
    assert registry.user_store.root == tmp_path / "cache"
    assert [store.readonly for _, store in registry.stores()] == [False, True, True]


def test_shipped_tables_are_trusted_whatever_the_umask_was(make):
    shipped = make().stores()[-1][1]
    assert shipped.root.name == "liger_registry_tunings"
    assert not shipped._guarded
