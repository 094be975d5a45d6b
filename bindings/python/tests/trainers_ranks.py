"""Released trainers, as their users write them, with what docs/accelerate.md and docs/lightning.md
add: stop in the warm-up and after it, and resume by their own checkpoints. test_torch_resume.py runs
it as torch_resume_ranks.py."""

import os
import shutil
import sys
import tempfile
import warnings

import torch_resume_ranks
from torch_resume_ranks import from_rank_0

import onebit.torch
import torch
import torch.distributed as dist
from torch import nn

STEPS, STOPS = 24, (4, 12)
OPTIONS = {"warmup_steps": 8}


def as_a_launcher(rank, size):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="1", GROUP_RANK="0",
    )


def data(rank, size):
    """Of so many steps, always in the same order."""
    random = torch.Generator().manual_seed(5)
    points = torch.randn(STEPS * 16, 20, generator=random)[rank::size]
    return [(some, some[:, :1].sin()) for some in points.split(16 // size)]


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 1))


def bits(module):
    return torch.cat([one.detach().flatten() for one in module.parameters()])


def resumes(rank, train):
    """train(stop, from, to): to step `stop`, from a place or None, saved to a place: the bits."""
    place = from_rank_0(tempfile.mkdtemp() if rank == 0 else None)
    wanted = train(STEPS, None, None)
    for stop in STOPS:
        where = os.path.join(place, str(stop))
        assert not torch.equal(train(stop, None, where), wanted)
        assert torch.equal(train(STEPS, where, None), wanted), stop
    dist.barrier()
    if rank == 0:
        shutil.rmtree(place)


def lightning(rank, size):
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch, number):
            points, wanted = batch
            return nn.functional.mse_loss(self.network(points), wanted)

        def train_dataloader(self):  # one step an epoch: resuming in the middle skips no data
            epoch = self.trainer.current_epoch
            return torch.utils.data.DataLoader(data(rank, size)[epoch : epoch + 1], batch_size=None)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            return {"optimizer": optimizer,
                    "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Compress(lightning.Callback):
        def on_train_start(self, trainer, module):
            given = trainer.optimizers[0]
            trainer.optimizers = [onebit.torch.compress(trainer.strategy.model, given, **OPTIONS)]

        def on_train_end(self, trainer, module):
            assert trainer.optimizers[0].onebit.info()["steps"] == trainer.max_steps
            if self.place:
                trainer.save_checkpoint(self.place)
            trainer.optimizers[0].close()

    def train(stop, begin, place):
        callback = Compress()
        callback.place = place
        trainer = lightning.Trainer(
            accelerator="cpu", devices=size, strategy=DDPStrategy(process_group_backend="gloo"),
            max_steps=stop, callbacks=[callback], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
            reload_dataloaders_every_n_epochs=1,
        )
        module = Module()
        trainer.fit(module, ckpt_path=begin)
        return bits(module)

    resumes(rank, train)


def transformers(rank, size):
    import transformers

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network()

        def forward(self, points, labels):
            found = self.network(points)
            return {"loss": nn.functional.mse_loss(found, labels), "logits": found}

    random = torch.Generator().manual_seed(5)
    points = torch.randn(STEPS * 16, 20, generator=random)
    examples = [{"points": one, "labels": one[:1].sin()} for one in points]

    def train(stop, begin, place):
        class Compress(transformers.TrainerCallback):
            def on_train_begin(self, args, state, control, **kwargs):
                optimizer = onebit.torch.compress(
                    trainer.model_wrapped, trainer.optimizer, **OPTIONS)
                trainer.optimizer = optimizer

            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == stop < STEPS:
                    control.should_save = control.should_training_stop = True
                if control.should_save:
                    trainer.optimizer.consolidate_state_dict()

        with tempfile.TemporaryDirectory() as unused:
            args = transformers.TrainingArguments(
                place or unused, max_steps=STEPS, per_device_train_batch_size=16 // size,
                learning_rate=3e-3, save_strategy="no", report_to=[], use_cpu=True, seed=1,
                logging_strategy="no", disable_tqdm=True, ddp_find_unused_parameters=False,
            )
            trainer = transformers.Trainer(
                Model(), args, train_dataset=examples, callbacks=[Compress()])
            if begin:
                begin = os.path.join(begin, os.listdir(begin)[0])
            trainer.train(resume_from_checkpoint=begin)
        assert trainer.optimizer.onebit.info()["steps"] == stop
        trainer.optimizer.close()
        return bits(trainer.model)

    resumes(rank, train)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    names, size = sys.argv[1].split(","), int(sys.argv[2])

    def launched(name):
        def scenario(rank, size):
            as_a_launcher(rank, size)
            warnings.simplefilter("ignore")
            globals()[name](rank, size)

        scenario.__name__ = name
        return scenario

    torch_resume_ranks.SCENARIOS = [launched(name) for name in names]
    torch_resume_ranks.launch(names, size)
