"""``liger-tune explain``: why a problem on a device gets the implementation it gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from liger_registry.cli import _problems, _render
from liger_registry.errors import InvalidInputError, UnsupportedOptionError

CONTEXT = {"help_option_names": ["-h", "--help"], "allow_extra_args": True, "ignore_unknown_options": True}


def explain(
    context: typer.Context,
    op: Annotated[str, typer.Argument(metavar="OP", help="The operation, such as rms_norm.")],
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype", metavar="DTYPE", help="Dtype of all tensors, or of one as weight=float32; none: absent."
        ),
    ] = None,
    dim: Annotated[list[str] | None, typer.Option(metavar="NAME=N", help="A size; --NAME N is the same.")] = None,
    flag: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of the operation; --NAME VALUE too.")
    ] = None,
    phase: Annotated[
        str | None, typer.Option("--phase", metavar="PHASE", help="forward, backward or scheme; all by default.")
    ] = None,
    needs: Annotated[
        list[str] | None, typer.Option(metavar="INPUT", help="Inputs that need a gradient; by default all.")
    ] = None,
    frozen: Annotated[bool, typer.Option("--frozen", help="Weights need no gradient, as with LoRA.")] = False,
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="Such as h100 or cpu; by default the one present.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say why a problem gets the implementation it gets.

    Prints every tier that was asked and every candidate, why each lost, and its time and bytes.

    Sizes and options are given by name: liger-tune explain rms_norm --rows 16384 --hidden 4096 --dtype bfloat16
    """
    from liger_registry.device import Device
    from liger_registry.runtime import registry

    contract = registry.catalog.op(op)
    dims, flags = _pairs(dim or (), "--dim"), _pairs(flag or (), "--flag")
    for name, value in _extra(context.args):
        (dims if name in contract.dims else flags)[name] = value
    description = _problems.described(contract, dims, _render.items(dtype), flags)
    if needs is None:
        wanted = _problems.needs_of(contract, description, frozen)
    else:
        named = _render.items(needs)
        if unknown := [name for name in named if name not in contract.differentiable]:
            raise InvalidInputError(
                f"{op} has no input {unknown[0]!r}", candidates=contract.differentiable, fix="name a candidate"
            )
        wanted = tuple(name in named for name in contract.differentiable)
    _problems.check_phase(phase)
    problems = [
        problem
        for problem in _problems.problems_of(contract, description, wanted, registry.settings.memory_budget)
        if phase in (None, problem.phase)
    ]
    where = Device.parse(device) if device else registry.device
    explanations = []
    for problem in problems:
        budget = _problems.held_budget(contract, problem, registry.settings.memory_budget)
        explanations.append(registry.explain(problem, where, registry.terms(budget=budget)))
    if json:
        _render.emit_json([explanation.to_json() for explanation in explanations])
    else:
        typer.echo("\n\n".join(str(explanation) for explanation in explanations))


def _pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    pairs = {}
    for text in _render.items(texts):
        name, equals, value = text.partition("=")
        if not (equals and name and value):
            raise InvalidInputError(f"{option} {text} is no NAME=VALUE", fix=f"write {option} NAME=VALUE")
        pairs[name] = value
    return pairs


def _extra(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """``--name value`` and ``--name=value`` of options that only the operation knows."""
    pairs, rest = [], list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--") or not (equals or rest):
            raise UnsupportedOptionError(f"{name!r} is neither --NAME VALUE nor an option of explain", fix="--help")
        pairs.append((name[2:].replace("-", "_"), value if equals else rest.pop(0)))
    return pairs
