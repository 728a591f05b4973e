from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import planted
import pytest

from liger_registry.device import Device
from liger_registry.store import TableStore

RANK = """
import sys
from datetime import timedelta
from pathlib import Path
import planted
import torch.distributed as dist
from liger_registry.device import Device
from liger_registry.store import TableStore
from liger_registry.tuning.distributed import tune_sharded

rank, world, root, fail = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "fail"
dist.init_process_group(
    "gloo", init_method=f"file://{root / 'meet'}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
)
problems = [planted.problem(rows=rows, hidden=40) for rows in (16, 32, 64, 128)]
problems.append(planted.problem(op="affine", rows=16, hidden=40, phase="scheme"))
catalog = planted.sized()
if fail and rank == 1:
    catalog = None
try:
    report = tune_sharded(
        problems, catalog=catalog, device=Device.parse("cpu"), store=TableStore(root / f"tables{rank}"),
        isolate=False, clock_source="planted:clock",
    )
    print("measured", report.measured, "rows", len(report.rows))
except AttributeError as error:
    print("raised", error)
dist.destroy_process_group()
"""


def ranks(tmp_path, fail=""):
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": here, "TMPDIR": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), "2", str(tmp_path), fail],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return [out for out, _ in outputs]


@pytest.mark.dist
def test_each_measurement_once_and_every_directory_whole(tmp_path):
    outputs = ranks(tmp_path)
    counts = [int(out.split()[1]) for out in outputs]
    assert sum(counts) == 16
    assert min(counts) > 0
    tables = [TableStore(tmp_path / f"tables{rank}").load(Device.parse("cpu"), "affine") for rank in range(2)]
    assert len(tables[0].decisions) == 4
    assert len(tables[0].samples) == 16
    assert tables[0].decisions == tables[1].decisions
    assert tables[0].samples == tables[1].samples


@pytest.mark.dist
def test_a_rank_that_fails_keeps_no_other_waiting(tmp_path):
    outputs = ranks(tmp_path, "fail")
    assert outputs[0].startswith("measured")
    assert outputs[1].startswith("raised")
    assert planted.AFFINE.name == "affine"
    # What the first rank measured is in both directories.
    tables = [TableStore(tmp_path / f"tables{rank}").load(Device.parse("cpu"), "affine") for rank in range(2)]
    assert tables[0].decisions == tables[1].decisions
