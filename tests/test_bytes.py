"""The bytes that `mplug explain` predicts, without processes, are those that a rank really holds."""

import gc

import pytest
import torch
import torch.distributed as dist

from mplug.testing import run_workers

SETTINGS = [
    "model.num_layers=3",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.num_kv_heads=1",
    "model.vocab_size=259",
    "model.tie_embeddings=true",
    "data.name=mock",
    "data.vocab_size=259",
    "trainer.seq_length=16",
    "trainer.device=cpu",
    "trainer.eval_every=0",
]


def prepared(layout: str, precision: str):
    from mplug.registry import Registry
    from mplug.resolve import default_settings, resolve
    from mplug.run import prepare
    from mplug.settings import read_assignments

    words = [*SETTINGS, f"parallel.layout={layout}", f"trainer.precision={precision}"]
    return prepare(resolve(Registry(), default_settings(), read_assignments(words)))


def held(layout: str, precision: str) -> tuple[dict[str, int], int]:
    """What a rank holds after a step, kind by kind, and the bytes of all tensors alive in its process."""
    from mplug.build import build
    from mplug.groups import Groups

    run = prepared(layout, precision)
    run.rank = dist.get_rank()
    run.groups = Groups(run.rank)
    parts = build(run)
    parts.stepper.forward_backward(parts.train_loader.take(8), 1)
    parts.stepper.update(1e-3, 0.1)
    masters = [piece.master for piece in parts.pieces if piece.weight is not None]
    kinds = {
        "weights": list(parts.model.parameters().values()),
        "masters": masters,
        "gradients": [piece.gradient for piece in parts.pieces],
        "optimizer state": [t for piece in parts.pieces for t in parts.optimizer.state(piece).values()],
    }
    gc.collect()
    alive = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.is_cpu]
    return {kind: storage_bytes(tensors) for kind, tensors in kinds.items() if tensors}, storage_bytes(alive)


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}.values())


@pytest.mark.parametrize(("layout", "precision"), [("tp2pp2", "fp32"), ("tp2pp2", "bf16"), ("dp2", "fp32")])
def test_the_bytes_that_explain_predicts_are_those_that_a_rank_holds(layout: str, precision: str) -> None:
    from mplug.build import build_model, measure_bytes

    run = prepared(layout, precision)
    for rank, (measured, alive) in enumerate(run_workers(run.mesh.world_size, held, layout, precision)):
        run.rank = rank
        predicted = measure_bytes(run, build_model(run))
        assert predicted == measured
        assert sum(predicted.values()) <= alive <= sum(predicted.values()) * 1.2
