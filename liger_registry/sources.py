"""Fingerprints of launch functions' sources: whether what was measured is what would run."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType
from typing import Any

OURS = "liger_registry"
# Where our own launch functions and their helpers are. With the whole package any edit of the core would make every
# table stale.
OUR_KERNELS = (f"{OURS}.kernels", f"{OURS}.portable")


@functools.cache
def source_hash(launch: str | Callable[..., Any]) -> str:
    """Twelve hex digits that change when the code behind a launch function changes.

    For ``module:function`` that is the module's file and those below the same top-level package that it imports,
    followed as far as they go; below ``liger_registry``, those of its kernels and portable implementations. A module
    outside any package stands for itself. The files are read, not imported: a table is checked before the first kernel
    is imported.
    """
    if isinstance(launch, str):
        module = launch.partition(":")[0]
        top = module.partition(".")[0]
        within = OUR_KERNELS if top == OURS else (top,)
        texts = [text for _, text in sorted(_files(module, within, {}).items())]
    else:
        try:
            texts = [inspect.getsource(inspect.getmodule(launch) or launch)]
        except (OSError, TypeError):  # a notebook's module has no file, its cells have sources
            texts = [_own_source(launch)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def _files(module: str, within: tuple[str, ...], seen: dict[str, str]) -> dict[str, str]:
    """The text of a module and of the modules within some packages that it imports, by name."""
    spec = None if module in seen else spec_of(module)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return seen
    text = seen[module] = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    package = module if spec.submodule_search_locations else module.rpartition(".")[0]
    for name in _imports(text, package):
        if any(f"{name}.".startswith(f"{root}.") for root in within):
            _files(name, within, seen)
    return seen


def spec_of(module: str) -> ModuleSpec | None:
    """Where a module is; unlike ``importlib.util.find_spec``, this imports none of the packages above it."""
    top, *rest = module.split(".")
    try:
        spec, name = importlib.util.find_spec(top), top
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            name = f"{name}.{part}"
            spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    except Exception:  # finders of others may raise anything
        return None
    return spec


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
            for alias in node.names:
                # What is no module of the package is defined, or imported, in the package's own file.
                inner = f"{base}.{alias.name}"
                yield inner if spec_of(inner) else base


def _own_source(launch: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(launch)
    except (OSError, TypeError):
        code = getattr(launch, "__code__", None)
        name = getattr(launch, "__qualname__", type(launch).__qualname__)
        return f"{name} {_constant(code)}"


def _constant(value: object) -> str:
    """A constant of compiled code as a text that is the same in every process: no address, no order of a set."""
    if isinstance(value, CodeType):
        return f"code({value.co_code.hex()},{value.co_names},{_constant(value.co_consts)})"
    if isinstance(value, tuple):
        return f"({','.join(map(_constant, value))})"
    return f"{{{','.join(sorted(map(_constant, value)))}}}" if isinstance(value, frozenset) else repr(value)
