"""Sampling with a cache and by full recomputation: `python benchmarks/generate.py [--device cuda] [--tokens 512]`.

Prints seconds, tokens per second and their ratio for one prompt of 8 tokens, and on a GPU the share of the memory's
bandwidth that reading all weights once per token takes (`--bandwidth`, GB/s). The weights are random.
"""

import argparse
import time

import torch

from mplug.model.build import allocate_parts, build_model
from mplug.model.decoding import sample
from mplug.model.memory import initialize
from mplug.model.model import Model
from mplug.model.sampling import Sampling, sample_key
from mplug.run.run import Decoding
from mplug.testing.harness import tiny_run

SHAPES = {
    "small": {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "num_kv_heads": 4, "vocab_size": 8192},
    "7b": {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_kv_heads": 8, "vocab_size": 32000},
}
WIDTHS = {"small": 1408, "7b": 14336}


def built(shape: str, device: str, precision: str, length: int) -> Model:
    """A llama of random weights that samples one prompt at a time."""
    fields = {**SHAPES[shape], "ffn_hidden_size": WIDTHS[shape], "init_std": 0.02}
    settings = {"model.name": "llama", **{f"model.{name}": value for name, value in fields.items()}}
    settings |= {"trainer.precision": precision, "trainer.device": device, "trainer.seq_length": length}
    run = tiny_run(settings)
    run.decoding = Decoding(padded=False)
    model = build_model(run)
    allocate_parts(run, model)
    if shape == "small":
        initialize({name: one.data for name, one in model.parameters().items()}, model.placements, 0, 0)
    else:
        for parameter in model.parameters().values():
            parameter.data.normal_(std=0.02)
    return model


def seconds(model: Model, tokens: int, context: int) -> float:
    """The time for this number of tokens."""
    began = time.perf_counter()
    sample(model, [range(1, 9)], [sample_key(0)], tokens, context, Sampling(0.8), lambda *_: False)
    return time.perf_counter() - began


def main() -> None:
    """Measure, and print one line per way of sampling."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--bandwidth", type=float, help="of the GPU's memory, in GB/s (H200: 4800)")
    parser.add_argument("--only-cached", action="store_true", help="omit the full recomputation")
    parser.add_argument("--threads", type=int, help="threads of torch on a CPU; default: torch's choice")
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    context = asked.tokens + 8
    model = built(asked.shape, asked.device, asked.precision, context)
    seconds(model, 4, context)
    cached = seconds(model, asked.tokens, context)
    print(f"with a cache: {cached:.2f} s, {asked.tokens / cached:.1f} tokens/s", flush=True)
    if asked.bandwidth:
        size = sum(one.nbytes for name, one in model.parameters().items() if not name.startswith("embedding"))
        share = size / (asked.bandwidth * 1e9) / (cached / asked.tokens)
        print(f"weights of {size / 1e9:.2f} GB read once per token: {share:.0%} of the bandwidth", flush=True)
    if not asked.only_cached:
        model.uncached = "full recomputation is measured"
        whole = seconds(model, asked.tokens, context)
        print(f"without:      {whole:.2f} s, {asked.tokens / whole:.1f} tokens/s; ratio {whole / cached:.1f}")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
