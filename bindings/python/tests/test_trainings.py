"""Trainings as programs write them: what ranks find is in trainings_ranks.py."""

import importlib.util

import pytest
from test_torch_hook import launch

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not here")


def test_every_training_is_taken():
    """One spawn of ranks: losses beside plain training, and what is said."""
    assert launch("all", 2, "trainings_ranks.py").endswith("all well\n")
