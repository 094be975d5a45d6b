"""The method that chooses itself. What ranks find is in torch_auto_ranks.py."""

import importlib.util

import pytest
from test_torch_hook import launch

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not here")


@pytest.mark.parametrize("scenarios", ["choices,refused", "corrected", "resumed"])
def test_auto(scenarios):
    assert "all well\n" in launch(scenarios, 2, "torch_auto_ranks.py")
