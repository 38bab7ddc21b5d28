"""The speed of a model that sees, Qwen3-VL with random weights, in mplug and in the transformers library.

    python benchmarks/vision.py [--preset 3-2b] [--attention sdpa] [--kernels triton] [--library sdpa] [--steps 8] ...
    python benchmarks/vision.py --preset tiny --steps 1 --batches 1 --sides 16 64 --length 128   (on a CPU, for a test)

Both train on one device on the same micro batches: one sample a step, packed from documents of random tokens, with
pictures of noise of mixed sizes. The micro batches are made before, and take turns. Steps include the copy to the
device, clipping and AdamW. The library has bf16 weights, gradients and moments, where mplug has fp32 masters and
moments; so the library writes fewer bytes. Its attention is `--library`: 'auto' is flash attention (version 2, or 4) if
it is installed, else sdpa. With `--compile-library`, each of its blocks is compiled by itself.

Printed for each: tokens and patches per second, MFU of tower and decoder together (matrix products and attention of the
forward pass, times 3; causal attention once, inside documents and pictures only), and memory. Then the ratio.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mplug.config.defaults import default_settings
from mplug.config.sources import from_mapping, merge, read_assignments
from mplug.contracts.micro_batch import IGNORED, MicroBatch
from mplug.model.build import choose_device
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.assembly import Parts, build
from mplug.training.hardware import peak_memory_gib, peak_tflops
from mplug_compile.compilation import compiled_graphs
from mplug_estimates import timed


@dataclass
class Work:
    """What the measured steps compute."""

    tokens: int
    patches: int
    flops: int


@dataclass
class Measured:
    """The figures of a participant; `seconds` are those of each step, `loss` is that of the last one."""

    name: str
    seconds: list[float]
    memory_gib: float
    loss: float
    work: Work
    peak: float | None

    @property
    def tokens(self) -> float:
        """Tokens per second."""
        return self.work.tokens / sum(self.seconds)

    @property
    def row(self) -> str:
        """A line of the table."""
        total = sum(self.seconds)
        rate = self.work.flops / total / 1e12
        mfu = f"{100 * rate / self.peak:9.1f}%" if self.peak else f"{'':10}"
        patches = self.work.patches / total
        return f"{self.name:34}{self.tokens:12,.0f}{patches:12,.0f}{rate:10.1f}{mfu}{self.memory_gib:9.1f}"


def run_of(chosen: argparse.Namespace) -> Run:
    """The run of mplug."""
    settings: dict[str, object] = {
        "model": {"name": "qwen-vl", "preset": chosen.preset},
        "data": {
            "name": "mock",
            "media": chosen.media,
            "media_sides": list(chosen.sides),
            "documents": chosen.documents,
        },
        "kernels": {"attention": chosen.attention},
        "trainer": {"seq_length": chosen.length, "global_batch_size": 1, "micro_batch_size": 1, "steps": 1000},
    }
    changes = [from_mapping(settings, "benchmark"), read_assignments(chosen.set)]
    run = prepare(resolve(Registry(), default_settings(), merge(*changes)))
    run.device = choose_device(run.config)
    return run


def read(parts: Parts, number: int) -> list[MicroBatch]:
    """The first micro batches with pictures, and the time that one of them took."""
    start, found, count = time.perf_counter(), list[MicroBatch](), 0
    for batch in parts.train_loader.loader.take(20 * number):
        count += 1
        if int(batch["vision_rows"].max()) >= 0:
            found.append(batch)
        if len(found) == number:
            break
    seconds = (time.perf_counter() - start) / count
    print(f"a micro batch is made in {seconds:.2f} s, outside of the measured steps")
    for batch in found:
        pictures, patches = batch["patch_lengths"].shape[1], batch["patches"].shape[1]
        text = int((batch["vision_rows"] < 0).sum())
        print(f"  {pictures} pictures of {patches} patches in all, {text} tokens of text")
    return found


def work_of(parts: Parts, batches: Sequence[MicroBatch], steps: int) -> Work:
    """Tokens, patches and FLOPs of steps that take the micro batches in turn."""
    work = Work(0, 0, 0)
    for _, batch in zip(range(steps), cycle(batches), strict=False):
        tokens, patches = batch["tokens"].numel(), batch["patches"].shape[1]
        squares = int(batch.get("document_lengths", torch.tensor([tokens])).square().sum())
        flops = parts.model.flops.of(tokens, squares)
        for name, passes in parts.model.stream_passes.items():
            flops += passes.flops.of(int(batch[name].sum()), int(batch[name].square().sum()))
        work = Work(work.tokens + tokens, work.patches + patches, work.flops + flops)
    return work


def measured(
    name: str, step: Callable[[MicroBatch], Tensor], batches: Sequence[MicroBatch], work: Work, run: Run, steps: int
) -> Measured:
    """Time steps; each micro batch has been trained on once before."""
    for batch in batches:
        step(batch)
    losses, turns, compiled = list[Tensor](), cycle(batches), compiled_graphs()
    seconds = timed(lambda: losses.append(step(next(turns))), steps, run.device)
    if compiled_graphs() > compiled:
        print(f"{name}: torch compiled {compiled_graphs() - compiled} graphs during the measured steps")
    loss = float(losses[-1])
    return Measured(name, seconds, peak_memory_gib(run.device), loss, work, peak_tflops(run.device))


def ours(run: Run, chosen: argparse.Namespace) -> tuple[Measured, list[MicroBatch], Work]:
    """mplug's figures, and the micro batches."""
    parts = build(run)
    batches = read(parts, chosen.batches)
    if run.device == "cuda":  # as the library's
        batches = [{name: x.pin_memory() for name, x in batch.items()} for batch in batches]
    work = work_of(parts, batches, chosen.steps)

    def step(batch: MicroBatch) -> Tensor:
        run.step += 1
        parts.stepper.forward_backward(parts.train_loader.step_of([batch]), run.step)
        return parts.stepper.update(1e-5, 0.0).loss

    start = time.perf_counter()
    found = measured(f"mplug, {chosen.attention}", step, batches, work, run, chosen.steps)
    print(f"mplug: {compiled_graphs()} graphs, {time.perf_counter() - start:.0f} s with compilation")
    return found, batches, work


def library_of(run: Run, chosen: argparse.Namespace) -> tuple[Any, str]:
    """The library's model of the same shape, and its attention."""
    from mplug_huggingface_format.model_config import config_of
    from transformers import AutoConfig, Qwen3VLForConditionalGeneration
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_4_available

    fields = config_of(run.config)
    config = AutoConfig.for_model(**fields)
    attention = chosen.library
    if attention == "auto":
        fourth = "flash_attention_4" if is_flash_attn_4_available() else "sdpa"
        attention = "flash_attention_2" if is_flash_attn_2_available() else fourth
    if attention == "flash_attention_4":
        lengths_as_numbers()
    dtype = torch.bfloat16 if run.config.trainer.precision == "bf16" else torch.float32
    with torch.device(run.device):
        model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation=attention, dtype=dtype)
    return model.train(), attention


def lengths_as_numbers() -> None:
    """Let flash-attn-4 take the largest lengths as the library gives them: as tensors, which it refuses itself."""
    from flash_attn import cute

    attend = cute.flash_attn_varlen_func
    names = ("max_seqlen_q", "max_seqlen_k")

    @wraps(attend)
    def attend_with_numbers(*args: Any, **given: Any) -> Any:
        return attend(*args, **{name: int(x) if name in names else x for name, x in given.items()})

    cute.flash_attn_varlen_func = attend_with_numbers


def arguments_of(batch: MicroBatch, merge_size: int) -> dict[str, Tensor]:
    """A micro batch as the library takes it."""
    lengths = batch["patch_lengths"][0]
    lengths = lengths[lengths > 0]
    starts = lengths.cumsum(0) - lengths
    sizes = batch["patch_places"][0, starts, 2:]
    if int(batch["vision_rows"].max()) + 1 != int(lengths.sum()) // merge_size**2:
        raise ValueError("the library cannot take patches that no token shows")
    labels = batch["labels"].roll(1, dims=1)  # the library shifts them itself
    labels[:, 0] = IGNORED
    positions = batch["positions"].expand_as(batch["tokens"])
    return {
        "input_ids": batch["tokens"],
        "labels": labels,
        "pixel_values": batch["patches"][0],
        "image_grid_thw": torch.cat((torch.ones_like(sizes[:, :1]), sizes), dim=1),
        "position_ids": torch.cat((positions[None], batch["coordinates"].permute(2, 0, 1))),
        "mm_token_type_ids": (batch["vision_rows"] >= 0).int(),
    }


def theirs(run: Run, chosen: argparse.Namespace, batches: Sequence[MicroBatch], work: Work) -> Measured:
    """The library's figures."""
    model, attention = library_of(run, chosen)
    if chosen.compile_library:
        for block in (*model.model.visual.blocks, *model.model.language_model.layers):
            block.compile(dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=run.device == "cuda")
    merge_size = model.config.vision_config.spatial_merge_size
    prepared = [arguments_of(batch, merge_size) for batch in batches]
    if run.device == "cuda":
        prepared = [{name: x.pin_memory() for name, x in one.items()} for one in prepared]

    def step(batch: MicroBatch) -> Tensor:
        moved = {name: x.to(run.device, non_blocking=True) for name, x in batch.items()}
        loss: Tensor = model(**moved, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = ", compiled" if chosen.compile_library else ""
    return measured(f"transformers, {attention}{compiled}", step, prepared, work, run, chosen.steps)


def main() -> None:
    """Measure both and print the table."""
    chosen = options()
    run = run_of(chosen)
    found, batches, work = ours(run, chosen)
    table = [found]
    print(f"{'':34}{'tokens/s':>12}{'patches/s':>12}{'TFLOP/s':>10}{'MFU':>10}{'GiB':>9}")
    print(found.row, flush=True)
    if chosen.library != "none":
        gc.collect()
        if run.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        table.append(theirs(run, chosen, batches, work))
        print(table[-1].row)
        print(f"ratio of tokens/s: {table[0].tokens / table[1].tokens:.3f}")
    print(f"losses of the last step: {', '.join(f'{one.loss:.4f}' for one in table)}")
    if chosen.out:
        Path(chosen.out).write_text(json.dumps([asdict(one) for one in table]))


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", default="3-2b")
    parser.add_argument("--attention", default="sdpa", help="kernel of mplug's attention")
    parser.add_argument("--library", default="auto", help="attention of the library: auto, a name it knows, or none")
    parser.add_argument("--compile-library", action="store_true")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sample")
    parser.add_argument("--media", type=int, default=24, help="largest number of pictures of a sample")
    parser.add_argument("--sides", type=int, nargs=2, default=(224, 1024), help="smallest and largest side in pixels")
    parser.add_argument("--documents", type=int, default=4, help="documents of a sample")
    parser.add_argument("--batches", type=int, default=4, help="number of different micro batches")
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--set", action="append", default=[], help="a setting of mplug's run, as in mplug train")
    parser.add_argument("--out", help="file for the figures, in JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
