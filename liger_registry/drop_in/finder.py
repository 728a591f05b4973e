"""The modules of ``liger_kernel``: made on import, with names that are looked up on access.

A name that is not offered is a ``NotOfferedError`` where it is accessed, an AttributeError, so that ``hasattr`` says
no; ``from liger_kernel.x import name`` raises ``NotOfferedImportError``, an ImportError, so that programs which do
without catch what they catch today. For the second every module is a package: the interpreter asks a finder for what a
package does not have.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from liger_registry.drop_in import VERSION, absent, names
from liger_registry.errors import NotOfferedError, NotOfferedImportError, RegistryWarning

ROOT = "liger_kernel"


def _told(module: str, name: str, reason: str) -> dict[str, str]:
    """What both errors say."""
    return {
        "what": f"{module}.{name} is not offered",
        "why": reason,
        "fix": "run without liger-tune exec to use liger-kernel's own, or leave it out",
    }


class Served(ModuleType):
    """A module of ``liger_kernel``."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name == "__all__":
            return names.offered(_inside(self.__name__))
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        inside = _inside(self.__name__)
        target = names.target(inside, name)
        if target is not None:
            value = getattr(importlib.import_module(target[0]), target[1])
            self.__dict__[name] = value
            return value
        reason = absent.reason(inside, name)
        if reason:
            raise NotOfferedError(**_told(self.__name__, name, reason))
        if f"{inside}.{name}".lstrip(".") in names.MODULES:
            return importlib.import_module(f"{self.__name__}.{name}")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401
        if not name.startswith("__") and not isinstance(value, ModuleType) and name in dir(self):
            warnings.warn(
                f"{self.__name__}.{name} is replaced: calls by that name get the replacement, layers and losses of "
                "models that the registry's operations were applied to do not",
                RegistryWarning,
                stacklevel=2,
            )
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *names.offered(_inside(self.__name__))})


class Finder(MetaPathFinder, Loader):
    """Finds and makes the modules of ``liger_kernel``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that liger-kernel has.

        Raises:
            NotOfferedImportError: a module, or a name in one, that is not offered.
        """
        if not fullname.startswith(f"{ROOT}."):
            return None
        inside = _inside(fullname)
        if inside in names.MODULES:
            return ModuleSpec(fullname, self, origin=__file__, is_package=True)
        parent, _, name = inside.rpartition(".")
        reason = absent.reason(parent, name) if parent in names.MODULES or not parent else ""
        if reason:
            raise NotOfferedImportError(**_told(fullname.rpartition(".")[0], name, reason))
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module, which looks its names up."""
        return Served(spec.name, f"{spec.name} of liger-kernel 0.8.5, answered by liger-registry.")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run; liger-kernel's own choice of kernels is said to be without effect."""
        if _inside(module.__name__) == "ops":
            absent.warn_of_settings()


def _inside(fullname: str) -> str:
    return fullname.partition(".")[2]


def serve(root: str) -> None:
    """Make the package that is being imported one whose modules and names are found here."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    module = sys.modules[root]
    module.__class__ = Served
    module.__dict__["__version__"] = VERSION
    module.__dict__.pop("serve", None)
