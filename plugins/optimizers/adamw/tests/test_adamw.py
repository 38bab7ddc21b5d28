"""AdamW over pieces, against the paper's algorithm in fp64."""

from dataclasses import dataclass, field

import pytest
import torch
from mplug_adamw import AdamW
from torch import Tensor

from mplug import Init, Mesh, Optimizer, Parameter, Piece, Placement, StepScalars

SHAPES = {"matrix": (5, 3), "vector": (4,), "decayed_vector": (3,), "free_matrix": (2, 2)}
DECAY = {"decayed_vector": True, "free_matrix": False}
INIT, MESH = Init("constant"), Mesh.of([], 1)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pieces() -> list[Piece]:
    found = []
    for number, (name, shape) in enumerate(SHAPES.items()):
        parameter = Parameter(("a", "b")[: len(shape)], INIT, decay=DECAY.get(name))
        placement = Placement(name, parameter, shape, MESH, (0,))
        found.append(Piece(name, drawn(*shape, seed=number), torch.zeros(shape), None, parameter, placement))
    return found


def scalars(lr: float, weight_decay: float = 0.1, scale: float = 1.0, skip: bool = False) -> StepScalars:
    return StepScalars(torch.tensor(lr), torch.tensor(scale), torch.tensor(float(skip)), weight_decay)


def optimizer(of: list[Piece], **config: float) -> Optimizer:
    return AdamW(AdamW.Config(**config)).build_optimizer(of)


@dataclass
class Paper:
    """Algorithm 2 of arXiv 1711.05101, with the decay that is decoupled multiplied by the learning rate."""

    weight: Tensor
    decays: bool
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    step: int = 0
    moments: list[Tensor] = field(default_factory=list)

    def update(self, gradient: Tensor, lr: float, decay: float) -> None:
        first, second = self.moments or (torch.zeros_like(self.weight), torch.zeros_like(self.weight))
        self.step += 1
        first = self.beta1 * first + (1 - self.beta1) * gradient
        second = self.beta2 * second + (1 - self.beta2) * gradient**2
        self.moments = [first, second]
        unbiased = first / (1 - self.beta1**self.step), second / (1 - self.beta2**self.step)
        decayed = self.weight * (1 - lr * decay) if self.decays else self.weight
        self.weight = decayed - lr * unbiased[0] / (unbiased[1].sqrt() + self.eps)


def papers(of: list[Piece], **config: float) -> dict[str, Paper]:
    decays = {"matrix": True, "vector": False, "decayed_vector": True, "free_matrix": False}
    return {piece.name: Paper(piece.master.double(), decays[piece.name], **config) for piece in of}


STEPS = [  # lr, weight decay, scale
    (1e-2, 0.1, 1.0),
    (2e-2, 0.1, 0.25),
    (5e-3, 0.0, 4.0),
    (0.0, 0.5, 1.0),
    (1e-1, 0.3, 1e-3),
    (3e-4, 0.2, 10.0),
]


@pytest.mark.parametrize("config", [{}, {"beta1": 0.5, "beta2": 0.999, "eps": 1e-3}, {"beta1": 0.0, "eps": 1e-6}])
def test_weights_and_moments_are_those_of_the_paper_while_rate_decay_and_scale_change(config: dict[str, float]) -> None:
    mine = pieces()
    exact, adamw = papers(mine, **config), optimizer(mine, **config)
    for number, (lr, decay, scale) in enumerate(STEPS):
        for piece in mine:
            piece.gradient.copy_(drawn(*piece.gradient.shape, seed=100 + number))
            exact[piece.name].update(piece.gradient.double() * scale, lr, decay)
        adamw.step(scalars(lr, decay, scale))
        for piece in mine:
            right = exact[piece.name]
            torch.testing.assert_close(piece.master.double(), right.weight, rtol=2e-6, atol=2e-7)
            state = adamw.state(piece)
            assert float(state["step"]) == number + 1
            torch.testing.assert_close(state["exp_avg"].double(), right.moments[0], rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(state["exp_avg_sq"].double(), right.moments[1], rtol=1e-5, atol=1e-9)


def test_decay_applies_to_those_parameters_only_whose_plan_says_so() -> None:
    mine = pieces()
    before = {piece.name: piece.master.clone() for piece in mine}
    optimizer(mine).step(scalars(0.1, 0.5))  # all gradients are zero, so nothing else moves a weight
    for piece in mine:
        factor = 0.95 if piece.name in ("matrix", "decayed_vector") else 1.0
        torch.testing.assert_close(piece.master, before[piece.name] * factor, rtol=1e-6, atol=0)


def test_it_works_where_no_parameter_decays_or_all_do() -> None:
    for names in (("matrix", "decayed_vector"), ("vector", "free_matrix")):
        mine = [piece for piece in pieces() if piece.name in names]
        before = [piece.master.clone() for piece in mine]
        for piece in mine:
            piece.gradient.fill_(1.0)
        optimizer(mine).step(scalars(0.1))
        assert all(not torch.equal(piece.master, old) for piece, old in zip(mine, before, strict=True))


@pytest.mark.parametrize("broken", [1.0, float("nan"), float("inf")])
def test_a_step_that_is_skipped_changes_nothing_at_all(broken: float) -> None:
    mine = pieces()
    adamw = optimizer(mine)
    for piece in mine:
        piece.gradient.copy_(drawn(*piece.gradient.shape, seed=3))
    adamw.step(scalars(0.1))
    for piece in mine:
        piece.gradient.fill_(broken)
    before = {p.name: [t.clone() for t in (p.master, p.gradient, *adamw.state(p).values())] for p in mine}
    adamw.step(scalars(0.1, scale=broken, skip=True))
    for piece in mine:
        after = (piece.master, piece.gradient, *adamw.state(piece).values())
        for now, then in zip(after, before[piece.name], strict=True):
            torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


def test_a_step_after_a_skipped_one_is_as_if_that_had_not_been() -> None:
    results = []
    for skips in (0, 3):
        mine = pieces()
        adamw = optimizer(mine)
        for step in range(2):
            for piece in mine:
                piece.gradient.fill_(float("nan"))
            for _ in range(skips):
                adamw.step(scalars(0.1, skip=True))
            for piece in mine:
                piece.gradient.copy_(drawn(*piece.gradient.shape, seed=step))
            adamw.step(scalars(0.1))
        results.append([piece.master for piece in mine])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_masters_are_updated_in_place() -> None:
    mine = pieces()
    addresses = [piece.master.data_ptr() for piece in mine]
    adamw = optimizer(mine)
    adamw.step(scalars(0.1))
    assert [piece.master.data_ptr() for piece in mine] == addresses
    assert not any(piece.master.requires_grad for piece in mine)


def test_gradients_are_read_where_they_are_at_every_step() -> None:
    mine = pieces()
    adamw = optimizer(mine)
    adamw.step(scalars(0.1, 0.0))
    before = mine[0].master.clone()
    mine[0].gradient.fill_(1.0)
    adamw.step(scalars(0.1, 0.0))
    assert not torch.equal(mine[0].master, before)


def test_the_state_is_live_and_of_the_pieces_shape_or_scalar() -> None:
    mine = pieces()
    adamw = optimizer(mine)
    held = {piece.name: adamw.state(piece) for piece in mine}
    for piece in mine:
        piece.gradient.fill_(1.0)
        assert {tuple(tensor.shape) for tensor in held[piece.name].values()} == {(), tuple(piece.master.shape)}
        assert not any(tensor.requires_grad for tensor in held[piece.name].values())
    adamw.step(scalars(0.1))
    for state in held.values():
        assert float(state["step"]) == 1
        assert float(state["exp_avg"].flatten()[0]) == pytest.approx(0.1)


def test_copying_into_the_state_continues_another_optimizer_bitwise() -> None:
    def step(of: list[Piece], adamw: Optimizer, number: int) -> None:
        for piece in of:
            piece.gradient.copy_(drawn(*piece.gradient.shape, seed=number))
        adamw.step(scalars(0.05 / number))

    one, other = pieces(), pieces()
    first = optimizer(one)
    step(one, first, 1)
    step(one, first, 2)
    second = optimizer(other)
    for mine, theirs in zip(other, one, strict=True):
        mine.master.copy_(theirs.master)
        for name, tensor in second.state(mine).items():
            tensor.copy_(first.state(theirs)[name])
    step(one, first, 3)
    step(other, second, 3)
    for mine, theirs in zip(other, one, strict=True):
        assert torch.equal(mine.master, theirs.master)


def test_it_needs_elements_only() -> None:
    assert optimizer(pieces()).needs == "elements"
