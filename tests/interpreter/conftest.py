"""Tests that run kernels in Triton's interpreter, on the CPU, in a process started with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/interpreter needs a process of its own: TRITON_INTERPRET=1 pytest tests/interpreter")
