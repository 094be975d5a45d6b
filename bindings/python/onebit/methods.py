"""The optimizers, a row each: the class, the name in C (of onebit_NAME_create and
onebit_NAME_options_t), what it is, and the fields of its options between `size` and `common`: double,
or int or size_t where it says so. Everything else of this package that an optimizer has is made from
its row."""

from typing import NamedTuple


class Method(NamedTuple):
    kind: str
    name: str
    title: str
    fields: str

    def typed(self):
        """(field, its type) of all fields."""
        for field in self.fields.split():
            name, _, type_name = field.partition(":")
            yield name, type_name or "double"


METHODS = (
    Method(
        "EfficientAdam",
        "efficient_adam",
        "Efficient-Adam with one bit, the one to begin with",
        "beta1 beta2 epsilon gain trust_ratio:int min_ratio max_ratio"
        " warmup_steps:size_t",
    ),
    Method(
        "Adam",
        "adam",
        "1-bit Adam",
        "beta1 beta2 epsilon freeze_step:size_t freeze_threshold no_bias_correction:int"
        " exchange:int shards:int",
    ),
    Method(
        "Lamb",
        "lamb",
        "1-bit LAMB",
        "beta1 beta2 epsilon freeze_step:size_t freeze_threshold no_bias_correction:int"
        " max_coefficient min_coefficient coefficient_beta max_factor min_factor factor_change",
    ),
    Method(
        "ZeroOneAdam",
        "zero_one_adam",
        "0/1 Adam",
        "beta1 beta2 epsilon no_bias_correction:int variance_freeze_step:size_t"
        " variance_update_scaler:size_t local_step_scaler:size_t local_step_clipper:size_t",
    ),
    Method("Momentum", "momentum", "1-bit momentum SGD", "momentum warmup_steps:size_t"),
    Method("Lion", "lion", "Lion in one bit", "beta1 beta2 beta3 epsilon"),
)
NAMES = [method.kind for method in METHODS]
