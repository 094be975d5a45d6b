"""Trains a small network with Lightning, as it is and with onebit's hook, on two processes of this
machine, and says how the two compare.

    pip install lightning
    python lightning_ddp.py

Tried with Lightning 2.6.6. The lines that change a program are marked with `# onebit`.
"""

import argparse

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from train_ddp import CLASSES, HIDDEN, WIDTH, teacher_data

import onebit.torch  # onebit


class Classifier(lightning.LightningModule):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.network = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
            nn.Linear(HIDDEN, CLASSES),
        )

    def training_step(self, batch, number):
        points, classes = batch
        return nn.functional.cross_entropy(self.network(points), classes)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Onebit(lightning.Callback):  # onebit
    """Registers the hook once the process group and the wrapped model are there."""

    def on_train_start(self, trainer, module):
        self.state = onebit.torch.HookState(warmup_steps=20, optimizer=trainer.optimizers[0])
        trainer.strategy.model.register_comm_hook(self.state, onebit.torch.allreduce_hook)

    def on_train_end(self, trainer, module):
        self.sent = self.state.comm.bytes_sent
        self.state.close()


def train(options, callbacks):
    """The loss on data that was not trained on."""
    lightning.seed_everything(0, verbose=False)
    model = Classifier(options.steps)
    loader = DataLoader(TensorDataset(*teacher_data(8192, seed=100)), batch_size=32, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=options.steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    points, classes = teacher_data(4096, seed=99)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model.network(points), classes).item()
    return loss, trainer, sum(one.numel() for one in model.parameters())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain, _, _ = train(options, [])
    hook = Onebit()
    bits, trainer, elements = train(options, [hook])
    if trainer.is_global_zero:
        ring = 2 * (options.ranks - 1) / options.ranks * 4 * elements * options.steps
        print(f"Lightning {lightning.__version__}, {options.ranks} ranks, {options.steps} steps")
        print(f"plain    validation loss {plain:.4f}  {ring:10.0f} bytes sent (counted for a ring)")
        print(f"one bit  validation loss {bits:.4f}  {hook.sent:10d} bytes sent once compressed")


if __name__ == "__main__":
    main()
