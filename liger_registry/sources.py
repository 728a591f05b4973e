"""Fingerprints of launch functions' sources: whether what was measured is what would run."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@functools.cache
def source_hash(launch: str | Callable[..., Any]) -> str:
    """Twelve hex digits that change when the code behind a launch function changes.

    For ``module:function`` that is the module's file and those of its own package that it imports, followed as far as
    they go. The files are read, not imported: a table is checked before the first kernel is imported.
    """
    if isinstance(launch, str):
        texts = [text for _, text in sorted(_files(launch.partition(":")[0], {}).items())]
    else:
        try:
            texts = [inspect.getsource(inspect.getmodule(launch) or launch)]
        except (OSError, TypeError):  # a notebook's module has no file, its cells have sources
            texts = [_own_source(launch)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def _files(module: str, seen: dict[str, str]) -> dict[str, str]:
    """The text of a module and of the modules of the same package that it imports, by name."""
    if module in seen:
        return seen
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # finding a module imports the packages above it, which may raise anything
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return seen
    text = seen[module] = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    package = module if spec.submodule_search_locations else module.rpartition(".")[0]
    for name in _imports(text, package):
        if package and name.startswith(f"{package}."):
            _files(name, seen)
    return seen


def _imports(text: str, package: str) -> Iterator[str]:
    """The modules that a source may import, relative names made absolute; names that are no modules among them."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _own_source(launch: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(launch)
    except (OSError, TypeError):
        code = getattr(launch, "__code__", None)
        parts = () if code is None else (code.co_code.hex(), code.co_consts, code.co_names)
        return f"{getattr(launch, '__qualname__', type(launch).__qualname__)} {parts}"
