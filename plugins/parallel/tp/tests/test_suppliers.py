"""Which sites of a model tensor parallelism supplies, decided by the plan alone, and what it puts there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mplug_tp.chunked import name_for
from mplug_tp.product import OVERLAPPED
from mplug_tp.suppliers import _of_own_part, _with_global_heads
from torch import Tensor
from torch.nn import functional as F

from mplug import Model, Run, UsageError
from mplug.config.defaults import default_settings
from mplug.config.sources import read_assignments
from mplug.distributed.groups import Groups
from mplug.model.build import build_model
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.tensors.random import sample_keys
from mplug_nn import (
    AttentionCore,
    AttentionInputs,
    AttentionSpec,
    Boundary,
    Dropout,
    Gemm,
    Narrow,
    Operand,
    PackedHeads,
    packed_heads_of,
)
from mplug_nn.attention import scaled_dot_product
from mplug_testing import run_workers
from mplug_testing.harness import tiny_run

B, S, D, HEADS, V = 2, 8, 16, 4, 30
Part = Callable[[Tensor], Tensor]
RUN = [
    "model.num_layers=2",
    f"model.hidden_size={D}",
    f"model.num_attention_heads={HEADS}",
    f"model.vocab_size={V}",
    "model.position=learned",
    "model.dropout=0.5",
    "model.attention_dropout=0.5",
    f"trainer.seq_length={S}",
    "trainer.device=cpu",
    "kernels.default=null",
    "data.name=mock",
]
WITH, WITHOUT = "parallel.tp.sequence_parallel=true", "parallel.tp.sequence_parallel=false"
TP, PLAIN = "parallel/tp", "plain torch"


def prepared(*assignments: str, layout: str = "tp2") -> Run:
    settings = read_assignments([*RUN, f"parallel.layout={layout}", *assignments])
    return prepare(resolve(Registry(), default_settings(), settings))


def suppliers(model: Model) -> dict[tuple[str, str], str]:
    """(role, slot) -> who supplies it."""
    return {(filled.site.role, filled.site.slot): filled.supplier for filled in model.slots}


ALWAYS = {
    ("embedding.token", "Embedding.lookup"),
    ("blocks.*.attn.qkv", "Linear.gather"),
    ("blocks.*.attn.out", "Linear.scatter"),
    ("blocks.*.mlp.up", "Linear.gather"),
    ("blocks.*.mlp.down", "Linear.scatter"),
    ("head.project", "Linear.gather"),
    ("head.loss", "Loss.cross_entropy"),
}
IN_THE_STREAM = {
    ("embedding.position", "Embedding.lookup"),
    ("embedding.dropout", "Dropout.rows"),
    ("blocks.*.dropout1", "Dropout.rows"),
    ("blocks.*.dropout2", "Dropout.rows"),
}


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize(("choice", "wanted"), [(WITH, ALWAYS | IN_THE_STREAM), (WITHOUT, ALWAYS)])
def test_these_sites_and_no_others_are_supplied(choice: str, wanted: set[tuple[str, str]], tied: str) -> None:
    found = suppliers(build_model(prepared(choice, f"model.tie_embeddings={tied}")))
    assert {site for site, supplier in found.items() if supplier == TP} == wanted
    assert set(found.values()) == {TP, PLAIN}


@pytest.mark.parametrize("choice", [WITH, WITHOUT])
def test_with_overlap_the_products_of_split_weights_are_supplied_too(choice: str) -> None:
    plain, found = (suppliers(build_model(prepared(choice, f"parallel.tp.overlap={on}"))) for on in ("null", "true"))
    collectives = ("Linear.gather", "Linear.scatter")
    products = {(role, "Linear.product") for role, slot in ALWAYS if slot in collectives}
    assert {site for site in found if found[site] != plain[site]} == products
    assert {found[site] for site in products} == {TP}


def test_a_supplied_gemm_is_called_whole_within_the_collectives() -> None:
    gemm = Gemm(lambda x, weight: 3 * x @ weight.t(), lambda grad, weight: 5 * grad @ weight)
    name = name_for(None, sequence_parallel=True)
    narrow = Narrow(gemm, before=Boundary(lambda x: 7 * x, lambda x: 11 * x, lambda x: x, name))
    x, weight, grad = drawn(B, S, D, seed=1), Operand(drawn(4, D, seed=2)), drawn(B, S, 4, seed=3)
    y, saved = OVERLAPPED.forward(x, weight, narrow, {})
    torch.testing.assert_close(y, 21 * x @ weight.values.t())
    grad_x, grad_weight = OVERLAPPED.backward(grad, weight, saved, None, narrow, {}, True)
    torch.testing.assert_close(grad_x, 55 * grad @ weight.values)
    torch.testing.assert_close(grad_weight, 7 * torch.einsum("bso,bsi->oi", grad, x), rtol=1e-4, atol=1e-4)


def test_sequence_parallelism_is_the_default() -> None:
    assert suppliers(build_model(prepared())) == suppliers(build_model(prepared(WITH)))


class Listening(PackedHeads):
    """Packed heads that say which heads they compute."""

    dropout = True

    def attend(self, heads: Tensor, num_heads: int, num_kv_heads: int, spec: AttentionSpec, inputs: Any) -> Tensor:
        return torch.full((), inputs.first_head)


def test_packed_heads_know_their_numbers_in_the_whole_model_too() -> None:
    def core(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        raise AssertionError("it is called")

    assert packed_heads_of(_with_global_heads(1, core)) is None
    packed = packed_heads_of(_with_global_heads(1, AttentionCore(core, packed_heads=Listening())))
    assert packed is not None
    assert packed.attend(torch.zeros(1, 1, 8, 2), 4, 2, AttentionSpec(1.0, 2, 2), AttentionInputs()) == 4
    assert packed.serves(AttentionSpec(1.0, 2, 2, dropout=0.5))
    assert not packed.serves(AttentionSpec(1.0, 2, 2, causal=False))


@pytest.mark.parametrize("stage", range(2))
def test_stages_of_a_pipeline_are_supplied_alike(stage: int) -> None:
    run = prepared(WITH, layout="tp2pp2")
    run.rank = 2 * stage
    found = suppliers(build_model(run))
    kept = {0: "embedding", 1: "head"}[stage]
    wanted = {site for site in ALWAYS | IN_THE_STREAM if site[0].startswith(("blocks", kept))}
    assert {site for site, supplier in found.items() if supplier == TP} == wanted


def test_a_default_kernel_stands_back_only_where_tensor_parallelism_must_be() -> None:
    found = suppliers(build_model(prepared("kernels.default=sdpa", "model.attention_dropout=0")))
    assert found["blocks.*.attn", "Attention.core"] == "kernels/sdpa"
    assert {site for site, supplier in found.items() if supplier == TP} == ALWAYS | IN_THE_STREAM


# Refusals.


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        ("parallel.layout=tp2 trainer.seq_length=7", r"tp=2 does not divide trainer\.seq_length=7; .*parallel=false"),
        ("parallel.layout=tp4 model.ffn_hidden_size=30", "tp=4 does not divide the 30 mlp"),
        (
            "parallel.layout=tp4 model.num_attention_heads=12 model.hidden_size=24 model.num_kv_heads=3",
            "the 3 kv heads",
        ),
    ],
)
def test_what_the_ranks_do_not_divide_is_refused(assignments: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build_model(prepared(*assignments.split()))


def test_a_sequence_is_refused_only_where_it_is_divided() -> None:
    prepared("trainer.seq_length=7", WITHOUT)


# What the suppliers do, on two ranks.

POSITIONS, TOKENS = torch.arange(S)[None], torch.arange(B * S).view(B, S)
DROPPED = AttentionSpec(0.5, D // HEADS, D // HEADS, dropout=0.5)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heads() -> list[Tensor]:
    return [drawn(B, S, HEADS, D // HEADS, seed=seed) for seed in (5, 6, 7)]


def own(x: Tensor, rank: int, dim: int = 1) -> Tensor:
    return x.chunk(2, dim)[rank]


def moved(choice: str) -> dict[str, Tensor]:
    """What the suppliers make of this rank's tensors, which differ from rank to rank."""
    run = prepared(choice)
    rank = dist.get_rank()
    run.rank, run.groups = rank, Groups(rank)
    model = build_model(run)
    block, embedding = model.module.get_submodule("blocks.1"), model.module.get_submodule("embedding")
    embedding.dropout.site = torch.tensor(5)
    part: Part = (lambda x: own(x, rank)) if choice == WITH else (lambda x: x)
    keys, local = sample_keys(1, 1, torch.arange(B)), part(drawn(B, S, D, seed=1)).clone().requires_grad_()
    up, down = own(drawn(4 * D, D, seed=8), rank, dim=0), own(drawn(D, 4 * D, seed=9), rank, dim=1)
    y = block.mlp.down.scatter(torch.relu(block.mlp.up.gather(local) @ up.t()) @ down.t())
    y.backward(part(drawn(B, S, D, seed=10)))
    found = {
        "gathered": block.attn.qkv.gather(local),
        "scattered": block.mlp.down.scatter(drawn(B, S, D, seed=2 + rank)),
        "tokens": embedding.token.lookup(TOKENS, own(drawn(V, D, seed=4), rank, dim=0)),
        "positions": embedding.position.lookup(POSITIONS, drawn(V, D, seed=4)),
        "rows": embedding.dropout.rows(POSITIONS),
        "dropout": embedding.dropout(local, keys, POSITIONS),
        "attention": block.attn.core(*(own(x, rank, dim=2) for x in heads()), DROPPED, AttentionInputs(keys)),
        "an mlp": y,
        "the gradient of an mlp": local.grad,
    }
    return {name: x.detach() for name, x in found.items()}


def whole() -> dict[str, Tensor]:
    """The same in one process."""
    dropout, keys, stream = Dropout(0.5), sample_keys(1, 1, torch.arange(B)), drawn(B, S, D, seed=1).requires_grad_()
    dropout.site = torch.tensor(5)
    y = torch.relu(stream @ drawn(4 * D, D, seed=8).t()) @ drawn(D, 4 * D, seed=9).t()
    y.backward(drawn(B, S, D, seed=10))
    found = {
        "scattered": drawn(B, S, D, seed=2) + drawn(B, S, D, seed=3),
        "tokens": F.embedding(TOKENS, drawn(V, D, seed=4)),
        "positions": F.embedding(POSITIONS, drawn(V, D, seed=4)),
        "rows": POSITIONS,
        "dropout": dropout(stream, keys, POSITIONS),
        "an mlp": y,
        "the gradient of an mlp": stream.grad,
        "gathered": stream,
        "attention": scaled_dot_product(*heads(), DROPPED, AttentionInputs(keys)),
    }
    return {name: x.detach() for name, x in found.items()}


SUMMED = {
    **dict.fromkeys(("scattered", "attention"), (1.3e-6, 1e-5)),
    **dict.fromkeys(("an mlp", "the gradient of an mlp"), (1e-4, 1e-3)),
}
"""Relative and absolute tolerances; everything else is exact."""


@pytest.mark.parametrize("choice", [WITH, WITHOUT])
def test_the_stream_is_divided_under_sequence_parallelism_and_all_is_as_in_one_process(choice: str) -> None:
    for rank, found in enumerate(run_workers(2, moved, choice)):
        for name, expected in whole().items():
            if name == "attention":
                expected = own(expected, rank, dim=2)
            elif name != "gathered" and choice == WITH:
                expected = own(expected, rank)
            rtol, atol = SUMMED.get(name, (0, 0))
            assert torch.allclose(found[name], expected, rtol, atol), name


@pytest.mark.parametrize(
    ("healing", "overlap", "found"),
    [(False, "null", True), (True, "null", False), (True, "false", False), (False, "true", True)],
)
def test_gpus_of_a_run_that_survives_a_death_do_not_overlap(
    monkeypatch: pytest.MonkeyPatch, healing: bool, overlap: str, found: bool
) -> None:
    """A stream that waits for a signal of a dead process would wait for ever."""
    seen = list[bool]()
    monkeypatch.setattr("mplug_tp.suppliers.offers", lambda *given: seen.append(given[3]) or [])
    run = prepared(f"parallel.tp.overlap={overlap}", *(["extensions.heal.spares=1"] if healing else []))
    run.device = "cuda"
    run.hooks.call.offer(run=run, model=None)
    assert seen == [found]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["parallel.tp.overlap=true"], "this run runs on the CPU"),
        ([], "this run has no overlap"),
        (["parallel.tp.overlap=false"], "parallel.tp.overlap is false"),
        (["parallel.tp.sequence_parallel=false"], "parallel.tp.sequence_parallel is false"),
    ],
)
def test_chunks_of_samples_are_refused_without_copies_between_gpus(settings: list[str], words: str) -> None:
    def offered() -> None:
        run = prepared("parallel.tp.chunks=samples", *settings)
        run.hooks.call.offer(run=run, model=None)

    with pytest.raises(UsageError, match=words):
        offered()


def test_an_overlap_that_is_named_is_refused_beside_healing() -> None:
    run = prepared("parallel.tp.overlap=true", "extensions.heal.spares=1")
    run.device = "cuda"
    with pytest.raises(UsageError, match=r"parallel.tp.overlap=true waits for signals .* \(extensions/heal\)"):
        run.hooks.call.offer(run=run, model=None)


def gathered_parts() -> list[tuple[list[float], float]]:
    """Be one rank with a row of its number: the rows of all, and its row's gradient, weighted by ranks; for two slots.

    Rows of a tower are used by each rank in its own way. What an objective needs of all positions, ranks use alike.
    """
    run, found = tiny_run({"parallel.layout": "dp2tp2"}), []
    for slot in ("Join.gather", "Objective.gathered"):
        (gather,) = (one.suppliers[slot] for one in _of_own_part(None, run.group("tp")) if slot in one.suppliers)  # type: ignore[arg-type]
        own = torch.tensor([[float(dist.get_rank())]], requires_grad=True)
        whole = gather(own)
        (whole * (1 + own.detach())).sum().backward()
        assert own.grad is not None
        found.append((whole[0].tolist(), float(own.grad)))
    return found


def test_rows_are_gathered_within_a_group_and_gradients_are_those_of_all_ranks_or_of_the_own_use() -> None:
    assert run_workers(4, gathered_parts) == [
        [([first, first + 1.0], 2 * first + 3), ([first, first + 1.0], 1.0 + rank)]
        for rank, first in enumerate((0.0, 0.0, 2.0, 2.0))
    ]
