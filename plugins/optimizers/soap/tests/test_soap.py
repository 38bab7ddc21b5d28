"""SOAP over pieces: mplug's suite against the algorithm of the paper in fp64."""

import pytest
import torch
from mplug_soap import SOAP
from mplug_soap.both import is_hidden_matrix
from mplug_soap.rotated import Side
from torch import Tensor

from mplug import Init, Parameter, ShapedState
from mplug_testing import DenseStep, OptimizerSuite, dense
from mplug_testing.harness import tiny_run


@pytest.mark.wide("reshard", tests=["test_a_layout_gives_the_weights_of_one_process"])
class TestSOAP(OptimizerSuite):
    plugin = "soap"
    layouts = ("fsdp2tp2",)
    settings = {"optimizer.refresh_every": 2, "optimizer.eps": 1e-2}
    examples = {"tables": [[]], "largest_factor": [9]}
    tolerance = 0.01  # roots of small second moments amplify the rounding of bases in fp32; fp64 is exact below

    def reference(self, weight: Tensor, steps: list[DenseStep], parameter: Parameter, config: SOAP.Config) -> Tensor:
        is_hidden = weight.dim() == 2 and "vocab" not in parameter.axes
        return soap(weight, steps, config) if is_hidden else adamw(weight, steps, config)


def soap(weight: Tensor, steps: list[DenseStep], config: SOAP.Config) -> Tensor:
    """With the moments of the paper: both in the coordinates of the bases, the first one carried over at a refresh."""
    rows, columns = weight.shape
    factors = [weight.new_zeros(n, n, dtype=torch.float64) for n in (rows, columns)]
    bases = [torch.eye(n, dtype=torch.float64, device=weight.device) for n in (rows, columns)]
    has = [n <= config.largest_factor for n in (rows, columns)]
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for number, (gradient, lr, decay) in enumerate(steps):
        weight = weight * (1 - lr * decay)
        left, right = bases
        if number > 0:
            rotated = left.T @ gradient @ right
            first = config.beta1 * first + (1 - config.beta1) * rotated
            second = config.beta2 * second + (1 - config.beta2) * rotated**2
            root = (second / (1 - config.beta2**number)).sqrt() + config.eps
            weight = weight - lr * left @ (first / (1 - config.beta1**number) / root) @ right.T
        original = left @ first @ right.T
        for side, product in enumerate((gradient @ gradient.T, gradient.T @ gradient)):
            if not has[side]:
                continue
            factors[side] = config.factor_beta * factors[side] + (1 - config.factor_beta) * product
            for _ in range(10 if number == 0 else int(number % config.refresh_every == 0)):
                identity = torch.eye(len(product), device=weight.device)
                shifted = factors[side] + config.shift * factors[side].trace() / len(product) * identity
                quotients = torch.stack([vector @ shifted @ vector for vector in bases[side].T])
                order = quotients.bfloat16().argsort(descending=True, stable=True)
                bases[side] = torch.linalg.qr(shifted @ bases[side][:, order])[0]
                second = second.index_select(side, order)
        first = bases[0].T @ original @ bases[1]
    return weight


def adamw(weight: Tensor, steps: list[DenseStep], config: SOAP.Config) -> Tensor:
    tensor = torch.nn.Parameter(weight.clone())
    torchs = torch.optim.AdamW([tensor], betas=(config.beta1, config.beta2), eps=config.eps, foreach=False)
    for gradient, lr, decay in steps:
        tensor.grad = gradient
        torchs.param_groups[0].update(lr=lr, weight_decay=decay)
        torchs.step()
    return tensor.detach()


class TestOneSide(TestSOAP):
    """Sides of more than 12 elements have no factor."""

    settings = {"optimizer.largest_factor": 12, "optimizer.refresh_every": 3, "optimizer.eps": 1e-4}
    settings |= {"optimizer.shift": 0.01, "optimizer.factor_beta": 0.8, "optimizer.beta1": 0.7}
    layouts = ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
class TestOnAGPU(TestSOAP):
    settings = {"trainer.device": "cuda", **TestSOAP.settings}
    layouts = ()


MATRICES = {"matrix", "wide matrix", "fused matrices", "experts"}


def bench_in_fp64(names: set[str], **fields: float) -> dense.Bench:
    settings = {f"optimizer.{name}": value for name, value in fields.items()}
    run = tiny_run({"optimizer.name": "soap", "trainer.precision": "fp64", **settings})
    pieces = [piece for piece in dense.make_pieces("cpu") if piece.name in names]
    for piece in pieces:
        piece.master, piece.gradient = piece.master.double(), piece.gradient.double()
    return dense.Bench(run, pieces)


@pytest.mark.parametrize("refresh_every", [1, 3])
def test_in_fp64_updates_are_those_of_the_paper(refresh_every: int) -> None:
    bench = bench_in_fp64(MATRICES, refresh_every=refresh_every)
    before = {piece.name: piece.master.clone() for piece in bench.pieces}
    for number in range(8):
        bench.step(number, lr=0.01, weight_decay=0.1)
    for piece in bench.pieces:
        for name, where in dense.matrices(piece):
            steps = [
                DenseStep(
                    dense.gradient_of(piece, n)[where].double(), float(torch.tensor(0.01)), float(torch.tensor(0.1))
                )
                for n in range(8)
            ]
            exact = soap(before[piece.name][where], steps, bench.run.config.optimizer)
            error = float((piece.master[where] - exact).abs().max())
            assert error <= 1e-6 * float((exact - before[piece.name][where]).abs().max()), name


def test_bases_become_the_eigenvectors_of_the_factors() -> None:
    """With the same gradient in every step, the factor in the basis becomes diagonal, in descending order."""
    bench = bench_in_fp64({"wide matrix"}, refresh_every=1)
    for number in range(300):
        bench.step(number, lambda piece, _: dense.gradient_of(piece, 0))
    state = bench.optimizer.state(bench.pieces[0])
    factor, basis = (next(iter(_shaped(state[f"left_{name}"]).parts.values())) for name in ("factor", "basis"))
    rotated = basis.T @ factor @ basis
    values = rotated.diagonal()
    assert float((rotated - values.diag()).abs().max()) <= 1e-6 * float(values.max())
    assert torch.equal(values.sort(descending=True)[0], values)


def test_rounding_chooses_no_basis() -> None:
    """Inputs whose segments have mean 0, as after norms: the first vectors of the standard basis span a null vector."""
    torch.manual_seed(0)
    inputs = torch.randn(25, 4, 16, dtype=torch.float64)
    inputs -= inputs.mean(-1, keepdim=True)
    factor, sides = inputs.flatten(1).mT @ inputs.flatten(1), list[Side]()
    for rounding in (0.0, 1e-15):
        side, noise = Side.new(64, factor), rounding * torch.randn_like(factor)
        side.factor.copy_(factor * (1 + noise + noise.mT))
        side.refresh(10, 1e-3, torch.tensor(False))
        sides.append(side)
    overlaps = (sides[0].basis.mT @ sides[1].basis).abs()
    assert float((overlaps - torch.eye(64)).abs().max()) <= 1e-10


def _shaped(state: Tensor | ShapedState) -> ShapedState:
    assert isinstance(state, ShapedState)
    return state


def test_experts_are_stacked_and_segments_numbered_in_the_state() -> None:
    bench = dense.Bench(tiny_run({"optimizer.name": "soap"}), dense.make_pieces("cpu"))
    of = {piece.name: bench.optimizer.state(piece) for piece in bench.pieces}
    shapes = {n: one.shape for n, one in of["experts"].items() if isinstance(one, ShapedState)}
    assert shapes["left_factor"] == shapes["left_basis"] == (3, 8, 8)
    assert shapes["right_factor"] == (3, 12, 12)
    assert shapes["exp_avg"] == shapes["exp_avg_sq_in_bases"] == (3, 8, 12)
    assert _shaped(of["fused matrices"]["left_factor.0"]).shape == (16, 16)
    assert _shaped(of["fused matrices"]["exp_avg_sq_in_bases.2"]).shape == (8, 12)
    assert set(of["table"]) == {"step", "exp_avg", "exp_avg_sq"}


def test_biases_of_experts_and_tables_are_no_matrices() -> None:
    init = Init("constant")
    for dims, is_matrix in {
        ("expert", "mlp"): False,
        ("vocab", "embed"): False,
        ("expert", "mlp", "embed"): True,
    }.items():
        assert is_hidden_matrix(Parameter(dims, init), ("vocab",)) is is_matrix
