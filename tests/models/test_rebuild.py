"""``rebuild``: a function built again differs in the names it was given, and in nothing else."""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
import types
import weakref

import pytest

from liger_registry.transformers.engine import rebuild as module
from liger_registry.transformers.engine.rebuild import CannotRebuild, Shared, chain, global_names, rebuild, syntax


def helper(x):
    return x + 1


SCALE = 10


def plain(x, y=3, *rest, scale=2, **others):
    """What it says."""
    return helper(x) * SCALE + y + scale + len(rest) + len(others)


def countdown(n):
    return 0 if n == 0 else helper(countdown(n - 1))


class Base:
    def value(self):
        return 5


class Derived(Base):
    __hidden = 7

    def value(self):
        return helper(super().value()) + self.__hidden

    def named(self):
        return super(Derived, self).value() + helper(Derived.__hidden)  # noqa: UP008 - by its own name

    def lazily(self):
        return [helper(i) for i in range(3)], (lambda x: helper(x))(1)

    def raises(self):
        return helper(
            None,
        )


def counted(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        wrapper.calls += 1
        return function(*args, **kwargs)

    wrapper.calls = 0
    return wrapper


def hiding(function):
    box = [function]

    @functools.wraps(function)
    def wrapper(*args):
        return box[0](*args)

    return wrapper


class Object:
    def __init__(self, function):
        self.__wrapped__ = function

    def __call__(self, *args):
        return self.__wrapped__(*args)


@counted
@counted
def twice(x):
    return helper(x)


def closing(n):
    def inner(x):
        return helper(x) + n

    def change():
        nonlocal n
        n += 100

    return inner, change


def hundred(x):
    return x + 100


def test_one_name_differs_and_nothing_else():
    made = rebuild(plain, {"helper": hundred})
    assert plain(1) == 25
    assert made(1) == 1015
    assert made(1, 4, 5, scale=3, more=1) == 1019
    assert plain.__globals__["helper"] is helper
    assert inspect.signature(made) == inspect.signature(plain)
    assert (made.__name__, made.__qualname__, made.__module__) == ("plain", "plain", __name__)
    assert made.__doc__ == plain.__doc__
    assert made.__globals__ is plain.__globals__
    assert made.__defaults__ is plain.__defaults__


def test_other_globals_are_read_when_they_are_needed(monkeypatch):
    made = rebuild(plain, {"helper": hundred})
    monkeypatch.setitem(globals(), "SCALE", 1)
    assert made(1) == 106


def test_defaults_are_the_objects_of_the_function():
    def collects(x, found=[]):  # noqa: B006 - that it is one object is what is tested
        found.append(helper(x))
        return found

    made = rebuild(collects, {"helper": hundred})
    assert made(1) is made(2)
    assert collects(0) == [101, 102, 1]


def test_without_names_the_code_is_the_same():
    made = rebuild(plain, {})
    assert made.__code__.co_code == plain.__code__.co_code
    assert made.__code__.co_consts == plain.__code__.co_consts


def test_a_function_that_calls_itself_calls_the_global_one():
    assert rebuild(countdown, {"helper": hundred})(3) == 102


def test_classes_keep_super_private_names_and_their_own_name():
    names = {"helper": hundred}
    thing = Derived()
    assert rebuild(Derived.value, names)(thing) == 112
    assert rebuild(Derived.named, names)(thing) == 112
    assert rebuild(Derived.lazily, names)(thing) == ([100, 101, 102], 101)
    assert thing.value() == 13


def test_closures_are_shared():
    inner, change = closing(1)
    made = rebuild(inner, {"helper": hundred})
    assert made(0) == 101
    change()
    assert made(0) == 201
    assert inner(0) == 102


def test_decorators_are_applied_again():
    made = rebuild(twice, {"helper": hundred})
    assert made(1) == 101
    assert inspect.unwrap(made).__code__ is not inspect.unwrap(twice).__code__
    assert len(chain(made)) == len(chain(twice)) == 3
    assert twice(1) == 2


def test_tracebacks_name_the_file_and_the_line():
    made = rebuild(Derived.raises, {"helper": lambda x: x + 1})
    with pytest.raises(TypeError) as raised:
        made(Derived())
    (frame,) = [f for f in traceback.extract_tb(raised.value.__traceback__) if f.name == "raises"]
    assert frame.filename == __file__
    assert "helper(" in frame.line
    if sys.version_info >= (3, 11):
        assert {*Derived.raises.__code__.co_positions()} & {*made.__code__.co_positions()}
        assert made.__code__.co_qualname == "Derived.raises"


def test_what_cannot_be_rebuilt_says_why():
    with pytest.raises(CannotRebuild, match="SCALER is not a global name in plain"):
        rebuild(plain, {"SCALER": 1})
    with pytest.raises(CannotRebuild, match="x is not a global name"):
        rebuild(helper, {"x": 1})
    with pytest.raises(CannotRebuild, match="does not show where"):
        rebuild(hiding(helper), {})
    with pytest.raises(CannotRebuild, match="wrapped in a Object"):
        rebuild(wrapping(Object(helper)), {})
    with pytest.raises(CannotRebuild, match="builtin_function_or_method"):
        rebuild(len, {})
    with pytest.raises(CannotRebuild, match="cannot be read"):
        rebuild(eval("lambda x: x"), {})


def wrapping(thing):
    @functools.wraps(helper)
    def wrapper(x):
        return thing(x)

    wrapper.__wrapped__ = thing
    return wrapper


def written(tmp_path, text, name="written"):
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    made = types.ModuleType(name)
    exec(compile(text, str(path), "exec"), made.__dict__)
    return made, path


def test_a_source_that_is_not_what_runs_is_noticed(tmp_path):
    text = "def f(x):\n    return g(x) * 2\n\n\ndef g(x):\n    return x\n"
    made, path = written(tmp_path, text)
    assert rebuild(made.f, {"g": hundred})(1) == 202
    edited, path = written(tmp_path, text.replace("* 2", "* 4"), "edited")
    path.write_text(text.replace("* 2", "* 3"))
    with pytest.raises(CannotRebuild, match=r"the source of f is not what runs"):
        rebuild(edited.f, {"g": hundred})
    path.write_text("broken(")
    with pytest.raises(CannotRebuild, match="cannot be read"):
        rebuild(edited.f, {"g": hundred})


@pytest.mark.parametrize("change", ["* True", "* 1.0", "- -0.0", "- 0.0"])
def test_constants_are_compared_by_kind(tmp_path, change):
    before = {"* True": "* 1", "* 1.0": "* 1", "- -0.0": "- 0.0", "- 0.0": "- 0"}[change]
    made, path = written(tmp_path, f"def f(x):\n    return x {before}\n", "constants")
    path.write_text(f"def f(x):\n    return x {change}\n")
    with pytest.raises(CannotRebuild, match="not what runs"):
        syntax(made.f)


def test_names_that_a_file_imports_compile_as_they_did(tmp_path):
    text = (
        "import math\nimport os.path as path\n\n\ndef f(x):\n    return math.floor(g(x)) + len(path.join('a', 'b'))\n"
    )
    made, _ = written(tmp_path, text + "\n\ndef g(x):\n    return x\n", "importing")
    assert rebuild(made.f, {"g": hundred})(1.5) == 104


def test_an_edit_changes_the_definition_of_the_new_function_alone():
    def edit(tree):
        tree.body[-1].value = module.ast.Constant(42)

    assert rebuild(helper, {}, edit)(1) == 42
    assert rebuild(helper, {})(1) == 2
    assert helper(1) == 2


def test_global_names_of_inner_functions_count():
    assert {"helper", "range"} <= set(global_names(Derived.lazily))


def test_shared_values_go_with_their_function():
    shared = Shared()
    function = rebuild(helper, {})
    kept = weakref.ref(function)
    assert shared.get_or_make(function, "a", lambda: [1]) is shared.get_or_make(function, "a", lambda: [2])
    assert shared.get_or_make(function, "b", lambda: [3]) == [3]
    del function
    assert kept() is None
