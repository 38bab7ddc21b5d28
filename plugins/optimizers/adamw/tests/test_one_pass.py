"""The kernel against torch.optim.AdamW in fp64, on pieces of odd sizes at odd addresses.

It runs on a GPU, and where there is none in Triton's interpreter, in a process of its own.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from mplug_adamw import AdamW
from mplug_adamw.fused import FusedAdamW
from torch import Tensor
from triton_kernels import DEVICE, INTERPRETED, assert_interpreted, outside_of_the_interpreter, runs, torchs_rounding

from mplug import Init, Mesh, Optimizer, Parameter, Piece, Placement, StepScalars
from mplug_testing.waiting import never_waiting

__all__ = ["torchs_rounding"]


@outside_of_the_interpreter
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself runs here")
def test_the_claims_about_the_kernel_hold_in_tritons_interpreter() -> None:
    assert_interpreted(Path(__file__))


# Pieces, and what they are compared with.

CHUNK, BLOCK = 1 << 12 if INTERPRETED else 1 << 14, 1 << 10


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow."""
    if INTERPRETED:
        monkeypatch.setattr("mplug_adamw.one_pass.CHUNK", CHUNK)


class Kind(NamedTuple):
    """A piece of `numel` elements, whose tensors begin `off` elements after an aligned address."""

    numel: int
    decays: bool = True
    in_bf16: bool = True
    off: int = 0


KINDS = [
    Kind(1, decays=False),
    Kind(3),
    Kind(BLOCK),
    Kind(BLOCK + 1, off=1),
    Kind(CHUNK, in_bf16=False),
    Kind(CHUNK + 5, decays=False, off=2),
    Kind(2 * CHUNK + BLOCK + 6),
    Kind(CHUNK + BLOCK, in_bf16=False, off=3),
]
GUARD, GUARD_VALUE = 8, 77.0


def drawn(numel: int, *seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(hash(seed) % 2**32)).to(DEVICE)


class Held:
    """Pieces whose tensors lie between guards, which no update may touch."""

    def __init__(self, gradients: torch.dtype = torch.float32) -> None:
        self.gradients = gradients
        self.storages: list[tuple[Tensor, slice]] = []
        self.pieces = [self._piece(number, kind) for number, kind in enumerate(KINDS)]

    def _piece(self, number: int, kind: Kind) -> Piece:
        parameter = Parameter(("a",), Init("constant"), decay=kind.decays)
        placement = Placement(f"{number}", parameter, (kind.numel,), Mesh.of([], 1))
        master, gradient = self._between(kind, torch.float32), self._between(kind, self.gradients)
        master.copy_(drawn(kind.numel, number))
        weight = self._between(kind, torch.bfloat16).copy_(master) if kind.in_bf16 else None
        return Piece(placement.name, master, gradient, weight, parameter, placement)

    def _between(self, kind: Kind, dtype: torch.dtype) -> Tensor:
        inside = slice(GUARD + kind.off, GUARD + kind.off + kind.numel)
        storage = torch.full((inside.stop + GUARD,), GUARD_VALUE, dtype=dtype, device=DEVICE)
        self.storages.append((storage, inside))
        return storage[inside].zero_()

    def assert_guards_are_whole(self) -> None:
        for storage, inside in self.storages:
            assert bool((storage[: inside.start] == GUARD_VALUE).all())
            assert bool((storage[inside.stop :] == GUARD_VALUE).all())


def scalars(lr: float, weight_decay: float, scale: float, skip: bool = False) -> StepScalars:
    values = (lr, scale, float(skip), float(weight_decay))
    return StepScalars(*(torch.tensor(value, device=DEVICE) for value in values))


def optimizer(pieces: list[Piece], **config: float) -> Optimizer:
    from mplug_adamw.one_pass import OnePassAdamW

    return OnePassAdamW(pieces, AdamW.Config(**config))


STEPS = [  # lr, weight decay, scale
    (1e-2, 0.1, 1.0),
    (2e-2, 0.1, 0.25),
    (5e-3, 0.0, 4.0),
    (0.0, 0.5, 1.0),
    (1e-1, 0.3, 1e-3),
    (3e-4, 0.2, 10.0),
]


def give(held: Held, number: int, factor: float = 1.0) -> None:
    """Write the gradients of a step."""
    for index, piece in enumerate(held.pieces):
        piece.gradient.copy_(drawn(piece.gradient.numel(), index, 100 + number)).mul_(factor)


def stepped(held: Held, of: Optimizer, numbers: range = range(len(STEPS))) -> Optimizer:
    """The optimizer after steps of `STEPS`."""
    for number in numbers:
        give(held, number)
        of.step(scalars(*STEPS[number]))
    return of


def tensors(held: Held, of: Optimizer) -> dict[str, Tensor]:
    found = {}
    for piece in held.pieces:
        found |= {f"{piece.name}/{name}": tensor for name, tensor in of.state(piece).items()}
        found |= {f"{piece.name}/master": piece.master}
        found |= {} if piece.weight is None else {f"{piece.name}/weight": piece.weight}
    return found


class InFp64:
    """torch.optim.AdamW over copies in fp64, one tensor after the other."""

    def __init__(self, pieces: list[Piece], config: AdamW.Config) -> None:
        self.pieces = pieces
        self.weights = {piece.name: torch.nn.Parameter(piece.master.double().cpu()) for piece in pieces}
        self.decays = {piece.name: piece.parameter.decays for piece in pieces}
        self.torch = torch.optim.AdamW(
            [{"params": [weight], "name": name} for name, weight in self.weights.items()],
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            foreach=False,
        )

    def step(self, lr: float, weight_decay: float, scale: float) -> None:
        for piece in self.pieces:
            self.weights[piece.name].grad = piece.gradient.double().cpu() * scale
        for group in self.torch.param_groups:
            group.update(lr=lr, weight_decay=weight_decay if self.decays[group["name"]] else 0.0)
        self.torch.step()


# Claims.


@runs
@pytest.mark.parametrize("config", [{}, {"beta1": 0.5, "beta2": 0.999, "eps": 1e-3}, {"beta1": 0.0, "eps": 1e-6}])
def test_updates_are_those_of_torch_in_fp64_for_any_size_and_address(config: dict[str, float]) -> None:
    """And weights are the rounded masters."""
    held = Held()
    exact, of = InFp64(held.pieces, AdamW.Config(**config)), optimizer(held.pieces, **config)
    assert of.one_pass
    for number, given in enumerate(STEPS):
        give(held, number)
        exact.step(*given)
        of.step(scalars(*given))
        for piece in held.pieces:
            right, state = exact.weights[piece.name], of.state(piece)
            torch.testing.assert_close(piece.master.double().cpu(), right.data, rtol=2e-6, atol=1e-6)
            assert piece.weight is None or torch.equal(piece.weight, piece.master.bfloat16())
            assert float(state["step"]) == number + 1
            for name, allowed in (("exp_avg", 1e-6), ("exp_avg_sq", 1e-7)):
                moment = exact.torch.state[right][name]
                torch.testing.assert_close(state[name].double().cpu(), moment, rtol=2e-5, atol=allowed)
    held.assert_guards_are_whole()


@runs
def test_gradients_in_bf16_give_the_bits_of_the_same_ones_in_fp32() -> None:
    rounded, whole = Held(torch.bfloat16), Held()
    one, other = optimizer(rounded.pieces), optimizer(whole.pieces)
    for number, given in enumerate(STEPS):
        give(rounded, number)
        for mine, theirs in zip(rounded.pieces, whole.pieces, strict=True):
            theirs.gradient.copy_(mine.gradient)
        one.step(scalars(*given))
        other.step(scalars(*given))
    expected = tensors(whole, other)
    assert [name for name, tensor in tensors(rounded, one).items() if not torch.equal(tensor, expected[name])] == []
    rounded.assert_guards_are_whole()


@runs
@pytest.mark.parametrize("before", [0, 2])
def test_state_is_within_a_millionth_of_torchs_fused_implementation_and_continues_its(before: int) -> None:
    mine, theirs = Held(), Held()
    fused = stepped(theirs, FusedAdamW(theirs.pieces, AdamW.Config()), range(before))
    of = optimizer(mine.pieces)
    for piece, other in zip(mine.pieces, theirs.pieces, strict=True):
        piece.master.copy_(other.master)
        for name, tensor in of.state(piece).items():
            tensor.copy_(fused.state(other)[name])
    for held, one in ((mine, of), (theirs, fused)):
        stepped(held, one, range(before, len(STEPS)))
    expected = tensors(theirs, fused)
    for name, tensor in tensors(mine, of).items():
        if not name.endswith("/weight"):  # which torch leaves to the host
            error = float((tensor - expected[name]).norm() / expected[name].norm())
            assert error <= 1e-6, f"{name} is off by {error}"


@runs
@pytest.mark.parametrize("factor", [1.0, float("nan"), float("inf")])
def test_a_skipped_step_changes_no_bit(factor: float) -> None:
    held = Held()
    of = stepped(held, optimizer(held.pieces), range(1))
    before = {name: tensor.clone() for name, tensor in tensors(held, of).items()}
    give(held, 1, factor)
    of.step(scalars(1e-2, 0.1, factor, skip=True))
    assert [name for name, tensor in tensors(held, of).items() if not torch.equal(tensor, before[name])] == []
    held.assert_guards_are_whole()


@runs
def test_bias_corrections_are_exact_to_fp32_over_a_hundred_thousand_steps() -> None:
    from mplug_adamw.one_pass import unbiased

    betas = torch.tensor([0.9, 0.999]).double()
    found = unbiased(torch.arange(1, 100_001).float(), betas).double()
    logarithms = torch.arange(1, 100_001).double()[:, None] * betas.log()
    right = -torch.expm1(logarithms)
    right[:, 1] = right[:, 1].sqrt()
    torch.testing.assert_close(found, right, rtol=1e-7, atol=0)


@runs
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_steps_neither_compile_again_nor_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    held, compiled = Held(), []
    of = stepped(held, optimizer(held.pieces), range(1))
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **told: compiled.append(told))
    given = [scalars(lr, decay, scale, skip) for lr, decay, scale, skip in ((0.0, 0, 1.0, False), (1.0, 1, 2.0, True))]
    with never_waiting():
        for one in given:
            of.step(one)
    assert compiled == []
