"""Data sets in the format of Megatron, and what a loader reads from them."""

from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
pytest.importorskip("tokenizers")

from mplug_indexed import Indexed
from mplug_indexed.files import Writer
from mplug_indexed.samples import IndexedLoader

S = 16
EOD = 0
FOLDER = Path(mkdtemp(prefix="mplug-indexed-"))


def write(prefix: Path, documents: list[Any], dtype: Any = np.uint16) -> Path:
    with Writer(prefix, dtype) as writer:
        writer.add_documents(np.concatenate([*map(np.array, documents), []]), [len(one) for one in documents])
    return prefix


def random_documents(seed: int, number: int = 300, longest: int = 25, vocab_size: int = 250) -> list[Any]:
    """Documents of random tokens, each ended by EOD; but for the empty ones."""
    random = np.random.default_rng(seed)
    return [
        np.append(random.integers(1, vocab_size, length), EOD) if length else np.array([], dtype=np.int64)
        for length in random.integers(0, longest, number)
    ]


FIM_TOKENS = {"fim_prefix_token": 251, "fim_middle_token": 252, "fim_suffix_token": 253}
ONE, TWO = (str(write(FOLDER / f"corpus{seed}", random_documents(seed))) for seed in (1, 2))


def build(config: dict[str, Any], split: str = "train", shard: tuple[int, int] = (0, 1), **trainer: Any) -> Any:
    section = {"seq_length": S, "seed": 1, "steps": 20, "global_batch_size": 8, "eval_samples": 8, "eval_every": 0}
    run: Any = SimpleNamespace(
        config=SimpleNamespace(
            trainer=SimpleNamespace(**{**section, **trainer}), model=SimpleNamespace(vocab_size=256)
        ),
        mesh=SimpleNamespace(batch_shard=lambda _: shard),
        rank=0,
        micro_batch_size=3,
    )
    plugin = Indexed(Indexed.Config(**config))
    if split == "train":
        plugin.configure(run.config)
        plugin.check_data(run.config)
    return plugin.build_loader(run, split)  # type: ignore[arg-type]


def taken(loader: IndexedLoader, number: int) -> dict[str, Any]:
    batches = list(loader.take(number))
    whole = [
        {name: one if one.dim() == 1 else one.expand(len(batch["sample_ids"]), -1) for name, one in batch.items()}
        for batch in batches
    ]
    return {name: torch.cat([batch[name] for batch in whole]) for name in whole[0]}


REARRANGED = {**FIM_TOKENS, "eod_token": EOD}


def windows(loader: IndexedLoader, number: int) -> list[list[int]]:
    batch = taken(loader, number)
    return torch.cat((batch["tokens"], batch["labels"][:, -1:]), dim=1).tolist()
