"""The device a choice is made for: what it is called, how many units it has, and what one block may use.

Vendors rename devices between driver versions, so a name is never identity: the SKU follows from arch, unit count and
memory, and the name decides only between parts that agree in all three.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from liger_registry.errors import TableInvalidError, UnknownDeviceError
from liger_registry.parts import (
    EMULATED_ARCH,
    MOST,
    REGISTERS,
    SHARED_MEMORY,
    Part,
    by_name,
    capability_number,
    identify,
    safe_part,
    siblings,
)

__all__ = ["CPU_CLOCK", "CUDA_EVENTS", "VENDORS", "Device", "Limits", "capability_number", "identify", "safe_part"]

if TYPE_CHECKING:
    import torch

VENDORS = ("cuda", "rocm", "cpu", "interpreter")
#: Measuring protocols: how a time was taken, part of the key of what a table holds.
CUDA_EVENTS, CPU_CLOCK = "cuda-events-1", "cpu-clock-1"
_SAFE = re.compile(r"[a-z0-9_](?:[a-z0-9._-]{0,62}[a-z0-9_-])?")
_GENERATED = re.compile(r"(sm_[0-9]+[a-z]?|gfx[0-9a-f]+)-([0-9]{1,6})u-([0-9]{1,6})g")
_INTERPRETERS = {
    "interpreter": ("interpreter", "cuda"),
    "interpreter:cuda": ("interpreter", "cuda"),
    "interpreter:rocm": ("interpreter-rocm", "rocm"),
    "interpreter-rocm": ("interpreter-rocm", "rocm"),
}
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "int | None": (int, type(None)),
    "Limits": (Mapping,),
}
# By torch.device itself: a lookup takes 0.2 us, by its type and index 0.5. One without an index never stays here
# (but the CPU): which GPU is the current one may change.
_memo: dict[torch.device, Device] = {}
_memo_interpret: dict[torch.device, Device] = {}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one block may use.

    Attributes:
        warp_size: threads of a warp or wavefront; 1 on a CPU.
        max_threads: threads of a block; 1 on a CPU.
        shared_memory: bytes of shared memory a block may opt in to; 0 on a CPU.
        registers: 32-bit registers of one unit (SM or CU); 0 on a CPU.
        l2_bytes: bytes of the L2 cache, of the last-level cache on a CPU; 0 where unknown.
    """

    warp_size: int
    max_threads: int
    shared_memory: int
    registers: int
    l2_bytes: int


@dataclass(frozen=True, slots=True)
class Device:
    """A device, present or not.

    Attributes:
        vendor: ``cuda``, ``rocm``, ``cpu`` or ``interpreter`` (Triton's interpreter on the CPU).
        arch: ``sm_90``, ``gfx942``, ``x86_64-avx512``, ``interpreter-cuda``.
        sku: ``h200``; generated (``sm_90-78u-64g``) for a part not known by name.
        units: SMs, CUs, or usable cores.
        memory_bytes: the device's whole memory as its driver reports it; nominal for a device that is not present.
        limits: what one block may use.
        name: what the vendor calls it; for display, not part of equality.
        index: which of the present ones; not part of equality.

    Raises:
        UnknownDeviceError: the vendor is none of the four, a part of the name cannot stand in a path, or a figure is
            out of range.
    """

    vendor: str
    arch: str
    sku: str
    units: int
    memory_bytes: int
    limits: Limits
    name: str = field(default="", compare=False)
    index: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.vendor not in VENDORS:
            raise UnknownDeviceError(f"{self.vendor!r} is no vendor", candidates=VENDORS)
        if self.vendor == "interpreter" and self.arch not in EMULATED_ARCH:
            raise UnknownDeviceError(f"no interpreter has the arch {self.arch!r}", candidates=EMULATED_ARCH)
        if not (1 <= self.units <= MOST and self.memory_bytes >= 0):
            raise UnknownDeviceError(
                f"a device cannot have {self.units} units and {self.memory_bytes} bytes of memory",
                fix=f"units are 1 to {MOST}, memory is not negative",
            )
        for part in self.directory:
            if not _SAFE.fullmatch(part):
                raise UnknownDeviceError(
                    f"{part[:80]!r} cannot name a device",
                    why="vendor, arch and SKU are names of directories",
                    fix="use at most 64 of a-z, 0-9, '.', '_' and '-', neither beginning nor ending with a dot",
                )

    @property
    def directory(self) -> tuple[str, str, str]:
        """The path of the device's tables below a root, ``("cuda", "sm_90", "h200-132")``."""
        return self.vendor, self.arch, f"{self.sku}-{self.units}"

    @property
    def fingerprint(self) -> str:
        """The same as one text, ``cuda/sm_90/h200-132``."""
        return "/".join(self.directory)

    @property
    def emulates(self) -> str:
        """The vendor whose kernels run here: ``cuda`` or ``rocm`` for an interpreter, else the vendor itself."""
        return self.arch.removeprefix("interpreter-") if self.vendor == "interpreter" else self.vendor

    @property
    def protocol(self) -> str:
        """How this version measures on the device: ``cuda-events-1`` on GPUs, ``cpu-clock-1`` elsewhere."""
        return CUDA_EVENTS if self.vendor in ("cuda", "rocm") else CPU_CLOCK

    @property
    def siblings(self) -> tuple[str, ...]:
        """The SKUs of the other known parts of the same arch, nearest first."""
        return siblings(self.vendor, self.arch, self.sku, self.units, self.memory_bytes)

    @classmethod
    def parse(cls, text: str) -> Device:
        """The device of a name.

        Args:
            text: a known SKU or alias (``h200``, ``a100-40``, ``mi300x``), a generated SKU, ``cpu`` for this machine,
                ``cuda`` or ``cuda:1`` (``rocm:1``) for a GPU that is present, ``interpreter`` or ``interpreter:rocm``.

        Raises:
            UnknownDeviceError: the name is none of these, or the GPU is not present.
        """
        name = re.sub(r"\s+", "-", text.strip().lower())
        if name == "cpu":
            return _cpu()
        if name in _INTERPRETERS:
            return _interpreter(*_INTERPRETERS[name])
        if (present := re.fullmatch(r"(cuda|rocm)(?::([0-9]{1,4}))?", name)) is not None:
            return _present(present[1], None if present[2] is None else int(present[2]))
        if (part := by_name().get(name.replace("_", "-"))) is not None:
            return _of_part(part)
        if (made := _GENERATED.fullmatch(name)) is not None and int(made[2]) > 0:
            return _of_figures(made[1], int(made[2]), int(made[3]) << 30)
        known = [*by_name(), "cpu", "interpreter", "interpreter:rocm", "cuda", "cuda:0", "rocm:0"]
        close = difflib.get_close_matches(name[:80], known, n=3)
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        raise UnknownDeviceError(
            f"no device is called {shown!r}",
            candidates=dict.fromkeys([*close, *known]),
            fix="name one of the candidates, or a part by its figures, such as sm_90-78u-64g",
        )

    @classmethod
    def of(cls, target: torch.device | torch.Tensor, *, interpret: bool = False) -> Device:
        """The device of a tensor, or the one that a ``torch.device`` names.

        Only the first call for an index asks the driver; later ones are one dictionary lookup.

        Args:
            target: a tensor or a ``torch.device``; an accelerator without an index means the current one.
            interpret: whether the CPU stands for Triton's interpreter.

        Raises:
            UnknownDeviceError: torch has no such GPU, or it is a kind of device that this package does not serve.
        """
        place: Any = getattr(target, "device", target)
        device = (_memo_interpret if interpret else _memo).get(place)
        return _locate(place, interpret) if device is None else device

    @classmethod
    def default(cls) -> Device:
        """The current GPU if there is one, else the CPU."""
        import torch

        return cls.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    @classmethod
    def from_properties(cls, properties: object, *, vendor: str, index: int | None = None) -> Device:
        """The device that ``torch.cuda.get_device_properties`` describes.

        Args:
            properties: torch's object; attributes that this version of torch lacks are filled from the known part.
            vendor: ``cuda`` or ``rocm``.
            index: torch's index of it.
        """
        name = _printable(str(getattr(properties, "name", "")))
        units = max(1, min(_figure(properties, "multi_processor_count"), MOST))
        memory = _figure(properties, "total_memory")
        if vendor == "rocm":
            arch = safe_part(str(getattr(properties, "gcnArchName", "")).split(":")[0], 24)
        else:
            arch = f"sm_{_figure(properties, 'major')}{_figure(properties, 'minor')}"
        sku = identify(vendor, arch, units, memory, name)
        part = by_name().get(sku)
        usual = _limits(vendor, arch, part.l2_mib << 20 if part is not None else 0)
        l2, registers = _figure(properties, "L2_cache_size"), _figure(properties, "regs_per_multiprocessor")
        limits = Limits(
            warp_size=_figure(properties, "warp_size") or usual.warp_size,
            max_threads=_figure(properties, "max_threads_per_block") or usual.max_threads,
            shared_memory=_figure(properties, "shared_memory_per_block_optin") or usual.shared_memory,
            # HIP reports registers of a block and the L2 cache of a single die, so there the known figures stand.
            registers=usual.registers if vendor == "rocm" else registers or usual.registers,
            l2_bytes=max(l2, usual.l2_bytes) if vendor == "rocm" else l2 or usual.l2_bytes,
        )
        return cls(vendor, arch, sku, units, memory, limits, name, index)

    def to_json(self) -> dict[str, Any]:
        """The device as JSON values; ``from_json`` takes them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Device:
        """The device that ``to_json`` wrote.

        Raises:
            TableInvalidError: a field is missing, unknown, of the wrong type, or names no possible device.
        """
        values = _typed(cls, fields, optional=("name", "index"))
        if _printable(values.get("name", "")) != values.get("name", ""):
            # It reaches terminals, which obey what stands in some texts.
            raise TableInvalidError("the name of a Device is no line of at most 128 printable characters")
        try:
            return cls(**{**values, "limits": Limits(**_typed(Limits, values["limits"]))})
        except UnknownDeviceError as error:
            raise TableInvalidError(error.what, why=error.why, candidates=error.candidates, fix=error.fix) from error


def _limits(vendor: str, arch: str, l2_bytes: int) -> Limits:
    if vendor == "rocm":
        warp = 64 if arch.startswith("gfx9") else 32
        return Limits(warp, 1024, SHARED_MEMORY.get(arch, 64 << 10), REGISTERS.get(arch, 65536), l2_bytes)
    # Every arch since sm_80 lets a block have 99 KiB at least, and every one before it 48.
    least = 99 << 10 if capability_number(arch) >= 80 else 48 << 10
    return Limits(32, 1024, SHARED_MEMORY.get(arch, least), REGISTERS.get(arch, 65536), l2_bytes)


def _of_part(part: Part) -> Device:
    limits = _limits(part.vendor, part.arch, part.l2_mib << 20)
    return Device(part.vendor, part.arch, part.sku, part.units, part.gib << 30, limits)


def _of_figures(arch: str, units: int, memory_bytes: int) -> Device:
    vendor = "cuda" if arch.startswith("sm_") else "rocm"
    sku = identify(vendor, arch, units, memory_bytes)
    part = by_name().get(sku)
    return Device(vendor, arch, sku, units, memory_bytes, _limits(vendor, arch, 0)) if part is None else _of_part(part)


def _interpreter(sku: str, vendor: str) -> Device:
    arch = f"interpreter-{vendor}"
    # Few units, so that persistent grids stay small: the interpreter runs one block after the other.
    limits = _limits(vendor, EMULATED_ARCH[arch], (40 if vendor == "cuda" else 4) << 20)
    return Device("interpreter", arch, sku, 4, 16 << 30, limits, f"Triton's interpreter, for {vendor}")


def _locate(place: torch.device, interpret: bool) -> Device:
    if place.type == "cuda":
        return _present("cuda", place.index)
    if place.type != "cpu":
        raise UnknownDeviceError(
            f"no implementation serves devices of kind {place.type!r}",
            candidates=("cpu", "cuda"),
            fix="move the tensors to one of the candidates (GPUs of AMD are called cuda by torch)",
        )
    if interpret:
        return _memo_interpret.setdefault(place, _interpreter(*_INTERPRETERS["interpreter"]))
    return _memo.setdefault(place, _cpu())


def _present(vendor: str, index: int | None) -> Device:
    """The GPU of an index, the current one by default; torch calls those of AMD ``cuda`` too."""
    import torch

    built = "rocm" if torch.version.hip else "cuda"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (vendor == "rocm" and built != "rocm") or count == 0 or (index is not None and index >= count):
        raise UnknownDeviceError(
            f"there is no device {vendor if index is None else f'{vendor}:{index}'} on this machine",
            why=f"torch {torch.__version__}, built for {built}, sees {count} of them",
            candidates=[*(f"{built}:{i}" for i in range(count)), "cpu"],
            fix="name a part, such as h200, if the device need not be present",
        )
    index = torch.cuda.current_device() if index is None else index
    place = torch.device("cuda", index)
    device = _memo.get(place)
    if device is None:
        found = Device.from_properties(torch.cuda.get_device_properties(index), vendor=built, index=index)
        device = _memo.setdefault(place, found)
    # The interpreter stands for the CPU alone.
    return _memo_interpret.setdefault(place, device)


@functools.lru_cache(maxsize=1)
def _cpu() -> Device:
    from liger_registry import processor

    found = processor.describe()
    arch = safe_part("-".join(filter(None, (found.machine, found.capability))))
    limits = Limits(warp_size=1, max_threads=1, shared_memory=0, registers=0, l2_bytes=found.cache_bytes)
    units = max(1, min(found.cores, MOST))
    sku = identify("cpu", arch, units, found.memory_bytes, found.model)
    return Device("cpu", arch, sku, units, found.memory_bytes, limits, _printable(found.model))


def _figure(properties: object, name: str) -> int:
    """A count or size of torch's object; 0 where this torch or this driver has none."""
    value = getattr(properties, name, 0)
    return value if isinstance(value, int) and value > 0 else 0


def _printable(name: str) -> str:
    return "".join(c for c in name if c.isprintable()).strip()[:128]


def _typed(kind: type[Any], fields: object, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass read from JSON, each of its declared type and no figure negative."""
    if not isinstance(fields, Mapping):
        raise TableInvalidError(f"{kind.__name__} should be an object, not {type(fields).__name__}")
    declared = {f.name: str(f.type) for f in dataclasses.fields(kind)}
    wrong = [str(name) for name in fields if name not in declared]
    wrong += [name for name in declared if name not in fields and name not in optional]
    for name in declared.keys() & fields.keys():
        value = fields[name]
        fits = isinstance(value, _JSON_TYPES[declared[name]]) and not isinstance(value, bool)
        if not fits or (isinstance(value, int) and value < 0):
            wrong.append(name)
    if wrong:
        raise TableInvalidError(
            f"{kind.__name__} has missing, unknown or invalid fields: {', '.join(sorted(wrong))}",
            candidates=[f"{name}: {declared[name]}" for name in declared],
        )
    return dict(fields)
