"""From what a user names (models, sizes, dtypes) to problem keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from liger_registry.architecture import PRESETS, Architecture
from liger_registry.config import Fields, Scalar
from liger_registry.errors import InvalidInputError, UnsupportedDtypeError, UnsupportedOptionError
from liger_registry.op import Description, DimKind, Op
from liger_registry.problem import BACKWARD, FORWARD, PHASES, SCHEME, Problem

if TYPE_CHECKING:
    from liger_registry.catalog import Catalog

MODELS_HELP = f"Model directories, config.json files, or presets: {', '.join(PRESETS)}."
LARGEST = 1 << 40
DTYPES = ("bfloat16", "float16", "float32", "float64")


def check_dtypes(names: Iterable[str]) -> list[str]:
    """The dtype names as given.

    Raises:
        UnsupportedDtypeError: one is no floating dtype that an operation is defined for.
    """
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    found = [short.get(name, name.removeprefix("torch.")) for name in names]
    for name in found:
        if name not in DTYPES:
            raise UnsupportedDtypeError(f"{name!r} is no dtype to measure", candidates=DTYPES, fix="name a candidate")
    return found


def counts(texts: Iterable[str], option: str) -> list[int]:
    """The positive integers that an option was given.

    Raises:
        InvalidInputError: one is none.
    """
    return [size(text, option, f"write {option} 4096, or several, separated by commas") for text in texts]


def size(text: str, option: str, fix: str = "") -> int:
    """The positive integer that an option was given.

    Raises:
        InvalidInputError: it is none, or larger than any size there is.
    """
    # Python refuses to read integers of thousands of digits.
    if not (text.isascii() and text.isdecimal()) or len(text) > 40 or not 0 < int(text) < LARGEST:
        short = text if len(text) <= 40 else f"{text[:37]}..."
        raise InvalidInputError(
            f"{option} {short} is no positive integer",
            why=f"it is not below {LARGEST}" if text.isdecimal() and text.strip("0") else "",
            fix=fix or f"write {option} 4096",
        )
    return int(text)


def number(value: int, option: str, least: int, most: int) -> int:
    """The number that an option was given.

    Raises:
        InvalidInputError: it is outside the range.
    """
    if not least <= value <= most:
        shown = value if abs(value) < LARGEST else "of that many digits"
        raise InvalidInputError(f"{option} {shown} cannot be used", fix=f"write a number from {least} to {most}")
    return value


def needs_of(op: Op, description: Description, frozen: bool) -> tuple[bool, ...]:
    """Which differentiable inputs need gradients in training: all that are there, but no frozen weights."""
    return tuple(
        description.dtypes.get(name) != "none" and not (frozen and _is_parameter(name)) for name in op.differentiable
    )


def _is_parameter(name: str) -> bool:
    return name in ("weight", "bias") or name.endswith(("_weight", "_bias"))


def held_budget(op: Op, problem: Problem, budget: int | None) -> int | None:
    """The bytes beyond the outputs that a problem's implementations are held to: the user's, else the operation's."""
    return budget if budget is not None else op.budget(problem)


def problems_of(
    op: Op, description: Description, needs: Sequence[bool], budget: int | None = None
) -> Iterator[Problem]:
    """Every choice that one call makes: forward and backward of each scheme, and the scheme where there are several.

    Args:
        op: the operation.
        description: what the call looks like.
        needs: which differentiable inputs need gradients.
        budget: the user's memory budget in bytes; part of the key only where the operation declares one of its own.
    """

    def problem(phase: str, scheme: str) -> Problem:
        wanted = needs if op.takes_needs(phase, scheme) else ()
        bare = op.problem(description, phase, scheme, wanted)
        if op.budget(bare) is None:
            return bare
        return op.problem(description, phase, scheme, wanted, held_budget(op, bare, budget))

    bare = op.problem(description, BACKWARD, op.schemes[0].name, needs)
    able = op.schemes_for(op.options_of(bare))
    for scheme in able:
        yield problem(FORWARD, scheme.name)
        if any(needs):
            yield problem(BACKWARD, scheme.name)
    if len(able) > 1 and any(needs):
        yield problem(SCHEME, "")


def model_problems(
    catalog: Catalog,
    architectures: Sequence[Architecture],
    tokens: Sequence[int],
    *,
    ops: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    frozen: bool = False,
    budget: int | None = None,
) -> list[Problem]:
    """The problems that models pose in training, each once, in the order of the models.

    Args:
        catalog: what is registered.
        architectures: the models.
        tokens: batch times sequence length, each.
        ops: only these operations.
        dtypes: instead of each model's own.
        frozen: only inputs need gradients.
        budget: the memory budget in bytes; None for each operation's own.

    Raises:
        UnknownOpError: there is no such operation.
    """
    wanted = [catalog.op(name) for name in ops] or [op for op in catalog.ops() if not op.by_name]
    found: dict[Problem, None] = {}
    for architecture in architectures:
        for dtype in dtypes or (architecture.dtype,):
            for op in wanted:
                for count in tokens:
                    for description in op.calls(architecture, count, dtype):
                        needs = needs_of(op, description, frozen)
                        found.update(dict.fromkeys(problems_of(op, description, needs, budget)))
    return list(found)


def code_problems(
    catalog: Catalog,
    architectures: Sequence[Architecture],
    tokens: Sequence[int],
    *,
    ops: Sequence[str] = (),
    dtypes: Sequence[str] = (),
) -> list[Problem]:
    """Problems that show each operation's code at models' sizes: of models, and ``standing`` ones of the others.

    Args:
        catalog: what is registered.
        architectures: the models.
        tokens: batch times sequence length, each.
        ops: only these operations; by default all, private ones and those called by name alone too.
        dtypes: instead of each model's own.

    Raises:
        UnknownOpError: there is no such operation.
    """
    found: dict[Problem, None] = {}
    for op in [catalog.op(name) for name in ops] or catalog.ops():
        posed = model_problems(catalog, architectures, tokens, ops=(op.name,), dtypes=dtypes)
        if not posed:
            kinds = [(a, dtype, n) for a in architectures for dtype in dtypes or (a.dtype,) for n in tokens]
            for description in filter(None, (standing(op, a, n, dtype) for a, dtype, n in kinds)):
                posed += problems_of(op, description, needs_of(op, description, frozen=False))
        found.update(dict.fromkeys(posed))
    return list(found)


def standing(op: Op, architecture: Architecture, tokens: int, dtype: str) -> Description | None:
    """A call of an operation that no model makes by itself, a loss or a softmax, at the sizes of a model.

    It is the first of the contract's own examples, with a model's sizes for its own. Channels, groups and positions,
    which language models lack, are those of an image model, whose blocks go from 64 x 64 to 8 x 8.
    """
    first = None if op.odd is None else next(iter(op.odd(dtype)), None)
    if first is None:
        return None
    sizes = {
        "hidden": architecture.hidden,
        "teacher_hidden": architecture.hidden,
        "width": architecture.intermediate,
        "vocab": architecture.vocab,
        "channels": 320,
        "spatial": min(4096, max(64, tokens)),
    }
    dims = {
        name: tokens if op.dims[name] is DimKind.BUCKET and name in ("rows", "tokens") else sizes.get(name) or value
        for name, value in first.dims.items()
    }
    flags = {name: 32 if name == "groups" else value for name, value in first.flags.items()}
    return Description(Fields(dims), first.dtypes, Fields(flags))


def template(op: Op, dtype: str) -> Description | None:
    """What a call of the operation looks like in some public model: which dims, dtypes and flags its key has."""
    for preset in PRESETS.values():
        for description in op.calls(preset, 4096, dtype):
            return description
    # No public model calls it: the first of the contract's own examples.
    return None if op.odd is None else next(iter(op.odd(dtype)), None)


def described(op: Op, dims: Mapping[str, str], dtypes: Sequence[str], flags: Mapping[str, str]) -> Description:
    """The description that a user wrote as texts; dtypes and options not given have their defaults.

    Args:
        op: the operation.
        dims: sizes by name.
        dtypes: ``bfloat16`` for all tensors, or ``weight=float32`` for one.
        flags: options that are part of the key.

    Raises:
        InvalidInputError: a dim is unknown, missing or no positive integer.
        UnsupportedDtypeError: a dtype that no operation takes.
        UnsupportedOptionError: a flag that is not part of the key, or a value it does not take.
    """
    options = {option.name for option in op.options}
    unknown = [name for name in dims if name not in op.dims]
    stray = [name for name in flags if name not in options]
    if missing := [*unknown, *stray] or [name for name in op.dims if name not in dims]:
        named = "needs the size" if missing[0] in op.dims else "has no size" if unknown else "has no size or option"
        raise InvalidInputError(
            f"{op.name} {named} {missing[0]!r}",
            candidates=op.dims if unknown or not stray else [*op.dims, *options],
            fix=" ".join(f"--{name} N" for name in op.dims),
        )
    sizes: dict[str, Scalar] = {name: size(text, f"--{name}") for name, text in dims.items()}
    common = check_dtypes([text for text in dtypes if "=" not in text][-1:]) or ["bfloat16"]
    usual = template(op, common[0])
    names: dict[str, Scalar] = dict(usual.dtypes) if usual else dict.fromkeys(op.differentiable, common[0])
    for name, _, value in (text.partition("=") for text in dtypes if "=" in text):
        if name not in names:
            raise UnsupportedDtypeError(
                f"{op.name} has no tensor {name!r} in its key", candidates=names, fix="name a candidate"
            )
        names[name] = "none" if value == "none" else check_dtypes([value])[0]
    defaults = {option.name: option.default for option in op.options}
    marks: dict[str, Scalar] = {n: defaults.get(n, value) for n, value in usual.flags.items()} if usual else {}
    marks.update({name: _flag(op, name, value, marks) for name, value in flags.items()})
    return Description(Fields(sizes), Fields(names), Fields(marks))


def _flag(op: Op, name: str, text: str, known: Mapping[str, Scalar]) -> Scalar:
    option = next((o for o in op.options if o.name == name), None)
    if option is None or (known and name not in known):
        raise UnsupportedOptionError(
            f"{name!r} does not change which implementation of {op.name} is chosen",
            candidates=known,
            fix="leave it out, or name a candidate",
        )
    value: object = text
    if option.kind is bool:
        value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    elif option.kind in (int, float):
        with suppress(ValueError):  # the validation below says what it takes
            value = option.kind(text)
    return option.validate(op.name, value)


def check_phase(phase: str | None) -> str | None:
    """The phase as given; InvalidInputError if there is none of that name."""
    if phase is not None and phase not in PHASES:
        raise InvalidInputError(f"there is no phase {phase!r}", candidates=PHASES, fix="name a candidate")
    return phase
