"""A package ``liger_kernel`` for programs that import it: its names are ours, for one command and its children.

The package lies in a directory of its own with the metadata of a distribution, and is on nobody's path until
``liger-tune exec`` puts it there through PYTHONPATH, before what is installed. Its modules are made on import
(``finder``): a name of liger-kernel 0.8.5 is found where it is in this distribution (``names``), or raises an error
that says why it is not offered (``absent``).

Importing this module imports neither torch nor Triton nor transformers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from liger_registry.errors import DropInError

#: What ``importlib.metadata.version("liger_kernel")`` answers in there: the release whose names they are, and whose.
VERSION = "0.8.5+liger.registry"


def directory() -> Path:
    """The directory that holds the package ``liger_kernel`` and its metadata.

    Raises:
        DropInError: it is not there, or PYTHONPATH cannot name it.
    """
    path = Path(__file__).parent / "site"
    if not (path / "liger_kernel" / "__init__.py").is_file():
        raise DropInError(
            f"{path} holds no package liger_kernel",
            why="this distribution is incomplete, or it is imported from an archive",
            fix="install liger-registry from a wheel with pip",
        )
    if os.pathsep in str(path):
        raise DropInError(
            f"PYTHONPATH cannot name {path}",
            why=f"its parts are separated by {os.pathsep!r}",
            fix="install liger-registry into a directory without it in its name",
        )
    return path


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of an environment in which programs find our ``liger_kernel`` first.

    Raises:
        DropInError: as of ``directory``.
    """
    ours = str(directory())
    # An empty PYTHONPATH is none; an empty part of another one is the working directory, and stays.
    others = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part != ours]
    kept = others if any(others) else []
    return {**environ, "PYTHONPATH": os.pathsep.join([ours, *kept])}
