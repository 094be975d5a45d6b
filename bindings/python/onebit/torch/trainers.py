"""Callbacks for trainers: `onebit.torch.TrainerCallback` for Hugging Face's,
`onebit.torch.LightningCallback` for Lightning's. Each class is created at its first use, since its
base class belongs to the trainer."""

import sys

from onebit._native import warn
from onebit.torch.compress import compress
from onebit.torch.hook import models_of


class _Compressing:
    """kind, options: as in `onebit.torch.compress`

    optimizer: the result of `compress`; None: the training has one process, or has not begun
    """

    def __init__(self, kind=None, **options):
        self._kind, self._options, self.optimizer, self._ended = kind, options, None, False

    def _begin(self, model, optimizer):
        """Compresses the optimizer. model: a DistributedDataParallel; None: there is none"""
        if model is None:
            warn("the trainer has not wrapped its model in a DistributedDataParallel: "
                 "nothing is exchanged, and nothing is compressed")
            return optimizer
        self.optimizer = compress(model, optimizer, self._kind, **self._options)
        return self.optimizer

    def _every(self):
        return self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]

    def _synchronize(self):
        """Makes the ranks' models equal before a validation, since local steps of method "auto"
        make them differ."""
        for one in self._every():
            if hasattr(one, "automatic"):
                one.automatic.synchronize()

    def _end(self, is_first, write=print):
        """Writes the saved traffic, on the first process."""
        self._ended, every = True, self._every()
        for one in every if self.optimizer is not None else ():
            one.close()
        if is_first and self.optimizer is not None:
            write(f"onebit: {every[0].report()}")
            sys.stdout.flush()


def trainer_callback():
    import transformers
    from tqdm.auto import tqdm

    class TrainerCallback(_Compressing, transformers.TrainerCallback):
        __doc__ = f"""For transformers.Trainer: `callbacks=[onebit.torch.TrainerCallback()]`.

    {_Compressing.__doc__}"""

        def on_train_begin(self, args, state, control, model=None, optimizer=None, **_):
            found = models_of(model.parameters())
            fresh = [one for one in found if not getattr(one, "_comm_hooks", None)]
            self._begin(next(iter(fresh or found), None), optimizer)

        def on_step_end(self, args, state, control, **_):
            saves = control.should_save and not args.save_only_model
            if saves and hasattr(self.optimizer, "consolidate_state_dict"):
                self.optimizer.consolidate_state_dict()
            elif control.should_save or control.should_evaluate:
                self._synchronize()

        on_epoch_end = on_step_end

        def on_evaluate(self, args, state, control, **_):
            if args.save_strategy == "best" and not self._ended:  # the result is known later
                self.on_step_end(args, state, transformers.TrainerControl(should_save=True))

        def on_train_end(self, args, state, control, **_):
            self._end(state.is_world_process_zero, tqdm.write)  # not behind the progress bar

    return TrainerCallback


def lightning_callback():
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

    class LightningCallback(_Compressing, Callback):
        __doc__ = f"""For Lightning's Trainer: `callbacks=[onebit.torch.LightningCallback()]`.

    {_Compressing.__doc__}"""

        def on_train_start(self, trainer, module):
            model = trainer.strategy.model
            model = None if model is module else model
            found = self._begin(model, trainer.optimizers)
            if model is None:
                return
            trainer.optimizers = found

            def clip_grad_by_norm(optimizer, clip_val):
                getattr(optimizer, "optimizer", optimizer).clip_grad_norm_(clip_val)

            trainer.precision_plugin.clip_grad_by_norm = clip_grad_by_norm

        def on_validation_start(self, trainer, module):
            self._synchronize()

        def on_train_end(self, trainer, module):
            self._end(trainer.is_global_zero)

    return LightningCallback


CALLBACKS = {"TrainerCallback": trainer_callback, "LightningCallback": lightning_callback}
