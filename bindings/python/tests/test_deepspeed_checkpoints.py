"""Tests checkpoints of DeepSpeed's 1-bit optimizers. examples/continue_deepspeed.py --record has written
data/deepspeed-0.19.6.tar.xz with DeepSpeed 0.19.6. It contains DeepSpeed's checkpoints in the compressed
stage, and the losses of its next steps."""

import json
import struct
import sys
import tarfile

import numpy as np
import onebit
import pytest
from conftest import HERE, PACKAGE, REPOSITORY

torch = pytest.importorskip("torch")

if not hasattr(torch, "compile"):
    pytest.skip("DeepSpeed's files are read by torch 2.0 or newer", allow_module_level=True)

from onebit import deepspeed  # noqa: E402
from onebit import part  # noqa: E402
from onebit.deepspeed import convert, state  # noqa: E402
from test_deepspeed import train_model  # noqa: E402

sys.path[:0] = [str(PACKAGE / "examples"), str(REPOSITORY / "examples")]
import continue_deepspeed  # noqa: E402
import deepspeed_part  # noqa: E402

KINDS = list(continue_deepspeed.PARAMETERS)
MORE, RANKS, SIZES = 20, 2, (6, 5)
STOPS = continue_deepspeed.STOPS


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(HERE / "data" / "deepspeed-0.19.6.tar.xz") as archive:
        for member in archive.getmembers():  # Python 3.9 has no filter for extractall
            if member.isfile():
                path = folder / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.extractfile(member).read())
    return folder


def continue_training(comm, kind, folder, steps=MORE, **options):
    """Returns the losses of this rank's next steps, and the optimizer."""
    model = continue_deepspeed.network(*SIZES)
    config = continue_deepspeed.configuration(kind, False)
    made = deepspeed.from_config(config, model.parameters(), comm, **options)
    made.load_deepspeed(folder, model)
    losses = []
    for step in range(STOPS[kind], STOPS[kind] + steps):
        made.zero_grad()
        loss = continue_deepspeed.loss_of(model, SIZES[0], comm.rank, step)
        loss.backward()
        made.step()
        losses.append(loss.item())
    return losses, made


def largest_difference(on_ranks, kind, folder, recorded, ranks=RANKS, **options):
    """Returns the largest difference from the losses of DeepSpeed's run: in the first steps, and in all
    steps."""
    whole = json.loads((recorded / kind / "DeepSpeed, not stopped.json").read_text())
    losses = on_ranks(ranks, lambda comm: continue_training(comm, kind, folder, profile="deepspeed")[0])
    apart = [abs(a / b - 1) for a, b in zip(np.mean(losses, 0), whole)]
    return max(apart[:8]), max(apart)


@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_as_deepspeed(on_ranks, recorded, kind):
    first, largest = largest_difference(on_ranks, kind, recorded / kind, recorded)
    print(f"{kind}: {first:.1e} in the first 8 steps, {largest:.1e} in {MORE}")
    assert first < 1e-4 and largest < 2e-2


@pytest.mark.parametrize("kind", KINDS)
def test_residuals_that_are_not_there_are_told_of(on_ranks, recorded, kind, tmp_path):
    folder = continue_deepspeed.without_residuals(recorded / kind)
    with pytest.warns(onebit.OnebitWarning, match="the checkpoint has no residuals, so they begin with zeros"):
        first, largest = largest_difference(on_ranks, kind, folder, recorded)
    assert 1e-3 < largest < 1


@pytest.mark.parametrize(
    "kind, options, steps",
    [
        ("OneBitAdam", {"freeze_step": 4}, 2),
        ("OneBitAdam", {"freeze_step": 4}, 7),
        ("OneBitLamb", {"freeze_step": 4}, 7),
        ("ZeroOneAdam", {"var_freeze_step": 4, "local_step_scaler": 2}, 11),
    ],
)
def test_parts_equal_those_of_the_library(on_ranks, kind, options, steps):
    """Compares each byte, except those of counts that are not converted; this test has no such counts."""

    def body(comm):
        made, _ = train_model(kind, steps, comm, profile="deepspeed", **options)
        return made.onebit.save()

    for rank, data in enumerate(on_ranks(2, body)):
        layout, other = part.layout_of(data)
        assert not other
        ranks, _, stage, _, _, apart = struct.unpack_from("<6I", data, 64)
        padding, done, frozen_at, *exchanges = struct.unpack_from("<6Q", data, 104)
        found = part.read_part(data).sections
        numbers = next((one[3] for one in found if one[0] == part.NUMBERS), np.zeros(0))
        head = part.Head(ranks, stage, apart, padding, done, frozen_at, exchanges, numbers)
        arrays = [one for one in found if one[0] != part.NUMBERS]
        assert part.make_part(layout, head, rank, arrays) == data


@pytest.mark.parametrize("count", [7, 200001])
def test_the_example_writes_a_state_of_arrays(tmp_path, count):
    """Checks that the library loads what examples/deepspeed_part.py writes. The first tensor needs
    padding."""

    def make(comm):
        tensors = [[np.random.default_rng([size, k]).standard_normal(size).astype("f4") for k in range(2)]
                   for size in (21, count)]  # fmt: skip
        return onebit.Adam(comm, tensors, freeze_step=100, profile="deepspeed")

    with onebit.Communicator.self_() as comm:
        optimizer = make(comm)
        for _ in range(3):
            assert optimizer.step(0.01) is onebit.Status.OK
        saved = optimizer.save()
        elements = [row for row in part.read_part(saved).sections if row[1] == part.ELEMENTS]
        arrays = [np.concatenate([row[3] for row in elements if row[0] == what])
                  for what in (part.PARAMETERS, part.MOMENTUM, part.VARIANCE)]  # fmt: skip
        split = zip(*(np.split(one, [21]) for one in arrays))
        deepspeed_part.write_checkpoint(tmp_path, list(split), 3)
        again = make(comm)
        again.load_files(tmp_path)
        assert again.save() == saved
        assert count > 7 or (tmp_path / "part-1-0").read_bytes() == saved


def test_another_number_of_ranks_and_the_default_profile(on_ranks, recorded):
    for ranks in (1, 3):
        losses = on_ranks(
            ranks, lambda comm: continue_training(comm, KINDS[0], recorded / KINDS[0], profile="deepspeed")[0]
        )
        assert np.isfinite(losses).all() and np.mean(losses) < 0.5
    for kind in KINDS[:2]:
        with pytest.warns(onebit.OnebitWarning, match="only after one more dense step"):
            made = on_ranks(2, lambda comm: continue_training(comm, kind, recorded / kind, 3)[1].onebit.info())
        assert made[0]["steps"] == STOPS[kind] + 2 and made[0]["freeze_step"] == STOPS[kind]
    with pytest.raises(onebit.Error, match="with a frozen variance needs profile='deepspeed'"):
        on_ranks(2, lambda comm: continue_training(comm, KINDS[2], recorded / KINDS[2]))


def test_convert_checkpoint(on_ranks, recorded, tmp_path):
    config = continue_deepspeed.configuration(KINDS[0], False)
    names = [f"{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")]
    for given in (None, names):
        deepspeed.convert_checkpoint(recorded / KINDS[0], tmp_path, config, names=given)

        def from_files(comm):
            model = continue_deepspeed.network(*SIZES)
            made = deepspeed.from_config(config, model.parameters(), comm, profile="deepspeed")
            made.onebit.load_files(tmp_path)
            return made.onebit.save()

        def directly(comm):
            folder = recorded / KINDS[0]
            return continue_training(comm, KINDS[0], folder, 0, profile="deepspeed")[1].onebit.save()

        assert on_ranks(2, from_files) == on_ranks(2, directly)
    with pytest.raises(onebit.Error, match="has no parameter 'nothing'"):
        deepspeed.convert_checkpoint(recorded / KINDS[0], tmp_path, config, names=["nothing"])
    with pytest.raises(onebit.Error, match="in the order in which DeepSpeed's"):
        turned = names[1::-1] + names[2:]
        deepspeed.convert_checkpoint(recorded / KINDS[0], tmp_path, config, names=turned)


def test_what_cannot_be_loaded_is_refused_on_all_ranks(on_ranks, recorded, tmp_path):
    lamb = recorded / KINDS[1]
    (tmp_path / "latest").write_text("global_step7")
    for words, folder, kind in (
        ("the checkpoint belongs to lamb, but the optimizer is adam", lamb, KINDS[0]),
        ("mp_rank_00_model_states.pt does not exist", tmp_path, KINDS[0]),
        ("has no file 'latest'", tmp_path / "nowhere", KINDS[0]),
    ):
        with pytest.raises(onebit.Error, match=words):
            on_ranks(2, lambda comm: continue_training(comm, kind, folder))  # noqa: B023

    def one_rank_alone(comm):
        folder = lamb if comm.rank == 0 else tmp_path
        with pytest.raises(onebit.Error):
            continue_training(comm, KINDS[1], folder)

    on_ranks(2, one_rank_alone)


def test_wrappers_and_states_that_are_not_one(recorded):
    path = recorded / KINDS[0] / f"global_step{STOPS[KINDS[0]]}" / "mp_rank_00_model_states.pt"
    saved = torch.load(path, weights_only=True)
    parameters = list(enumerate(saved["module"].values()))
    plain = state.read_state(path.parent, saved, parameters)
    inside = saved["optimizer"]
    flat = {
        name: torch.cat([one[name].flatten() for one in inside["state"].values()])
        for name in ("exp_avg", "exp_avg_sq")
    }
    one = {**inside["state"][0], **flat}
    masters = torch.cat([values.flatten() for _, values in parameters])
    wrapped = {"optimizer_state_dict": {"state": {0: one}}, "fp32_groups_flat": [masters]}
    layout = part.Layout("adam", True, [len(x["parameter"]) for x in plain.tensors], [False] * 4)
    found = state.read_state(path.parent, {**saved, "optimizer": wrapped}, parameters)
    assert found.flat and len(found.tensors) == 1
    found = found._replace(ranks=None)
    with pytest.warns(onebit.OnebitWarning, match="compressed each group as one tensor"):
        data = convert.parts_of(found, layout, {"freeze_step": 40})
    other = convert.parts_of(plain, layout, {"freeze_step": 40})
    for what in (part.PARAMETERS, part.MOMENTUM, part.VARIANCE):
        values = [
            [row[3] for row in part.read_part(made[0]).sections if row[:2] == (what, part.ELEMENTS)]
            for made in (data, other)
        ]
        assert np.allclose(*values, rtol=1e-6)
    for words, optimizer in {
        "has no optimizer state": None,
        "has no state of a 1-bit optimizer": {"state": {0: {}}, "param_groups": []},
    }.items():
        with pytest.raises(onebit.Error, match=words):
            state.read_state(path.parent, {**saved, "optimizer": optimizer}, parameters)


def test_counters_that_deepspeed_began_anew(recorded):
    folder, saved = state.read_folder(recorded / KINDS[2])
    parameters = list(enumerate(saved["module"].values()))
    found = state.read_state(folder, saved, parameters)
    rules = continue_deepspeed.PARAMETERS[KINDS[2]]
    counts = [len(one["parameter"]) for one in found.tensors]
    layout = part.Layout("zero_one_adam", True, counts, [False] * 4)
    convert.parts_of(found, layout, rules)  # gives no warning
    found.tensors[0]["local_step_counter"] += 1
    with pytest.warns(onebit.OnebitWarning, match="local_step_counter is 2 in the checkpoint"):
        convert.parts_of(found, layout, rules)
