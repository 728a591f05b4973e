"""The call of a handle, written out as source for each operation.

A call reads what the choice depends on, looks it up and launches. Looping over inputs, or passing arguments on through
``*args``, would cost more than all of that; so the code is made from the contract, once an operation.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from typing import Any

from liger_registry.op import Op

# What the choice depends on of each tensor. The types are in the key, so that a hit needs no check of them: only calls
# with plain tensors are ever entered. Reading, hashing and comparing a torch.device takes .2 us, an index .07; so only
# the first tensor has its device in the key, and of the others what tells those apart that have no index (CPU and
# meta). Sparse tensors are plain by type.
_FIRST = "type({0}), {0}.shape, {0}.dtype, {0}.device, {0}.layout, {0}.requires_grad"
_OTHER = "type({0}), {0}.shape, {0}.dtype, {0}.get_device(), {0}.is_meta, {0}.layout, {0}.requires_grad"

# The call before is tried first: one guard in C++ (.25 us for two tensors) then stands for all that is read of tensors,
# which takes .66 us before it is hashed and compared. What a guard does not see is the state. It is looked up by its
# hash, never only compared: a tensor given as an option may be equal to a number, and asking that waits for a GPU.
#
# torch.compiler.is_dynamo_compiling is `return False` until Dynamo traces it, half the time of is_compiling; export
# without Dynamo runs on fake tensors, which are no plain ones.
_TEMPLATE = """\
def __call__(self, {parameters}, *lr_more, **lr_unknown):
    if lr_compiling():
        return self._library({names}, *lr_more, **lr_unknown)
{guards}    try:
        lr_state = ({absent}{options}lr_grad_enabled(), lr_deterministic(), lr_function_modes() and lr_mode_types(),
            lr_forward_ad._current_level, lr_pins())
        lr_memo = self._memo
        lr_guard, lr_last = lr_memo.last
        lr_key = None
        lr_entry = lr_last.get(lr_state) if lr_guard({inputs}) else None
        if lr_entry is None:
            lr_key = ({fields}lr_dispatch_modes(), lr_functorch(), lr_state)
            lr_entry = lr_memo[lr_key]
            lr_memo.last = lr_entry.guard, {{lr_state: lr_entry}}
        if lr_more or lr_unknown:
            lr_key = lr_entry = None
    except KeyError:
        lr_entry = None
    except (TypeError, AttributeError, RuntimeError):
        lr_key = lr_entry = None
    if lr_entry is None:
        return self._miss(lr_key, ({names}, *lr_more), lr_unknown)
    if lr_entry.backward is None:
        return lr_entry.run({inputs})
    return lr_apply(lr_entry, {inputs})
"""


# Only operations that ask for them pay for these looks.
_AUTOCAST = """\
    try:
        lr_cast = lr_autocast({first}.device.type if hasattr({first}, "device") else "cpu")
    except RuntimeError:  # of a device that autocast does not know, such as meta
        lr_cast = False
    if lr_cast:
        return self._autocast(({names}, *lr_more), lr_unknown)
"""
_CHECK = """\
    if self._chooser.checking:
        self._check(({names}, *lr_more), lr_unknown)
"""


def make_call(op: Op, scope: Mapping[str, Any]) -> Callable[..., Any]:
    """The ``__call__`` of an operation's handles.

    Args:
        op: the contract.
        scope: the functions that the template calls, by their names in it.
    """
    parameters = [f"{i.name}=None" for i in op.inputs] + [f"{o.name}={o.default!r}" for o in op.options]
    inputs = [i.name for i in op.inputs]
    options = [o.name for o in op.options]
    fields = ""
    for spec in op.inputs:
        read = (_FIRST if not fields else _OTHER).format(spec.name)
        fields += f"{spec.name} if {spec.name} is None else ({read}), " if spec.optional else f"{read}, "
    names = ", ".join([*inputs, *options])
    guards = _AUTOCAST.format(first=inputs[0], names=names) if op.autocast else ""
    guards += _CHECK.format(names=names) if op.check_values is not None else ""
    source = _TEMPLATE.format(
        parameters=", ".join(parameters),
        names=names,
        guards=guards,
        inputs=", ".join(inputs),
        fields=fields,
        options="".join(f"{name}, " for name in options),
        absent="".join(f"{i.name} is None, " for i in op.inputs if i.optional),
    )
    filename = f"liger_registry/calls/{op.name}.py"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)  # so that tracebacks show it
    namespace: dict[str, Any] = dict(scope)
    exec(compile(source, filename, "exec"), namespace)  # made of identifiers that Op.check has seen
    call: Callable[..., Any] = namespace["__call__"]
    call.__doc__ = f"{op.doc}\n\nSee the contract of ``{op.name}`` for arguments and errors."
    return call
