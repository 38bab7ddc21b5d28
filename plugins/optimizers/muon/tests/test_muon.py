"""Muon over pieces: mplug's suite against Muon and AdamW in fp64, and torch.optim.Muon beside it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from mplug_muon import Muon
from mplug_muon.polynomials import POLYNOMIALS, orthogonalized, polynomials
from mplug_muon.routing import is_hidden_matrix
from scanning import HYBRID
from torch import Tensor

from mplug import Init, Parameter, Placement, Segment, UsageError
from mplug.model.build import build_model
from mplug.training.assembly import build
from mplug_matrices import matrices
from mplug_testing import DenseStep, OptimizerSuite, dense
from mplug_testing.harness import tiny_run

ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {
        "model.name": "bert",
        "model.hidden_size": 32,
        "model.num_attention_heads": 4,
        "model.vocab_size": 257,
        "data.name": "masked",
        "data.of": {"name": "mock"},
        "data.mask_token": 256,
    },
    "t5": {
        "model.name": "t5",
        "model.hidden_size": 32,
        "model.vocab_size": 400,
        "data.name": "spans",
        "data.of": {"name": "mock"},
        "data.encoder_length": 16,
        "data.end_token": 1,
    },
}
HIDDEN = {"matrix", "wide matrix", "fused matrices", "matrix that does not decay", "experts"}


class TestMuon(OptimizerSuite):
    plugin = "muon"
    layouts = ("fsdp2tp2",)
    examples = {"tables": [[]], "separate": [["heads"]]}
    without_effect = dict.fromkeys(
        ("qk_clip", "qk_clip_alpha"), "the suite's matrices belong to no attention (test_clip)"
    )

    def reference(self, weight: Tensor, steps: list[DenseStep], parameter: Parameter, config: Muon.Config) -> Tensor:
        is_hidden = weight.dim() == 2 and "vocab" not in parameter.axes
        return muon(weight, steps, config) if is_hidden else adamw(weight, steps, config)


def muon(weight: Tensor, steps: list[DenseStep], config: Muon.Config) -> Tensor:
    """With a running sum of gradients, and the iteration's polynomial applied to singular values themselves."""
    rows, columns = weight.shape
    factor = {"original": max(1, rows / columns) ** 0.5, "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5}
    factor |= {"spectral": max(rows, columns) ** 0.5, "unit_rms_norm": (rows / columns) ** 0.5}
    momentum = torch.zeros_like(weight)
    for gradient, lr, decay in steps:
        momentum = config.momentum * momentum + gradient
        ahead = config.momentum * momentum + gradient if config.nesterov else momentum
        u, values, vh = torch.linalg.svd(ahead, full_matrices=False)
        values = values / values.norm()
        for a, b, c in polynomials(config.iteration, config.num_iterations):
            values = a * values + b * values**3 + c * values**5
        weight = (1 - lr * decay) * weight - lr * factor[config.scale] * (u * values) @ vh
    return weight


def adamw(weight: Tensor, steps: list[DenseStep], config: Muon.Config) -> Tensor:
    tensor, ratio = torch.nn.Parameter(weight.clone()), 1.0 if config.adamw_lr is None else config.adamw_lr / config.lr
    betas = config.adamw_beta1, config.adamw_beta2
    torchs = torch.optim.AdamW([tensor], betas=betas, eps=config.adamw_eps, foreach=False)
    for gradient, lr, decay in steps:
        tensor.grad = gradient
        torchs.param_groups[0].update(lr=lr * ratio, weight_decay=decay)
        torchs.step()
    return tensor.detach()


class TestOriginal(TestMuon):
    """As its author published it, with AdamW at a rate of its own."""

    settings = {"optimizer.scale": "original", "optimizer.lr": 0.02, "optimizer.adamw_lr": 3e-3}
    settings |= {"optimizer.adamw_beta1": 0.7, "optimizer.adamw_eps": 1e-6}
    layouts = ()


class TestWithoutNesterov(TestMuon):
    """And matrices of one shape that are not orthogonalised together are updated alike."""

    settings = {"optimizer.nesterov": False, "optimizer.momentum": 0.8, "optimizer.num_iterations": 3}
    layouts = ()

    @pytest.fixture(autouse=True)
    def _one_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(matrices, "BATCH", 1)


class TestPolarExpress(TestMuon):
    settings = {"optimizer.iteration": "polar_express", "optimizer.num_iterations": 9, "optimizer.scale": "spectral"}
    layouts = ()


class TestQuintic(TestMuon):
    settings = {"optimizer.iteration": "quintic", "optimizer.num_iterations": 6, "optimizer.scale": "unit_rms_norm"}
    layouts = ()


@pytest.mark.parametrize(
    ("iteration", "number", "low", "high"),
    [
        ("newton_schulz", 5, 0.68, 1.21),
        ("quintic", 5, 0.75, 1.25),
        ("polar_express", 5, 0.85, 1.14),
        ("polar_express", 9, 0.9999, 1.0001),
    ],
)
def test_an_iteration_brings_singular_values_near_one(iteration: str, number: int, low: float, high: float) -> None:
    """Those between 0.005 and 1, in fp64, with the singular vectors of the matrix."""
    values = torch.logspace(-2.3, 0, 24, dtype=torch.float64)
    u, v = (torch.linalg.qr(dense.drawn((32, 24), "cpu", word).double())[0] for word in "uv")
    x = (u * values @ v.T)[None]
    found = orthogonalized(x, iteration, number)[0]
    singular = u.T @ found @ v
    torch.testing.assert_close(singular, singular.diagonal().diag(), rtol=0, atol=1e-9)
    assert low <= float(singular.diagonal().min()) <= float(singular.diagonal().max()) <= high


def test_the_polynomials_of_keller_jordan_are_those_of_torch() -> None:
    (own,) = POLYNOMIALS["newton_schulz"][1]
    assert own == torch.optim.Muon([torch.nn.Parameter(torch.zeros(2, 2))]).defaults["ns_coefficients"]


def test_each_head_is_a_matrix_of_its_own_if_the_config_says_so() -> None:
    """A step with separate heads is the step of a weight whose heads are segments, in the plan."""

    def stepped(separate: list[str], parameter: Parameter, shape: tuple[int, ...]) -> Tensor:
        run = tiny_run({"optimizer.name": "muon", "optimizer.separate": separate})
        piece = dense.make_pieces("cpu")[2]
        placement = Placement("fused", parameter, shape, piece.placement.mesh)
        bench = dense.Bench(run, [replace(piece, name="fused", parameter=parameter, placement=placement)])
        bench.step(1)
        return piece.master

    parameter, shape = dense.PARAMETERS["fused matrices"]
    heads = tuple(Segment("rows", 1, 4) for _ in range(8))
    alone = stepped([], replace(parameter, dims=(heads, "embed")), shape)
    assert torch.equal(stepped(["heads", "kv_heads"], parameter, shape), alone)
    assert not torch.equal(stepped([], parameter, shape), alone)


@pytest.mark.gpu
class TestOnAGPU(TestMuon):
    settings = {"trainer.device": "cuda"}
    layouts = ()
    tolerance = 0.05  # the iteration is in bf16


@pytest.mark.parametrize(("scale", "nesterov"), [("original", True), ("match_rms_adamw", False)])
def test_matrices_and_momenta_are_those_of_torchs_muon(scale: str, nesterov: bool) -> None:
    """Which iterates in bf16: updates are compared within what that rounds."""
    run = tiny_run({"optimizer.name": "muon", "optimizer.scale": scale, "optimizer.nesterov": nesterov})
    bench = dense.Bench(run, [piece for piece in dense.make_pieces("cpu") if piece.name in HIDDEN])
    parts = [(piece, where) for piece in bench.pieces for _, where in dense.matrices(piece)]
    copies = [torch.nn.Parameter(piece.master[where].clone()) for piece, where in parts]
    before = [copy.detach().clone() for copy in copies]
    groups = [
        {"params": [copy], "weight_decay": 0.1 if piece.parameter.decays else 0.0}
        for copy, (piece, _) in zip(copies, parts, strict=True)
    ]
    torchs = torch.optim.Muon(groups, lr=1e-2, momentum=0.95, nesterov=nesterov, adjust_lr_fn=scale)
    for number in (1, 2, 3):
        bench.step(number, lr=1e-2, weight_decay=0.1)
        for copy, (piece, where) in zip(copies, parts, strict=True):
            copy.grad = dense.gradient_of(piece, number)[where]
        torchs.step()
    for copy, old, (piece, where) in zip(copies, before, parts, strict=True):
        moved = copy.detach() - old
        assert float((piece.master[where] - copy.detach()).norm()) <= 0.02 * float(moved.norm()), piece.name
        momentum = bench.optimizer.state(piece)["momentum_buffer"][where]
        torch.testing.assert_close(momentum, torchs.state[copy]["momentum_buffer"])


def test_hidden_matrices_have_a_momentum_and_everything_else_the_moments_of_adamw() -> None:
    bench = dense.Bench(tiny_run({"optimizer.name": "muon"}), dense.make_pieces("cpu"))
    found = {piece.name: set(bench.optimizer.state(piece)) for piece in bench.pieces}
    moments = {"step", "exp_avg", "exp_avg_sq"}
    assert found == {name: {"momentum_buffer"} if name in HIDDEN else moments for name in dense.PARAMETERS}


@pytest.mark.parametrize(
    ("fields", "tables"),
    [
        ({}, {"embedding.token.weight", "head.project.weight"}),
        ({"position": "learned"}, {"embedding.token.weight", "embedding.position.weight", "head.project.weight"}),
        ({"tie_embeddings": True}, {"embedding.token.weight"}),
    ],
)
def test_embeddings_and_the_head_of_a_model_are_told_by_the_plan(fields: dict[str, Any], tables: set[str]) -> None:
    run = tiny_run({"optimizer.name": "muon", **{f"model.{name}": value for name, value in fields.items()}})
    parts = build(run)
    matrices = {piece.name for piece in parts.pieces if piece.master.dim() == 2}
    hidden = {piece.name for piece in parts.pieces if "momentum_buffer" in parts.optimizer.state(piece)}
    assert hidden
    assert matrices - hidden == tables


@pytest.mark.parametrize("of_group", [False, True], ids=["run", "group"])
def test_items_of_an_axis_that_the_model_does_not_have_are_refused(of_group: bool) -> None:
    def settings(*separate: str) -> dict[str, Any]:
        muon = {"name": "muon", "separate": list(separate)}
        if of_group:
            return {"optimizer.groups": [{"match": "blocks", "optimizer": muon}]}
        return {f"optimizer.{name}": value for name, value in muon.items()}

    with pytest.raises(UsageError, match=r"optimizer\.separate: no matrix .* 'head'; the axes of rows are .*heads"):
        build_model(tiny_run(settings("heads", "head")))
    build_model(tiny_run(settings("heads", "kv_heads")))


@pytest.mark.parametrize("optimizer", ["muon", "soap"])
@pytest.mark.parametrize(("model", "table"), [("bert", "embedding.token_type.weight"), ("t5", "relative.weight")])
def test_by_default_the_tables_of_encoders_are_no_hidden_matrices(optimizer: str, model: str, table: str) -> None:
    """The rows of token types, and of ranges of distances, are separate vectors."""
    run = tiny_run({"optimizer.name": optimizer, **ENCODERS[model]})
    tables = run.config.optimizer.tables
    found = [one for name, one in build_model(run).placements.items() if name.endswith(table)]
    assert [is_hidden_matrix(one.parameter, tables) for one in found] == [False] * (1 if model == "bert" else 2)


def test_the_rows_of_a_short_convolution_are_separate_and_decays_are_no_matrices() -> None:
    mixers = {**HYBRID, "model.mixer_types": ["gated_delta", "mamba2"]}
    parts = build(tiny_run({"optimizer.name": "muon", **mixers}))
    of_mixers = {piece.name: piece for piece in parts.pieces if ".attn." in piece.name}
    hidden = {name for name in of_mixers if "momentum_buffer" in parts.optimizer.state(of_mixers[name])}
    assert {name.rpartition("attn.")[2] for name in hidden} == {"inputs.weight", "out.weight"}
    undecayed = {name.rpartition(".")[2] for name, piece in of_mixers.items() if not piece.parameter.decay}
    assert {"A_log", "dt_bias", "D"} <= undecayed


def test_biases_of_experts_are_stacked_vectors_and_no_matrices() -> None:
    init = Init("constant")
    shapes = {
        ("expert", "expert_mlp"): False,
        ("every_expert", "embed"): False,
        ("expert", "expert_mlp", "embed"): True,
        ("router_expert", "embed"): True,
    }
    for dims, is_matrix in shapes.items():
        assert is_hidden_matrix(Parameter(dims, init), ("vocab", "positions", "conv")) is is_matrix, dims


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_in_fp64_weights_are_those_of_torchs_muon(scale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own iteration in fp64, which it otherwise computes in bf16."""
    run = tiny_run({"optimizer.name": "muon", "optimizer.scale": scale, "trainer.precision": "fp64"})
    pieces = [piece for piece in dense.make_pieces("cpu") if piece.name in {"matrix", "wide matrix"}]
    for piece in pieces:
        piece.master, piece.gradient = piece.master.double(), piece.gradient.double()
    bench = dense.Bench(run, pieces)
    copies = [torch.nn.Parameter(piece.master.clone()) for piece in pieces]
    lr, decay = (float(torch.tensor(value)) for value in (1e-2, 0.1))
    torchs = torch.optim.Muon(copies, lr=lr, weight_decay=decay, momentum=0.95, nesterov=True, adjust_lr_fn=scale)
    monkeypatch.setattr(Tensor, "bfloat16", lambda x: x)
    for number in (1, 2, 3):
        bench.step(number, lr=1e-2, weight_decay=0.1)
        for copy, piece in zip(copies, pieces, strict=True):
            copy.grad = dense.gradient_of(piece, number).double()
        torchs.step()
    for copy, piece in zip(copies, pieces, strict=True):
        torch.testing.assert_close(piece.master, copy.detach(), rtol=1e-10, atol=1e-10)
