"""Ranks that work on shards: FSDP2 on a mesh of replicas and shards, and DistributedDataParallel inside
a host first. What ranks find is in hsdp_ranks.py."""

import importlib.util

import pytest
from test_torch_hook import launch

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not here")


@pytest.mark.parametrize(
    "scenarios",
    ["in_full_precision,in_bits,skipped,checkpoints,refusals", "norms,inside,inside_resumes,inside_cannot"],
)
def test_shards(scenarios):
    from onebit.torch import shards

    if not shards.FSDPModule:
        pytest.skip("this torch has no fully_shard")
    assert launch(scenarios, 4, "hsdp_ranks.py").endswith("all well\n")
