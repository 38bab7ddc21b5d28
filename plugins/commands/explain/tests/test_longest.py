"""`explain --longest`: the longest samples that fit, and what refuses longer ones."""

import re

from click.testing import CliRunner
from mplug_explain import command

SMALL = (
    *("--data", "mock", "--model", "llama", "--set", "model.num_layers=2", "--set", "model.hidden_size=256"),
    *("--set", "model.num_attention_heads=2", "--set", "model.ffn_hidden_size=1024", "--set", "model.vocab_size=8192"),
    *("--set", "trainer.micro_batch_size=1", "--set", "trainer.global_batch_size=1"),
)


def found(gib: str, *more: str) -> tuple[int, str]:
    """(tokens, the whole output)."""
    result = CliRunner().invoke(command, [*SMALL, "--longest", gib, *more])
    number = re.match(r"samples of ([\d,]+) tokens fit", result.output)
    return int(number[1].replace(",", "")) if number else 0, result.output + str(result.exception or "")


def test_more_memory_recomputation_tiles_and_offload_make_longer_samples_fit() -> None:
    full = ("--recompute", "full", "--set", "memory.tiles.mlp=1024", "--set", "memory.tiles.loss=1024")
    cpu = ("--set", "memory.recompute.offload=true", "--set", "optimizer.offload={chunk: 1}")
    lengths = [found("1")[0], found("2")[0], found("2", *full)[0]]
    moved, text = found("2", *full, *cpu)
    assert 1024 < lengths[0] < lengths[1] < lengths[2] < moved
    assert "activations in CPU memory" in text
    assert "optimizer state in CPU memory" in text
    assert lengths[1] > 2 * lengths[0], "weights and states do not grow with the samples"


def test_a_model_that_does_not_fit_at_all_is_refused() -> None:
    length, text = found("0.01")
    assert length == 0
    assert "samples of 1,024 tokens need" in text


def test_the_answer_says_why_longer_samples_are_refused() -> None:
    learned = ("--model", "gpt", "--set", "model.position=learned", "--set", "model.max_position_embeddings=3000")
    small = [word for word in SMALL if word not in ("--model", "llama")]
    result = CliRunner().invoke(command, [*small, *learned, "--longest", "64"])
    assert "samples of 2,048 tokens fit into 64 GiB" in result.output, result.output
    assert "longer samples are refused" in result.output
    assert "max_position_embeddings" in result.output


def test_explain_says_from_which_length_on_attention_dominates_packed_documents() -> None:
    """Per token and layer: 6 (4 h h + 3 h f) FLOPs of products; per squared length 6 h, of causal attention."""
    small = [*SMALL, "--set", "trainer.global_batch_size=2", "--parallel", "dp2", "--set", "data.documents=3"]
    result = CliRunner().invoke(command, [*small, "--set", "parallel.balance=true"])
    layer = 6 * (4 * 256 * 256 + 3 * 256 * 1024)
    equal = (2 * layer + 6 * 256 * 8192) // (2 * 6 * 256)
    assert f"documents of more than {equal:,} tokens have most of their FLOPs in attention; parallel.balance" in (
        result.output
    ), result.output
