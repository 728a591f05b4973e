"""Plans: one digest for one set of decisions, and ranks that agree or all raise."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import fakes
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liger_registry import Config, Plan
from liger_registry.errors import PlanError
from liger_registry.plan import Exchange, Part, agree
from liger_registry.table import Choice

ENTRIES = st.dictionaries(
    st.tuples(
        st.sampled_from(["cuda/sm_90/h200-132", "cpu/a/b"]), st.integers(1, 9).map(lambda n: fakes.problem(rows=n))
    ),
    st.builds(Choice, st.sampled_from(["any:a", "cuda:b"]), st.integers(0, 3).map(lambda n: Config(block=n))),
    max_size=6,
)


@given(ENTRIES)
def test_json_and_order(entries):
    plan = Plan(entries)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.digest == plan.digest == Plan(dict(reversed(entries.items()))).digest
    assert len(plan.digest) == 64
    assert len(plan) == len(entries)
    assert set(plan) == set(entries)
    for (place, problem), choice in entries.items():
        assert plan.get(place, problem) == choice
    assert plan.get("elsewhere", fakes.problem(rows=1)) is None


@given(ENTRIES, ENTRIES)
def test_other_plans_have_other_digests(one, two):
    assert (Plan(one).digest == Plan(two).digest) is (one == two)


def test_the_type_of_a_value_is_in_the_digest():
    digests = {
        Plan({("a/b/c", fakes.problem()): Choice("any:a", Config(x=x))}).digest for x in (1, True, 1.0, "1", None)
    }
    assert len(digests) == 5


def test_a_plan_does_not_follow_the_mapping_it_was_made_of():
    entries = {("a/b/c", fakes.problem()): Choice("any:a", Config())}
    plan = Plan(entries)
    entries.clear()
    assert len(plan) == 1
    with pytest.raises(AttributeError):
        plan.digest = "0"


def document():
    plan = Plan({("a/b/c", fakes.problem(rows=n)): Choice("any:a", Config(block=n)) for n in (1, 2)})
    return json.loads(json.dumps(plan.to_json()))


def tampered(change):
    made = document()
    change(made)
    return made


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["decisions"][0]["config"].update(block=9),
        lambda d: d["decisions"][0].update(implementation="any:b"),
        lambda d: d["decisions"][0].update(device="a/b/d"),
        lambda d: d["decisions"].pop(),
        lambda d: d.update(digest="0" * 64),
        lambda d: d.pop("digest"),
        lambda d: d.update(decisions={}),
        lambda d: d.update(schema=2),
        lambda d: d.pop("schema"),
        lambda d: d["decisions"][0].pop("implementation"),
        lambda d: d["decisions"][0].update(dims={"rows": -1}),
        lambda d: d["decisions"][0].update(config=[1]),
        lambda d: d["decisions"][0].update(config={"block": [1]}),
        lambda d: d["decisions"].append("text"),
        lambda d: d["decisions"].append(None),
        lambda d: d["decisions"].append([]),
    ],
)
def test_a_document_that_was_tampered_with(change):
    assert Plan.from_json(document()).digest == document()["digest"]
    with pytest.raises(PlanError):
        Plan.from_json(tampered(change))


@pytest.mark.parametrize("value", [None, [], "text", 3, {}])
def test_what_is_no_document(value):
    with pytest.raises(PlanError):
        Plan.from_json(value)


# --- agreeing ---------------------------------------------------------------------------------------------------------


class Ranks:
    """Several ranks in one process: an all-gather among threads that fails if one of them does not come."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=10)
        self.values = [None] * count

    def run(self, jobs):
        outcomes = [None] * len(jobs)

        def work(rank):
            try:
                outcomes[rank] = jobs[rank](FakeExchange(self, rank))
            except Exception as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes


class FakeExchange:
    def __init__(self, ranks, rank):
        self.ranks, self.rank = ranks, rank

    def all(self, value):
        self.ranks.values[self.rank] = value
        self.ranks.barrier.wait()
        values = list(self.ranks.values)
        self.ranks.barrier.wait()
        return values


def job(fingerprint, rows, block=1, **replaced):
    """What a rank does: it wants these problems, and would decide all of them on this block."""
    given_parts = {
        "problems": lambda: [fakes.problem(rows=n) for n in rows],
        "resolve": lambda problem: Choice("any:a", Config(block=block)),
        "validate": lambda plan: None,
        **replaced,
    }

    def prepare():
        given_parts.pop("fails", lambda: None)()
        return Part(fingerprint, **given_parts)

    return lambda exchange: agree(exchange, prepare)


def test_ranks_with_different_problems_agree():
    plans = Ranks(4).run(
        [job("gpu/a/x", [1], 10), job("gpu/a/y", [2], 20), job("gpu/a/x", [1, 3], 30), job("gpu/a/y", [], 40)]
    )
    assert len({plan.digest for plan in plans}) == 1
    plan = plans[0]
    assert len(plan) == 2 * 3
    # The lowest rank of each fingerprint decides all problems for it.
    for rows in (1, 2, 3):
        assert plan.get("gpu/a/x", fakes.problem(rows=rows)).config.block == 10
        assert plan.get("gpu/a/y", fakes.problem(rows=rows)).config.block == 20


def test_only_the_lowest_rank_of_a_fingerprint_is_asked():
    asked = []

    def resolver(rank):
        return lambda problem: asked.append(rank) or Choice("any:a", Config())

    Ranks(3).run([job("a/b/c", [1, 2], resolve=resolver(rank)) for rank in range(3)])
    assert asked == [0, 0]


def fails(*_):
    raise OSError("planted")


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("fails", "could not say what it needs"),
        ("problems", "could not say what it needs"),
        ("resolve", "could not decide"),
        ("validate", "cannot carry the plan out"),
    ],
)
def test_a_rank_that_fails_makes_all_of_them_raise(rank, part, text):
    jobs = [job(f"a/b/{n}", [1], **({part: fails} if n == rank else {})) for n in range(3)]
    outcomes = Ranks(3).run(jobs)
    for outcome in outcomes:
        assert isinstance(outcome, PlanError), outcome
        assert f"rank {rank} {text}" in outcome.what
        assert "OSError: planted" in outcome.why


def test_nobody_wants_anything():
    plans = Ranks(2).run([job("a/b/c", []), job("a/b/d", [])])
    assert {len(plan) for plan in plans} == {0}


def test_one_process_needs_no_group():
    plan = job("a/b/c", [1])(Exchange())
    assert len(plan) == 1
    assert Exchange().rank == 0


# --- real processes ---------------------------------------------------------------------------------------------------

SCRIPT = """
    import json, os, sys, warnings
    from pathlib import Path
    import torch.distributed as dist
    from liger_registry import Device, Registry
    from liger_registry.errors import PlanError
    from liger_registry.settings import Settings

    rank, root, results = int(os.environ["RANK"]), Path(sys.argv[1]), {}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    warnings.simplefilter("ignore")  # the corrupt table's
    device = Device.parse("cpu")
    for case in ("different", "none", "corrupt"):
        registry = Registry(Settings(cache_dir=root / case / str(rank)))
        plan = registry.freeze()
        decided = [registry.decide(problem, device) for place, problem in plan if place == device.fingerprint]
        results[case] = {
            "digest": plan.digest,
            "sources": sorted({d.source for d in decided}),
            "choices": sorted(f"{d.problem.rows} {d.choice}" for d in decided),
        }
    try:
        registry.freeze(problems=[None] if rank else [])
    except PlanError as error:
        results["broken"] = error.what
    print(json.dumps(results))
    dist.destroy_process_group()
"""


BROKEN = """
    import json, os, sys, warnings
    from datetime import timedelta
    from pathlib import Path
    import torch.distributed as dist
    import liger_registry.assembly as assembly
    from liger_registry import Registry
    from liger_registry.errors import PlanError

    rank, results = int(os.environ["RANK"]), {}
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=30))
    os.environ["LIGER_TUNE_CACHE_DIR"] = str(Path(sys.argv[1]) / str(rank))

    def fails(*arguments):
        raise ImportError("planted")

    load = assembly.load_kernels
    for case, name, value in (
        ("mode", "LIGER_TUNE_MODE", "sometimes"),
        ("pin", "LIGER_PIN", "rms_nrom=eager"),
        ("plugins", "", ""),
        ("nothing", "", ""),
    ):
        if rank == 1 and name:
            os.environ[name] = value
        if rank == 1 and case == "plugins":
            assembly.load_kernels = fails
        try:
            registry = Registry()
            results[case] = registry.freeze().digest
        except PlanError as error:
            results[case] = error.what + ": " + error.why
        os.environ.pop(name or "LIGER_PIN", None)
        assembly.load_kernels = load
    print(json.dumps(results))
    dist.destroy_process_group()
"""


def free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def run_ranks(root, script=SCRIPT, timeout=120):
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(root)],
            env={
                **os.environ,
                "RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def norm_problem(rows):
    from liger_registry.config import Fields

    return fakes.Problem(
        "rms_norm",
        "default",
        "forward",
        Fields(rows=rows, hidden=64),
        Fields(x="float32", weight="float32"),
        Fields(casting="llama"),
    )


def fill_cache(root: Path, choice, rows):
    from liger_registry.implementation import source_hash
    from liger_registry.store import TableStore
    from liger_registry.table import Provenance, Stored

    provenance = Provenance("none", source_hash("liger_registry.portable.rms_norm:forward"))
    entries = [Stored(norm_problem(n), choice, 1.0, choice, 2.0, 0.01, "cpu-clock-1", provenance) for n in rows]
    TableStore(root).record(fakes.CPU, "rms_norm", entries)
    return TableStore(root).path(fakes.CPU, "rms_norm")


@pytest.mark.dist
def test_two_processes_over_gloo(tmp_path):
    eager, functional = Choice("any:eager", Config()), Choice("any:functional", Config())
    for case in ("different", "none", "corrupt"):
        fill_cache(tmp_path / case / "0", eager, (4, 16))
    fill_cache(tmp_path / "different" / "1", functional, (4, 64))
    fill_cache(tmp_path / "corrupt" / "1", functional, (4, 64)).write_text('{"schema": 1, "op')
    one, two = run_ranks(tmp_path)
    assert one == two
    # Rank 0 decides by its own table; a problem that only rank 1 knows is answered by what is nearest to it.
    both = ["16 any:eager()", "4 any:eager()"]
    for case, choices in {"different": [*both, "64 any:eager()"], "none": both, "corrupt": both}.items():
        assert set(choices) <= set(one[case]["choices"]), case
        assert one[case]["sources"] == ["plan"]
        assert len(one[case]["digest"]) == 64
    assert "rank 1 could not say what it needs" in one["broken"]


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_a_rank_that_fails_before_the_first_exchange_keeps_no_other_waiting(tmp_path):
    one, two = run_ranks(tmp_path, BROKEN, timeout=60)
    assert one == two
    for case, text in {"mode": "LIGER_TUNE_MODE", "pin": "rms_nrom", "plugins": "planted"}.items():
        assert one[case].startswith("rank 1 could not say what it needs")
        assert text in one[case]
    assert len(one["nothing"]) == 64
