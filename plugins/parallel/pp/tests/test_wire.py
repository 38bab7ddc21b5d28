"""What two ranks exchange: two wires of one process, and a queue in place of the network."""

import gc
import re
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mplug_pp.batches import Batches
from mplug_pp.wire import HEADER, Crossing, Wire, key_of
from torch import Tensor

from mplug import RunError
from mplug_schedules import Action, Kind

NAMES = ("hidden", "residual")


class Network:
    """Messages that were sent and not yet received. A send is complete when its message has been received."""

    def __init__(self) -> None:
        self.messages = deque[Tensor]()
        self.groups = list[str]()
        self.received = 0

    def isend(self, tensor: Tensor, peer: int, group: str) -> Any:
        self.messages.append(tensor.clone())
        self.groups.append(f"send {group}")
        number = self.received + len(self.messages)
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: self.received >= number)

    def irecv(self, tensor: Tensor, peer: int, group: str) -> Any:
        self.groups.append(f"receive {group}")

        def wait() -> None:
            message = self.messages.popleft()
            self.received += 1
            assert (message.dtype, message.shape) == (tensor.dtype, tensor.shape), "the network would hang"
            tensor.copy_(message)

        return SimpleNamespace(wait=wait)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    found = Network()
    monkeypatch.setattr("torch.distributed.isend", found.isend)
    monkeypatch.setattr("torch.distributed.irecv", found.irecv)
    return found


def wire(direction: str = "up") -> Wire:
    other = "down" if direction == "up" else "up"
    return Wire(1, "cpu", direction, other)


def key(*tokens: int, **others: tuple[int, ...]) -> Any:
    entries = {"tokens": torch.zeros(tokens, dtype=torch.int64), "generator_key": 3}
    return key_of({**entries, **{name: torch.zeros(shape) for name, shape in others.items()}})  # type: ignore[arg-type]


def activations(dtype: torch.dtype, *shape: int) -> list[Tensor]:
    return [torch.ones(shape, dtype=dtype), torch.zeros(3, dtype=torch.float32)]


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.int64, torch.bool, torch.complex128],
    ids=str,
)
def test_tensors_of_any_dtype_and_number_of_dimensions_arrive(network: Network, dtype: torch.dtype) -> None:
    sender, receiver = Crossing(NAMES), Crossing(NAMES)
    for shape in ((), (2, 3), (1, 2, 1, 2, 1, 2, 1, 2)):
        sent = activations(dtype, *shape)
        sender.send(wire(), sent, key(len(shape), 1))
        received = receiver.receive(wire("down"), key(len(shape), 1))()
        for one, other in zip(received, sent, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one.to(torch.complex128), other.to(torch.complex128))
    assert not network.messages


def test_only_the_first_micro_batch_with_entries_of_some_shapes_is_announced(network: Network) -> None:
    """Lengths may vary with any entry: two micro batches with the same tokens may have other document lengths."""
    sender = Crossing(NAMES)
    keys = [key(2, 8), key(2, 8), key(2, 6), key(2, 8, lengths=(2, 3)), key(2, 8, lengths=(2, 4)), key(2, 8)]
    for entries, announced in zip(keys, (True, False, True, True, True, False), strict=True):
        sender.send(wire(), activations(torch.float32, 4, 5), entries)
        headers = [message.shape == (HEADER,) for message in network.messages]
        assert headers == ([True, True] if announced else []) + [False, False]
        network.messages.clear()


def test_each_direction_has_a_communicator_of_its_own(network: Network) -> None:
    upper, lower = wire("up"), wire("down")
    for sender, receiver in ((upper, lower), (lower, upper)):
        arrival = receiver.receive([(torch.float32, (2,))])  # before the tensor is needed
        sender.send([torch.ones(2)])
        assert torch.equal(arrival.wait()[0], torch.ones(2))
    assert network.groups == ["receive up", "send up", "receive down", "send down"]


def test_a_sent_tensor_is_released_as_soon_as_it_has_been_sent(network: Network) -> None:
    one, tensor = wire(), torch.ones(2)
    alive = weakref.ref(tensor)
    one.send([tensor])
    del tensor
    one.release()
    assert alive() is not None  # the message is still under way
    one.receive([(torch.float32, (2,))]).wait()
    one.release()
    gc.collect()
    assert alive() is None
    assert not one.under_way


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.bfloat16, (2, 8, 5)), (torch.float32, (2, 8, 6))], ids=["dtype", "shape"]
)
def test_an_activation_that_differs_from_its_announcement_is_an_error_before_it_is_sent(
    network: Network, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """The receiver would hang, or read bytes of one dtype as those of another."""
    sender = Crossing(NAMES)
    sender.send(wire(), activations(torch.float32, 2, 8, 5), key(2, 8))
    network.messages.clear()
    said = rf"'hidden' that crosses .* has {str(dtype)[6:]} of shape {re.escape(str(shape))}, and had float32 of shape "
    with pytest.raises(RunError, match=rf"{said}\(2, 8, 5\) for an earlier micro batch whose entries have the same"):
        sender.send(wire(), activations(dtype, *shape), key(2, 8))
    assert not network.messages


def test_what_a_header_cannot_hold_and_another_name_than_the_receiver_expects_are_refused(network: Network) -> None:
    with pytest.raises(RunError, match=r"'hidden' cannot cross .* its 100 dimensions .* fewer dimensions"):
        Crossing(NAMES).send(wire(), activations(torch.float32, *[1] * 100), key(2, 8))
    Crossing(NAMES).send(wire(), activations(torch.float32, 2, 8, 5), key(2, 8))
    with pytest.raises(RunError, match="sends the activation 'hidden', and this stage expects 'other'"):
        Crossing(("other",) * len(NAMES)).receive(wire(), key(2, 8))


# Micro batches.


class Promised:
    """Micro batches of a loader that promises `number` of them and has `real`; `read` lists those that were read."""

    def __init__(self, number: int, real: int) -> None:
        self.number, self.read, self._numbers = number, list[int](), iter(range(real))

    def __length_hint__(self) -> int:
        return self.number

    def __iter__(self) -> "Promised":
        return self

    def __next__(self) -> Any:
        self.read.append(next(self._numbers))
        return {"number": self.read[-1]}


def batches(source: Any) -> Batches:
    found = Batches(source, lambda batch: batch)
    found.expect([Action(Kind.FORWARD, number) for number in range(3)])
    return found


def test_a_micro_batch_is_read_when_it_is_needed_and_dropped_after_its_last_action() -> None:
    source = Promised(3, 3)
    found = batches(source)
    assert (found.number, source.read) == (3, [])
    assert found[0]["number"] == 0
    assert source.read == [0]
    found.used(0)
    with pytest.raises(KeyError):
        found[0]
    assert found[2]["number"] == 2
    assert source.read == [0, 1, 2]
    found.finish()


def test_micro_batches_of_an_unknown_number_are_counted_first() -> None:
    assert batches(iter([{"number": 0}, {"number": 1}])).number == 2


def test_a_loader_that_breaks_its_promise_is_an_error() -> None:
    with pytest.raises(RunError, match="ended after 1 of the 3 micro batches of a step"):
        batches(Promised(3, 1))[2]
    found = batches(Promised(3, 4))
    found[2]
    with pytest.raises(RunError, match="more than the 3 micro batches"):
        found.finish()
