"""From the making of an object of onebit.torch to its end: what it gives back, and what ranks say of
one that is gone. What each scenario finds is in torch_life_ranks.py."""

import importlib.util

import pytest
from test_torch_hook import launch as of_program

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not here")


def launch(scenario, ranks=2):
    return of_program(scenario, ranks, "torch_life_ranks.py")


def test_nothing_is_kept():
    assert launch("freed,static_graph,joined,forked,interrupted") == "all well\n"


def test_the_hook_is_of_the_models_group():
    assert launch("of_its_group", 4) == "all well\n"


def test_a_rank_that_is_gone_is_named():
    assert sorted(launch("gone", 3).splitlines()) == ["rank 0 knows", "rank 1 knows"]
