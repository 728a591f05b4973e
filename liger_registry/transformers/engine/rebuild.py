"""A function built again from its own source with a few names, or statements, of its own.

A modeling file calls module-level functions by their global names, and those globals are everybody's. What one module's
``forward`` calls is therefore changed by building that function once more: the same syntax compiled inside a function
whose parameters are the names that differ. All other names stay the globals they are, read when they are needed, and
closures, defaults and attributes are the original's own objects. A rebuilt function is an ordinary one for
``torch.compile``, for tracebacks (files, lines and columns are kept) and for debuggers.

A source that is not what runs (a file edited since, code changed by an import hook) is noticed: before anything is
changed it is compiled unchanged and must give the very instructions of the function.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
import linecache
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any, Generic, TypeVar

Function = Callable[..., Any]
Edit = Callable[[ast.FunctionDef], None]
T = TypeVar("T")

_FUTURES = 0
for _feature in __future__.all_feature_names:
    _FUTURES |= getattr(__future__, _feature).compiler_flag
_COMPARED = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars")
_COUNTS = ("co_argcount", "co_posonlyargcount", "co_kwonlyargcount")
_QUALIFIED = ("co_qualname",) if hasattr(CodeType, "co_qualname") else ()
_trees: weakref.WeakKeyDictionary[CodeType, ast.FunctionDef] = weakref.WeakKeyDictionary()


class CannotRebuild(Exception):
    """A function that cannot be built again; ``reason`` says why, for the report."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def chain(function: Function) -> list[FunctionType]:
    """A function and those its decorators wrapped, the innermost last.

    Raises:
        CannotRebuild: one of them is no Python function.
    """
    found = []
    layer: Any = function
    while True:
        if not isinstance(layer, FunctionType):
            raise CannotRebuild(f"{_name(function)} is wrapped in a {type(layer).__name__}")
        if layer in found:
            raise CannotRebuild(f"{_name(function)} wraps itself")
        found.append(layer)
        inner = layer.__dict__.get("__wrapped__")
        if inner is None:
            return found
        layer = inner


def syntax(function: FunctionType) -> ast.FunctionDef:
    """The definition of a function without its decorators, defaults and annotations; a copy of the caller's own.

    Raises:
        CannotRebuild: there is no source, or it is not what runs.
    """
    tree = _trees.get(function.__code__)
    if tree is None:
        tree = _trees[function.__code__] = _checked(function)
    return copy.deepcopy(tree)


def rebuild(function: Function, names: Mapping[str, object], edit: Edit | None = None) -> Function:
    """The function with other objects for some global names, and its decorators around it again.

    Args:
        function: an attribute of a class, or a function of a module, decorated or not.
        names: what each of these names means in it from now on.
        edit: changes the definition in place before it is compiled, where other names are not enough.

    Raises:
        CannotRebuild: no source, a name that is not a global of the function, or a decorator that does not show where
            it keeps what it wraps.
    """
    layers = chain(function)
    inner = layers[-1]
    tree = syntax(inner)
    if edit is not None:
        edit(tree)
        ast.fix_missing_locations(tree)
    code = _compiled(inner, tree, (*inner.__code__.co_freevars, *names))
    cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
    for name, value in names.items():
        if name not in code.co_freevars:
            raise CannotRebuild(f"{name} is not a global name in {_name(function)}")
        cells[name] = CellType(value)
    missing = [name for name in code.co_freevars if name not in cells]
    if missing:
        raise CannotRebuild(f"{_name(function)} has no {missing[0]} of its own")
    made = _like(inner, code, tuple(cells[name] for name in code.co_freevars))
    for original, wrapped in zip(reversed(layers[:-1]), reversed(layers[1:]), strict=True):
        made = _wrapped_again(original, wrapped, made)
    return made


def global_names(function: FunctionType) -> list[str]:
    """The names that a function, or one defined in it, may look up among its globals, and those of attributes."""
    return list(dict.fromkeys(name for code in _codes(function.__code__) for name in code.co_names))


class Shared(Generic[T]):
    """Values by function or class, and key, forgotten with it: what is made once serves all instances.

    Neither a value nor a key may hold the function or class, or neither would ever be forgotten.
    """

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Function, dict[object, T]] = weakref.WeakKeyDictionary()

    def get_or_make(self, owner: Function, key: object, make: Callable[[], T]) -> T:
        """The value for this function or class, and key; made, and kept, if there is none."""
        known = self._of.setdefault(owner, {})
        if key not in known:
            known[key] = make()
        return known[key]


def _name(function: object) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _checked(function: FunctionType) -> ast.FunctionDef:
    name, code = _name(function), function.__code__
    linecache.checkcache(code.co_filename)
    lines = tuple(linecache.getlines(code.co_filename, function.__globals__))
    found = [d for d in _file(lines).get((code.co_name, code.co_firstlineno), ()) if isinstance(d, ast.FunctionDef)]
    if len(found) != 1:
        raise CannotRebuild(f"the source of {name} cannot be read")
    block = copy.deepcopy(found[0])
    block.decorator_list, block.returns = [], None
    arguments = block.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    # The function's own objects are used, whatever their expressions would give now.
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    if not _same(_compiled(function, block, code.co_freevars), code):
        raise CannotRebuild(f"the source of {name} is not what runs")
    return block


@functools.lru_cache(maxsize=8)  # each takes some megabytes, and a model's classes come from one file or two
def _file(lines: tuple[str, ...]) -> dict[tuple[str, int], list[ast.stmt]]:
    """The definitions of a file by name and first line, and under ("", 0) the imports at its top level."""
    found: dict[tuple[str, int], list[ast.stmt]] = {}
    try:
        module = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return found
    inner: set[int] = set()
    for node in ast.walk(module):
        scope = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda))
        if scope or id(node) in inner:
            inner.update(map(id, ast.iter_child_nodes(node)))
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.setdefault((node.name, first), []).append(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in inner:
            found.setdefault(("", 0), []).append(node)
    return found


def _imported(function: FunctionType) -> list[str]:
    """The names it uses that are imported at the top of its file: calls of their attributes compile differently."""
    lines = tuple(linecache.getlines(function.__code__.co_filename, function.__globals__))
    aliases = (alias for node in _file(lines).get(("", 0), ()) for alias in getattr(node, "names", ()))
    bound = {(alias.asname or alias.name).split(".")[0] for alias in aliases}
    return sorted(bound.intersection(global_names(function)))


def _compiled(function: FunctionType, tree: ast.FunctionDef, free: tuple[str, ...]) -> CodeType:
    """The code of a definition in which these names are those of an enclosing function."""
    body: ast.FunctionDef | ast.ClassDef = tree
    scopes = function.__qualname__.split(".")
    if len(scopes) > 1 and scopes[-2] != "<locals>":
        # In a class of its name: for names with two underscores, and for super().
        (defined,) = ast.parse(f"class {scopes[-2]}: pass").body
        assert isinstance(defined, ast.ClassDef)
        defined.body = [tree]
        body = defined
    # The class has a __class__ of its own, which the function's cell takes the place of.
    names = [name for name in dict.fromkeys(free) if name != "__class__" or body is tree]
    imports = [f"import {name}\n" for name in _imported(function) if name not in names]  # compiled, never run
    outer = ast.parse(f"{''.join(imports)}def outer({', '.join(names)}): pass")
    definition = outer.body[-1]
    assert isinstance(definition, ast.FunctionDef)
    # What the definition itself is called is a global like others, as it is for methods that name their class.
    definition.body = [body] if body.name in names else [ast.Global([body.name]), body]
    flags = function.__code__.co_flags & _FUTURES
    try:
        module = compile(ast.fix_missing_locations(outer), function.__code__.co_filename, "exec", flags, True)
    except (SyntaxError, ValueError, TypeError) as error:
        raise CannotRebuild(f"{_name(function)} does not compile by itself") from error
    code = next(code for code in _codes(module) if code.co_name == tree.name and code.co_firstlineno == tree.lineno)
    # Python 3.10 keeps no such name in the code.
    qualified: dict[str, Any] = {name: getattr(function.__code__, name) for name in _QUALIFIED}
    return code.replace(**qualified)


def _same(one: CodeType, other: CodeType) -> bool:
    """Whether two codes compute the same, wherever they are defined."""
    if any(getattr(one, name) != getattr(other, name) for name in (*_COMPARED, *_COUNTS)):
        return False
    if (one.co_flags ^ other.co_flags) & ~inspect.CO_NESTED or len(one.co_consts) != len(other.co_consts):
        return False
    return all(_same_constant(a, b) for a, b in zip(one.co_consts, other.co_consts, strict=True))


def _same_constant(one: object, other: object) -> bool:
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _same(one, other)
    if isinstance(one, str) and isinstance(other, str) and "<locals>" in one:
        return one.split(".")[-1] == other.split(".")[-1]  # Python 3.10 keeps the names of inner functions here
    if isinstance(one, frozenset):
        return one == other
    # By its text, which tells 1 from True and 0.0 from -0.0 wherever they are.
    return type(one) is type(other) and repr(one) == repr(other)


def _like(function: FunctionType, code: CodeType, closure: tuple[CellType, ...]) -> FunctionType:
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = None if function.__kwdefaults__ is None else dict(function.__kwdefaults__)
    made.__annotations__ = function.__annotations__
    made.__doc__, made.__module__, made.__qualname__ = function.__doc__, function.__module__, function.__qualname__
    made.__dict__.update(function.__dict__)
    return made


def _wrapped_again(wrapper: FunctionType, inner: FunctionType, made: FunctionType) -> FunctionType:
    """A decorator's wrapper around ``made`` in place of ``inner``."""
    cells = wrapper.__closure__ or ()
    holding = [cell for cell in cells if _contents(cell) is inner]
    if len(holding) != 1:
        raise CannotRebuild(f"a decorator of {_name(inner)} does not show where it keeps the function")
    closure = tuple(CellType(made) if cell is holding[0] else cell for cell in cells)
    again = _like(wrapper, wrapper.__code__, closure)
    again.__dict__["__wrapped__"] = made
    return again


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None
