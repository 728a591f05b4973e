from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liger_registry import device as device_module
from liger_registry import processor
from liger_registry.device import Device, Limits, safe_part
from liger_registry.errors import TableInvalidError, UnknownDeviceError
from liger_registry.parts import PARTS, Part

SAFE = re.compile(r"[a-z0-9_](?:[a-z0-9._-]{0,62}[a-z0-9_-])?")
GIB = 1 << 30


def properties(name: str, arch: tuple[int, int], units: int, memory: int, **more: Any) -> SimpleNamespace:
    """What torch reports of an NVIDIA GPU, with the figures of an H100 where none are given."""
    usual = {
        "warp_size": 32,
        "max_threads_per_block": 1024,
        "shared_memory_per_block_optin": 232448,
        "regs_per_multiprocessor": 65536,
        "L2_cache_size": 50 << 20,
    }
    figures = {"name": name, "major": arch[0], "minor": arch[1], "multi_processor_count": units, "total_memory": memory}
    return SimpleNamespace(**{**usual, **figures, **more})


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No memory of the devices of other tests."""
    monkeypatch.setattr(device_module, "_memo", {})
    monkeypatch.setattr(device_module, "_memo_interpret", {})
    yield monkeypatch
    monkeypatch.undo()


def pretend(patch: pytest.MonkeyPatch, *gpus: SimpleNamespace, hip: str | None = None) -> list[int]:
    """Lets torch see these GPUs, the last one current; returns the list of indices that were asked for."""
    asked: list[int] = []

    def get(index: int) -> SimpleNamespace:
        asked.append(index)
        return gpus[index]

    patch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    patch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    patch.setattr(torch.cuda, "current_device", lambda: len(gpus) - 1)
    patch.setattr(torch.cuda, "get_device_properties", get)
    patch.setattr(torch.version, "hip", hip)
    return asked


class TestParse:
    @pytest.mark.parametrize("part", PARTS, ids=lambda part: part.sku)
    def test_parse(self, part: Part) -> None:
        for name in (part.sku, *part.aliases, part.sku.upper()):
            found = Device.parse(name)
            assert (found.vendor, found.arch, found.sku, found.units) == (part.vendor, part.arch, part.sku, part.units)
            assert found.memory_bytes == part.gib << 30
            assert found.limits.warp_size == (64 if part.vendor == "rocm" else 32)
            assert found.limits.max_threads == 1024

    @pytest.mark.parametrize(
        ("name", "shared", "registers"),
        [
            ("t4", 65536, 65536),
            ("a100", 166912, 65536),
            ("a40", 101376, 65536),
            ("l40s", 101376, 65536),
            ("h100", 232448, 65536),
            ("h200", 232448, 65536),
            ("b200", 232448, 65536),
            ("mi300x", 65536, 131072),
            ("mi355x", 163840, 131072),
        ],
    )
    def test_limits(self, name: str, shared: int, registers: int) -> None:
        limits = Device.parse(name).limits
        assert (limits.shared_memory, limits.registers) == (shared, registers)

    def test_aliases(self) -> None:
        assert (
            Device.parse("h100") == Device.parse("h100-sxm") == Device.parse(" H100_SXM ") == Device.parse("h100 sxm")
        )
        assert Device.parse("a100").sku == "a100-80"
        assert Device.parse("h200").fingerprint == "cuda/sm_90/h200-132"
        assert Device.parse("h200").directory == ("cuda", "sm_90", "h200-132")
        assert Device.parse("mi300x").fingerprint == "rocm/gfx942/mi300x-304"

    def test_generated(self) -> None:
        found = Device.parse("sm_90-78u-64g")
        assert (found.vendor, found.arch, found.sku, found.units) == ("cuda", "sm_90", "sm_90-78u-64g", 78)
        assert found.limits.shared_memory == 232448
        assert Device.parse("gfx942-38u-24g").vendor == "rocm"
        assert Device.parse("gfx1100-96u-24g").limits.warp_size == 32
        assert Device.parse("sm_90-132u-80g") == Device.parse("h100-sxm")

    @pytest.mark.parametrize(
        "text", ["", "h300", "sm_90", "sm_90-0u-64g", "../h200", "cuda:x", "interpreter:cpu", "\u4e2d"]
    )
    def test_unknown(self, text: str) -> None:
        with pytest.raises(UnknownDeviceError) as caught:
            Device.parse(text)
        assert {"h200", "mi300x", "cpu", "interpreter"} <= set(caught.value.candidates)
        assert len(set(caught.value.candidates)) == len(caught.value.candidates)

    def test_the_closest_candidate_comes_first(self) -> None:
        with pytest.raises(UnknownDeviceError) as caught:
            Device.parse("h100-smx")
        assert caught.value.candidates[0] == "h100-sxm"

    @given(st.text(max_size=80))
    def test_any_text_is_a_device_or_a_named_error(self, text: str) -> None:
        with contextlib.suppress(UnknownDeviceError):
            assert all(SAFE.fullmatch(part) for part in Device.parse(text).directory)

    @pytest.mark.parametrize("name", ["interpreter", "interpreter:cuda"])
    def test_interpreter(self, name: str) -> None:
        found = Device.parse(name)
        assert (found.vendor, found.arch, found.emulates, found.units) == ("interpreter", "interpreter-cuda", "cuda", 4)
        assert found.limits == Device.parse("a100").limits
        assert found.siblings == ()

    def test_interpreter_for_rocm(self) -> None:
        found = Device.parse("interpreter:rocm")
        assert (found.vendor, found.arch, found.emulates) == ("interpreter", "interpreter-rocm", "rocm")
        assert (found.limits.warp_size, found.limits.shared_memory) == (64, 65536)
        assert Device.parse(found.sku) == found
        assert found.fingerprint != Device.parse("interpreter").fingerprint

    def test_gpus_emulate_themselves(self) -> None:
        assert [Device.parse(name).emulates for name in ("h200", "mi300x", "cpu")] == ["cuda", "rocm", "cpu"]


class TestFromProperties:
    def test_as_reported(self) -> None:
        reported = properties("NVIDIA H200", (9, 0), 132, 150109880320, L2_cache_size=62914560)
        found = Device.from_properties(reported, vendor="cuda", index=3)
        assert found == Device(
            "cuda", "sm_90", "h200", 132, 150109880320, Limits(32, 1024, 232448, 65536, 62914560), "other name", 0
        )
        assert (found.name, found.index) == ("NVIDIA H200", 3)
        assert found.limits == Device.parse("h200").limits

    def test_an_older_torch_lacks_attributes(self) -> None:
        reported = SimpleNamespace(name="A100", major=8, minor=0, multi_processor_count=108, total_memory=42298834944)
        assert Device.from_properties(reported, vendor="cuda").limits == Device.parse("a100-40").limits

    def test_the_drivers_word_counts_for_a_slice(self) -> None:
        reported = properties("NVIDIA H100 MIG 1g.10gb", (9, 0), 16, 9984 << 20, L2_cache_size=6 << 20)
        found = Device.from_properties(reported, vendor="cuda")
        assert found.fingerprint == "cuda/sm_90/sm_90-16u-10g-16"
        assert found.limits.l2_bytes == 6 << 20

    def test_rocm(self) -> None:
        reported = SimpleNamespace(
            name="AMD Instinct MI300X",
            gcnArchName="gfx942:sramecc+:xnack-",
            major=9,
            minor=4,
            multi_processor_count=304,
            total_memory=196592 << 20,
            warp_size=64,
            shared_memory_per_block_optin=0,
            regs_per_multiprocessor=65536,
            L2_cache_size=4 << 20,
        )
        found = Device.from_properties(reported, vendor="rocm")
        assert found.fingerprint == "rocm/gfx942/mi300x-304"
        assert found.limits == Limits(64, 1024, 65536, 131072, 32 << 20)

    def test_nothing_is_reported(self) -> None:
        found = Device.from_properties(SimpleNamespace(), vendor="cuda")
        assert found.units == 1
        assert found.limits.shared_memory == 49152

    def test_control_characters_do_not_reach_the_screen(self) -> None:
        reported = properties("H200\x1b[31m\n" + "x" * 500, (9, 0), 132, 150109880320)
        found = Device.from_properties(reported, vendor="cuda")
        assert found.name.isprintable()
        assert len(found.name) <= 128


class TestOf:
    def test_cpu(self, fresh: pytest.MonkeyPatch) -> None:
        found = Device.of(torch.empty(1))
        assert found is Device.of(torch.device("cpu")) is Device.of(torch.empty(2))
        assert found == Device.parse("cpu")
        assert Device.of(torch.empty(1), interpret=True) == Device.parse("interpreter")
        assert Device.of(torch.empty(1)) is found

    def test_the_driver_is_asked_once_an_index(self, fresh: pytest.MonkeyPatch) -> None:
        gpus = [properties("NVIDIA H200", (9, 0), 132, 150109880320), properties("L4", (8, 9), 58, 23034 << 20)]
        asked = pretend(fresh, *gpus)
        for _ in range(3):
            assert Device.of(torch.device("cuda", 0)).sku == "h200"
            assert Device.of(torch.device("cuda", 1)).sku == "l4"
            assert Device.of(torch.device("cuda", 1), interpret=True).sku == "l4"
            assert Device.parse("cuda:1").index == 1
        assert sorted(asked) == [0, 1]

    def test_no_index_follows_the_current_device(self, fresh: pytest.MonkeyPatch) -> None:
        pretend(fresh, properties("H200", (9, 0), 132, 150109880320), properties("L4", (8, 9), 58, 23034 << 20))
        assert Device.of(torch.device("cuda")).sku == Device.default().sku == Device.parse("cuda").sku == "l4"
        fresh.setattr(torch.cuda, "current_device", lambda: 0)
        assert Device.of(torch.device("cuda")).sku == Device.default().sku == Device.parse("cuda").sku == "h200"

    def test_amd(self, fresh: pytest.MonkeyPatch) -> None:
        reported = properties("MI300X", (9, 4), 304, 196592 << 20, gcnArchName="gfx942:sramecc+:xnack-", warp_size=64)
        pretend(fresh, reported, hip="6.4")
        for found in (Device.default(), Device.parse("rocm:0"), Device.parse("rocm"), Device.parse("cuda:0")):
            assert (found.vendor, found.sku, found.index) == ("rocm", "mi300x", 0)

    def test_no_gpu(self, fresh: pytest.MonkeyPatch) -> None:
        pretend(fresh)
        assert Device.default().vendor == "cpu"
        for name in ("cuda", "cuda:0", "rocm:0"):
            with pytest.raises(UnknownDeviceError, match="there is no device"):
                Device.parse(name)
        with pytest.raises(UnknownDeviceError):
            Device.of(torch.device("cuda", 0))

    def test_no_such_gpu(self, fresh: pytest.MonkeyPatch) -> None:
        pretend(fresh, properties("H200", (9, 0), 132, 150109880320))
        with pytest.raises(UnknownDeviceError) as caught:
            Device.of(torch.device("cuda", 4))
        assert caught.value.candidates == ("cuda:0", "cpu")
        with pytest.raises(UnknownDeviceError):
            Device.parse("rocm:0")

    @pytest.mark.parametrize("kind", ["meta", "mps", "xpu"])
    def test_other_kinds(self, kind: str) -> None:
        with pytest.raises(UnknownDeviceError, match=kind):
            Device.of(torch.device(kind))


class TestCarrying:
    @pytest.mark.parametrize("name", ["h200", "mi300x", "cpu", "interpreter", "interpreter:rocm", "sm_90-78u-64g"])
    def test_json_and_pickle(self, name: str) -> None:
        found = dataclasses.replace(Device.parse(name), name="a name", index=2)
        for copy in (Device.from_json(json.loads(json.dumps(found.to_json()))), pickle.loads(pickle.dumps(found))):
            assert copy == found
            assert hash(copy) == hash(found)
            assert (copy.name, copy.index) == ("a name", 2)

    def test_name_and_index_may_be_missing(self) -> None:
        fields = Device.parse("h200").to_json()
        del fields["name"], fields["index"]
        assert Device.from_json(fields) == Device.parse("h200")

    @pytest.mark.parametrize(
        "change",
        [
            {"vendor": "tpu"},
            {"vendor": None},
            {"arch": "../.."},
            {"sku": 7},
            {"units": True},
            {"units": 1.0},
            {"units": "132"},
            {"units": 0},
            {"units": 10**40},
            {"memory_bytes": -1},
            {"limits": None},
            {"limits": {}},
            {"limits": [32, 1024, 0, 0, 0]},
            {"index": -1},
            {"index": False},
            {"name": None},
            {"extra": 1},
        ],
    )
    def test_hostile_json(self, change: dict[str, Any]) -> None:
        with pytest.raises(TableInvalidError):
            Device.from_json({**Device.parse("h200").to_json(), **change})

    @pytest.mark.parametrize("field", ["vendor", "arch", "sku", "units", "memory_bytes", "limits"])
    def test_missing_json(self, field: str) -> None:
        fields = Device.parse("h200").to_json()
        del fields[field]
        with pytest.raises(TableInvalidError, match=field):
            Device.from_json(fields)

    @pytest.mark.parametrize("whole", [None, [], "h200", 3])
    def test_no_object(self, whole: Any) -> None:
        with pytest.raises(TableInvalidError):
            Device.from_json(whole)

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        )
    )
    def test_any_json_is_a_named_error(self, value: Any) -> None:
        with pytest.raises(TableInvalidError):
            Device.from_json(value)

    def test_is_immutable(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            Device.parse("h200").units = 1  # type: ignore[misc]


class TestSafeParts:
    @given(
        st.text(max_size=100) | st.none(),
        st.text(max_size=60) | st.sampled_from(["gfx942:sramecc+:xnack-", "../../etc", ""]),
        st.integers(-5, 10**12),
        st.integers(-5, 10**20),
        st.sampled_from(["cuda", "rocm"]),
    )
    def test_any_device_has_a_safe_fingerprint(
        self, name: str | None, arch: str, units: int, memory: int, vendor: str
    ) -> None:
        reported = SimpleNamespace(name=name, gcnArchName=arch, multi_processor_count=units, total_memory=memory)
        found = Device.from_properties(reported, vendor=vendor)
        assert found.fingerprint.split("/") == list(found.directory)
        assert all(SAFE.fullmatch(part) for part in found.directory)
        assert Device.from_json(json.loads(json.dumps(found.to_json()))) == found

    @pytest.mark.parametrize("field", ["arch", "sku"])
    @pytest.mark.parametrize(
        "bad", ["", "..", ".hidden", "-x", "a/b", "a\\b", "A100", "a b", "a\n", "h\u00fc", "x" * 65]
    )
    def test_no_device_with_an_unsafe_name(self, field: str, bad: str) -> None:
        change: dict[str, Any] = {field: bad}
        with pytest.raises(UnknownDeviceError):
            dataclasses.replace(Device.parse("h200"), **change)

    @pytest.mark.parametrize(
        "change", [{"vendor": "tpu"}, {"vendor": "interpreter"}, {"units": 0}, {"units": 10**6}, {"memory_bytes": -1}]
    )
    def test_no_impossible_device(self, change: dict[str, Any]) -> None:
        with pytest.raises(UnknownDeviceError):
            dataclasses.replace(Device.parse("h200"), **change)


@pytest.mark.parametrize(
    ("name", "protocol"),
    [
        ("h200", "cuda-events-1"),
        ("mi300x", "cuda-events-1"),
        ("cpu", "cpu-clock-1"),
        ("interpreter", "cpu-clock-1"),
        ("interpreter:rocm", "cpu-clock-1"),
    ],
)
def test_protocol(name: str, protocol: str) -> None:
    from liger_registry.tuning.measure import protocol_of

    device = Device.parse(name)
    assert device.protocol == protocol
    assert protocol == protocol_of("cuda" if device.vendor in ("cuda", "rocm") else "cpu")


class TestCpu:
    def test_this_machine(self) -> None:
        found = Device.parse("cpu")
        assert found.vendor == "cpu"
        assert found.units >= 1
        assert found.limits.warp_size == found.limits.max_threads == 1
        assert found.limits.shared_memory == found.limits.registers == 0
        assert found.arch.startswith(safe_part(processor.describe().machine))
        assert all(SAFE.fullmatch(part) for part in found.directory)

    @pytest.mark.parametrize(
        ("machine", "capability", "arch"),
        [
            ("x86_64", "AVX512", "x86_64-avx512"),
            ("AMD64", "AVX2", "x86_64-avx2"),
            ("arm64", "DEFAULT", "aarch64"),
            ("aarch64", "SVE256", "aarch64-sve256"),
            ("x86_64", "NO AVX", "x86_64"),
            ("s390x", "Z VECTOR", "s390x-zvector"),
            ("", "DEFAULT", "unknown"),
        ],
    )
    def test_arch(self, monkeypatch: pytest.MonkeyPatch, machine: str, capability: str, arch: str) -> None:
        monkeypatch.setattr("platform.machine", lambda: machine)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        assert device_module._cpu.__wrapped__().arch == arch
