"""Seconds to read a published checkpoint of 3 files, beside the seconds of safetensors' own reading of the same files.

    python benchmarks/pretrained.py [folder for the files; default: a temporary one]

The folder is a Llama of about 0.4 GB in bf16. Each rank of tp2pp2 is measured alone, in this process, with a warm file
cache. The bytes are those that the rank reads.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mplug_huggingface_format.folder import INDEX
from mplug_huggingface_format.model_config import config_of
from mplug_huggingface_format.opened import open_folder
from mplug_huggingface_format.weights import PublicWeights
from safetensors.torch import load_file, save_file

from mplug.config.defaults import default_settings
from mplug.config.sources import from_mapping
from mplug.model.build import allocate_parts, build_model
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug_pretrained.external_form import conversion
from mplug_pretrained.public_load import fill_from, weights_of

SIZES = {"num_layers": 12, "hidden_size": 1024, "num_attention_heads": 16, "num_kv_heads": 8, "ffn_hidden_size": 3072}
MODEL = {"name": "llama", "preset": None, **SIZES, "vocab_size": 32000, "norm_eps": 1e-6}
ROUNDS = 3


def run_of(layout: str, **checkpoint: object) -> Run:
    settings: dict[str, object] = {
        "parallel": {"layout": layout},
        "trainer": {"device": "cpu", "precision": "bf16"},
        **({"checkpoint": checkpoint} if checkpoint else {"model": MODEL}),
    }
    return prepare(resolve(Registry(), default_settings(), from_mapping(settings, "benchmark")))


def write(folder: Path) -> None:
    """A folder with random weights in three files of similar size."""
    run = run_of("")
    made = conversion(build_model(run))
    names = list(made.public)
    placed = {}
    for number in range(3):
        file, own = f"model-{number + 1:05d}-of-00003.safetensors", names[number::3]
        save_file({name: torch.randn(made.shape(name)).bfloat16() for name in own}, folder / file)
        placed |= dict.fromkeys(own, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    (folder / "config.json").write_text(json.dumps(config_of(run.config)))


def seconds(action: Callable[[], object]) -> float:
    """The best of some rounds; the first warms the file cache."""
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return min(found)


def measure(folder: Path, layout: str, rank: int) -> tuple[float, int, int]:
    """(seconds, bytes read, bytes of the rank's parts) of one rank."""
    run = run_of(layout, pretrained=str(folder))
    run.rank = rank
    model = build_model(run)
    allocate_parts(run, model)
    read = 0
    original = PublicWeights._slice

    def counted(weights: PublicWeights, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        nonlocal read
        found = original(weights, name, start, shape)
        read += found.nbytes
        return found

    PublicWeights._slice = counted  # type: ignore[method-assign]
    try:
        spent = seconds(lambda: fill_from(open_folder(folder), run, model, weights_of(model)))
    finally:
        PublicWeights._slice = original  # type: ignore[method-assign]
    own = sum(2 * box.numel for name in model.parameters() for box in model.placements[name].boxes(rank))
    return spent, read // ROUNDS, own


def main(folder: Path) -> None:
    """Write the folder and print the table."""
    write(folder)
    files = sorted(folder.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    print(f"{'':24}{'seconds':>9}{'MB read':>10}{'MB own':>9}")
    plain = seconds(lambda: [[one.clone() for one in load_file(file).values()] for file in files])  # it maps lazily
    print(f"{'safetensors, all files':24}{plain:9.2f}{total / 1e6:10.0f}")
    for layout, ranks in (("", 1), ("tp2pp2", 4)):
        for rank in range(ranks):
            spent, read, own = measure(folder, layout, rank)
            print(f"{(layout or 'one process') + f', rank {rank}':24}{spent:9.2f}{read / 1e6:10.0f}{own / 1e6:9.0f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
