"""Every causal-LM type of the installed transformers, plain and patched: prints a table and writes it into docs.

    python -m tests.models.table [TYPE ...] [--processes 2] [--json FILE] [--no-write]

Each type is measured in a process of its own kind: two at a time, one type after the other, and a process that dies or
takes too long costs its type alone. Without types it does all, and only then writes the document: docs/models.md, and
with transformers of before 5 docs/models-4.57.md.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from comparing import CANCELLED, GRADIENT, Outcome, compare, counts  # noqa: E402 - found only now

LIMIT_S = 240.0
# By major release; the oldest that is supported has a page of its own.
DOCUMENTS = {4: "models-4.57.md", 5: "models.md"}
SHOWN = {
    "fused_linear_cross_entropy": "fused loss",
    "cross_entropy": "loss",
    "rms_norm": "RMSNorm",
    "layer_norm": "LayerNorm",
    "fused_add_rms_norm": "add + norm",
    "swiglu": "SwiGLU",
    "geglu": "GEGLU",
    "relu_squared": "ReLU²",
    "rope": "rotary",
    "qk_norm_rope": "q/k norm + rotary",
}


def work(pipe: Connection) -> None:
    """Compare each type that arrives, until None does."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    while (model_type := pipe.recv()) is not None:
        start = time.perf_counter()
        outcome = compare(model_type)
        outcome.seconds = time.perf_counter() - start
        pipe.send(outcome.asdict())


def serve(types: SimpleQueue[str], done: list[Outcome], told: bool) -> None:
    """One process at a time over the queue; a new one where the old one dies or hangs."""
    context = multiprocessing.get_context("spawn")
    process, pipe = None, None
    while True:
        try:
            model_type = types.get_nowait()
        except Empty:
            break
        if process is None:
            pipe, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
        pipe.send(model_type)
        try:
            arrived = pipe.poll(LIMIT_S)
            outcome = Outcome(**pipe.recv()) if arrived else None
        except EOFError:
            arrived, outcome = True, None
        if outcome is None:
            process.kill()
            process.join()
            why = f"the process died with {process.exitcode}" if arrived else f"no answer in {LIMIT_S:.0f} s"
            outcome, process = Outcome(model_type, failed={"process": why}), None
        done.append(outcome)
        if told:
            print(line(outcome), flush=True)
    if process is not None:
        pipe.send(None)
        process.join(10)


def compare_all(types: list[str], processes: int = 2, told: bool = False) -> list[Outcome]:
    """The outcomes of these types, in their order."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    queue: SimpleQueue[str] = SimpleQueue()
    for model_type in types:
        queue.put(model_type)
    done: list[Outcome] = []
    threads = [threading.Thread(target=serve, args=(queue, done, told)) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(done, key=lambda outcome: types.index(outcome.model_type))


def verdict(outcome: Outcome) -> str:
    """In a few words."""
    if outcome.unbuilt:
        return f"not built: {short(outcome.unbuilt)}"
    if outcome.differences:
        return "DIFFERS: " + "; ".join(map(short, outcome.differences))
    if "loss" in outcome.plain:
        return f"the plain model fails: {short(outcome.plain['loss'])}"
    return "same"


def short(text: str) -> str:
    """Without the folders of files, and of a length for a table."""
    text = re.sub(r"(/[^ :]+)+/(?=[^ /]+\.py)", "", text).replace("|", "\\|")
    return text if len(text) <= 160 else text[:157] + "..."


def line(outcome: Outcome) -> str:
    """One type on the terminal."""
    ops = ", ".join(SHOWN.get(op, op) for op in sorted(outcome.ops)) or "-"
    return f"{outcome.model_type:26} {outcome.seconds:5.1f} s  {ops:60} {verdict(outcome)}"


def reasons(outcomes: list[Outcome]) -> list[tuple[str, str, list[str]]]:
    """Why an operation was not applied: operation, reason, types; the commonest first."""
    found: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for outcome in outcomes:
        own = {(row[0], short(f"{row[4]}: {row[3]}" if row[4] else row[3])) for row in outcome.rows if not row[2]}
        if outcome.materialised:
            places = ", ".join(sorted(short(place) for place in outcome.materialised))
            own.add(("fused_linear_cross_entropy", f"the model reads its logits itself, at {places}"))
        for key in own:
            found[key].append(outcome.model_type)
    order = sorted(found.items(), key=lambda item: (item[0][0], -len(item[1]), item[0][1]))
    return [(op, why, types) for (op, why), types in order]


def document(outcomes: list[Outcome]) -> str:
    """The page of the documentation."""
    import torch
    import transformers

    own = page_of(int(transformers.__version__.split(".")[0])).name
    other = " and ".join(f"[{name}]({name})" for name in DOCUMENTS.values() if name != own)
    found = counts(outcomes)
    built = [outcome for outcome in outcomes if not outcome.unbuilt]
    gradient = max((o.gradient for o in built), default=0.0)
    same = [outcome for outcome in built if not outcome.differences]
    partly = sum(bool(outcome.plain) for outcome in same)
    text = [
        "# Models" if own == DOCUMENTS[5] else f"# Models of transformers {transformers.__version__}",
        "",
        f"Written by `python -m tests.models.table`; do not edit. See also {other}.",
        "",
        f"Commit {commit()}, transformers {transformers.__version__}, torch {torch.__version__}, "
        f"{datetime.date.today().isoformat()}, on the CPU.",
        "",
        f"Of the {len(outcomes)} causal-LM types that this transformers has, {len(built)} can be built small from "
        f"their configs, and {found.get('compared', 0)} of these compute a loss by themselves. Each was run as it is "
        "and with `liger_registry.transformers.apply(model)`: the loss and every parameter's gradient in training, the "
        "logits and 8 greedily generated tokens, all in float32, and the loss in bf16 by the accuracy rule. "
        f"**{found.get('differ', 0)} differ**; {len(same) - partly} are the same in all of it, "
        f"{partly} in what the plain model can do: the table names the rest, which was not compared.",
        "",
        f"The largest difference of a loss is {max((o.loss for o in built), default=0):.1e} of it, of logits "
        f"{max((o.logits for o in built), default=0):.1e}, of a gradient {gradient:.1e} of what is allowed "
        f"({GRADIENT:.0e} of its norm, and {CANCELLED:.0e} of the largest one's).",
        "",
        "| operation | types that it was applied to |",
        "|---|---:|",
        *(f"| {SHOWN[op]} (`{op}`) | {found[op]} |" for op in SHOWN if found.get(op)),
        f"| a gated MLP of either kind | {found.get('gated', 0)} |",
        "",
        "A type counts for an operation that its loss called, and for the fused loss only if no logits were made.",
        "",
        "## Types",
        "",
        "| type | class | operations | |",
        "|---|---|---|---|",
    ]
    for o in outcomes:
        ops = ", ".join(SHOWN.get(op, op) for op in SHOWN if op in o.ops)
        missing = [f"{what}: {short(why)}" for what, why in o.plain.items() if what != "loss"]
        told = verdict(o) + (f"; not compared, since the plain model fails: {'; '.join(missing)}" if missing else "")
        text.append(f"| {o.model_type} | {o.model_class} | {ops} | {told} |")
    text += [
        "",
        "## Reasons",
        "",
        "What the reports say of layers that were looked at and left alone.",
        "",
        "| operation | reason | types |",
        "|---|---|---|",
    ]
    text += [f"| {SHOWN.get(op, op)} | {why} | {', '.join(types)} |" for op, why, types in reasons(outcomes)]
    return "\n".join(text) + "\n"


def page_of(major: int) -> Path:
    """The page for a release of transformers."""
    return ROOT / "docs" / DOCUMENTS.get(major, DOCUMENTS[5])


def commit() -> str:
    """The commit's hash, with a word if the tree differs from it."""
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return told.stdout.strip().replace("-dirty", " with changes")


def main() -> int:
    """Compare, print, write; leaves with 1 if a type differs."""
    import transformers
    from zoo import names

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where to put all there is to know")
    parser.add_argument("--no-write", action="store_true", help="leave the documentation as it is")
    asked = parser.parse_args()
    outcomes = compare_all(asked.types or list(names()), asked.processes, told=True)
    if asked.json:
        asked.json.write_text(json.dumps([outcome.asdict() for outcome in outcomes], indent=1))
    found = counts(outcomes)
    print("\n" + "\n".join(f"{SHOWN.get(op, op):20} {count}" for op, count in sorted(found.items())))
    for outcome in outcomes:
        if outcome.differences:
            print(line(outcome))
    if not asked.types and not asked.no_write:
        page = page_of(int(transformers.__version__.split(".")[0]))
        page.parent.mkdir(exist_ok=True)
        page.write_text(document(outcomes))
        print(f"wrote {page.relative_to(ROOT)}")
    return int(bool(found.get("differ")))


if __name__ == "__main__":
    sys.exit(main())
