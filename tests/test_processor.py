from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from liger_registry import processor


def test_systems_that_tell_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert processor.model_name(tmp_path / "cpuinfo") == "arm"
    assert processor.last_level_cache(tmp_path) == 0
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sysconf")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert processor.usable_cores() == 1
    assert processor.memory_bytes() == 0


def test_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC 9754\nmodel name\t: other\n")
    assert processor.model_name(tmp_path / "cpuinfo") == "AMD EPYC 9754"


def test_the_highest_level_of_cache_is_read(tmp_path: Path) -> None:
    for index, level, size in ((0, "1", "48K"), (1, "2", "2048K"), (2, "3", "32M"), (3, "x", "9G"), (4, "4", "?")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "level").write_text(level + "\n")
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert processor.last_level_cache(tmp_path) == 32 << 20
