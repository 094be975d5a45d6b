"""The backend of torch.distributed: a program that knows nothing of it, and which call is of which
tensor."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not here")


@pytest.fixture
def backend():
    import onebit

    try:
        from onebit.torch import backend
    except onebit.Error as error:
        assert error.status is onebit.Status.ERROR_UNSUPPORTED
        pytest.skip(error.message)
    return backend


def test_a_program_that_is_not_changed(backend):
    command = [sys.executable, str(HERE / "backend_ranks.py"), "3"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert sum(line.startswith("all well") for line in ran.stdout.splitlines()) == 3, ran.stdout


def test_which_tensor_a_call_is_of(backend):
    """Three tensors, of which two have as many elements; a fourth between them begins anew."""
    order, step = backend.Order(), [(5, "a"), (7, "b"), (5, "c")]
    found = [order.add(*call) for call in (step * 6)[:16]]
    assert found == [(None, True, False)] * 15 + [(None, True, True)]
    assert order.period() == 3
    order.repeat(3)  # the 16th was the first of a step
    assert [order.add(*call)[0] for call in step[1:] + step] == [0, 1, 2, 0, 1]
    assert order.add(5, "b") == (2, False, False)  # of this rank alone: it tells the others
    assert order.add(9, "d") == (None, True, False)  # of all ranks
    assert order.period() == 0 and order.add(7, "b")[0] is None
    order.forget()
    for number in range(1100):  # a sequence that does not repeat is not kept for ever
        assert order.add(number, "a")[2] == (number % 1025 + 1 in backend._LOOKS)
    assert order.period() == 0 and len(order._calls) < 100
    with pytest.raises(ValueError, match="bits is 3"):
        backend.register(bits=3)
