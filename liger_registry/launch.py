"""Launching Triton kernels: prepared launches, recorded launches, launches in Triton's interpreter.

With ``_triton.py`` and ``compile.py`` this is the only module that touches Triton's launch and compile API; none of
them imports Triton before the first launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

from liger_registry._interpreter import exact_bfloat16
from liger_registry._triton import (
    bind,
    interpreting,
    kernel_parameters,
    prepared_supported,
    triton_available,
    triton_version,
)
from liger_registry.errors import DeviceMismatchError, InvalidInputError
from liger_registry.records import Argument, LaunchRecord

__all__ = [
    "Argument",
    "LaunchRecord",
    "NotLoaded",
    "interpreting",
    "launch",
    "record",
    "triton_available",
    "triton_version",
]

_GRID_LIMIT = 2**31  # blocks of a launch; Triton's launchers multiply the three sizes in 32 bits
_GRID_LIMIT_YZ = 65535

_Layout = Callable[..., None]
_Entries = dict[tuple[Hashable, ...], tuple[Any, ...]]
_layouts: dict[tuple[Hashable, ...], _Layout] = {}
_latest: dict[int, _Layout] = {}  # by the kernel's id; an id, because hashing a kernel takes a lock and half a us
_recordings = threading.local()
_recording = 0  # open recordings of all threads: the hot path reads one global, and a thread-local only if it is not 0
_recording_lock = threading.Lock()


class NotLoaded(Exception):
    """A launch during stream capture whose binary is not loaded; compiling there is not possible."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **parameters: Any) -> None:  # noqa: ANN401
    """Launch a Triton kernel on the device of its first tensor, on that device's current stream.

    Args:
        kernel: a function decorated with ``@triton.jit``.
        grid: one to three block counts; a launch with a zero among them does nothing.
        args: tensors, ints, floats, bools and None for the parameters that are no ``tl.constexpr``, in order. Python
            floats arrive in the kernel as fp32.
        parameters: the ``tl.constexpr`` parameters and launch options (``num_warps``, ``num_stages``, ...).

    Raises:
        InvalidInputError: a grid that no device can launch.
        DeviceMismatchError: tensors that are not on a GPU.
        NotLoaded: a stream is being captured and the binary is not loaded.
    """
    if _recording and _record(kernel, grid, args, parameters):
        return
    layout = _latest.get(id(kernel))
    if layout is None:
        layout = _latest[id(kernel)] = _layout_of(kernel, args, parameters)
    layout(grid, args, parameters)


# --- prepared launches ------------------------------------------------------------------------------------------------

# One function for each (kernel, types of all arguments, names of the keywords), written out as source: looping over the
# arguments would cost three times as much. All that Triton specialises on is in the key, or finer: dtype, 16-byte
# alignment, (HIP) whether 32-bit offsets reach all of the storage, each int's equality to 1, divisibility by 16 and
# width, constexprs and options. Other types (1 == True, but not to Triton) go to the layout made for those.
# Host time of a hit with 5 tensors, 3 ints, a float and 5 keywords, beyond the compiled kernel's own `run`: 1.6 us, of
# which .5 are dtypes and addresses, on a quiet core with a stand-in for `run`. On an H200's host with Triton 3.6 `run`
# is 5.7 us and `kernel[grid]` 15.3 us.
_TEMPLATE = """
def prepared(lr_grid, lr_args, lr_keywords):
    if len(lr_args) != {count} or len(lr_keywords) != {keyword_count}:
        return other(lr_grid, lr_args, lr_keywords)
    {values} = lr_args
    try:
        {keywords} = {keyword_values}
    except KeyError:
        return other(lr_grid, lr_args, lr_keywords)
    if {other_types}:
        return other(lr_grid, lr_args, lr_keywords)
    if len(lr_grid) == 1:
        lr_x = lr_grid[0]
        lr_y = lr_z = 1
        if not 0 < lr_x < 2147483648:
            expand(name, lr_grid)
            return
    else:
        lr_x, lr_y, lr_z = expand(name, lr_grid)
        if not lr_x:
            return
    lr_index = {index}
    if lr_index != {current}:
        return elsewhere(lr_index, prepared, lr_grid, lr_args, lr_keywords)
    lr_key = ({key})
    lr_entry = entries.get(lr_key)
    if lr_entry is None or {hooked}:
        return miss(lr_key, ({bound}), lr_grid, lr_keywords)
    lr_run, lr_function, lr_packed = lr_entry
    lr_run(lr_x, lr_y, lr_z, raw_stream(lr_index), lr_function, lr_packed, None, None, None, {bound})
"""


@lru_cache(maxsize=1)
def _device_calls() -> tuple[Callable[[], int], Callable[[int], int], int | None, bool]:
    """The current device's index, a device's raw current stream, an only device's index, and whether this is HIP."""
    import torch

    if not torch.cuda.is_available():
        return (lambda: -2), (lambda index: 0), -2, False  # no tensor is there, so all are turned away
    torch.cuda.current_device()  # makes the context, which the calls below expect
    only = 0 if torch.cuda.device_count() == 1 else None
    return torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream, only, torch.version.hip is not None


def _layout_of(kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> _Layout:  # noqa: ANN401
    """The layout for just these types and names, made if it is new."""
    types = (id(kernel), *(v.__class__ for v in (*args, *keywords.values())), *keywords)
    layout = _layouts.get(types)
    if layout is None:
        if type(kernel).__name__ == "InterpretedFunction":
            exact_bfloat16()
            layout = partial(_interpret, kernel)
        elif hasattr(kernel, "params"):
            layout = _prepared_layout(kernel, args, keywords)
        else:
            raise TypeError(f"launch takes functions decorated with @triton.jit alone, not a {type(kernel).__name__}")
        _layouts[types] = layout
    return layout


def _interpret(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], keywords: dict[str, Any]) -> None:  # noqa: ANN401
    name, parameters = kernel.fn.__name__, kernel_parameters(kernel)
    sources, _ = bind(name, parameters, len(args), tuple(keywords))
    if not all(_expand(name, grid)):
        return
    bound = [
        args[source] if isinstance(source, int) else keywords[source] if source is not None else parameter.default
        for source, parameter in zip(sources, parameters, strict=True)
    ]
    kernel[grid](*bound)  # the interpreter knows only some of the options, and none of them changes a result


def _prepared_layout(kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> _Layout:  # noqa: ANN401
    parameters = kernel_parameters(kernel)
    sources, options = bind(kernel.fn.__name__, parameters, len(args), tuple(keywords))
    current_device, raw_stream, only, hip = _device_calls()
    bound: list[str] = []
    key = ["lr_index"]
    pointers: list[str] = []
    for parameter, source in zip(parameters, sources, strict=True):
        if not isinstance(source, int):
            bound.append(source if source is not None else f"default_{parameter.name}")
            continue
        value, argument = f"lr_{source}", args[source]
        bound.append(value)
        if hasattr(argument, "data_ptr"):
            key.append(f"{value}.dtype")
            if parameter.specialize_alignment:
                pointers.append(f"{value}.data_ptr()")
            if hip and parameter.specialize:
                key.append(f"{value}.untyped_storage().size() < 2147483648")
        elif isinstance(argument, int) and not isinstance(argument, bool):
            divisible = f"not {value} & 15" if parameter.specialize_alignment else "True"
            lowest = 1 if parameter.specialize else -2147483649
            key.append(f"{divisible} if {lowest} < {value} < 2147483648 else int_class({value})")
        elif argument is not None and not isinstance(argument, bool | float):
            raise TypeError(f"launch of {kernel.fn.__name__}() got a {type(argument).__name__} as an argument")
    if pointers:  # nearly always all are aligned: one test for all of them, each one's flag only if it fails
        flags = ", ".join(f"{pointer} & 15 == 0" for pointer in pointers)
        key.append(f"({' | '.join(pointers)}) & 15 and ({flags},)")
    key += keywords
    values = [f"lr_{i}" for i in range(len(args))]
    first = next((v for v, a in zip(values, args, strict=True) if hasattr(a, "data_ptr")), None)
    enter, enter_calls, exit_, exit_calls = _hooks()
    types = {name: v.__class__ for name, v in zip((*values, *keywords), (*args, *keywords.values()), strict=True)}
    source_text = _TEMPLATE.format(
        count=len(args),
        keyword_count=len(keywords),
        values=f"[{', '.join(values)}]",
        keywords=f"[{', '.join(keywords)}]",
        keyword_values="(" + "".join(f"lr_keywords[{name!r}], " for name in keywords) + ")",
        other_types=" or ".join(f"{v}.__class__ is not type_{v}" for v in types) or "False",
        index="current_device()" if first is None else f"{first}.get_device()",
        current="current_device()" if only is None else only,
        key=", ".join(key) + ",",
        bound="".join(f"{b}, " for b in bound),
        hooked="pre_run_hooks or runtime.launch_enter_hook is not enter or enter_calls"
        " or runtime.launch_exit_hook is not exit or exit_calls",
    )
    entries: _Entries = {}

    def other(grid: tuple[int, ...], args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        _layout_of(kernel, args, keywords)(grid, args, keywords)

    def miss(
        key: tuple[Hashable, ...], bound: tuple[Any, ...], grid: tuple[int, ...], keywords: dict[str, Any]
    ) -> None:
        _launch_through_triton(kernel, entries, key, bound, grid, {name: keywords[name] for name in options})

    namespace: dict[str, Any] = {
        **{f"default_{p.name}": p.default for p in parameters},
        **{f"type_{v}": kind for v, kind in types.items()},
        "kernel": kernel,  # keeps the kernel alive, so that its id stays its own
        "pre_run_hooks": kernel.pre_run_hooks,
        "name": kernel.fn.__name__,
        "expand": _expand,
        "int_class": _int_class,
        "current_device": current_device,
        "raw_stream": raw_stream,
        "elsewhere": _launch_elsewhere,
        "other": other,
        "miss": miss,
        "entries": entries,
        "runtime": _knobs(),
        "enter": enter,
        "enter_calls": enter_calls,
        "exit": exit_,
        "exit_calls": exit_calls,
    }
    exec(compile(source_text, f"<launch of {kernel.fn.__name__}>", "exec"), namespace)
    layout: _Layout = namespace["prepared"]
    return layout


def _launch_through_triton(
    kernel: Any,  # noqa: ANN401
    entries: _Entries,
    key: tuple[Hashable, ...],
    bound: tuple[Any, ...],
    grid: tuple[int, ...],
    options: dict[str, Any],
) -> None:
    """The first launch of a specialisation, and every one while somebody's hooks want to see it."""
    import torch

    if key not in entries and torch.cuda.is_current_stream_capturing():
        raise NotLoaded(f"kernel {kernel.fn.__name__} is not loaded for these arguments")
    compiled = kernel[_expand(kernel.fn.__name__, grid)](*bound, **options)
    if key in entries:
        return
    run, function, packed = (getattr(compiled, name, None) for name in ("run", "function", "packed_metadata"))
    if prepared_supported() and callable(run) and function is not None and packed is not None:
        entries[key] = run, function, packed
        return

    def through_triton(x: int, y: int, z: int, *rest: Any) -> None:
        kernel[(x, y, z)](*rest[6:], **options)

    entries[key] = through_triton, None, None


def _int_class(value: int) -> bool | int:
    """What Triton specialises on in an int; True and False, for 32 bits, are also what the template writes itself."""
    if value == 1:
        return 7
    divisible = value % 16 == 0
    if -(2**31) <= value < 2**31:
        return divisible
    return (4 if value >= 2**63 else 2) + divisible


def _launch_elsewhere(
    index: int, layout: _Layout, grid: tuple[int, ...], args: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    """The same launch under a guard of the tensors' own device."""
    import torch

    if index < 0:
        tensor = next(arg for arg in args if hasattr(arg, "data_ptr"))
        raise DeviceMismatchError(
            f"a Triton kernel was launched on tensors on {tensor.device}",
            why="compiled kernels run on GPUs only",
            fix="move the tensors to a GPU, or set TRITON_INTERPRET=1 before Triton is imported",
        )
    with torch.cuda.device(index):
        layout(grid, args, keywords)


def _expand(name: str, grid: tuple[int, ...]) -> tuple[int, int, int]:
    """A grid as three sizes; all zero if there is nothing to launch.

    Raises:
        InvalidInputError: more than three sizes, a negative one, or one beyond what a device launches.
    """
    sizes = (*grid, 1, 1)[:3]
    if not 0 < len(grid) <= 3 or min(sizes) < 0:
        raise InvalidInputError(f"kernel {name} has no valid grid", why=f"got {grid}")
    x, y, z = sizes
    if not x * y * z:
        return 0, 0, 0
    if y > _GRID_LIMIT_YZ or z > _GRID_LIMIT_YZ or x * y * z >= _GRID_LIMIT:
        raise InvalidInputError(
            f"kernel {name} cannot be launched on a grid of {x} x {y} x {z} blocks",
            why=f"the limits are 2**31 - 1 blocks in all and {_GRID_LIMIT_YZ} in the second and third place",
            fix="use larger blocks, or loop inside the kernel",
        )
    return x, y, z


def _knobs() -> Any:  # noqa: ANN401
    try:
        from triton import knobs

        return knobs.runtime
    except ImportError:  # before 3.4 hooks live elsewhere; there every launch goes through `kernel[grid]` anyway
        return SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)


def _hooks() -> tuple[object, object, object, object]:
    """Triton's launch hooks and what they will call. From 3.6 on a hook is a chain, which says nothing while empty."""
    runtime = _knobs()
    found: list[object] = []
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        # A chain changes in place, so its list tells at any time; any other object is one that wants to be called.
        found += [hook, () if hook is None else getattr(hook, "calls", (hook,))]
    return found[0], found[1], found[2], found[3]


# --- recorded launches ------------------------------------------------------------------------------------------------


@contextmanager
def record(aligned: bool = True) -> Iterator[list[LaunchRecord]]:
    """Collect this thread's launches instead of running them; launch functions are then called on meta tensors.

    Args:
        aligned: whether tensors are taken to lie at addresses divisible by 16. Views at an offset that is not are
            unaligned either way.
    """
    global _recording
    records: list[LaunchRecord] = []
    outer = getattr(_recordings, "open", None)
    with _recording_lock:
        _recording += 1
    _recordings.open = records, aligned
    try:
        yield records
    finally:
        _recordings.open = outer
        with _recording_lock:
            _recording -= 1


def _record(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], parameters: dict[str, Any]) -> bool:  # noqa: ANN401
    """Add a launch to this thread's recording; False if it has none open."""
    recording = getattr(_recordings, "open", None)
    if recording is None:
        return False
    records, aligned = recording
    name = kernel.fn.__name__
    known = kernel_parameters(kernel)
    sources, options = bind(name, known, len(args), tuple(parameters))
    # A size that the kernel opts out of must not tell records apart: they would be compiled once for each of its kinds.
    special = {source: p.specialize for source, p in zip(sources, known, strict=True)}
    if all(_expand(name, grid)):
        records.append(
            LaunchRecord(
                kernel=f"{kernel.fn.__module__}:{kernel.fn.__qualname__}",
                grid=tuple(grid),
                arguments=tuple(Argument.of(arg, aligned, special[n]) for n, arg in enumerate(args)),
                constexprs=tuple(sorted((k, v) for k, v in parameters.items() if k not in options)),
                options=tuple(sorted((k, parameters[k]) for k in options)),
            )
        )
    return True
