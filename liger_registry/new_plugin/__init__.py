"""A ready plugin: a distribution of its own with two implementations of an operation, tests, CI and a licence.

The files are templates beside this module, with ``$name`` where a plugin has its own; nothing is imported but the
standard library.
"""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from liger_registry.errors import RegistrationError, TableError, UnsupportedOptionError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST = 60


@dataclass(frozen=True, slots=True)
class Kernel:
    """What templates say of an operation that there is a kernel for.

    Attributes:
        width: the name of the exact dim, a row's length.
        sizes: sizes as ``liger-tune explain`` takes them.
        torch_doc: one sentence for the PyTorch implementation.
    """

    width: str
    sizes: str
    torch_doc: str


#: The operations that there are kernels for.
KERNELS = {
    "rms_norm": Kernel(
        "hidden", "--rows 2048 --hidden 1024", "PyTorch with one fused reduction for the sum of squares"
    ),
    "softmax": Kernel("width", "--rows 2048 --width 1024", "PyTorch in one buffer of fp32"),
    "relu_squared": Kernel("width", "--rows 2048 --width 4096", "PyTorch in one buffer"),
}
# From a plugin's file to its template; {package} and {op} are filled in in both.
FILES = {
    "pyproject.toml": "pyproject.toml.tmpl",
    "README.md": "README.md.tmpl",
    "LICENSE": "LICENSE.tmpl",
    ".gitignore": "gitignore.tmpl",
    ".github/workflows/tests.yml": "workflow.yml.tmpl",
    "{package}/__init__.py": "init.py.tmpl",
    "{package}/kernel.py": "{op}/kernel.py.tmpl",
    "{package}/portable.py": "{op}/portable.py.tmpl",
    "{package}/py.typed": "py.typed.tmpl",
    "tests/test_conformance.py": "test_conformance.py.tmpl",
    "tests/test_plugin.py": "test_plugin.py.tmpl",
}


def package_of(name: str) -> str:
    """The import package of a distribution's name, which is checked.

    Raises:
        RegistrationError: it is no name for a distribution, or the package would hide another one.
    """
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise RegistrationError(
            f"{name[:80]!r} is no name for a plugin",
            why=f"a name has at most {_LONGEST} small letters, digits and single hyphens, and begins with a letter",
            candidates=[suggestion] if (suggestion := _suggested(name)) else (),
            fix="name it like fast-rms-norm",
        )
    package = name.replace("-", "_")
    if keyword.iskeyword(package) or package in sys.stdlib_module_names:
        raise RegistrationError(f"{name!r} is no name for a plugin", why=f"{package} is Python's own", fix="add a word")
    # Without the working directory, where the plugin may lie that is to be written.
    if package.startswith("liger_registry") or importlib.util.find_spec(package) is not None:
        raise RegistrationError(
            f"{name!r} is no name for a plugin", why=f"there is a package {package} already", fix="take another name"
        )
    return package


def _suggested(name: str) -> str:
    """The nearest name that would do; empty if there is none."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")[:_LONGEST].strip("-")
    return found if _NAME.fullmatch(found) else ""


def files_of(name: str, op: str = "rms_norm") -> dict[str, str]:
    """A plugin's files, from path to text.

    Args:
        name: the distribution's name.
        op: the operation.

    Raises:
        RegistrationError: the name is none.
        UnsupportedOptionError: there is no kernel for the operation.
    """
    package = package_of(name)
    if op not in KERNELS:
        raise UnsupportedOptionError(
            f"there is no kernel of {op[:80]} to begin with",
            candidates=KERNELS,
            fix="begin with a candidate, and exchange the operation and its launch function",
        )
    kernel = KERNELS[op]
    words = {
        "name": name,
        "package": package,
        "op": op,
        "triton": f"{package}_triton",
        "torch": f"{package}_torch",
        "torch_doc": kernel.torch_doc,
        "width": kernel.width,
        "sizes": kernel.sizes,
    }
    root = resources.files(__package__).joinpath("templates")
    made = {}
    for path, template in FILES.items():
        text = root.joinpath(template.format(op=op)).read_text(encoding="utf-8")
        made[path.format(package=package)] = Template(text).substitute(words)
    return made


def write(name: str, op: str, directory: Path) -> list[Path]:
    """Write a plugin into a directory of its name, all of its files or none.

    Args:
        name: the distribution's name.
        op: the operation.
        directory: where to make the directory.

    Returns:
        The files.

    Raises:
        RegistrationError: the name is none.
        UnsupportedOptionError: there is no kernel for the operation.
        TableError: the directory is there already, or cannot be written.
    """
    made, target = files_of(name, op), directory / name
    if os.path.lexists(target):
        raise TableError(f"{target} is there already", fix="take another name, or another --directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=directory))
        try:
            for path, text in made.items():
                (partial / path).parent.mkdir(parents=True, exist_ok=True)
                (partial / path).write_text(text, encoding="utf-8")
            partial.chmod(0o755)
            # Onto a directory that was made since it fails, unless that is empty.
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise TableError(
            f"{target} cannot be written",
            why=error.strerror or str(error),
            fix="name a --directory that can be written",
        ) from error
    return [target / path for path in made]
