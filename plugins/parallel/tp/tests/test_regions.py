"""The run without memory that finds out what tensor parallelism divides: its lengths, and what counts as divided."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from mplug_tp.regions import REMEDY, _Divided, _entries, whole_sequences

from mplug_testing.harness import tiny_run


@pytest.mark.parametrize(
    ("size", "length", "expected"),
    [(2, 1024, 1024), (2, 4096, 1024), (2, 3072, 768), (2, 1028, 514), (2, 2050, 2050), (2, 1026, 1026), (4, 8, 8)],
)
def test_a_sequence_is_halved_to_512_positions_a_rank_as_long_as_halves_are_even(
    size: int, length: int, expected: int
) -> None:
    """2050 = 2 x 1025: a half has no even part for each of two ranks."""
    trainer = SimpleNamespace(seq_length=length)
    run = SimpleNamespace(
        mesh=SimpleNamespace(axes={"tp": SimpleNamespace(size=size)}),
        config=SimpleNamespace(trainer=trainer),
        entries=frozenset({"tokens"}),
    )
    units = [SimpleNamespace(optional=("documents",))]
    context = {"tokens": ("batch", "sequence"), "documents": ("batch", "document")}
    model = SimpleNamespace(plan=SimpleNamespace(units=units, context=context))
    found = _entries(cast(Any, run), cast(Any, model))
    assert {name: tuple(entry.shape) for name, entry in found.items()} == {"tokens": (2, expected)}


def test_modules_between_the_two_products_of_a_pair_see_the_whole_sequence() -> None:
    """The residual stream is divided; behind a column-parallel product the sequence is whole, attention included."""
    run = tiny_run({"parallel.layout": "tp2"})
    with torch.device("meta"):
        model = run.hooks.call.build_model(run=run)
    model.place(run.mesh, None)
    found = whole_sequences(run, model, ["blocks.0.attn.qkv", "blocks.0.attn.out", "blocks.1.mlp.up"])
    assert found == {"blocks.0.attn.qkv": REMEDY, "blocks.0.attn.out": True, "blocks.1.mlp.up": REMEDY}


def test_what_an_operator_without_a_result_writes_from_a_divided_tensor_is_divided() -> None:
    divided = _Divided()
    with torch.device("meta"), divided:
        own, written, other = divided.mark(torch.empty(2)), torch.zeros(2), torch.zeros(2)
        torch._foreach_add_([written], [own])
        torch._foreach_add_([other], [torch.zeros(2)])
    assert (divided.has(written), divided.has(other)) == (True, False)
