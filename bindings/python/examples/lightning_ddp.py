"""Trains a small network with Lightning on two processes of this machine: as it is, with onebit's
hook, and with Adam that sends one bit an element. Says how they compare.

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
    def __init__(self, way, steps):
        super().__init__()
        self.way, self.steps = way, steps
        self.network = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
            nn.Linear(HIDDEN, CLASSES),
        )

    def training_step(self, batch, number):
        points, classes = batch
        return nn.functional.cross_entropy(self.network(points), classes)

    def configure_optimizers(self):
        if self.way == "Adam in one bit":
            optimizer = onebit.torch.EfficientAdam(  # onebit
                self.parameters(), lr=2e-3, weight_decay=0.01
            )
        elif self.way == "plain AdamW":
            optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.01)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Attach(lightning.Callback):  # onebit
    """The optimizer of onebit.torch exchanges what DistributedDataParallel would average."""

    def on_train_start(self, trainer, module):
        trainer.optimizers[0].attach(trainer.strategy.model)

    def on_train_end(self, trainer, module):
        self.sent = trainer.optimizers[0].comm.bytes_sent
        trainer.optimizers[0].close()


class Hook(lightning.Callback):  # onebit
    """Registers the hook once the process group and the wrapped model are there."""

    def on_train_start(self, trainer, module):
        self.state = onebit.torch.HookState(warmup_steps=20, optimizer=trainer.optimizers[0])
        trainer.strategy.model.register_comm_hook(self.state, onebit.torch.allreduce_hook)

    def on_train_end(self, trainer, module):
        self.sent = self.state.comm.bytes_sent
        self.state.close()


WAYS = {"plain SGD": None, "SGD, the hook": Hook, "plain AdamW": None, "Adam in one bit": Attach}


def train(options, way):
    """The loss on data that was not trained on, the bytes that onebit has sent, and the trainer."""
    callback = WAYS[way]() if WAYS[way] else lightning.Callback()
    lightning.seed_everything(0, verbose=False)
    model = Classifier(way, options.steps)
    loader = DataLoader(TensorDataset(*teacher_data(8192, seed=100)), batch_size=32, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=options.steps,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    points, classes = teacher_data(4096, seed=99)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model.network(points), classes).item()
    return loss, getattr(callback, "sent", None), trainer


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for way in WAYS:
        loss, sent, trainer = train(options, way)
        elements = sum(one.numel() for one in trainer.model.parameters())
        ring = int(2 * (options.ranks - 1) / options.ranks * 4 * elements * options.steps)
        note = " (counted for a ring)" if sent is None else ""
        if trainer.is_global_zero:
            print(f"{way:16} validation loss {loss:.4f}  {sent or ring} bytes sent{note}")


if __name__ == "__main__":
    main()
