"""Runs the programs of docs/python-trainers.md with released trainers, stops them in the warm-up and after
it, and resumes them from the trainers' own checkpoints. test_torch.py starts this file in the way of
torch_resume_ranks.py."""

import os
import pathlib
import tempfile
import textwrap
import warnings

from torch_common import (
    draw_normal,
    flatten_parameters,
    is_equal_on_ranks,
    make_layers,
    make_shared_directory,
    record_warnings,
    run_scenarios,
)

import onebit.torch
import torch
import torch.distributed as dist
from torch import nn

STEPS, STOPS = 24, (4, 12)
OPTIONS = {"warmup_steps": 8}


def begin_rank(rank, size):
    """Sets the variables that a launcher sets."""
    warnings.simplefilter("ignore")
    os.environ.update(
        TOKENIZERS_PARALLELISM="false",
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="1", GROUP_RANK="0",
    )


def make_batches(rank, size):
    """Returns the batches of STEPS steps, always in the same order."""
    points = draw_normal(5, STEPS * 16, 20)[rank::size]
    return [(some, some[:, :1].sin()) for some in points.split(16 // size)]


def make_network():
    return make_layers(20, 60, 60, 1)


def check_resumed(rank, train):
    """Checks that a training resumes to the bit. train(stop, from, to) trains up to step `stop` from a saved
    state or None, saves to a path, and returns the parameters."""
    directory = make_shared_directory()
    wanted = train(STEPS, None, None)
    for stop in STOPS:
        where = os.path.join(directory, str(stop))
        assert not torch.equal(train(stop, None, where), wanted)
        assert torch.equal(train(STEPS, where, None), wanted), stop


def find_block(page, word):
    """Returns the Python code of a document that contains a word."""
    text = (pathlib.Path(__file__).parents[3] / "docs" / page).read_text()
    blocks = [one.partition("```")[0] for one in text.split("```python\n")[1:]]
    (found,) = (one for one in blocks if word in one)
    return textwrap.dedent(found)


def check_documented_program(page, word, make_names):
    """Runs a program of a document as it is, and without its new lines. The losses must be similar."""
    program = find_block(page, word)
    plain = [one for one in program.splitlines(True) if "# onebit" not in one]
    assert len(plain) < len(program.splitlines())
    points, losses, before = draw_normal(9, 512, 20), [], os.getcwd()
    os.chdir(make_shared_directory())
    for one in "", program, "".join(plain):
        named, module = make_names()
        with record_warnings() as said:
            exec(compile(one, page, "exec"), named)  # noqa: S102
        # The program clips by the norm of the mean gradient, so torch gives no warning of writes.
        assert not [one for one in said if "written to" in one]
        assert is_equal_on_ranks(flatten_parameters(module))
        with torch.no_grad():
            losses.append(nn.functional.mse_loss(module(points), points[:, :1].sin()).item())
    untrained, compressed, dense = losses
    assert dense < 0.7 * untrained and compressed != dense, (page, losses)
    assert abs(compressed - dense) < 0.05 * (untrained - dense), (page, losses)
    os.chdir(before)


def make_program_objects(**names):
    """Makes the objects of a program, before the trainer prepares them."""
    module = make_network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    points = draw_normal(5, 1600, 20)
    data = torch.utils.data.TensorDataset(points, points[:, :1].sin())
    return {"torch": torch, "model": module, "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100),
            "loader": torch.utils.data.DataLoader(data, batch_size=8), **names}, module  # fmt: skip


def define_lightning_module():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = make_network()

        def training_step(self, batch, number):
            return nn.functional.mse_loss(self.network(batch[0]), batch[1])

        validation_step = training_step

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            return {"optimizer": optimizer,
                    "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Module


def make_lightning_trainer(size, **options):
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    return lightning.Trainer(
        accelerator="cpu", devices=size, strategy=DDPStrategy(process_group_backend="gloo"), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, **options,
    )  # fmt: skip


def lightning(rank, size):
    import lightning

    class Module(define_lightning_module()):
        def train_dataloader(self):  # one step an epoch: resuming in the middle skips no data
            epoch = self.trainer.current_epoch
            return torch.utils.data.DataLoader(make_batches(rank, size)[epoch : epoch + 1], batch_size=None)

    class Save(lightning.Callback):
        def on_train_end(self, trainer, module):
            if self.place:
                trainer.save_checkpoint(self.place)

    def train(stop, begin, place):
        save, callback = Save(), onebit.torch.LightningCallback(**OPTIONS)
        save.place = place
        trainer = make_lightning_trainer(
            size, max_steps=stop, callbacks=[save, callback], reload_dataloaders_every_n_epochs=1)
        module = Module()
        trainer.fit(module, ckpt_path=begin)
        assert callback.optimizer[0].report().steps == stop
        return flatten_parameters(module)

    def make_names():
        module = Module()
        return {"lightning": lightning, "module": module}, module.network

    check_documented_program("python-trainers.md", "lightning.Trainer", make_names)
    check_documented_program("python-trainers.md", "lightning.Fabric",
                             lambda: make_program_objects(lightning=lightning))  # fmt: skip
    check_resumed(rank, train)


class LocalSteps:
    """Begins local steps in the first step, and records the model before and in a validation."""

    def __init__(self, callback):
        self.callback, self.validated = callback, []

    def after_step(self, step, model):
        if step == 1:
            every = self.callback.optimizer
            automatic = (every[0] if isinstance(every, list) else every).automatic
            automatic._choice.local_steps = 10
            automatic._switch_method("local steps")
        assert is_equal_on_ranks(flatten_parameters(model)) == (step == 1), step

    def validate(self, model):
        self.validated.append(flatten_parameters(model))
        assert is_equal_on_ranks(flatten_parameters(model))


def lightning_local(rank, size):
    """Checks that all ranks have the same model in a validation and at the end."""
    import lightning

    class Local(LocalSteps, lightning.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            self.after_step(trainer.global_step, module)

        def on_validation_end(self, trainer, module):
            self.validate(module)

    callback, module = onebit.torch.LightningCallback(method="auto", local_steps=True), define_lightning_module()()
    local, loader = Local(callback), torch.utils.data.DataLoader(make_batches(rank, size), batch_size=None)
    make_lightning_trainer(
        size, max_steps=5, val_check_interval=3, num_sanity_val_steps=0, callbacks=[local, callback],
    ).fit(module, loader, loader)
    assert len(local.validated) == 1 and is_equal_on_ranks(flatten_parameters(module))


def make_arguments(directory, **options):
    import transformers

    return transformers.TrainingArguments(
        directory, learning_rate=3e-3, report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
        ddp_find_unused_parameters=False, **options,
    )  # fmt: skip


class Model(nn.Module):
    """A model with the interface that transformers' Trainer requires."""

    def __init__(self):
        super().__init__()
        self.network = make_network()

    def forward(self, points, labels):
        found = self.network(points)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


def transformers_local(rank, size):
    """Checks that all ranks evaluate the same model. The best model, loaded at the end, must have the
    evaluated parameters."""
    import transformers

    class Local(LocalSteps, transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            self.after_step(state.global_step, model)

        def on_evaluate(self, args, state, control, model=None, **_):
            self.validate(model)

    callback = onebit.torch.TrainerCallback(method="auto", local_steps=True)
    local = Local(callback)
    examples = [{"points": one, "labels": wanted} for of in make_batches(0, 1) for one, wanted in zip(*of)]
    arguments = make_arguments(
        make_shared_directory(), max_steps=5, per_device_train_batch_size=4, eval_strategy="steps",
        eval_steps=3, save_strategy="best", metric_for_best_model="loss", load_best_model_at_end=True,
        greater_is_better=True,  # the first model is the best
    )
    trainer = transformers.Trainer(Model(), arguments, train_dataset=examples, eval_dataset=examples[:64],
                                   callbacks=[local, callback])  # fmt: skip
    trainer.train()
    assert len(local.validated) == 2 and torch.equal(flatten_parameters(trainer.model), local.validated[0])


def transformers(rank, size):
    import transformers

    points = draw_normal(5, STEPS * 16, 20)
    examples = [{"points": one, "labels": one[:1].sin()} for one in points]

    def train(stop, begin, place):
        class Stop(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == stop < STEPS:
                    control.should_training_stop = True
                    control.should_save, control.should_evaluate = stop == STOPS[0], stop != STOPS[0]

        callback = onebit.torch.TrainerCallback(**OPTIONS)
        args = make_arguments(
            place or tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=16 // size,
            save_strategy="best", metric_for_best_model="loss", logging_strategy="no")
        trainer = transformers.Trainer(
            Model(), args, train_dataset=examples, eval_dataset=examples[:16],
            callbacks=[Stop(), callback])  # fmt: skip
        if begin:
            begin = os.path.join(begin, os.listdir(begin)[0])
        trainer.train(resume_from_checkpoint=begin)
        assert callback.optimizer.report().steps == stop
        return flatten_parameters(trainer.model)

    def make_names():
        model = Model()
        arguments = make_arguments(
            "unused", max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            save_strategy="no")
        return {"transformers": transformers, "model": model, "arguments": arguments,
                "examples": examples}, model.network  # fmt: skip

    check_documented_program("python-trainers.md", "transformers.Trainer(", make_names)
    check_resumed(rank, train)


def transformers_back(rank, size):
    """Checks that a Trainer without onebit resumes from a checkpoint of the guide's callback, and that a checkpoint of
    the model alone sends no residuals."""
    import transformers

    named, place = {"transformers": transformers, "torch": torch}, make_shared_directory()
    exec(compile(find_block("python-trainers.md", "on_save"), "guide", "exec"), named)  # noqa: S102
    examples = [{"points": one, "labels": one[:1].sin()} for one in draw_normal(5, 640, 20)]

    def train(callbacks, begin, **options):
        args = make_arguments(place, max_steps=20, per_device_train_batch_size=8, save_steps=12,
                              logging_strategy="no", **options)  # fmt: skip
        trainer = transformers.Trainer(Model(), args, train_dataset=examples, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=begin)
        assert is_equal_on_ranks(flatten_parameters(trainer.model))
        return trainer

    for only_model in True, False:
        callback = onebit.torch.TrainerCallback(**OPTIONS)
        train([callback] if only_model else [callback, named["TorchState"]()], None, save_only_model=only_model)
        assert (callback.optimizer.report().checkpoint_bytes > 0) is not only_model
    states = train([], os.path.join(place, "checkpoint-12")).optimizer.state
    assert all(set(one) == {"step", "exp_avg", "exp_avg_sq"} and one["step"] == 20 for one in states.values())


def accelerate(rank, size):
    import accelerate

    os.environ["ACCELERATE_USE_CPU"] = "true"

    def train(stop, begin, place):
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
        module = make_network()
        inner = torch.optim.AdamW(module.parameters(), lr=3e-3)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(inner, STEPS * size)
        model, prepared, rates = accelerator.prepare(module, inner, rates)
        optimizer = onebit.torch.compress(model, prepared, **OPTIONS)
        assert optimizer is prepared
        if begin:
            accelerator.load_state(begin)
        for points, wanted in make_batches(rank, size)[optimizer.onebit.info()["steps"] : stop]:
            for part in zip(points.chunk(2), wanted.chunk(2)):
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.mse_loss(model(part[0]), part[1]))
                    optimizer.step(), rates.step(), optimizer.zero_grad()
        assert optimizer.report().steps == stop
        if place:
            optimizer.consolidate_state_dict()
            accelerator.save_state(place)
            dist.barrier()
        optimizer.close()
        return flatten_parameters(module)

    check_documented_program("python-trainers.md", "accelerate.Accelerator",
                             lambda: make_program_objects(accelerate=accelerate))  # fmt: skip
    check_resumed(rank, train)


if __name__ == "__main__":
    run_scenarios(globals(), begin_rank)
