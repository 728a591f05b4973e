"""A rank that only says what a script tells it to, so that a group starts in no time; see ``test_scale.py``.

``SCRIPT`` names a JSON file: by ``mode@length``, or ``mode`` for what comes before the first length, what a rank does.
Each rank that starts leaves a line in ``STARTED``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
SAME = {"losses": [4.0, 3.0], "same": [2.0, 2.0]}
CHECK = {"hf": SAME, "ours": SAME, "logits": {}}
JOB = Path(sys.argv[1])


def say(event: str, length: int | None = None, **what: object) -> None:
    with (JOB.parent / f"rank{RANK}.jsonl").open("a") as file:
        file.write(json.dumps({"event": event, "at": time.time(), "length": length, **what}) + "\n")


def meet(key: str) -> None:
    """Wait for all ranks, as real ones do when they start and before each length."""
    (JOB.parent / f"{key}.{RANK}").touch()
    while len(list(JOB.parent.glob(f"{key}.*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.005)


def act(script: dict, key: str, length: int | None) -> None:
    """Do what is told of a place, if it is told of this rank; then the process is at its end."""
    found = script.get(key, {})
    if "do" not in found:
        return
    if found["rank"] != RANK:
        if found["do"] == "hang":
            return
        time.sleep(0.2)  # as a rank that notices in its next exchange that another one is gone
        say("failed", length, text="RuntimeError: Connection closed by peer")
    elif found["do"] == "hang":
        time.sleep(60)
    elif found["do"] == "die":
        print("a last word", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        say(found["do"], length, text=found["text"])
    sys.exit()


def main() -> None:
    job = json.loads(JOB.read_text())
    script = json.loads(Path(os.environ["SCRIPT"]).read_text())
    with Path(os.environ["STARTED"]).open("a") as file:
        budget, nvls = os.environ.get("LIGER_MEMORY_BUDGET"), os.environ["NCCL_NVLS_ENABLE"]
        file.write(
            json.dumps([job["kind"], job.get("mode"), job.get("lengths"), RANK, budget, nvls, os.getpid()]) + "\n"
        )
    meet("started")
    if job["kind"] == "check":
        act(script, "check", None)
        say("result", measured=[2, 2], digests=script.get("digests", ["a", "a"]), bfloat16=CHECK, float32=CHECK)
    else:
        act(script, job["mode"], None)
        for length in job["lengths"]:
            say("begin", length)
            meet(f"length{length}")
            act(script, f"{job['mode']}@{length}", length)
            speed = script.get("speed", {}).get(job["mode"], 100.0)
            found = {"tokens_s": speed, "ms": 1e3 * length / speed, "first_s": 1.0, "steps": job["steps"]}
            say("result", length, **found, peak_gib=None, reserved_gib=None, losses=[4.0], applied=[])
    say("done")


main()
