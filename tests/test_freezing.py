"""Freezing: which problems a plan is made of, and what a rank refuses to carry out."""

from __future__ import annotations

import dataclasses

import fakes
import pytest

from liger_registry import Config
from liger_registry.config import Fields
from liger_registry.decision import CLUSTER, SHIPPED_TABLES, USER
from liger_registry.errors import ConfigOutsideSpaceError, PlanError, UnknownImplementationError
from liger_registry.freezing import tabled, validate
from liger_registry.plan import Plan
from liger_registry.problem import SCHEME
from liger_registry.table import Choice

H200, H100, PROBLEM = fakes.H200, fakes.H100, fakes.problem()


def plan(implementation, config=None, device=H200, problem=PROBLEM):
    return Plan({(device.fingerprint, problem): Choice(implementation, config or Config())})


def test_a_plan_that_can_be_carried_out():
    catalog = fakes.catalog()
    validate(plan("cuda:tiled", Config(block=64)), catalog, H200)
    validate(plan("any:reference"), catalog, H200)
    validate(plan("cuda:gone", Config(block=7), device=H100), catalog, H200)  # not of this rank's device


@pytest.mark.parametrize("config", [Config(block=7), Config(), Config(block=64.0), Config(block=64, more=1)], ids=str)
def test_a_config_that_the_space_does_not_have(config):
    with pytest.raises(ConfigOutsideSpaceError):
        validate(plan("cuda:tiled", config), fakes.catalog(), H200)


def test_an_implementation_or_a_scheme_that_is_not_there():
    with pytest.raises(UnknownImplementationError):
        validate(plan("cuda:gone"), fakes.catalog(), H200)
    choice = fakes.Problem("affine", "", SCHEME, PROBLEM.dims, PROBLEM.dtypes, PROBLEM.flags)
    validate(plan("scheme:default", problem=choice), fakes.catalog(), H200)
    with pytest.raises(PlanError, match="scheme:gone"):
        validate(plan("scheme:gone", problem=choice), fakes.catalog(), H200)


def test_problems_of_the_tables_that_a_call_can_pose(tmp_path):
    dispatcher, stores = fakes.dispatcher(tmp_path)
    user, cluster, sibling = (fakes.problem(rows=rows) for rows in (2, 4, 8))
    hostile = [
        dataclasses.replace(user, dtypes=Fields(x="bfloat16")),
        dataclasses.replace(user, dtypes=Fields(x="nn", w="bfloat16")),
        dataclasses.replace(user, flags=Fields()),
        dataclasses.replace(user, flags=Fields(style="odd")),
        dataclasses.replace(user, flags=Fields(style="plain", more=1)),
    ]
    other = dataclasses.replace(fakes.stored(fakes.problem(rows=16)), protocol="cpu-clock-1")
    stores[USER].record(H200, "affine", [*map(fakes.stored, [user, *hostile]), other])
    stores[CLUSTER].record(H200, "affine", [fakes.stored(cluster)])
    stores[SHIPPED_TABLES].record(H100, "affine", [fakes.stored(sibling)])
    stores[USER].record(H100, "affine", [fakes.stored(fakes.problem(rows=32))])
    assert set(tabled(dispatcher, H200)) == {user, cluster, sibling}
    dispatcher.mode = "off"
    assert set(tabled(dispatcher, H200)) == set()
