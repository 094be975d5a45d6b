"""What trainers save of an optimizer, and resume from. What ranks find is in torch_resume_ranks.py."""

import importlib.util

import pytest
from test_torch_hook import launch

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not here")


@pytest.mark.parametrize("scenarios", ["own,consolidated", "averaged,half,dense"])
def test_as_many_ranks(scenarios):
    assert launch(scenarios, 2, "torch_resume_ranks.py").endswith("all well\n")


def test_other_numbers_of_ranks():
    assert launch("others,averaged_by_others", 3, "torch_resume_ranks.py").endswith("all well\n")


def test_distributed_checkpoints():
    import torch

    if not hasattr(torch, "compile"):
        pytest.skip("this torch has no torch.distributed.checkpoint.state_dict")
    pytest.importorskip("torch.distributed.checkpoint.state_dict")
    assert launch("distributed", 3, "torch_resume_ranks.py").endswith("all well\n")


@pytest.mark.parametrize("trainer", ["accelerate", "lightning", "transformers"])
def test_released_trainers(trainer):
    """That Accelerate resumes is in torch_carry_ranks.py."""
    if not importlib.util.find_spec(trainer):
        pytest.skip(f"{trainer} is not here")
    assert "all well\n" in launch(trainer, 2, "trainers_ranks.py")
