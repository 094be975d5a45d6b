"""Tests optimizers, checkpoints and statistics on numpy arrays; ranks are threads."""

import numpy
import onebit
import pytest
from onebit import Status

COUNT = 600


def make_parameters(seed, dtype=numpy.float32):
    return [
        numpy.random.default_rng([seed, number]).standard_normal(COUNT + number).astype(dtype)
        for number in range(3)
    ]


def fill_gradients(gradients, rank, step):
    for number, one in enumerate(gradients):
        random = numpy.random.default_rng([rank, step, number])
        one[:] = random.standard_normal(one.size).astype(one.dtype)


def make_optimizer(comm, kind=onebit.Adam, dtype=numpy.float32, **options):
    parameters, gradients = make_parameters(5, dtype), make_parameters(6, dtype)
    tensors = list(zip(parameters, gradients))
    return parameters, gradients, kind(comm, tensors, **options)


def make_steps(comm, optimizer, gradients, first, last):
    for step in range(first, last):
        fill_gradients(gradients, comm.rank, step)
        assert optimizer.step(1e-2) is Status.OK


@pytest.mark.parametrize(
    "kind, options",
    [
        (onebit.EfficientAdam, {}),
        (onebit.EfficientAdam, {"gain": 1.0, "bucket_size": 700}),
        (onebit.Lion, {"beta2": 0.98, "bucket_size": 700}),
        (onebit.Adam, {"freeze_step": 2}),
        (onebit.Adam, {"freeze_step": 2, "shards": "step"}),
        (onebit.Lamb, {"freeze_step": 2, "bucket_size": 700}),
        (onebit.ZeroOneAdam, {"variance_freeze_step": 3}),
        (onebit.Momentum, {"warmup_steps": 1}),
        (onebit.Adam, {"freeze_step": 2, "dtype": numpy.float16}),
    ],
)
def test_ranks_stay_alike_and_go_on_from_checkpoints(on_ranks, tmp_path, kind, options):
    def body(comm):
        parameters, gradients, optimizer = make_optimizer(comm, kind, **options)
        make_steps(comm, optimizer, gradients, 0, 4)
        part = optimizer.save()
        optimizer.save_files(tmp_path / "checkpoint")
        make_steps(comm, optimizer, gradients, 4, 6)
        other, its_gradients, again = make_optimizer(comm, kind, **options)
        again.load_files(tmp_path / "checkpoint")
        make_steps(comm, again, its_gradients, 4, 6)
        assert [one.tobytes() for one in other] == [one.tobytes() for one in parameters]
        assert again.info()["steps"] == 6
        return part, [one.tobytes() for one in parameters]

    ranks = on_ranks(2, body)
    assert ranks[0][1] == ranks[1][1]
    parts = [part for part, _ in ranks]

    def from_parts(comm):
        parameters, gradients, optimizer = make_optimizer(comm, kind, **options)
        optimizer.load(parts)
        make_steps(comm, optimizer, gradients, 4, 6)
        with pytest.raises(onebit.Error) as caught:
            optimizer.load([parts[0][:-9], parts[1]])
        assert caught.value.status in (Status.ERROR_CHECKPOINT, Status.ERROR_PEER)
        return [one.tobytes() for one in parameters]

    assert on_ranks(2, from_parts) == [ranks[0][1]] * 2


def test_statistics(on_ranks):
    def body(comm):
        _, gradients, optimizer = make_optimizer(comm, freeze_step=2, clip_norm=1.0, initial_loss_scale=1024)
        assert optimizer.loss_scale == 1024
        assert optimizer.stage() == (onebit.Stage.STAGE_WARMUP, 0)
        make_steps(comm, optimizer, gradients, 0, 4)
        assert optimizer.stage() == (onebit.Stage.STAGE_COMPRESSED, 4)
        info, found = optimizer.info(), optimizer.statistics()
        assert info["stage"] is onebit.Stage.STAGE_COMPRESSED and info["name"] == "adam"
        assert info["exchanges"] == (2, 2, 0) and info["gradient_norm"] > 0
        assert found["info"]["steps"] == 4 and found["bits_bytes"] > 0
        assert optimizer.describe_json()["steps"] == 4 and "adam" in optimizer.describe()
        assert optimizer.tensor_statistics(1)["count"] == COUNT + 1
        assert optimizer.check() is None
        with pytest.raises(onebit.Error, match="tensor is 3"):
            optimizer.tensor_statistics(3)
        gradients[0][7] = numpy.inf
        assert optimizer.step(1e-2) is Status.SKIPPED and optimizer.loss_scale == 512
        optimizer.set_gradient(0, None)
        assert optimizer.step(1e-2) is Status.OK
        with pytest.raises(onebit.Error, match="tensor is 9"):
            optimizer.set_gradient(9, None)

    on_ranks(2, body)


def test_wrong_tensors_on_one_rank_are_told_to_all(on_ranks):
    good = numpy.zeros(10, numpy.float32)
    wrong = [
        ([(good, numpy.zeros(9, numpy.float32))], "tensors[0].gradient has 9 elements"),
        ([(numpy.zeros(10), None)], "tensors[0].parameter has type <f8"),
        ([(good, None), (numpy.zeros(3, numpy.float16), None)], "tensors[1].parameter has type"),
        ([onebit.Tensor(good, None, weight_decay=-1)], "weight_decay"),
    ]

    def body(comm):
        for tensors, words in wrong:
            mine = tensors if comm.rank == 0 else [(good.copy(), None)]
            with pytest.raises(onebit.Error) as caught:
                onebit.Adam(comm, mine)
            if comm.rank == 0:
                assert caught.value.status is Status.ERROR_ARGUMENT
                assert words in caught.value.message
            else:
                assert caught.value.status in (Status.ERROR_PEER, Status.ERROR_MISMATCH)
        with pytest.raises(TypeError, match="no option 'betas'"):
            onebit.Adam(comm, [(good.copy(), None)], betas=(0.9, 0.99))

    on_ranks(2, body)
