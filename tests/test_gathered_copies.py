"""Ranks gather the copies of weights that products read (FP8) instead of the weights: no bit of a run changes.

`acme-product` does the same with other numbers: tests/test_product.py.
"""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from gathered_settings import BLOCKS, COPIES, DELAYED, FSDP2, Settings
from torch import Tensor

from mplug import UsageError
from mplug.model.build import build_model
from mplug_nn import Linear
from mplug_products import GatheredCopies, gathered_copies
from mplug_sharding import GatheredPlacement
from mplug_testing import run_workers
from mplug_testing.harness import Trace, tiny_run, train_steps

FUSED: Settings = {**DELAYED, "kernels.norm_product": "fp8", "kernels.activation_product": "fp8"}
ROWWISE: Settings = {"precisions.fp8.scaling": "rowwise"}
COMPILED: Settings = {"trainer.compile": "aot_eager", "memory.recompute.mode": "full"}


def watched(settings: Settings) -> tuple[Trace, Counter[int], dict[str, int]]:
    """Be one rank: the trace, the bytes that it sent in each gathering of a unit, and those that are predicted."""
    import mplug_fsdp.gathered as gathered

    warnings.simplefilter("ignore")  # torch's own, as it traces
    sent, join_all = Counter[int](), gathered.join_each

    def join_each(tensors: list[Tensor], own: list[Tensor], group: Any) -> None:
        sent[sum(one.nbytes for one in own)] += 1
        join_all(tensors, own, group)

    gathered.join_each = join_each  # type: ignore[attr-defined]
    try:
        return train_steps(settings), sent, predicted(settings)
    finally:
        gathered.join_each = join_all  # type: ignore[attr-defined]


def both(settings: Settings) -> list[tuple[Trace, Counter[int], dict[str, int]]]:
    """Be one rank of two runs: with weights, and with copies."""
    return [watched({**settings, **more}) for more in ({}, COPIES)]


def predicted(settings: Settings) -> dict[str, int]:
    """The bytes of each parameter that a rank sends when it is gathered, as `mplug explain` sums them."""
    run = tiny_run(settings)
    model = build_model(run)
    copies, found = gathered_copies(run, model), {}
    for name, placement in model.placements.items():
        assert isinstance(placement, GatheredPlacement)
        own = copies.get(name)
        whole = placement.gathered_shape(0)
        rows = torch.empty(placement.rows_each, *whole[1:], dtype=torch.bfloat16, device="meta")
        found[name] = own.part_bytes if isinstance(own, GatheredCopies) else rows.nbytes
    return found


def assert_same_bits(found: Trace, right: Trace) -> None:
    """Losses, gradients and norms of two runs of a rank under one layout."""
    assert (found.losses, found.norms, found.val_loss) == (right.losses, right.norms, right.val_loss)
    torch.testing.assert_close(found.gradients, right.gradients, rtol=0, atol=0)


def test_fp8_numbers_travel_in_every_pass_and_the_run_has_the_same_bits() -> None:
    """Two steps of two micro batches each, and an evaluation."""
    for (right, in_bf16, whole), (found, in_fp8, small) in run_workers(2, both, FSDP2):
        assert_same_bits(found, right)
        product = [name for name in whole if name.startswith("blocks.1.") and "norm" not in name]
        assert len(product) == 4
        for predicted_bytes, sent in ((whole, in_bf16), (small, in_fp8)):
            of_unit = {
                unit: sum(count for name, count in predicted_bytes.items() if name.startswith(unit))
                for unit in ("embedding.", "blocks.0.", "blocks.1.", "head.")
            }
            assert set(sent) == set(of_unit.values())
        assert all(small[name] * 2 == whole[name] for name in product)
        assert all(small[name] == whole[name] for name in whole.keys() - product)
        assert sum(in_fp8.values()) == sum(in_bf16.values()), "as many gatherings"


OTHERS: dict[str, list[Settings]] = {
    "fsdp2": [
        *({"memory.recompute.mode": "full"}, DELAYED, FUSED, BLOCKS, {"kernels.fp8.keep_weights": True}),
        {"parallel.fsdp.reshard_after_forward": False, "parallel.fsdp.prefetch": 2},
        {"parallel.fsdp.cpu_offload": True, "parallel.fsdp.prefetch": 0},
        *({"parallel.fsdp.reduce_dtype": "bf16"}, {"model.frozen": ["blocks.1"]}, {"adapters.lora.rank": 16}),
        *(COMPILED, {**COMPILED, **FUSED}, {"trainer.compile": "inductor", **BLOCKS}),
    ],
    "fsdp4": [{"model.ffn_hidden_size": 144}],
    "fsdp3": [{"trainer.global_batch_size": 12}],
    "dp2fsdp2": [{}],
    "tp2fsdp2": [{}, {**FUSED, "memory.recompute.mode": "full"}],
    "fsdp2pp2": [{"model.num_layers": 4}],
}


@pytest.mark.wide("precision")
@pytest.mark.parametrize(("layout", "changes"), [(one, own) for one, some in OTHERS.items() for own in some], ids=str)
def test_other_runs_have_the_same_bits(layout: str, changes: Settings) -> None:
    settings = {**FSDP2, **changes, "parallel.layout": layout}
    for (right, in_bf16, _), (found, in_fp8, _) in run_workers(tiny_run(settings).mesh.world_size, both, settings):
        assert_same_bits(found, right)
        assert sum(size * count for size, count in in_fp8.items()) < sum(n * count for n, count in in_bf16.items())


# What is gathered as it is.


def reasons(settings: Settings) -> dict[str, str]:
    """Of the matrices in the middle block, what ranks gather: 'copies', or why the weight itself."""
    run = tiny_run({**FSDP2, **COPIES, **settings})
    found = gathered_copies(run, build_model(run))
    return {
        name.removeprefix("blocks.1."): own if isinstance(own, str) else "copies"
        for name, own in found.items()
        if name.startswith("blocks.1.") and "norm" not in name and "adapter" not in name
    }


def test_weights_that_are_not_for_one_product_alone_are_gathered_as_they_are() -> None:
    run = tiny_run({**FSDP2, **COPIES, "model.tie_embeddings": True})
    found = gathered_copies(run, build_model(run))
    as_they_are = {name: own for name, own in found.items() if isinstance(own, str)}
    assert as_they_are["embedding.token.weight"] == "several modules read it"
    assert as_they_are["blocks.0.mlp.up.weight"] == "its product reads no copies", "a base module"
    assert as_they_are["blocks.1.norm1.weight"] == "no product in a slot reads it"
    assert all(name.startswith("blocks.1.") for name in found.keys() - as_they_are.keys())
    borders = reasons({**BLOCKS, "parallel.layout": "fsdp4"})
    assert borders["attn.qkv.weight"] == "copies"
    assert borders["attn.out.weight"] == "a rank has 64 of its rows, and the copies need a multiple of 128"
    assert set(reasons({}).values()) == {"copies"}
    low_rank = {"adapters.lora.rank": 16, "adapters.lora.targets": ["qkv"]}
    assert set(reasons(low_rank).values()) == {"copies"}
    of_dora = reasons({**low_rank, "adapters.lora.dora": True})
    assert of_dora.pop("attn.qkv.weight") == "its adapter may read it (reads_weight)"
    assert set(of_dora.values()) == {"copies"}


class Reader(Linear):
    """A layer that reads its weight itself."""

    def without_bias(self, x: Any) -> Tensor:
        return super().without_bias(x) + self.weight.sum()


def test_a_layer_whose_code_may_read_the_weight_gets_the_weight() -> None:
    run = tiny_run({**FSDP2, **COPIES})
    model = build_model(run)
    mlp: Any = model.module.get_submodule("blocks.1.mlp")
    mlp.up.__class__ = Reader
    mlp.down.adaptable = False
    found = gathered_copies(run, model)
    assert found["blocks.1.mlp.up.weight"] == "Reader changes how a linear layer computes"
    assert "Linear.adaptable" in str(found["blocks.1.mlp.down.weight"])
    assert isinstance(found["blocks.1.attn.qkv.weight"], GatheredCopies)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"trainer.precision": "bf16", "kernels.linear": None}, "its product reads no copies"),
        (ROWWISE, "the FP8 numbers of its rows and those of its columns have as many bytes as the weight in bf16"),
    ],
    ids=["bf16", "rowwise"],
)
def test_a_run_without_any_copies_is_refused(settings: Settings, reason: str) -> None:
    with pytest.raises(UsageError, match=r"parallel/fsdp is set to gather copies of weights, and no product") as error:
        build_model(tiny_run({**FSDP2, **COPIES, **settings}))
    assert reason in str(error.value)
    build_model(tiny_run({**FSDP2, **settings}))


def test_explain_lists_what_is_gathered_and_why(cli: Any) -> None:
    words = [word for key, value in {**FSDP2, **COPIES}.items() for word in ("--set", f"{key}={value}")]
    listed = cli("explain", *words).stdout.partition("Gathered for each pass\n")[2].partition("\n\n")[0]
    lines = [line.split() for line in listed.splitlines()]
    (copied,) = [line for line in lines if line[0] == "blocks.*.mlp.up.weight" and line[1] == "1"]
    (whole,) = [line for line in lines if line[0] == "blocks.*.mlp.up.weight" and line[1] == "2"]
    assert copied[2:6] == ["fsdp", "kernels/fp8:", "float8_e4m3fn,", "float32"]
    assert int(whole[4].replace(",", "")) == 2 * 2 * int(copied[6].replace(",", "")), "two weights, twice the bytes"
    assert " ".join(whole[5:]) == "its product reads no copies"
