"""A process group of ``python -m benchmarks scale``: its ranks are started, listened to, and ended.

``listen`` gives each result as a rank writes it down, and one last word if the ranks did not end well: memory was
short, a rank failed or died, or nothing came for too long. Whatever it was, no process is left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import record

#: What is run as a rank; the file of the job comes behind.
COMMAND = (sys.executable, "-m", "benchmarks.scale_rank")
#: Seconds in which ranks load their libraries, meet and build the model.
START_S = 240.0
POLL_S = 0.1
#: NVLink multicast is off: it needs a fabric manager that containers may not reach, and NCCL fails without it.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
#: For what the user has not set. All ranks are on this host, whose name may not lead anywhere.
DEFAULTS = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
RESULT, OOM, FAILED = "result", "oom", "failed"


@dataclass(frozen=True, slots=True)
class Word:
    """What was heard.

    Attributes:
        kind: ``result``, ``oom`` or ``failed``; the last two come once, at the end.
        length: of which length; None for what came before the first one began.
        value: the figures, or ``text`` and ``log``.
        late: whether the time was up.
    """

    kind: str
    length: int | None
    value: dict[str, Any]
    late: bool = False


@dataclass(slots=True)
class _Heard:
    """What one rank has written so far."""

    path: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    read: int = 0

    def more(self) -> list[dict[str, Any]]:
        """The whole lines that have come since; a line may be half written."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.read)
            whole, _, _ = file.read().rpartition(b"\n")
        if not whole:
            return []
        self.read += len(whole) + 1
        new = [json.loads(line) for line in whole.splitlines()]
        self.events += new
        return new

    @property
    def ended(self) -> bool:
        """Whether the rank has said its last word."""
        return any(event["event"] in ("done", OOM, FAILED) for event in self.events)


def listen(job: dict[str, Any], ranks: int, environment: dict[str, str], limit_s: float) -> Iterator[Word]:
    """Start the ranks of a job and give what they say, until they are done or one is not well.

    Args:
        job: what ``scale_rank`` reads.
        ranks: how many.
        environment: variables beyond this process's.
        limit_s: seconds that a length may take.
    """
    with tempfile.TemporaryDirectory(prefix="scale-") as place:
        directory = Path(place)
        (directory / "job.json").write_text(json.dumps({**job, "limit_s": limit_s + START_S}))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                processes.append(_start(directory, rank, ranks, environment))
            yield from _words(directory, processes, limit_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


def _start(directory: Path, rank: int, ranks: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    variables = {**DEFAULTS, **os.environ, **ENVIRONMENT, **{n: str(v) for n, v in own.items()}, **environment}
    with (directory / f"rank{rank}.log").open("wb") as log:
        command = [*COMMAND, str(directory / "job.json")]
        return subprocess.Popen(
            command, cwd=record.ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )


def _words(directory: Path, processes: list[subprocess.Popen[bytes]], limit_s: float) -> Iterator[Word]:
    heard = [_Heard(directory / f"rank{rank}.jsonl") for rank in range(len(processes))]
    end, limit, length = time.monotonic() + START_S, START_S, None
    while True:
        # Who has ended is asked first: all that such a rank wrote is then read below.
        codes = [process.poll() for process in processes]
        first, *_ = [rank.more() for rank in heard]
        for event in first:  # all ranks have the same results
            if event["event"] == "begin":
                end, limit, length = time.monotonic() + limit_s, limit_s, event["length"]
            elif event["event"] == RESULT:
                yield Word(RESULT, event["length"], _figures(event))
        if (last := _last(directory, heard, codes)) is not None:
            yield last
            return
        if all(rank.ended for rank in heard):
            return
        if time.monotonic() > end:
            yield Word(FAILED, length, _told(directory, 0, f"no result after {limit:.0f} s"), late=True)
            return
        time.sleep(POLL_S)


def _last(directory: Path, heard: list[_Heard], codes: list[int | None]) -> Word | None:
    """Why the group is at its end, if one of its ranks is not well.

    A rank that is gone makes the others fail in their next exchange, so that the first failure is not always the cause:
    memory that was short comes first, then a rank that died without a word, then whoever failed first.
    """
    told = [(event["at"], rank, event) for rank, one in enumerate(heard) for event in one.events]
    short = [item for item in told if item[2]["event"] == OOM]
    failed = [item for item in told if item[2]["event"] == FAILED]
    dead = [rank for rank, code in enumerate(codes) if code is not None and not heard[rank].ended]
    if short:
        _, rank, event = min(short, key=lambda item: item[0])
        return Word(OOM, event["length"], {"text": event["text"], "rank": rank})
    if dead:
        rank, events = dead[0], heard[dead[0]].events
        length = events[-1]["length"] if events else None
        return Word(FAILED, length, _told(directory, rank, f"rank {rank} ended with {codes[rank]}", append=True))
    if failed:
        _, rank, event = min(failed, key=lambda item: item[0])
        return Word(FAILED, event["length"], _told(directory, rank, f"rank {rank}: {event['text']}"))
    return None


def _told(directory: Path, rank: int, text: str, append: bool = False) -> dict[str, Any]:
    """A failure in words, with the end of what the rank printed; ``append``: its last line is part of the words."""
    said = (directory / f"rank{rank}.log").read_text(errors="replace").strip().splitlines()
    last = f": {said[-1][:300]}" if append and said else ""
    return {"text": f"{text}{last}", "log": said[-30:]}


def _figures(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("event", "at", "length")}
