"""Coverage-guided fuzzing of the same targets with atheris, from the extra ``fuzz``.

``python -m tests.fuzz.coverage_guided table -max_total_time=600``; what follows the target goes to libFuzzer. Half of
the mutations are libFuzzer's own, which it chooses by what they reach, the others are those of ``mutating``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent))

import atheris

with atheris.instrument_imports(include=["liger_registry"]):
    import targets

from guarding import guarded
from mutating import Mutator


def main(arguments: list[str]) -> None:
    """Fuzz until libFuzzer ends the process."""
    name, options = arguments[1], arguments[2:]
    place = Path(tempfile.mkdtemp(prefix="liger-registry-fuzz-"))
    corpus = place / "corpus"
    corpus.mkdir()
    seeds = targets.seeds_of(name)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    check = targets.target(name, place)

    def one(data: bytes) -> None:
        with guarded(place):
            check(data)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        if seed % 2:
            return bytes(atheris.Mutate(data, most))
        return Mutator([data or b"{}", seeds[seed % len(seeds)]], Random(seed)).make()[:most]

    atheris.Setup([arguments[0], *options, "-max_len=20000", str(corpus)], one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in targets.TARGETS:
        sys.exit(f"usage: python -m tests.fuzz.coverage_guided {'|'.join(targets.TARGETS)} [option of libFuzzer ...]")
    main(sys.argv)
