"""What two stages exchange: two wires of one process, and a queue in place of the network."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mplug_pp.wire import HEADER, Wire
from torch import Tensor

from mplug import RunError

NAMES = ("hidden", "residual")


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> deque[Tensor]:
    """The messages that were sent and not yet received."""
    queue = deque[Tensor]()

    def isend(tensor: Tensor, neighbour: int, group: Any) -> Any:
        queue.append(tensor.clone())
        return SimpleNamespace(wait=lambda: None)

    def recv(tensor: Tensor, neighbour: int, group: Any) -> None:
        message = queue.popleft()
        assert (message.dtype, message.shape) == (tensor.dtype, tensor.shape), "the network would hang"
        tensor.copy_(message)

    monkeypatch.setattr("torch.distributed.isend", isend)
    monkeypatch.setattr("torch.distributed.recv", recv)
    return queue


def wire() -> Wire:
    run: Any = SimpleNamespace(device="cpu", group=lambda _: None)
    return Wire(run, 1, NAMES)


def batch(*tokens: int) -> dict[str, Tensor]:
    return {"tokens": torch.zeros(tokens, dtype=torch.int64)}


def activations(dtype: torch.dtype, *shape: int) -> list[Tensor]:
    return [torch.ones(shape, dtype=dtype), torch.zeros(3, dtype=torch.float32)]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool, torch.complex128], ids=str
)
def test_tensors_of_any_dtype_and_number_of_dimensions_arrive(messages: deque[Tensor], dtype: torch.dtype) -> None:
    sender, receiver = wire(), wire()
    for shape in ((), (2, 3), (1, 2, 1, 2, 1, 2, 1, 2)):
        sent = activations(dtype, *shape)
        sender.send_announced(sent, batch(len(shape), 1))
        received = receiver.receive(batch(len(shape), 1))
        for one, other in zip(received, sent, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one.to(torch.complex128), other.to(torch.complex128))
    assert not messages


def test_only_the_first_micro_batch_of_a_shape_of_tokens_is_announced(messages: deque[Tensor]) -> None:
    sender = wire()
    for tokens, length in (((2, 8), 4), ((2, 8), 2), ((2, 6), 4)):
        sender.send_announced(activations(torch.float32, *tokens, 5), batch(*tokens))
        assert [message.shape == (HEADER,) for message in messages] == [True, True, False, False][-length:]
        messages.clear()


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.bfloat16, (2, 8, 5)), (torch.float32, (2, 8, 6))], ids=["dtype", "shape"]
)
def test_an_activation_that_differs_from_its_announcement_is_an_error_before_it_is_sent(
    messages: deque[Tensor], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """The receiver would hang, or read bytes of one dtype as those of another."""
    sender, receiver = wire(), wire()
    sender.send_announced(activations(torch.float32, 2, 8, 5), batch(2, 8))
    receiver.receive(batch(2, 8))
    with pytest.raises(RunError) as raised:
        sender.send_announced(activations(dtype, *shape), batch(2, 8))
    assert str(raised.value) == (
        f"the activation 'hidden' that crosses pipeline stages has {str(dtype)[6:]} of shape {shape} for tokens of "
        f"shape (2, 8), and had float32 of shape (2, 8, 5) before; it must keep its dtype and shape"
    )
    assert not messages


def test_a_tensor_with_too_many_dimensions_for_a_header_is_refused() -> None:
    with pytest.raises(RunError, match="'hidden' has 100 dimensions, too many to cross pipeline stages"):
        wire().send_announced(activations(torch.float32, *[1] * 100), batch(2, 8))
