"""The attention of a long sequence on one GPU against context parallelism: time, and where it goes.

    python benchmarks/context.py [--cp 2] [--attention sdpa flash] [--methods ring all_gather ulysses] [--documents 8]

For every attention kernel and method: the median forward and backward pass of the attention core in bf16, causal, at
the heads of 7.1b (32 of 128) and batch 1, by the device's own clock; tokens a second and GPU against those of one GPU;
its TFLOP/s a GPU (4 H S² K / 2 forward, 2.5 times that backward); and of a profiled pass, the part in which collectives
ran at all, waiting for each other too, and the part in which nothing else did. The method
'documents' is all_gather with `parallel.cp.divide=documents`. On a CPU the shapes are small, and the times say nothing.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from mplug_bench.profiling import COLLECTIVES, profiled

from mplug.errors import UsageError
from mplug.model.build import build_model, choose_device
from mplug.run.launching import launch, launched
from mplug.run.prepare import prepare
from mplug.training.assembly import build_loader
from mplug.training.job import among
from mplug_estimates import timed
from mplug_nn import AttentionInputs
from mplug_streams.document_shares import document_maps
from mplug_testing.harness import tiny_config

METHODS = ("ring", "all_gather", "ulysses", "hierarchical", "documents")


@dataclass(frozen=True)
class Task:
    """One attention to measure; `settings` are those of a run whose model has it."""

    settings: dict[str, Any]
    calls: int


@dataclass(frozen=True)
class Found:
    """Seconds of a pass; the parts of it with any collective under way, and with nothing else under way."""

    seconds: float
    communicating: float
    exposed: float
    suppliers: str


def measure(task: Task, tell: Callable[[int], None]) -> Found:
    """Be one process of a measurement."""
    run = prepare(tiny_config(task.settings))
    run.device = choose_device(run.config)
    with among(launched(), run):
        step, suppliers = _pass(run)
        for number in range(5):
            step()
            tell(number)
        seconds = statistics.median(timed(step, task.calls, run.device))
        profile = profiled(step, run.device)
        exposed = profile.classes.get(COLLECTIVES, 0.0)
        figures = run.gathered((seconds, profile.collectives / profile.step, exposed / profile.step))
        return Found(*(max(column) for column in zip(*figures, strict=True)), suppliers)


def _pass(run: Any) -> tuple[Callable[[], None], str]:
    """A forward and backward pass of this rank's attention core, and who computes it."""
    (filled,) = (slot for slot in build_model(run).slots if slot.site.slot == "Attention.core")
    module, length = filled.site.module, run.config.trainer.seq_length
    own = length // run.mesh.world_size
    dtype = run.precision.activation_dtype
    heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads, module.num_heads)
    *qkv, gradient = (torch.randn(1, own, n, module.head_dim, device=run.device).to(dtype) for n in heads)
    leaves, spec, inputs = [x.requires_grad_() for x in qkv], module.spec, AttentionInputs()
    if run.entries:
        (batch,) = build_loader(run, "train").take(1)
        spec = replace(spec, documents=True)
        lengths = batch["document_lengths"]  # samples that are divided by documents need them on the CPU
        inputs = AttentionInputs(document_lengths=lengths if document_maps(run.mesh) else lengths.to(run.device))

    def once() -> None:
        torch.autograd.grad(module.core(*leaves, spec, inputs), leaves, gradient)

    return once, " in ".join([filled.supplier_label(run), *(wrap.label for wrap in filled.wraps)])


def settings(options: argparse.Namespace, attention: str, layout: str, **changes: Any) -> dict[str, Any]:
    """A model of one block with these heads."""
    on_gpu = torch.cuda.is_available()
    return {
        "model.num_layers": 1,
        "model.num_attention_heads": options.heads,
        "model.num_kv_heads": options.kv_heads or options.heads,
        "model.hidden_size": options.heads * options.head_dim,
        "model.head_dim": options.head_dim,
        "kernels.attention": attention,
        "data.documents": options.documents,
        "trainer.seq_length": options.length,
        "trainer.global_batch_size": 1,
        "trainer.micro_batch_size": 1,
        "trainer.eval_every": 0,
        "trainer.device": "cuda" if on_gpu else "cpu",
        "trainer.precision": "bf16" if on_gpu else "fp32",
        "parallel.layout": layout,
        **changes,
    }


def variants(options: argparse.Namespace, attention: str) -> dict[str, dict[str, Any]]:
    """What is measured with a kernel, by its name: one GPU first."""
    found = {"one GPU": settings(options, attention, "")}
    for method in options.methods:
        changes: dict[str, Any] = {"parallel.cp.method": method}
        if method == "documents":
            changes = {"parallel.cp.method": "all_gather", "parallel.cp.divide": "documents"}
        if method == "hierarchical":
            changes["parallel.cp.ulysses_degree"] = options.ulysses_degree
        found[f"cp{options.cp} {method}"] = settings(options, attention, f"cp{options.cp}", **changes)
    return found


def parsed() -> argparse.Namespace:
    """The command line."""
    on_gpu, parser = torch.cuda.is_available(), argparse.ArgumentParser()
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--attention", nargs="+", default=["sdpa"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS[:3]))
    parser.add_argument("--ulysses-degree", type=int, default=2, help="of hierarchical")
    parser.add_argument("--length", type=int, default=32768 if on_gpu else 256)
    parser.add_argument("--heads", type=int, default=32 if on_gpu else 4)
    parser.add_argument("--kv-heads", type=int, default=None)
    parser.add_argument("--head-dim", type=int, default=128 if on_gpu else 16)
    parser.add_argument("--documents", type=int, default=1, help="that the sample is packed with")
    parser.add_argument("--calls", type=int, default=20)
    return parser.parse_args()


def main() -> int:
    """Print a row for every attention and method."""
    options = parsed()
    flops = 3.5 * 4 * options.heads * options.length**2 * options.head_dim / 2
    header = ("ms", "us/token", "per GPU", "TFLOP/s", "comm.", "exposed")
    print(f"{'':<18}" + " ".join(f"{word:>10}" for word in header))
    for attention in options.attention:
        alone = 0.0
        for name, changes in variants(options, attention).items():
            ranks = options.cp if changes["parallel.layout"] else 1
            try:
                found: Found = launch(ranks, measure, Task(changes, options.calls))
            except UsageError as error:
                print(f"{name:<18}{error}")
                continue
            alone = alone or found.seconds
            cells = [f"{found.seconds * 1e3:.3f}", f"{found.seconds / options.length * 1e6:.4f}"]
            cells += [f"{alone / found.seconds / ranks:.3f}", f"{flops / found.seconds / ranks / 1e12:.4g}"]
            cells += [f"{part:.1%}" for part in (found.communicating, found.exposed)]
            print(f"{name:<18}" + " ".join(f"{cell:>10}" for cell in cells), end="")
            print(f"  {found.suppliers}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
