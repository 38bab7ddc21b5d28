"""Tiles of MLPs and losses give the run without them to rounding, in fp64, and hold less."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mplug_recompute import tiles

from mplug import UsageError
from mplug.model.build import build_model
from mplug.training.assembly import build
from mplug_estimates import estimate_activations
from mplug_testing.harness import difference, tiny_run, train_ranks, train_steps, weights_off
from mplug_testing.memory import kept_bytes

LLAMA: dict[str, Any] = {"model.name": "llama", "model.num_layers": 2, "model.vocab_size": 259}
LLAMA |= {"model.hidden_size": 32, "model.num_attention_heads": 4, "model.ffn_hidden_size": 48}
LLAMA |= {"trainer.precision": "fp64", "trainer.seq_length": 16}
TILED = {"memory.tiles.mlp": 5, "memory.tiles.loss": 3}
EXPERTS = {"model.name": "mixtral", "model.num_experts": 4, "model.num_experts_per_token": 2}
EXPERTS |= {"model.moe_ffn_hidden_size": 12, "model.num_shared_experts": 1}
PACKED = {"data.name": "mock", "data.documents": 3}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt": {"model.name": "gpt", "model.bias": True, "model.dropout": 0.1},
    "experts": EXPERTS,
    "gemma": {"model.name": "gemma", "model.logit_soft_cap": 3.0},
    "multi-token prediction": {"model.num_layers": 1, "model.num_mtp_layers": 2},
    "lora": {"adapters.lora.rank": 2},
    "recomputed units": {"memory.recompute.mode": "full"},
    "recomputed slots": {"memory.recompute.mode": "selective", "memory.recompute.slots": ["mlp", "activation"]},
    "documents": PACKED,
    "pairs": {"data.name": "mock", "data.documents": 4, "data.pairs": True, "objectives.dpo.beta": 0.3},
}


def require_equal(settings: dict[str, Any], ranks: int = 1, **layout: Any) -> None:
    plain = {**LLAMA, **settings}
    found = {**plain, **TILED, **layout}
    traces = train_ranks(ranks, found) if ranks > 1 else [train_steps(found)]
    reference = train_steps(plain)
    assert difference(traces, reference) == ""
    assert weights_off(traces, reference) == ""


@pytest.mark.wide("layouts", quick=["pairs"])
@pytest.mark.parametrize("model", MODELS)
def test_a_run_in_tiles_is_the_run_without_them(model: str) -> None:
    require_equal(MODELS[model])


@pytest.mark.wide("compile")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("model", ["llama", "lora"])
def test_compiled_tiles_give_the_eager_run_without_them(model: str, compiler: str) -> None:
    from mplug_testing.memory import _compiling

    own = {**LLAMA, "model.num_layers": 1, **MODELS[model], "memory.recompute.mode": "full"}
    reference = train_steps(own)
    with _compiling():
        found = train_steps({**own, "memory.tiles.mlp": 8, "memory.tiles.loss": 8, "trainer.compile": compiler})
    assert difference([found], reference) == ""


def test_tiles_keep_less_and_the_estimate_says_so() -> None:
    long = {**LLAMA, "trainer.seq_length": 256, "trainer.global_batch_size": 2, "model.ffn_hidden_size": 512}
    found = {}
    for name, settings in {
        "whole": {},
        "mlp": {"memory.tiles.mlp": 16, "memory.tiles.loss": None},
        "loss": {"memory.tiles.mlp": None, "memory.tiles.loss": 16},
        "both": {"memory.tiles.mlp": 16, "memory.tiles.loss": 16},
    }.items():
        run = tiny_run({**long, **settings})
        (activations,) = estimate_activations(run, build_model(run))
        found[name] = kept_bytes(run, build(run)), activations.kept.products, activations.kept.logits
    kept, products, logits = ({name: one[number] for name, one in found.items()} for number in range(3))
    assert kept["both"] < min(kept["mlp"], kept["loss"])
    assert max(kept["mlp"], kept["loss"]) < kept["whole"]
    assert (products["mlp"], products["loss"]) == (products["both"], products["whole"])
    assert products["mlp"] < products["whole"] / 2
    assert (logits["loss"], logits["mlp"]) == (logits["whole"] / 16, logits["whole"])


def test_no_call_has_more_positions_than_a_tile() -> None:
    lengths: list[int] = []

    def core(x: torch.Tensor) -> torch.Tensor:
        lengths.append(x.shape[1])
        return 2 * x

    def whole(inner: Callable[..., Any]) -> Callable[..., Any]:
        return inner

    x = torch.arange(22.0).reshape(1, 11, 2)
    assert torch.equal(tiles.tiled_mlp(4, whole, core)(x), 2 * x)
    assert lengths == [4, 4, 3]
    lengths.clear()
    assert torch.equal(tiles.tiled_mlp(11, whole, core)(x), 2 * x)
    assert lengths == [11]


def test_labels_of_a_tile_are_those_of_its_positions_on_all_ranks_of_sequence_parallelism() -> None:
    seen: list[list[int]] = []

    def loss(hidden: torch.Tensor, project: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(labels[0].tolist())
        return labels.sum().double(), labels.new_tensor(hidden.shape[1])

    labels = torch.arange(12)[None]  # two ranks have the positions 0 to 5 and 6 to 11
    total, count = tiles.tiled_loss(4, lambda inner: inner, loss)(torch.zeros(1, 6, 2), None, labels)
    assert seen == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert (int(total), int(count)) == (66, 6)


def test_log_probabilities_of_tiles_are_in_the_order_of_the_labels_of_all_ranks() -> None:
    lengths: list[int] = []

    def each(hidden: torch.Tensor, project: Any, labels: torch.Tensor) -> torch.Tensor:
        lengths.append(hidden.shape[1])
        return labels * 2

    labels = torch.arange(14)[None]  # two ranks have the positions 0 to 6 and 7 to 13
    found = tiles.tiled_log_probabilities(4, lambda inner: inner, each)(torch.zeros(1, 7, 2), None, labels)
    assert torch.equal(found, 2 * labels)
    assert lengths == [2, 2, 2, 1]


def test_adapters_with_dropout_of_whole_samples_are_not_tiled() -> None:
    dropout = {**LLAMA, "adapters.lora.rank": 2, "adapters.lora.dropout": 0.1}
    build_model(tiny_run({**dropout, "memory.tiles.mlp": 16, "memory.tiles.loss": 3}))  # a tile is a whole sample
    with pytest.raises(UsageError, match=r"memory/tiles cannot serve MLP\.core .*set memory\.tiles\.mlp=null"):
        build_model(tiny_run({**dropout, **TILED}))


def test_a_section_without_tiles_is_refused() -> None:
    with pytest.raises(UsageError, match=r"memory\.tiles has no tiles: mlp and loss are null"):
        tiny_run({**LLAMA, "memory.tiles.mlp": None, "memory.tiles.loss": None})


def test_a_loss_that_forgets_a_tile_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tiles._calls
    monkeypatch.setattr(tiles, "_calls", lambda *given: calls(*given)[:-1])
    with pytest.raises(AssertionError):
        require_equal({})
