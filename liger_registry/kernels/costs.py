"""What implementations cost beside their outputs, where a formula serves several operations; imports no Triton."""

from __future__ import annotations

from liger_registry.config import Config
from liger_registry.problem import Problem


def no_extra_bytes(problem: Problem, config: Config) -> int:
    """The bytes that an implementation takes which allocates nothing beyond its outputs."""
    return 0
