from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liger_registry.device import Device
from liger_registry.parts import PARTS, Part, by_name, capability_number, identify, safe_part

SAFE = re.compile(r"[a-z0-9_](?:[a-z0-9._-]{0,62}[a-z0-9_-])?")
GIB = 1 << 30
# What drivers report: bytes where torch's figure is known, else the MiB of nvidia-smi or rocm-smi.
REPORTED = [
    ("a100-40", "cuda", "sm_80", 108, 42298834944, "NVIDIA A100-SXM4-40GB"),
    ("a100-80", "cuda", "sm_80", 108, 81920 << 20, "NVIDIA A100-SXM4-80GB"),
    ("a100-80", "cuda", "sm_80", 108, 81038 << 20, "NVIDIA A100 80GB PCIe"),
    ("h100-sxm", "cuda", "sm_90", 132, 81559 << 20, "NVIDIA H100 80GB HBM3"),
    ("h100-sxm", "cuda", "sm_90", 132, 81004 << 20, "NVIDIA H800"),
    ("h100-pcie", "cuda", "sm_90", 114, 81559 << 20, "NVIDIA H100 PCIe"),
    ("h100-nvl", "cuda", "sm_90", 132, 99456909312, "NVIDIA H100 NVL"),
    ("h100-nvl", "cuda", "sm_90", 132, 95830 << 20, "NVIDIA H100 NVL"),
    ("h200", "cuda", "sm_90", 132, 150109880320, "NVIDIA H200"),
    ("h200", "cuda", "sm_90", 132, 143771 << 20, "NVIDIA H200 NVL"),
    ("gh200", "cuda", "sm_90", 132, 97871 << 20, "NVIDIA GH200 480GB"),
    ("h20", "cuda", "sm_90", 78, 97285 << 20, "NVIDIA H20"),
    ("b200", "cuda", "sm_100", 148, int(178.35 * GIB), "NVIDIA B200"),
    ("gb200", "cuda", "sm_100", 152, 189471 << 20, "NVIDIA GB200"),
    ("l4", "cuda", "sm_89", 58, 23034 << 20, "NVIDIA L4"),
    ("l40s", "cuda", "sm_89", 142, 46068 << 20, "NVIDIA L40S"),
    ("rtx-6000-ada", "cuda", "sm_89", 142, 49140 << 20, "NVIDIA RTX 6000 Ada Generation"),
    ("rtx-a6000", "cuda", "sm_86", 84, 49140 << 20, "NVIDIA RTX A6000"),
    ("a40", "cuda", "sm_86", 84, 46068 << 20, "NVIDIA A40"),
    ("rtx-4090", "cuda", "sm_89", 128, 24564 << 20, "NVIDIA GeForce RTX 4090"),
    ("t4", "cuda", "sm_75", 40, 15360 << 20, "Tesla T4"),
    ("mi300x", "rocm", "gfx942", 304, 196592 << 20, "AMD Instinct MI300X"),
    ("mi308x", "rocm", "gfx942", 80, 196592 << 20, "AMD Instinct MI308X"),
    ("mi325x", "rocm", "gfx942", 304, 262128 << 20, "AMD Instinct MI325X"),
    ("mi250x", "rocm", "gfx90a", 110, 65520 << 20, "AMD Instinct MI250X"),
    ("mi210", "rocm", "gfx90a", 104, 65520 << 20, "AMD Instinct MI210"),
    ("mi355x", "rocm", "gfx950", 256, 294896 << 20, "AMD Instinct MI355X"),
]
NAMED_ONLY = {"rtx-6000-ada", "rtx-a6000", "mi210"}  # equal to another part in arch, units and memory


class TestIdentify:
    @pytest.mark.parametrize(("sku", "vendor", "arch", "units", "memory", "name"), REPORTED)
    def test_what_drivers_report(self, sku: str, vendor: str, arch: str, units: int, memory: int, name: str) -> None:
        assert identify(vendor, arch, units, memory, name) == sku

    @pytest.mark.parametrize(
        "renamed", ["", "Graphics Device", "NVIDIA PG506-230", "AMD Radeon Graphics", "\u4e2d ../x"]
    )
    @pytest.mark.parametrize(
        ("sku", "vendor", "arch", "units", "memory", "name"), [row for row in REPORTED if row[0] not in NAMED_ONLY]
    )
    def test_a_renamed_device_keeps_its_sku(
        self, sku: str, vendor: str, arch: str, units: int, memory: int, name: str, renamed: str
    ) -> None:
        assert identify(vendor, arch, units, memory, renamed) == sku

    def test_the_name_never_beats_the_figures(self) -> None:
        assert identify("cuda", "sm_80", 108, 42298834944, "NVIDIA A100-SXM4-80GB") == "a100-40"
        assert identify("cuda", "sm_90", 114, 81559 << 20, "NVIDIA H200") == "h100-pcie"

    def test_a_renamed_twin_is_still_a_part_of_its_group(self) -> None:
        assert identify("cuda", "sm_86", 84, 46068 << 20, "NVIDIA A40 Rev. 2") == "a40"
        assert identify("cuda", "sm_86", 84, 46068 << 20, "Graphics Device") == "a40"

    @pytest.mark.parametrize(
        ("arch", "units", "memory", "name", "sku"),
        [
            ("sm_80", 98, 40192 << 20, "NVIDIA A100-SXM4-40GB MIG 7g.40gb", "sm_80-98u-40g"),
            ("sm_80", 42, 19968 << 20, "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "sm_80-42u-20g"),
            ("sm_80", 14, 4864 << 20, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "sm_80-14u-5g"),
            ("sm_90", 60, 40448 << 20, "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "sm_90-60u-40g"),
            ("sm_90", 132, 40448 << 20, "NVIDIA H100 80GB HBM3", "sm_90-132u-40g"),
            ("sm_90", 78, 64 << 30, "", "sm_90-78u-64g"),
            ("sm_90", 16, 0, "", "sm_90-16u-0g"),
        ],
    )
    def test_a_slice_is_a_device_of_its_own(self, arch: str, units: int, memory: int, name: str, sku: str) -> None:
        assert identify("cuda", arch, units, memory, name) == sku

    def test_a_partition_is_a_device_of_its_own(self) -> None:
        assert identify("rocm", "gfx942", 38, 24 << 30, "AMD Instinct MI300X") == "gfx942-38u-24g"
        assert identify("rocm", "gfx942", 20, 196592 << 20, "AMD Instinct MI308X") == "gfx942-20u-192g"

    @pytest.mark.parametrize("nominal", [5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256])
    def test_no_driver_version_changes_a_generated_sku(self, nominal: int) -> None:
        reported = [int(nominal * GIB * share / 1000) for share in range(900, 1020)]
        assert {identify("cuda", "sm_90", 77, memory) for memory in reported} == {f"sm_90-77u-{nominal}g"}

    @given(st.integers(0, 2**44), st.integers(0, 2**44))
    def test_more_memory_is_never_named_less(self, one: int, other: int) -> None:
        gib = [int(identify("cuda", "sm_99", 7, m).removeprefix("sm_99-7u-")[:-1]) for m in sorted((one, other))]
        assert gib == sorted(gib)

    @pytest.mark.parametrize(
        ("name", "sku"),
        [
            ("Intel(R) Xeon(R) Platinum 8488C", "intel-xeon-platinum-8488c"),
            ("Intel(R) Xeon(R) CPU @ 2.20GHz", "intel-xeon"),
            ("AMD EPYC 9754 128-Core Processor", "amd-epyc-9754"),
            ("AMD Ryzen 9 7950X 16-Core Processor", "amd-ryzen-9-7950x"),
            ("AMD Ryzen 7 8840U w/ Radeon 780M Graphics", "amd-ryzen-7-8840u"),
            ("12th Gen Intel(R) Core(TM) i7-1260P", "12th-gen-intel-core-i7-1260p"),
            ("Intel\u00ae Core\u2122 i7", "intel-core-i7"),
            ("aarch64", "aarch64"),
            ("", "unknown"),
        ],
    )
    def test_a_processor_is_its_model(self, name: str, sku: str) -> None:
        assert identify("cpu", "x86_64-avx512", 8, 64 << 30, name) == sku


class TestSafeParts:
    @given(
        st.sampled_from(["cuda", "rocm", "cpu", "interpreter"]),
        st.text(max_size=100) | st.sampled_from(["sm_90", "gfx942", "..", "/", "interpreter-rocm"]),
        st.integers(-(10**30), 10**30),
        st.integers(-(10**30), 10**30),
        st.text(max_size=200),
    )
    def test_any_sku(self, vendor: str, arch: str, units: int, memory: int, name: str) -> None:
        sku = identify(vendor, arch, units, memory, name)
        assert SAFE.fullmatch(sku)
        assert len(sku) <= 48
        assert not sku.startswith(".")
        assert not sku.endswith(".")

    @given(st.text(max_size=200) | st.sampled_from(["..", ".", "/", "\\", "a/../b", "\x00", "CON", " ", "\ud800"]))
    def test_any_text(self, text: str) -> None:
        part = safe_part(text)
        assert SAFE.fullmatch(part)
        assert part[0] not in ".-_"
        assert part[-1] not in ".-_"

    @given(st.text(max_size=60))
    def test_is_stable(self, text: str) -> None:
        assert safe_part(safe_part(text)) == safe_part(text)

    def test_what_is_cut_stays_apart(self) -> None:
        assert safe_part("a" * 80) != safe_part("a" * 81)
        assert safe_part("\u9f99\u82af") != safe_part("\u5146\u82af")


class TestParts:
    def test_names_are_unique(self) -> None:
        names = [name for part in PARTS for name in (part.sku, *part.aliases)]
        assert len(names) == len(set(names)) == len(by_name())
        assert all(safe_part(name) == name for name in names)

    def test_equal_figures_have_words_that_tell_them_apart(self) -> None:
        for one, other in itertools.combinations(PARTS, 2):
            if (one.vendor, one.arch, one.units, one.gib) == (other.vendor, other.arch, other.units, other.gib):
                assert one.words
                assert other.words
                assert not set(one.words) & set(other.words)

    @pytest.mark.parametrize("part", PARTS, ids=lambda part: part.sku)
    def test_each_is_found_by_its_own_figures(self, part: Part) -> None:
        assert identify(part.vendor, part.arch, part.units, part.gib << 30, " ".join(part.words)) == part.sku


class TestSiblings:
    @pytest.mark.parametrize(
        ("name", "first"),
        [
            ("h100-sxm", "h200"),
            ("h200", "h100-sxm"),
            ("h100-pcie", "h100-nvl"),
            ("h20", "h20-3e"),
            ("a100-40", "a100-80"),
            ("a100-80", "a100-40"),
            ("mi300x", "mi325x"),
            ("mi325x", "mi300x"),
            ("mi355x", "mi350x"),
            ("a40", "rtx-a6000"),
            ("sm_90-126u-80g", "h100-sxm"),
            ("sm_90-120u-80g", "h100-pcie"),
            ("sm_80-98u-40g", "a100-40"),
        ],
    )
    def test_nearest_first(self, name: str, first: str) -> None:
        assert Device.parse(name).siblings[0] == first

    @pytest.mark.parametrize("part", PARTS, ids=lambda part: part.sku)
    def test_all_others_of_the_arch(self, part: Part) -> None:
        expected = {other.sku for other in PARTS if other.arch == part.arch} - {part.sku}
        siblings = Device.parse(part.sku).siblings
        assert set(siblings) == expected
        assert len(siblings) == len(expected)

    def test_none_across_archs(self) -> None:
        assert Device.parse("sm_99-10u-8g").siblings == ()
        assert Device.parse("cpu").siblings == ()

    def test_what_the_driver_keeps_does_not_reorder_them(self) -> None:
        found = dataclasses.replace(Device.parse("h200"), memory_bytes=150109880320)
        assert found.siblings == Device.parse("h200").siblings


class TestCapabilityNumber:
    @pytest.mark.parametrize(
        ("arch", "number"),
        [
            ("sm_75", 75),
            ("sm_90", 90),
            ("sm_90a", 90),
            ("sm_100", 100),
            ("sm_120", 120),
            ("gfx90a", 0x90A),
            ("gfx942", 0x942),
            ("interpreter-cuda", 80),
            ("interpreter-rocm", 0x942),
            ("x86_64-avx512", 0),
            ("", 0),
            ("sm_", 0),
        ],
    )
    def test_numbers(self, arch: str, number: int) -> None:
        assert capability_number(arch) == number

    def test_generations_are_in_order(self) -> None:
        nvidia = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
        amd = ["gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100"]
        for archs in (nvidia, amd):
            assert sorted(archs, key=capability_number) == archs
