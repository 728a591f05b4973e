"""Compiling many recorded launches in processes of their own, of which any may die."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from liger_registry.compile import Compiled, Target, compile_failure, compile_record
from liger_registry.errors import CompileError
from liger_registry.records import LaunchRecord


def compile_many(
    records: Sequence[LaunchRecord],
    target: Target,
    processes: int = 2,
    cache_dir: Path | None = None,
    timeout_s: float = 600,
) -> list[Compiled | CompileError]:
    """Compile recorded launches in worker processes that end afterwards; see ``CompilePool``."""
    with CompilePool(processes) as pool:
        return pool.compile(records, target, cache_dir, timeout_s)


class CompilePool:
    """Worker processes that compile recorded launches, and stay until the pool is closed.

    A worker takes seconds to import what it compiles with, so it is started when there is work for it, and kept.
    Workers are spawned: a script that uses a pool needs the ``if __name__ == "__main__"`` guard.

    Args:
        processes: how many there are at most.
    """

    def __init__(self, processes: int = 2) -> None:
        self._workers = [_Worker() for _ in range(max(1, processes))]
        self._known: dict[Any, Compiled] = {}

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def compile(
        self, records: Sequence[LaunchRecord], target: Target, cache_dir: Path | None = None, timeout_s: float = 600
    ) -> list[Compiled | CompileError]:
        """Compile recorded launches, each what it compiles to or why it does not, in the order given.

        A worker that dies, or is at one record for more than ``timeout_s`` seconds, fails that record alone; another
        takes its place. Records that differ in nothing but the grid are compiled once, also over several calls.
        """
        keys = [(target, r.kernel, r.arguments, _typed(r.constexprs), _typed(r.options)) for r in records]
        found: dict[Any, Compiled | CompileError] = {key: self._known[key] for key in keys if key in self._known}
        missing = {key: record for key, record in zip(keys, records, strict=True) if key not in found}
        waiting: SimpleQueue[Any] = SimpleQueue()
        for item in missing.items():
            waiting.put(item)

        def work(worker: _Worker) -> None:
            while True:
                try:
                    key, record = waiting.get_nowait()
                except Empty:
                    return
                found[key] = worker.compile(record, target, cache_dir, timeout_s)

        # The workers that are there already are the first ones.
        threads = [threading.Thread(target=work, args=(w,), daemon=True) for w in self._workers[: len(missing)]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Not the failures: a worker may have died of what will not happen again.
        self._known.update({key: result for key in missing if isinstance(result := found[key], Compiled)})
        return [found[key] for key in keys]

    def close(self) -> None:
        """End the workers; the pool starts others if it is used again."""
        for worker in self._workers:
            worker.close()


def _typed(items: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, str, Any], ...]:
    return tuple((name, type(value).__name__, value) for name, value in items)  # 1 == True, but not to a compiler


class _Worker:
    """A spawned process that compiles one record at a time, started when the first one comes."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None

    def compile(
        self, record: LaunchRecord, target: Target, cache_dir: Path | None, timeout_s: float
    ) -> Compiled | CompileError:
        try:
            if self._pipe is None:
                context = multiprocessing.get_context("spawn")
                self._pipe, theirs = context.Pipe()
                self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
                self._process.start()
                theirs.close()
            self._pipe.send((record, target, cache_dir))
            if not self._pipe.poll(timeout_s):
                self.close(kill=True)
                return compile_failure(record, target, f"not done after {timeout_s:g} s")
            answer: Compiled | CompileError = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(10)
            code = self._process.exitcode
            self.close(kill=True)
            return compile_failure(record, target, f"the compiling process died, exit code {code}")
        except Exception as error:  # a record that does not pickle
            self.close(kill=True)
            return compile_failure(record, target, f"{type(error).__name__}: {error}")
        return answer

    def close(self, kill: bool = False) -> None:
        if self._pipe is not None:
            self._pipe.close()  # an idle worker reads the end of its input, and goes
            if kill:
                self._process.kill()
            self._process.join()
        self._pipe = self._process = None


def _serve(pipe: Connection) -> None:
    while True:
        try:
            record, target, cache_dir = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: Compiled | CompileError = compile_record(record, target, cache_dir)
        except CompileError as error:
            answer = error
        except Exception as error:
            answer = compile_failure(record, target, f"{type(error).__name__}: {error}")
        pipe.send(answer)
