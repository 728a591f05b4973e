"""Waiting for ranks that may take long, and not for those that are gone.

A rank that measures for an hour is waited for; one that has died is not. So each rank shows every few seconds that it
lives, in the store through which ``torch.distributed`` met, and whoever waits looks there. No collective is begun
before all are ready for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from liger_registry.errors import MeasurementError

# Ten signs may be late before a rank counts as gone.
SILENT_S, SIGNS = 60.0, 10.0


class Alive:
    """Shows that this rank lives, and knows of the others whether they do.

    Args:
        store: of ``torch.distributed``, with keys of this run alone.
        rank: this one.
        world: how many there are.
        silent_s: how long a rank may show nothing before it counts as gone.
    """

    def __init__(self, store: Any, rank: int, world: int, silent_s: float = SILENT_S) -> None:  # noqa: ANN401
        self._store, self._rank, self._world, self._silent_s = store, rank, world, silent_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._show, name="liger-registry-alive", daemon=True)

    def __enter__(self) -> Alive:
        self._store.set(f"alive{self._rank}", "0")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _show(self) -> None:
        number = 0
        while not self._stop.wait(self._silent_s / SIGNS):
            number += 1
            try:
                self._store.set(f"alive{self._rank}", str(number))
            except Exception:  # the store is gone with the rank that held it; who waits finds out
                return

    def wait(self, step: str) -> None:
        """Wait until every rank has come to a step.

        Raises:
            MeasurementError: some have shown no life for too long; it names them.
        """
        try:
            self._store.set(f"{step}{self._rank}", "1")
            self._wait(step)
        except MeasurementError:
            raise
        except Exception as error:
            raise _gone([0], f"the store it held cannot be reached: {error}") from error

    def _wait(self, step: str) -> None:
        started = time.monotonic()
        missing = [rank for rank in range(self._world) if rank != self._rank]
        shown: dict[int, tuple[bytes, float]] = {}
        while missing := [rank for rank in missing if not self._store.check([f"{step}{rank}"])]:
            now = time.monotonic()
            for rank in missing:
                sign = self._store.get(f"alive{rank}") if self._store.check([f"alive{rank}"]) else b""
                if rank not in shown or shown[rank][0] != sign:
                    shown[rank] = sign, now
            gone = [rank for rank in missing if now - shown[rank][1] > self._silent_s]
            if gone:
                raise _gone(gone, f"no sign of it for {self._silent_s:g} s")
            time.sleep(min(0.2, self._silent_s / SIGNS, 0.01 + (now - started) / 10))


def _gone(ranks: Sequence[int], why: str) -> MeasurementError:
    named = " and ".join(f"rank {rank}" for rank in ranks)
    return MeasurementError(
        f"{named} stopped during warmup",
        why=why,
        fix="run warmup again: what the other ranks measured is kept, and is not measured again",
    )
