"""The GPUs known by name, plain figures, one line a part; and how a device gets its name.

Sources: the vendors' data sheets and tuning guides, and what drivers report through ``torch.cuda``. Memory is the
nominal size in GiB; drivers report 0.5 % to 9 % less, the more so where ECC lives in the same memory. A part that is
not here is no error: it gets a generated SKU.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import unicodedata
from dataclasses import dataclass

MOST = 999_999  # units, or GiB: what a driver reports beyond it is nonsense, and names must stay short
_SKU_LENGTH = 48  # leaves room for "-<units>" in a path part of 64
# Reported over nominal memory: a T4 with ECC reports 0.91, and no driver reports more than there is.
_LEAST_MEMORY, _MOST_MEMORY, _USUAL_MEMORY = 0.88, 1.02, 0.987
EMULATED_ARCH = {"interpreter-cuda": "sm_80", "interpreter-rocm": "gfx942"}


@dataclass(frozen=True, slots=True)
class Part:
    """One SKU.

    Attributes:
        vendor: ``cuda`` or ``rocm``.
        arch: ``sm_90``, ``gfx942``.
        sku: the name that tables carry.
        units: SMs or CUs of one device as the runtime shows it (a GCD of an MI250X is a device).
        gib: nominal memory in GiB.
        l2_mib: L2 cache in MiB, over all dies of the device.
        words: what a vendor's device name must contain for this part to win over others of the same figures.
        aliases: other names that ``Device.parse`` takes; export variants with the same chip are here too.
        board: the form factor, where parts of one chip differ by it; siblings of the same board come first.
    """

    vendor: str
    arch: str
    sku: str
    units: int
    gib: int
    l2_mib: int
    words: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    board: str = ""


# Where arch, units and memory agree, the first line wins unless the device's name says otherwise.
# An A100 is the same device as PCIe card and as SXM module to the driver's figures, so they share an SKU.
PARTS: tuple[Part, ...] = (
    Part("cuda", "sm_75", "t4", 40, 16, 4),
    Part("cuda", "sm_80", "a100-80", 108, 80, 40, aliases=("a100", "a800")),
    Part("cuda", "sm_80", "a100-40", 108, 40, 40),
    Part("cuda", "sm_80", "a30", 56, 24, 24),
    Part("cuda", "sm_86", "a40", 84, 48, 6, words=("a40",)),
    Part("cuda", "sm_86", "rtx-a6000", 84, 48, 6, words=("a6000",), aliases=("a6000",)),
    Part("cuda", "sm_86", "rtx-3090-ti", 84, 24, 6),
    Part("cuda", "sm_86", "rtx-3090", 82, 24, 6),
    Part("cuda", "sm_86", "a10g", 80, 24, 6),
    Part("cuda", "sm_86", "a10", 72, 24, 6),
    Part("cuda", "sm_89", "l40s", 142, 48, 96, words=("l40s",)),
    Part("cuda", "sm_89", "l40", 142, 48, 96, words=("l40",)),
    Part("cuda", "sm_89", "rtx-6000-ada", 142, 48, 96, words=("6000", "ada")),
    Part("cuda", "sm_89", "rtx-4090", 128, 24, 72),
    Part("cuda", "sm_89", "l4", 58, 24, 48),
    Part("cuda", "sm_90", "h100-sxm", 132, 80, 50, aliases=("h100", "h800"), board="sxm"),
    Part("cuda", "sm_90", "h200", 132, 141, 60, words=("h200",), board="sxm"),
    Part("cuda", "sm_90", "h100-nvl", 132, 94, 60, words=("h100", "nvl"), board="pcie"),
    Part("cuda", "sm_90", "gh200", 132, 96, 60, words=("gh200",), aliases=("gh200-96",), board="superchip"),
    Part("cuda", "sm_90", "gh200-144", 132, 144, 60, words=("gh200",), board="superchip"),
    Part("cuda", "sm_90", "h100-pcie", 114, 80, 50, board="pcie"),
    Part("cuda", "sm_90", "h20", 78, 96, 60, board="sxm"),
    Part("cuda", "sm_90", "h20-3e", 78, 141, 60, board="sxm"),
    Part("cuda", "sm_100", "b200", 148, 180, 126),
    Part("cuda", "sm_100", "gb200", 152, 186, 126),
    Part("cuda", "sm_120", "rtx-5090", 170, 32, 96),
    Part("rocm", "gfx90a", "mi250x", 110, 64, 8),
    Part("rocm", "gfx90a", "mi250", 104, 64, 8, words=("mi250",)),
    Part("rocm", "gfx90a", "mi210", 104, 64, 8, words=("mi210",)),
    Part("rocm", "gfx942", "mi300x", 304, 192, 32),
    Part("rocm", "gfx942", "mi325x", 304, 256, 32),
    Part("rocm", "gfx942", "mi300a", 228, 128, 24),
    Part("rocm", "gfx942", "mi308x", 80, 192, 16),
    Part("rocm", "gfx950", "mi355x", 256, 288, 32, words=("mi355x",)),
    Part("rocm", "gfx950", "mi350x", 256, 288, 32, words=("mi350x",)),
)

# Bytes of shared memory (LDS) that one block may ask for, by arch. NVIDIA: the opt-in limit, 1 KiB below the carve-out.
SHARED_MEMORY: dict[str, int] = {
    "sm_70": 96 << 10,
    "sm_75": 64 << 10,
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_87": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx950": 160 << 10,
}

# 32-bit vector registers of one unit where it is not 65536: since gfx90a, four SIMDs with 512 registers of 64 lanes.
REGISTERS: dict[str, int] = {"gfx90a": 131072, "gfx942": 131072, "gfx950": 131072}


def identify(vendor: str, arch: str, units: int, memory_bytes: int, name: str = "") -> str:
    """The SKU of a device.

    Args:
        vendor: one of the four.
        arch: ``sm_90``, ``gfx942``.
        units: SMs, CUs or cores.
        memory_bytes: what the driver reports.
        name: the vendor's name: all of a CPU's identity, and for GPUs the last resort between equal parts.

    Returns:
        The SKU of a known part, a processor's model, or ``<arch>-<units>u-<GiB>g``; always a safe path part.
    """
    if vendor == "cpu":
        return _model(name)
    if vendor == "interpreter":
        return "interpreter-rocm" if arch == "interpreter-rocm" else "interpreter"
    gib = max(memory_bytes, 0) / 2**30
    fits = [
        part
        for part in PARTS
        if (part.vendor, part.arch, part.units) == (vendor, arch, units)
        and _LEAST_MEMORY * part.gib <= gib <= _MOST_MEMORY * part.gib
    ]
    if not fits:
        rounded = min(_round_gib(gib), MOST)
        return safe_part(f"{arch}-{max(1, min(units, MOST))}u-{rounded}g", _SKU_LENGTH)
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    named = [part for part in fits if part.words and words.issuperset(part.words)]
    return min(named or fits, key=lambda part: abs(gib - _USUAL_MEMORY * part.gib)).sku


def capability_number(arch: str) -> int:
    """A number that grows with the generation: 90 for ``sm_90``, 0x942 for ``gfx942``, 0 for a CPU.

    Numbers compare only within one vendor. An interpreter has the number of the arch it stands for.
    """
    arch = EMULATED_ARCH.get(arch, arch)
    if (nvidia := re.fullmatch(r"sm_([0-9]{2,4})[a-z]?", arch)) is not None:
        return int(nvidia[1])
    if (amd := re.fullmatch(r"gfx([0-9a-f]{3,5})", arch)) is not None:
        return int(amd[1], 16)
    return 0


def safe_part(text: str, length: int = 64) -> str:
    """A path part made of ``text``: at most ``length`` of ``[a-z0-9._-]``, never empty, no dot at either end.

    Where characters had to be cut, or nothing was left, a digest of the whole keeps different texts apart.
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    part = re.sub(r"[^a-z0-9._]+", "-", plain).strip("-._")
    if part and len(part) <= length:
        return part
    if not text.strip():
        return "unknown"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{part[: length - 9].rstrip('-._') or 'x'}-{digest}"


def _round_gib(gib: float) -> int:
    # Up to the next number of three significant bits (..., 20, 24, 28, 32, 40, 48 ...), after 2 % of slack. Sizes of
    # memory are such numbers, and what drivers keep for themselves (up to 10 %) never leads past the one below.
    gib *= 0.98
    if gib <= 0:
        return 0
    step = 1 << max(0, math.ceil(math.log2(gib)) - 3)
    return min(step * math.ceil(gib / step), 1 << 20)


@functools.lru_cache(maxsize=64)
def siblings(vendor: str, arch: str, sku: str, units: int, memory_bytes: int) -> tuple[str, ...]:
    """The SKUs of the other known parts of the same arch, nearest first."""
    own = by_name().get(sku)
    board = own.board if own is not None else ""
    gib = max(memory_bytes / 2**30 / _USUAL_MEMORY, 1.0)

    def distance(part: Part) -> tuple[float, bool, float]:
        # Units first, they set how a grid fills the device; then the board, which sets power and clocks; then memory.
        return abs(math.log(part.units / units)), part.board != board, abs(math.log(part.gib / gib))

    others = [part for part in PARTS if (part.vendor, part.arch) == (vendor, arch) and part.sku != sku]
    return tuple(part.sku for part in sorted(others, key=distance))


@functools.lru_cache(maxsize=1)
def by_name() -> dict[str, Part]:
    """Every known part under its SKU and its aliases."""
    return {name: part for part in PARTS for name in (part.sku, *part.aliases)}


def _model(name: str) -> str:
    """A processor's model without marks, clock and core count, which are not the same on every system."""
    plain = re.sub(r"\((?:r|tm|c)\)|[®™©]", " ", name, flags=re.IGNORECASE)
    plain = re.sub(r"@.*|\bw/.*|\bwith .*", " ", plain, flags=re.IGNORECASE)
    plain = re.sub(r"\b(?:[0-9]+-core|cpu|processor)\b", " ", plain, flags=re.IGNORECASE)
    return safe_part(plain, _SKU_LENGTH)
