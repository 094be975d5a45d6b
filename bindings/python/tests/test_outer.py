"""Tests the outer step on numpy arrays and torch tensors; ranks are threads."""

import threading

import numpy
import onebit
import pytest
from onebit import Status

COUNTS = (600, 33)


def make_parameters(dtype=numpy.float32):
    return [numpy.zeros(count, dtype) for count in COUNTS]


def train_locally(parameters, rank, step):
    for number, one in enumerate(parameters):
        target = numpy.random.default_rng([rank, step, number]).standard_normal(one.size)
        one -= (0.1 * (one - target)).astype(one.dtype)


def run_outer_steps(comm, parameters, outer, first, last):
    for step in range(first, last):
        train_locally(parameters, comm.rank, step)
        assert outer.step(1 + comm.rank) is Status.OK


@pytest.mark.parametrize("dtype", [numpy.float32, numpy.float16])
def test_checkpoints_go_on_to_the_bit(on_ranks, tmp_path, dtype):
    options = {"local_steps": 4, "delay": 2, "fragments": 2, "rule": "momentum", "weighted": 1}
    parts = [None, None]

    def body(comm):
        parameters, other = make_parameters(dtype), make_parameters(dtype)
        outer = onebit.Outer(comm, parameters, [1], **options)
        again = onebit.Outer(comm, other, [1], **options)
        run_outer_steps(comm, parameters, outer, 0, 5)
        parts[comm.rank] = outer.save()
        outer.save_files(tmp_path / "saved")
        again.load_files(tmp_path / "saved")
        assert again.info()["in_flight"] == outer.info()["in_flight"] == 1
        run_outer_steps(comm, parameters, outer, 5, 12)
        run_outer_steps(comm, other, again, 5, 12)
        assert all((a == b).all() for a, b in zip(parameters, other))
        again.load(parts)
        run_outer_steps(comm, other, again, 5, 12)
        assert all((a == b).all() for a, b in zip(parameters, other))
        outer.synchronize()
        return outer.info()["checksum"], [one.copy() for one in parameters]

    first, second = on_ranks(2, body)
    assert first[0] == second[0]
    assert all((a == b).all() for a, b in zip(first[1], second[1]))


@pytest.mark.parametrize("kind", ["outer", "optimizer"])
def test_the_others_go_on_without_a_lost_rank(on_ranks, kind):
    stepped = threading.Barrier(3)

    def make_stepper(comm, parameters, gradients):
        if kind == "outer":
            made = onebit.Outer(comm, parameters, local_steps=2)
            return made, made.step
        made = onebit.EfficientAdam(comm, list(zip(parameters, gradients)))
        return made, lambda: made.step(0.01)

    def local(comm, parameters, gradients, step):
        if kind == "outer":
            train_locally(parameters, comm.rank, step)
        for number, one in enumerate(gradients):
            one[:] = numpy.random.default_rng([comm.rank, step, number]).standard_normal(one.size)

    def body(comm):
        parameters, gradients = make_parameters(), make_parameters()
        made, step = make_stepper(comm, parameters, gradients)
        for number in range(3):
            local(comm, parameters, gradients, number)
            assert step() is Status.OK
        stepped.wait()  # an abort would end a step that another rank is still making
        if comm.rank == 2:
            comm.abort()
            made.close()
            comm.close()
            return None
        with pytest.raises(onebit.Error) as told:
            for number in range(3, 6):
                local(comm, parameters, gradients, number)
                step()
        assert told.value.status in (Status.ERROR_TRANSPORT, Status.ERROR_PEER)
        left = made.shrink()
        assert left.size == 2 and left.rank == comm.rank
        comm.close()  # the optimizer has another communicator now
        for number in range(6, 10):
            local(left, parameters, gradients, number)
            assert step() is Status.OK
        if kind == "outer":
            made.synchronize()
        left.close()  # closes the objects on it too
        with pytest.raises(onebit.Error, match="is closed"):
            step()
        return parameters

    first, second, _ = on_ranks(3, body)
    assert any(one.any() for one in first)
    assert all((a == b).all() for a, b in zip(first, second))


def test_what_is_wrong_is_told_on_all_ranks(on_ranks):
    def body(comm):
        mixed = [numpy.zeros(3, numpy.float32), numpy.zeros(3, numpy.float16)]
        with pytest.raises(onebit.Error) as told:
            onebit.Outer(comm, mixed if comm.rank else make_parameters())
        assert told.value.status is (Status.ERROR_ARGUMENT if comm.rank else Status.ERROR_PEER)
        with pytest.raises(TypeError if comm.rank else onebit.Error):
            onebit.Outer(comm, make_parameters(), **({"nothing": 1} if comm.rank else {}))
        parameters = [one + 7 for one in make_parameters()]
        with onebit.Outer(comm, parameters, rule="nesterov", bits=1) as outer:
            assert "set bits to 4" in outer.check()
            assert (outer.consensus(1, numpy.zeros(33, numpy.float32)) == 7).all()
            with pytest.raises(onebit.Error, match="out has 3 elements"):
                outer.consensus(0, numpy.zeros(3, numpy.float32))
        with pytest.raises(onebit.Error, match="is closed"):
            outer.step()

    on_ranks(2, body)


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 1}, {"rule": "nesterov"}])
def test_copies_of_tensors(on_ranks, options):
    """Checks that copies, as for tensors on a device, give the same bits, also after a state was
    loaded."""
    torch = pytest.importorskip("torch")
    parts = {stage: [None, None] for stage in ("auto", "host")}

    def body(comm):
        ways = [[torch.from_numpy(one) for one in make_parameters()] for _ in parts]
        options_of = {"local_steps": 4, **options}
        outers = [onebit.Outer(comm, one, [1], stage, **options_of) for one, stage in zip(ways, parts)]

        def steps(first, last):
            for step in range(first, last):
                for parameters, outer in zip(ways, outers):
                    train_locally([one.numpy() for one in parameters], comm.rank, step)
                    outer.step()
                assert all(torch.equal(*one) for one in zip(*ways)), step

        steps(0, 6)
        for saved, outer in zip(parts.values(), outers):
            saved[comm.rank] = outer.save()
        assert parts["auto"][comm.rank] == parts["host"][comm.rank]
        steps(6, 11)
        before = [one.clone() for one in ways[0]]
        for saved, outer in zip(parts.values(), outers):
            outer.load(saved)
        steps(6, 11)
        assert all(torch.equal(*one) for one in zip(before, ways[1]))
        for outer in outers:
            outer.synchronize()
        assert all(torch.equal(*one) for one in zip(*ways))
        return ways[1]

    assert all(torch.equal(*one) for one in zip(*on_ranks(2, body)))


def test_diloco(on_ranks):
    torch = pytest.importorskip("torch")
    import onebit.torch

    if not hasattr(torch.optim.Optimizer, "register_step_post_hook"):
        pytest.skip("this torch has no register_step_post_hook")

    def body(comm):
        ways = [torch.nn.Linear(20, 30) for _ in range(2)]
        with torch.no_grad():
            for one in [*ways[0].parameters(), *ways[1].parameters()]:
                one.fill_(0.5)
        ways[1].bias.requires_grad_(False)
        ways[0].bias.requires_grad_(False)
        inner = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in ways]
        sgd = torch.optim.SGD(ways[0].parameters(), lr=0.7, momentum=0.9, nesterov=True)
        diloco = onebit.torch.DiLoCo(ways[0], inner[0], 3, outer=sgd, comm=comm)
        outer = onebit.Outer(comm, [ways[1].weight], local_steps=3, rule="nesterov")
        assert diloco.outer.info()["bits"] == 4 and diloco.outer.info()["momentum"] == 0.9
        saved = None

        def steps(first, last, both=True):
            for step in range(first, last):
                random = torch.Generator().manual_seed(10 * step + comm.rank)
                points = torch.randn(8, 20, generator=random)
                for one, optimizer in zip(ways, inner):
                    optimizer.zero_grad()
                    one(points).square().mean().backward()
                    optimizer.step()
                if both:
                    outer.step()

        with diloco:
            steps(0, 7)
            assert diloco.status is Status.OK and diloco.outer.info()["steps"] == 7
            assert torch.equal(ways[0].weight, ways[1].weight)
            saved = {**diloco.state_dict(), "inner": inner[0].state_dict()}
            saved = {name: torch.clone(one) if name == "part" else one for name, one in saved.items()}
            weight = ways[0].weight.detach().clone()
        steps(7, 8, False)  # steps outside of the context do not count
        assert diloco.outer.info()["steps"] == 7
        diloco.load_state_dict(saved)
        assert torch.equal(ways[0].weight, weight)
        diloco.synchronize()
        with pytest.raises(onebit.Error, match="dampening of outer is 0.1"):
            wrong = torch.optim.SGD(ways[0].parameters(), lr=1.0, momentum=0.9, dampening=0.1)
            onebit.torch.DiLoCo(ways[0], inner[0], outer=wrong, comm=comm)
        with pytest.raises(onebit.Error, match="outer is a AdamW"):
            onebit.torch.DiLoCo(ways[0], inner[0], outer=inner[0], comm=comm)
        diloco.close(), outer.close()
        return ways[0].weight.detach()

    assert torch.equal(*on_ranks(2, body))


def test_sites_with_weights_save_and_load_by_themselves(on_ranks):
    options = {"local_steps": 3, "bits": 2, "weighted": 1, "patience": 1000.0, "delay": 2}

    def body(comm):
        alone = onebit.Communicator.self_()
        first, second = make_parameters(), make_parameters()
        outer = onebit.OuterSites(alone, comm, first, [1], **options)
        again = onebit.OuterSites(alone, comm, second, [1], **options)
        run_outer_steps(comm, first, outer, 0, 4)
        again.load([outer.save()])
        run_outer_steps(comm, first, outer, 4, 8)
        run_outer_steps(comm, second, again, 4, 8)
        assert all((one == other).all() for one, other in zip(first, second))
        outer.move(comm)
        outer.synchronize()
        assert outer.sites()["sites"] == 3 and outer.sites()["site"] == comm.rank
        with pytest.raises(onebit.Error, match="ONEBIT_OUTER_SPARSE is not supported with sites"):
            onebit.OuterSites(alone, comm, make_parameters(), bits=-1)
        again.close()
        outer.close()
        return first

    for parameters in on_ranks(3, body)[1:]:
        assert parameters[0].any()
