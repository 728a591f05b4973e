"""Compiling a recorded launch for a GPU that need not be there: registers, shared memory, and whether a config fits."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_registry._triton import bind, kernel_parameters, triton_available
from liger_registry.errors import CompileError, TritonMissingError, UnknownDeviceError
from liger_registry.records import Argument, LaunchRecord

if TYPE_CHECKING:
    from liger_registry.device import Device

_FORMAT = 1  # of the cached results


@dataclass(frozen=True, slots=True)
class Target:
    """What Triton compiles for: backend ``cuda`` or ``hip``, arch ``90`` or ``"gfx942"``, lanes of a warp."""

    backend: str
    arch: int | str
    warp_size: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compiled kernel needs.

    Attributes:
        kernel: ``module:qualname``.
        registers: 32-bit registers a thread; None where no tool could tell.
        spills: 32-bit registers a thread keeps in memory; None where no tool could tell.
        shared_memory: bytes a block.
        threads: threads a block.
        binary_bytes: size of the binary.
        hash: Triton's own key of the binary in its on-disk cache.
    """

    kernel: str
    registers: int | None
    spills: int | None
    shared_memory: int
    threads: int
    binary_bytes: int
    hash: str


def target_of(device: Device) -> Target:
    """The target that a device's kernels are compiled for.

    Raises:
        UnknownDeviceError: the device is no GPU.
    """
    if device.emulates == "cuda" and device.arch.startswith("sm_"):
        return Target("cuda", int(device.arch.removeprefix("sm_").rstrip("abcdefghijklmnopqrstuvwxyz")), 32)
    if device.emulates == "rocm" and device.arch.startswith("gfx"):
        return Target("hip", device.arch.split(":")[0], device.limits.warp_size)
    raise UnknownDeviceError(f"nothing can be compiled for {device.vendor}/{device.arch}", fix="name a GPU")


def fits(compiled: Compiled, device: Device) -> str | None:
    """Why a compiled kernel cannot run on a device; None if it can. Spilled registers are slow, but they run."""
    limits = device.limits
    if compiled.shared_memory > limits.shared_memory:
        return f"needs {compiled.shared_memory} bytes of shared memory a block, {device.sku} has {limits.shared_memory}"
    if compiled.threads > limits.max_threads:
        return f"needs {compiled.threads} threads a block, {device.sku} runs {limits.max_threads}"
    return None


def compile_record(record: LaunchRecord, target: Target, cache_dir: Path | None = None) -> Compiled:
    """Compile a recorded launch, or read what an earlier compile of it found.

    The source and the options are made by the kernel's own binder and by Triton's ``_pack_args``, from stand-ins that
    have the dtype, alignment and extent of the recorded arguments, with the keywords that ``JITFunction.run`` adds. So
    Triton's key of the binary is that of a later launch, which then finds it on disk. The tests compare it with the key
    of ``kernel.warmup`` under a stand-in driver, and on a GPU with that of a kernel that was launched.

    Args:
        record: from ``launch.record``.
        target: what to compile for.
        cache_dir: where results, failures too, are kept as small JSON files; None keeps none. What is read from there
            says nothing on whether Triton's cache still has the binary.

    Raises:
        CompileError: the kernel cannot be found or does not compile; ``why`` says with which config.
        TritonMissingError: Triton is not installed.
    """
    if not triton_available():
        raise TritonMissingError("offline compiles need Triton", fix="pip install triton")
    with _as_compile_error(record, target):
        source, options, digest = _source(record, target)
    path = cache_dir / digest[:2] / f"{digest}.json" if cache_dir is not None else None
    if path is not None and (known := _read(path, record)) is not None:
        return known
    try:
        with _as_compile_error(record, target):
            compiled = _compile(record, target, source, options)
    except CompileError as error:
        # A linker that is missing says nothing about the config, so only what the compiler says is kept.
        if path is not None and _says_the_compiler(error.__cause__):
            _write(path, {"error": error.why})
        raise
    if path is not None:
        _write(path, asdict(compiled))
    return compiled


@contextlib.contextmanager
def _as_compile_error(record: LaunchRecord, target: Target) -> Iterator[None]:
    try:
        yield
    except CompileError:
        raise
    except Exception as error:
        # In 3.4 the outer error shows the line of the kernel and the inner one says what is wrong with it.
        inner = f" ({error.__cause__})" if error.__cause__ is not None else ""
        raise compile_failure(record, target, f"{type(error).__name__}: {error}{inner}") from error


def _says_the_compiler(error: BaseException | None) -> bool:
    from triton.runtime.errors import TritonError

    return isinstance(error, TritonError | RuntimeError)


def compile_failure(record: LaunchRecord, target: Target, reason: str) -> CompileError:
    """The error that says which kernel, with which config, does not compile for what."""
    return CompileError(
        f"{record.kernel} does not compile for {target.backend} {target.arch}",
        why=f"({record.text}): {reason.strip()[:2000]}",
        fix="leave this config out of the space, with a constraint that gives this reason",
    )


class _Pointer:
    """Stands for a tensor where Triton looks at one before it compiles."""

    def __init__(self, argument: Argument) -> None:
        import torch

        self.dtype = getattr(torch, argument.dtype)
        self._address = 0 if argument.aligned else 8
        self._extent = 0 if argument.small else 2**31

    def data_ptr(self) -> int:
        return self._address

    def ptr_range(self) -> int:
        return self._extent


def _stand_in(argument: Argument) -> object:
    if argument.kind == "pointer":
        return _Pointer(argument)
    return {"none": None, "bool": True, "float": 0.5, "int": argument.value}[argument.kind]


def _find(name: str) -> Any:  # noqa: ANN401
    module, _, qualname = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _source(record: LaunchRecord, target: Target) -> tuple[Any, dict[str, Any], str]:
    """Triton's source and options of a record, and our digest of all that decides the result."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    kernel = _find(record.kernel)
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"it is a {type(kernel).__name__}; kernels are compiled where TRITON_INTERPRET is not set")
    parameters = kernel_parameters(kernel)
    given = {**dict(record.constexprs), **dict(record.options)}
    sources, options = bind(kernel.fn.__name__, parameters, len(record.arguments), tuple(given))
    values = [
        _stand_in(record.arguments[source]) if isinstance(source, int) else given[source] if source else p.default
        for source, p in zip(sources, parameters, strict=True)
    ]
    keywords = {name: given[name] for name in options}
    keywords["debug"] = kernel.debug or triton.knobs.runtime.debug
    for name in ("instrumentation_mode", "fpsan_homomorphic_casts"):
        if hasattr(triton.knobs.compilation, name):
            keywords[name] = getattr(triton.knobs.compilation, name)
    backend = make_backend(GPUTarget(target.backend, target.arch, target.warp_size))
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = binder(*values, **keywords)
    if hasattr(kernel, "_pack_args"):  # 3.6 and later
        packed, signature, constexprs, attrs = kernel._pack_args(backend, keywords, bound, specialization, rest)
    else:
        packed, signature, constexprs, attrs = _pack_args(kernel, backend, keywords, bound, specialization)
    source = ASTSource(kernel, signature, constexprs, attrs)
    facts = (_FORMAT, triton.__version__, asdict(target), record.kernel, source.hash(), packed.hash())
    return source, packed.__dict__, hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _pack_args(
    kernel: Any,  # noqa: ANN401
    backend: Any,  # noqa: ANN401
    keywords: dict[str, Any],
    bound: Mapping[str, Any],
    specialization: list[tuple[Any, Any]],
) -> tuple[Any, dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """What ``JITFunction.run`` does in 3.4 and 3.5, without tuples among the arguments."""
    options = backend.parse_options(keywords)
    if unknown := [name for name in keywords if name not in options.__dict__]:
        raise KeyError(f"Keyword argument {unknown[0]} was specified but unrecognised")
    values = list(bound.values())
    signature = {p.name: kind for p, (kind, _) in zip(kernel.params, specialization, strict=True)}
    constexprs: dict[tuple[int, ...], Any] = {
        (i,): values[i] for i, (kind, _) in enumerate(specialization) if kind == "constexpr"
    }
    attrs: dict[tuple[int, ...], Any] = {
        (i,): backend.parse_attr(attr) for i, (_, attr) in enumerate(specialization) if isinstance(attr, str)
    }
    return options, signature, constexprs, attrs


def _compile(record: LaunchRecord, target: Target, source: Any, options: dict[str, Any]) -> Compiled:  # noqa: ANN401
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp_size), options=options)
    shared = kernel.metadata.shared
    if target.backend == "hip":
        registers, spills, fixed = _amd_resources(kernel.asm["amdgcn"])
        shared = max(shared, fixed)
    else:
        registers, spills = _nvidia_resources(kernel.kernel, str(kernel.metadata.name))
    return Compiled(
        kernel=record.kernel,
        registers=registers,
        spills=spills,
        shared_memory=shared,
        threads=kernel.metadata.num_warps * target.warp_size,
        binary_bytes=len(kernel.kernel),
        hash=kernel.hash,
    )


def _nvidia_resources(binary: bytes, name: str) -> tuple[int | None, int | None]:
    """Registers and spills of a cubin, by the ``cuobjdump`` that comes with Triton; Nones where it does not run.

    Triton itself knows them only after loading on a GPU, where it counts local memory in words, as is done here.
    """
    import triton

    try:
        tool = triton.knobs.nvidia.cuobjdump.path
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            command = [tool, "--dump-resource-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None, None
    _, _, usage = text.partition(f"Function {name}:")
    fields = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage.split("Function ")[0])}
    if "REG" not in fields:
        return None, None
    return fields["REG"], (fields.get("STACK", 0) + fields.get("LOCAL", 0)) // 4


def _amd_resources(assembly: str) -> tuple[int | None, int | None, int]:
    """Vector registers, spilled registers and bytes of static shared memory, by the assembly's metadata."""
    fields = {key: int(value) for key, value in re.findall(r"^\s+(?:- )?\.(\w+):\s+(\d+)\s*$", assembly, re.MULTILINE)}
    spills = None
    if "vgpr_spill_count" in fields:
        spills = fields["vgpr_spill_count"] + fields.get("sgpr_spill_count", 0)
    return fields.get("vgpr_count"), spills, fields.get("group_segment_fixed_size", 0)


def _read(path: Path, record: LaunchRecord) -> Compiled | None:
    """What an earlier compile found; None if there was none or its file is damaged.

    Raises:
        CompileError: the earlier compile failed.
    """
    try:
        found = json.loads(path.read_bytes())
        if set(found) == {"error"} and isinstance(found["error"], str):
            reason = found["error"]
        else:
            compiled = Compiled(**found)
            numbers = (compiled.shared_memory, compiled.threads, compiled.binary_bytes)
            return compiled if all(type(n) is int for n in numbers) and compiled.kernel == record.kernel else None
    except (OSError, ValueError, TypeError):
        return None
    raise CompileError(f"{record.kernel} does not compile, as found earlier", why=reason, fix=f"remove {path} to retry")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Keep a result; a directory that cannot be written costs the next run a compile, and this one nothing."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, sort_keys=True)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
