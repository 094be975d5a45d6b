"""Runs spinningup's PPO (github.com/openai/spinningup, 038665d) as it is, on gymnasium's
CartPole: python ppo.py SPINNINGUP OUT SEED [NOISE], under mpirun.

What PPO does not use is replaced: tensorflow and joblib by nothing, gym by gymnasium. With NOISE
each rank multiplies the elements of the dense sums by the same random factors 1 + NOISE * normal:
what any small difference does to a run.
"""

import pathlib
import sys
import types
from unittest import mock

import gymnasium
import torch
from mpi4py import MPI

PLACE, OUT, SEED = sys.argv[1], sys.argv[2], int(sys.argv[3])
NOISE = float(sys.argv[4]) if len(sys.argv) > 4 else 0


class CartPole:
    """The calls of the gym that spinningup was written for."""

    def __init__(self):
        self.env = gymnasium.make("CartPole-v1")
        self.seed = 1000 * SEED + MPI.COMM_WORLD.Get_rank()
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space

    def reset(self):
        seed, self.seed = self.seed, None
        return self.env.reset(seed=seed)[0]

    def step(self, action):
        observation, reward, ended, cut, info = self.env.step(int(action))
        return observation, reward, ended or cut, info

    def __getstate__(self):
        return {}


sys.modules.update({
    "tensorflow": mock.MagicMock(), "joblib": mock.MagicMock(),
    "gym": types.SimpleNamespace(spaces=gymnasium.spaces, Env=object),
    "gym.spaces": gymnasium.spaces, "spinup": types.ModuleType("spinup"),
})
sys.modules["spinup"].__path__ = [str(pathlib.Path(PLACE) / "spinup")]
torch.set_num_threads(1)
from spinup.algos.pytorch.ppo import ppo  # noqa: E402

if NOISE:
    plain, random = ppo.mpi_avg_grads, torch.Generator().manual_seed(11)

    def noisy(module):
        plain(module)
        for one in module.parameters():
            one.grad *= 1 + NOISE * torch.randn(one.shape, generator=random)

    ppo.mpi_avg_grads = noisy
ppo.ppo(CartPole, ac_kwargs={"hidden_sizes": [128, 128]}, seed=SEED, steps_per_epoch=1000,
        epochs=8, logger_kwargs={"output_dir": OUT})
