"""AdamW over pieces, against the paper's algorithm in fp64."""

import torch
from mplug_adamw import AdamW
from mplug_testing import DenseStep, OptimizerSuite
from torch import Tensor

<<<<<<< HEAD
from mplug import Parameter
=======
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
        placement = Placement(name, parameter, shape, MESH)
        found.append(Piece(name, drawn(*shape, seed=number), torch.zeros(shape), None, parameter, placement))
    return found


def scalars(lr: float, weight_decay: float = 0.1, scale: float = 1.0, skip: bool = False) -> StepScalars:
    return StepScalars(torch.tensor(lr), torch.tensor(scale), torch.tensor(float(skip)), torch.tensor(weight_decay))


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


def test_it_works_where_no_parameter_decays_or_all_do() -> None:
    for names in (("matrix", "decayed_vector"), ("vector", "free_matrix")):
        mine = [piece for piece in pieces() if piece.name in names]
        before = [piece.master.clone() for piece in mine]
        for piece in mine:
            piece.gradient.fill_(1.0)
        optimizer(mine).step(scalars(0.1))
        assert all(not torch.equal(piece.master, old) for piece, old in zip(mine, before, strict=True))
>>>>>>> main


class TestAdamW(OptimizerSuite):
    plugin = "adamw"
    layouts = ("pp2", "fsdp2")

    def reference(self, weight: Tensor, steps: list[DenseStep], parameter: Parameter, config: AdamW.Config) -> Tensor:
        """Algorithm 2 of arXiv 1711.05101, with the decay that is decoupled multiplied by the learning rate."""
        first, second = torch.zeros_like(weight), torch.zeros_like(weight)
        for number, (gradient, lr, decay) in enumerate(steps, 1):
            first = config.beta1 * first + (1 - config.beta1) * gradient
            second = config.beta2 * second + (1 - config.beta2) * gradient**2
            unbiased = first / (1 - config.beta1**number), second / (1 - config.beta2**number)
            weight = weight * (1 - lr * decay) - lr * unbiased[0] / (unbiased[1].sqrt() + config.eps)
        return weight


class TestWithOtherMoments(TestAdamW):
    settings = {"optimizer.beta1": 0.5, "optimizer.beta2": 0.999, "optimizer.eps": 1e-3}
    layouts = ()
    checks_fields = False


class TestWithoutAFirstMoment(TestWithOtherMoments):
    settings = {"optimizer.beta1": 0.0, "optimizer.eps": 1e-6}
