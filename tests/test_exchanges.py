"""Flat buffers that ranks exchange: one order on all ranks, and a check that finds ranks with different ones."""

import os
from typing import Any, cast

import pytest
import torch.distributed as dist

import mplug_ops as ops
from mplug.layout.ranks import Grouping
from mplug.model.build import allocate_parts, build_model
from mplug.model.pieces import make_pieces
from mplug.run.prepare import prepare
from mplug_steps.reduction import Reduction
from mplug_testing import run_workers
from mplug_testing.harness import tiny_config

A, B = ops.Item("a", (2, 3)), ops.Item("b", (3,))


def test_the_order_is_that_of_the_names_and_within_a_name_that_of_the_starts() -> None:
    late, early = ops.Item("b", (1,), (2,)), ops.Item("b", (1,), (0,))
    assert ops.in_order([A, late, early], ["b", "other", "a"]) == [early, late, A]
    with pytest.raises(ValueError, match="'a' has no placement"):
        ops.in_order([A], ["b"])


def checked(whats: list[str], orders: list[list[ops.Item]], switch: str, in_pairs: bool = False) -> str:
    """Be a rank that exchanges what its place in the lists says, with all or with every second; returns the error."""
    os.environ[ops.CHECK] = switch
    rank, group = dist.get_rank(), dist.group.WORLD
    if in_pairs:
        group = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    try:
        ops.Exchange(whats[rank], group, orders[rank]).check()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_exchange_the_same_pass_and_others_too_where_the_run_does_not_ask_for_the_check() -> None:
    assert run_workers(2, checked, ["sums"] * 2, [[A, B]] * 2, "1") == ["", ""]
    assert run_workers(2, checked, ["sums"] * 2, [[A, B], [B, A]], "0") == ["", ""]


@pytest.mark.parametrize(
    ("whats", "last", "message"),
    [
        ("sums sums sums", [B, A], "ranks 0 and 2 exchange different buffers ('sums'): number 1 of their tensors is "
         "'a' [2, 3] and 'b' [3]"),
        ("sums sums sums", [A], "number 2 of their tensors is 'b' [3] and nothing"),
        ("sums sums sums", [A, ops.Item("b", (4,))], "number 2 of their tensors is 'b' [3] and 'b' [4]"),
        ("sums sums sums", [A, ops.Item("b", (3,), (3,))], "is 'b' [3] and 'b' [3] from [3]"),
        ("sums sums gathers", [A, B], "ranks 0 and 2 of one group begin different exchanges: 'sums' and 'gathers'"),
    ],
)  # fmt: skip
def test_every_rank_names_the_ranks_and_the_tensors_that_differ(whats: str, last: list[ops.Item], message: str) -> None:
    found = run_workers(3, checked, whats.split(), [[A, B], [A, B], last], "1")
    assert all(message in error for error in found), found


def test_each_group_compares_its_own_ranks() -> None:
    """Of both groups the second rank differs, and each names its own ranks and tensors."""
    even, odd = ("number 2 of their tensors is " + words for words in ("'b' [3] and nothing", "nothing and 'a' [2, 3]"))
    found = run_workers(4, checked, ["sums"] * 4, [[A, B], [B], [A], [B, A]], "1", True)
    for rank, error in enumerate(found):
        pair = f"ranks {rank % 2} and {rank % 2 + 2} exchange different buffers ('sums'): "
        assert error.startswith(pair + (odd if rank % 2 else even)), error


class GroupsOf:
    """Names the process groups of a rank, and creates none."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def of(self, grouping: Grouping, use: str = "") -> Any:
        return tuple(grouping.of(self.rank))


LLAMA = {
    "model.name": "llama",
    "model.num_layers": 4,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.ffn_hidden_size": 40,
    "model.vocab_size": 259,
    "model.num_mtp_layers": 1,
    "model.tie_embeddings": True,
}
SPLITS = [{"parallel.pp.schedule": "interleaved"}, {"parallel.pp.split": [6, 1]}]


@pytest.mark.parametrize("split", SPLITS, ids=["interleaved", "6,1"])
def test_two_stages_sum_the_parameters_that_they_share_in_one_order(split: dict[str, Any]) -> None:
    """The first stage has the embedding before the norm, and the last one the norm before the tied projection."""
    modules, orders = [], []
    for rank in (0, 1):
        run = prepare(tiny_config({**LLAMA, **split, "parallel.layout": "pp2"}))
        run.rank = rank
        model = build_model(run)
        allocate_parts(run, model)
        model.listen()
        run.groups = cast(Any, GroupsOf(rank))
        reduction = Reduction(run, model.placements, (), make_pieces(model)[::-1])
        shared = {"embedding.token.weight", "head.norm.weight", "head.project.weight", "ahead.head.norm.weight"}
        modules.append([name for name, _ in model.module.named_parameters() if name in shared])
        orders.append([[item.name for item in exchange.items] for exchange, _ in reduction.sums])
    assert orders == [[["embedding.token.weight", "head.norm.weight"]]] * 2
    assert modules[0] != modules[1]
