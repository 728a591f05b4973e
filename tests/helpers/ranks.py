"""Processes that talk over gloo, or NCCL, and stay, so that many tests share the seconds in which they start.

``Ranks(4).run("module:function", ...)`` calls a function on four ranks, each in a process of its own, and gives what
each returned. A rank that raises or dies fails the call with its traceback; whoever still waits for it is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# How long a rank waits for another in a collective, and the others for one that has failed.
COLLECTIVE_S, GRACE_S = 60.0, 5.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DS_BUILD_OPS": "0",
    "DS_ACCELERATOR": "cpu",
}


@dataclass(frozen=True)
class Outcome:
    """What became of a call on one rank: its value, or the traceback, or how its process ended."""

    value: Any = None
    error: str = ""


class Ranks:
    """A process group of some ranks, started on the first call and again after one that failed.

    Args:
        world: how many.
        limit_s: the longest a call may take.
        collective_s: how long a rank waits for another in a collective.
        backend: gloo, or nccl with a GPU for each rank.
        environment: variables of the ranks beyond the usual ones.
    """

    def __init__(
        self,
        world: int,
        limit_s: float = 120.0,
        collective_s: float = COLLECTIVE_S,
        backend: str = "gloo",
        **environment: str,
    ) -> None:
        self.world, self.limit_s, self.environment = world, limit_s, environment
        self.collective_s, self.backend = collective_s, backend
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._directory = ""

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, job: str, *arguments: Any, limit_s: float | None = None, **named: Any) -> list[Any]:
        """What ``function(rank, world, *arguments, **named)`` returns on each rank, by rank."""
        outcomes = self.outcomes(job, *arguments, limit_s=limit_s, **named)
        failed = [f"rank {n}: {o.error}" for n, o in enumerate(outcomes) if o.error]
        assert not failed, f"{job} failed\n" + "\n".join(failed)
        return [o.value for o in outcomes]

    def outcomes(self, job: str, *arguments: Any, limit_s: float | None = None, **named: Any) -> list[Outcome]:
        """The same, where ranks may fail: the others have the whole limit to end by themselves."""
        self._start()
        limit = limit_s or self.limit_s
        call = pickle.dumps((limit, job, arguments, named))
        for connection in self._connections:
            connection.send_bytes(call)
        outcomes = self._collect(time.monotonic() + limit + GRACE_S, limit_s is not None)
        if any(outcome.error for outcome in outcomes):
            self.close()
        return outcomes

    def _collect(self, end: float, patient: bool) -> list[Outcome]:
        found: dict[int, Outcome] = {}
        while len(found) < self.world and (left := end - time.monotonic()) > 0:
            waiting = {c: n for n, c in enumerate(self._connections) if n not in found}
            for ready in wait_for(list(waiting), left):
                assert isinstance(ready, Connection)
                rank = waiting[ready]
                found[rank] = self._receive(rank)
                if found[rank].error and not patient:
                    end = min(end, time.monotonic() + GRACE_S)
        return [found.get(n) or self._late(n) for n in range(self.world)]

    def _late(self, rank: int) -> Outcome:
        stack = Path(self._directory, f"stack{rank}")
        return Outcome(error=f"it was still waiting:\n{stack.read_text() if stack.exists() else ''}")

    def _receive(self, rank: int) -> Outcome:
        try:
            value, error = pickle.loads(self._connections[rank].recv_bytes())
            return Outcome(value, error)
        except (EOFError, OSError):
            self._processes[rank].join(GRACE_S)
            return Outcome(error=f"its process ended with {self._processes[rank].exitcode}")

    def _start(self) -> None:
        if self._processes:
            return
        self._directory = tempfile.mkdtemp(prefix="ranks-")
        context = get_context("spawn")
        settings = {**ENVIRONMENT, **self.environment}
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            own = {**settings, "LIGER_TUNE_CACHE_DIR": f"{self._directory}/tables{rank}"}
            given = rank, self.world, self._directory, own, self.collective_s, self.backend, theirs
            process = context.Process(target=serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def close(self) -> None:
        """End the processes; the next call starts others."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(0.2)
            process.kill()
            process.join()
        self._processes, self._connections = [], []
        shutil.rmtree(self._directory, ignore_errors=True)


def serve(
    rank: int,
    world: int,
    directory: str,
    environment: dict[str, str],
    collective_s: float,
    backend: str,
    connection: Connection,
) -> None:
    """One rank: calls what it is told until nobody is at the other end."""
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/meeting", world)
    place = torch.device("cuda", rank) if backend == "nccl" else None
    if place is not None:
        torch.cuda.set_device(place)
    limit = timedelta(seconds=collective_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit, device_id=place)
    with contextlib.suppress(EOFError, OSError), open(f"{directory}/stack{rank}", "w") as stack:
        while True:
            limit, job, arguments, named = pickle.loads(connection.recv_bytes())
            faulthandler.dump_traceback_later(limit, file=stack)  # where a rank waits that is late
            try:
                module, _, name = job.partition(":")
                value = getattr(importlib.import_module(module), name)(rank, world, *arguments, **named)
                answer = pickle.dumps((value, ""))
            except BaseException:
                answer = pickle.dumps((None, traceback.format_exc()))
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(answer)
            sys.stdout.flush()
    os._exit(0)  # without the farewell of process groups, which would wait for ranks that are gone
