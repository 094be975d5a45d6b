"""Tests DeepSpeed's configurations, names and checkpoints. DeepSpeed itself is not needed."""

import json
import warnings

import onebit
import pytest

torch = pytest.importorskip("torch")

from onebit import deepspeed  # noqa: E402


def make_config(kind="OneBitAdam", **more):
    parameters = more.pop("params", {})
    return {"optimizer": {"type": kind, "params": parameters}, **more}


def make_parameters(counts=(11, 9)):
    return [torch.nn.Parameter(torch.ones(count)) for count in counts]


def test_every_key_without_effect_is_named(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(make_config(
        params={"lr": 0.01, "cuda_aware": False, "comm_backend_name": "nccl", "freeze_step": 5,
                "max_grad_norm": 1.0, "max_coeff": 0.3},
        steps_per_print=10,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        fp16={"enabled": False, "hysteresis": 2},
        zero_optimization={"stage": 0},
        gradient_clipping=0.5,
    )))  # fmt: skip
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        made = deepspeed.from_config(path, make_parameters(), onebit.Communicator.self_())
    assert all(one.category is onebit.OnebitWarning for one in seen)
    assert {str(one.message).partition(" ")[0] for one in seen} == {
        "optimizer.params.cuda_aware",
        "optimizer.params.comm_backend_name",
        "optimizer.params.max_grad_norm",
        "optimizer.params.max_coeff",  # a parameter of LAMB
        "steps_per_print",
        "scheduler.type",
        "scheduler.params.warmup_num_steps",
        "fp16.hysteresis",
    }
    assert any("gradient_clipping is the key that clips" in str(one.message) for one in seen)
    assert made._options["clip_norm"] == 0.5


@pytest.mark.parametrize(
    "kind, params, here",
    [
        ("OneBitAdam", {"freeze_step": 5}, {"freeze_step": 4}),
        ("onebitadam", {"betas": [0.8, 0.99], "eps": 1e-6}, {"beta1": 0.8, "epsilon": 1e-6}),
        ("OneBitAdam", {"bias_correction": False}, {"no_bias_correction": True}),
        ("OneBitLamb", {"factor_max": 3, "coeff_beta": 0.8},
         {"max_factor": 3, "coefficient_beta": 0.8}),
        ("ZeroOneAdam", {"var_freeze_step": 7, "local_step_clipper": 8},
         {"variance_freeze_step": 7, "local_step_clipper": 8}),
    ],
)  # fmt: skip
def test_optimizers_are_known_by_name(kind, params, here):
    found = deepspeed.read_config(make_config(kind, params=params))
    assert not found.without_effect and found.kind.lower() == kind.lower()
    made = deepspeed.from_config(
        make_config(kind, params=params), make_parameters(), onebit.Communicator.self_()
    )
    assert {name: made._options[name] for name in here} == here
    made.onebit.close()  # the library accepts the options


def test_batches_precision_and_the_count_of_steps():
    read = deepspeed.read_config
    whole = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}
    assert read(make_config(**whole), world=2).arguments["gradient_factor"] == 1 / 4
    scaled = read(make_config(fp16={"enabled": True, "initial_scale_power": 8, "loss_scale_window": 50}))
    assert scaled.dtype == "float16" and scaled.arguments["initial_loss_scale"] == 256
    fixed = read(make_config(gradient_accumulation_steps=2, fp16={"enabled": True, "loss_scale": 128}))
    assert fixed.arguments == {"gradient_factor": 1 / 256, "clip_norm": 1.0}  # 1.0 is DeepSpeed's default
    assert "clip_norm" not in read(make_config(gradient_clipping=0)).arguments
    with_engine = read(make_config(gradient_clipping=1.0, **whole), world=2, engine=True)
    assert with_engine.arguments == {} and "optimizer" not in with_engine.rest
    exact = deepspeed.OneBitAdam(make_parameters(), onebit.Communicator.self_(), profile="deepspeed")
    assert exact._options["freeze_step"] == 100000 and exact.onebit.info()["steps"] == 0
    ignored = read(make_config(params={"bias_correction": True}), profile="deepspeed").without_effect
    assert ignored == [("optimizer.params.bias_correction", "as in DeepSpeed, which ignores it")]
    with pytest.warns(onebit.OnebitWarning, match="bf16.enabled is true, but a parameter has type"):
        deepspeed.from_config(
            make_config(bf16={"enabled": True}), make_parameters(), onebit.Communicator.self_()
        )


def test_invalid_configurations_are_refused(tmp_path):
    wrong = {
        "optimizer.type is 'Adam', not one of": make_config("Adam"),
        "optimizer.type is 'None'": {},
        "amsgrad is true": make_config(params={"amsgrad": True}),
        "zero_optimization.stage is 2": make_config(zero_optimization={"stage": 2}),
        "both true": make_config(fp16={"enabled": True}, bf16={"enabled": True}),
        "train_batch_size is 30, not": make_config(
            train_batch_size=30, train_micro_batch_size_per_gpu=8
        ),
        r"fp16 is \[1\], not an object": make_config(fp16=[1]),
        "optimizer.params is 'auto', not an object": make_config(params="auto"),
    }
    for words, given in wrong.items():
        with pytest.raises(onebit.Error, match=words):
            deepspeed.from_config(given, make_parameters(), onebit.Communicator.self_())
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(onebit.Error, match="is a list, not an object"):
        deepspeed.read_config(tmp_path / "list.json")
    comm = onebit.Communicator.self_()
    for words, options in {
        "freeze_step is 0": {"freeze_step": 0},
        "lr of group 0 is nan": {"lr": float("nan")},
        "profile is 'exact'": {"profile": "exact"},
    }.items():
        with pytest.raises(onebit.Error, match=words):
            deepspeed.OneBitAdam(make_parameters(), comm, **options)
    with pytest.raises(onebit.Error, match="cannot be added"):
        deepspeed.OneBitAdam(make_parameters(), comm).add_param_group({"params": make_parameters()})


def test_values_have_the_type_of_their_key():
    """Tries each key with "auto", text, lists and other values that tools fill in."""
    params = ("lr", "eps", "weight_decay", "betas", "bias_correction", "amsgrad", "freeze_step")
    of_kind = {
        "OneBitAdam": params,
        "OneBitLamb": ("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min",
                       "factor_threshold"),
        "ZeroOneAdam": ("var_freeze_step", "var_update_scaler", "local_step_scaler",
                        "local_step_clipper"),
    }  # fmt: skip
    half = {"enabled": True}
    cases = [("optimizer.params", name, kind, {}) for kind in of_kind for name in of_kind[kind]]
    for name in ("loss_scale", "initial_scale_power", "loss_scale_window", "min_loss_scale"):
        cases.append(("fp16", name, "OneBitAdam", half))
    cases += [
        ("fp16", "enabled", "OneBitAdam", {}), ("bf16", "enabled", "OneBitAdam", {}),
        ("zero_optimization", "stage", "OneBitAdam", {}),
        ("", "gradient_clipping", "OneBitAdam", {}), ("", "train_batch_size", "OneBitAdam", {}),
        ("", "train_micro_batch_size_per_gpu", "OneBitAdam", {}),
        ("", "gradient_accumulation_steps", "OneBitAdam", {}),
    ]  # fmt: skip
    for section, name, kind, rest in cases:
        path = f"{section}.{name}".lstrip(".")
        for value in ("auto", "false", "0", [], [1, "2"], {"a": 1}, float("nan")):
            given = {name: value}
            if section == "optimizer.params":
                given = {"optimizer": {"type": kind, "params": given}}
            elif section:
                given = {section: {**rest, **given}}
            with pytest.raises(onebit.Error) as error:
                deepspeed.read_config({**make_config(kind), **given}, world=1)
            assert f"{path} is {value!r}, not " in error.value.message, (error.value, given)
        given = {"optimizer": {"type": kind, "params": {name: None}}} if "." in section else {}
        deepspeed.read_config({**make_config(kind), **given}, world=1)
    read = deepspeed.read_config(make_config(params={"freeze_step": 1e3, "betas": [0.9, 0.99]})).arguments
    assert read == {"freeze_step": 1000, "betas": [0.9, 0.99], "clip_norm": 1.0}


def train_model(kind, steps, comm, made=None, first=0, **options):
    """Trains on gradients that depend on the rank and the step. Returns the parameters after each step."""
    given = make_parameters()
    made = made or getattr(deepspeed, kind)(given, comm, lr=0.01, **options)
    given = [one for group in made.param_groups for one in group["params"]]
    seen = []
    for step in range(first, first + steps):
        drawn = torch.Generator().manual_seed(100 * comm.rank + step)
        for one in given:
            one.grad = torch.randn(one.numel(), generator=drawn)
        made.step()
        seen.append(torch.cat([one.detach() for one in given]).clone())
    return made, seen


KINDS = [
    ("OneBitAdam", {"freeze_step": 4}),
    ("OneBitLamb", {"freeze_step": 4}),
    ("ZeroOneAdam", {"var_freeze_step": 4, "local_step_scaler": 2}),
]


@pytest.mark.parametrize("profile", ["default", "deepspeed"])
@pytest.mark.parametrize("kind, options", KINDS)
def test_goes_on_from_a_state_dict(on_ranks, kind, options, profile):
    """Checks that each rank continues from its own state. The parameters are those of the model."""
    options = {**options, "profile": profile}

    def run(comm):
        made, seen = train_model(kind, 8, comm, **options)
        return made.state_dict(), seen[-1]

    saved = on_ranks(2, run)
    whole = on_ranks(2, lambda comm: train_model(kind, 14, comm, **options)[1])

    def go_on(comm):
        made, _ = train_model(kind, 0, comm, **options)
        state, values = saved[comm.rank]
        given = [one for group in made.param_groups for one in group["params"]]
        for one, some in zip(given, values.split([one.numel() for one in given])):
            one.data.copy_(some)
        made.load_state_dict(state)
        return train_model(kind, 6, comm, made, 8)[1]

    for rank, seen in enumerate(on_ranks(2, go_on)):
        assert all(torch.equal(one, other) for one, other in zip(seen, whole[rank][8:]))


class Engine:
    """A stand-in for DeepSpeed's engine, with the attributes that `attach` reads."""

    enable_backward_allreduce = True
    has_moe_layers = pipeline_parallelism = False
    stage = 0

    def zero_optimization_stage(self):
        return self.stage


def test_no_step_before_attach():
    comm = onebit.Communicator.self_()
    given = make_parameters()
    made = deepspeed.OneBitAdam(given, comm, engine=True)
    for one in given:
        one.grad = torch.zeros_like(one)
    made.step()  # DeepSpeed's wrappers make this call
    assert made._core is None
    given[0].grad += 1
    with pytest.raises(onebit.Error, match="DeepSpeed has averaged the gradients; call attach"):
        made.step()
    for name, value in {"stage": 1, "has_moe_layers": True, "pipeline_parallelism": True}.items():
        engine = Engine()
        setattr(engine, name, value)
        with pytest.raises(onebit.Error, match="the engine has"):
            made.attach(engine)
        assert engine.enable_backward_allreduce
    engine = Engine()
    made.attach(engine)
    assert not engine.enable_backward_allreduce
    made.step()
    assert made.status is onebit.Status.OK and made.onebit.info()["steps"] == 1


def test_parameter_groups(on_ranks):
    def body(comm):
        given = make_parameters()
        groups = [{"params": given[:1], "lr": 0.02}, {"params": given[1:], "non_freeze": True}]
        made = deepspeed.OneBitAdam(groups, comm, lr=0.01, freeze_step=2)
        for one in given:
            one.grad = torch.ones_like(one)
        made.step()
        assert made.onebit.tensor_statistics(1)["uncompressed"] == 1
        moved = [1 - one.detach()[0].item() for one in given]
        assert moved == pytest.approx([0.02, 0.01], rel=1e-4)
        made.param_groups[0].update(lr=0.0, weight_decay=0.1)
        made.param_groups[1].update(weight_decay=0.1)
        before = [one.detach().clone() for one in given]
        made.step()
        assert torch.equal(given[0], before[0]) and not torch.equal(given[1], before[1])

    on_ranks(2, body)
