"""`mplug checkpoint upcycle`: the mixture has the logits of the dense model."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from command_line import Cli
from published import Made, loaded, logits
from torch import Tensor

from mplug_checkpoint.conversion import saved_run
from mplug_pretrained.inference import load_for_inference
from mplug_saving.folder import at_step

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": 67}
EXACT = 1e-10


def words(*settings: str) -> list[str]:
    own = ("trainer.device=cpu", "trainer.precision=fp64", "trainer.compile=never", "trainer.seq_length=16")
    return [word for setting in (*own, *settings) for word in ("--set", setting)]


@pytest.fixture
def dense(cli: Cli, tmp_path: Path) -> Path:
    """A run of two steps, so that its weights are not initial ones."""
    sizes = [f"model.{name}={value}" for name, value in {**SIZES, "ffn_hidden_size": 48}.items()]
    trained = words(*sizes, "model.rope_theta=123", "trainer.steps=2", "trainer.eval_every=0", "optimizer.lr=0.05")
    done = cli("train", "--name", "dense", "--model", "llama", "--data", "mock", *trained)
    assert done.returncode == 0, done.stderr
    return tmp_path / "runs" / "dense"


def logits_of(directory: Path) -> Tensor:
    path = at_step(directory / "checkpoints", None)
    model = load_for_inference(saved_run(directory), path)
    model.module.eval()
    return logits(model, torch.arange(32).view(2, 16))


def error(found: Tensor, right: Tensor) -> float:
    return float((found - right).abs().max() / right.abs().max())


MIXTURES = {
    "copies": ["model.num_experts=4"],
    "one expert of a token": [
        "model.num_experts=3",
        "model.num_experts_per_token=1",
        "model.moe_router_normalize=true",
    ],
    "parts": [
        *("model.num_experts=12", "model.num_experts_per_token=6", "model.moe_ffn_hidden_size=16"),
        *("model.moe_router_scale=2.5", "model.moe_router_score=sigmoid", "model.expert_bias_rate=0.01"),
        *("model.moe_router_num_groups=2", "model.moe_router_top_groups=1"),
    ],
    "some blocks": ["model.num_experts=4", "model.num_dense_layers=1"],
}


def test_a_mixture_has_the_logits_of_the_dense_model(dense: Path, cli_here: Cli) -> None:
    right = logits_of(dense)
    for name, settings in MIXTURES.items():
        done = cli_here("checkpoint", "upcycle", str(dense), "--name", name, "--model", "mixtral", *words(*settings))
        assert done.returncode == 0, done.stderr
        assert "its logits are the dense model's" in done.stdout
        assert error(logits_of(dense.parent / name), right) < EXACT, name


def test_a_published_folder_becomes_a_mixture(tmp_path: Path, cli_here: Cli) -> None:
    pytest.importorskip("transformers")
    folder, _ = Made(tmp_path)["qwen3"]
    _, model = loaded(folder, trainer__precision="fp64", trainer__seq_length=16)
    given = ["--name", "mix", "--set", "model.feed_forward_types=[mlp,experts]", "--set", "model.num_experts=4"]
    done = cli_here("checkpoint", "upcycle", str(folder), *given, *words())
    assert done.returncode == 0, done.stderr
    right = logits(model, torch.arange(32).view(2, 16))
    assert error(logits_of(tmp_path / "runs" / "mix"), right) < EXACT


def test_what_changes_the_logits_is_said_and_true(dense: Path, cli_here: Cli) -> None:
    right = logits_of(dense)
    changed: list[tuple[list[str], str]] = [
        (["--set", "model.moe_router_normalize=false"], "model.moe_router_normalize is false"),
        (["--noise", "0.1"], "the experts have noise"),
        (["--set", "model.capacity_factor=0.5"], "choices beyond model.capacity_factor are dropped"),
    ]
    for number, (options, reason) in enumerate(changed):
        given = ["--name", f"mix{number}", "--set", "model.feed_forward_types=[mlp,experts]"]
        done = cli_here("checkpoint", "upcycle", str(dense), *given, *words("model.num_experts=4"), *options)
        assert done.returncode == 0, done.stderr
        assert "its logits differ from those of the dense model, because " in done.stdout
        assert reason in done.stdout
        assert error(logits_of(dense.parent / f"mix{number}"), right) > 1e-4


def test_a_width_that_the_dense_family_computes_is_asked_for(cli: Cli, cli_here: Cli) -> None:
    sizes = [f"model.{name}={value}" for name, value in SIZES.items()]
    trained = words(*sizes, "model.activation=swiglu", "trainer.steps=1", "trainer.eval_every=0")
    done = cli("train", "--name", "dense", "--model", "gpt", "--data", "mock", *trained)
    assert done.returncode == 0, done.stderr
    done = cli_here(
        "checkpoint", "upcycle", "runs/dense", "--name", "mix", "--model", "mixtral", *words("model.num_experts=4")
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "does not divide the 128 of the dense model's MLP; set model.moe_ffn_hidden_size to 128" in done.stderr


REFUSED: list[tuple[Sequence[str], Sequence[str], str]] = [
    (
        ["--model", "mixtral"],
        ["model.rope_theta=3"],
        "'blocks.0.attn' has theta=3.0 in the mixture, 123.0 in the dense",
    ),
    (["--model", "mixtral"], ["model.num_shared_experts=1"], "has no counterpart of 'blocks.0.moe.shared.down.weight'"),
    (["--model", "mixtral"], ["model.hidden_size=64"], "the shapes of "),
    (["--model", "llama"], [], "the model has no experts in the place of an MLP"),
    (["--model", "mixtral"], ["model.moe_ffn_hidden_size=20"], "20 wide, which does not divide the 48"),
    (
        ["--model", "mixtral"],
        ["model.moe_ffn_hidden_size=16", "model.num_experts=6"],
        "model.num_experts_per_token=2 is no multiple of the 3 experts",
    ),
    (
        ["--model", "mixtral"],
        [
            *("model.moe_ffn_hidden_size=24", "model.num_experts=12"),
            *("model.moe_router_num_groups=4", "model.moe_router_top_groups=1"),
        ],
        "model.moe_router_num_groups=4 divides the 2 experts of 'blocks.0.moe' that make one MLP",
    ),
    (["--model", "mixtral", "--preset", "tiny"], [], "--preset: the dense model"),
]


def test_what_is_no_mixture_of_the_dense_model_is_refused(dense: Path, cli_here: Cli) -> None:
    for options, settings, sentence in REFUSED:
        done = cli_here("checkpoint", "upcycle", str(dense), "--name", "mix", *options, *words(*settings))
        assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr
    assert not (dense.parent / "mix").exists()
