"""Texts of long-tailed lengths, in batches and in lanes: `python benchmarks/lanes.py [--device cuda] [--texts 128]`.

A batch ends with its longest text. A lane takes the next text when one has ended; its cache has rows for the longest
text, or pages that the lanes share. Lengths are drawn from a log-normal distribution (median 24 tokens, sigma 1). The
weights are random, and texts of all ways must be equal.
"""

import argparse
import random
import time
from collections.abc import Callable

import torch

from mplug.model.build import allocate_parts, build_model
from mplug.model.memory import initialize
from mplug.run.run import Run
from mplug_sampling import Lanes, LaneText, Sampling, fill_lanes, sample, sample_key
from mplug_sampling.sampler import Sampler, sampling_run
from mplug_sampling.token_steps import Replays, replays_for
from mplug_testing.harness import tiny_config

SHAPES = {
    "tiny": {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": 2048},
    "small": {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "num_kv_heads": 4, "vocab_size": 8192},
    "1b": {"num_layers": 28, "hidden_size": 2048, "num_attention_heads": 16, "num_kv_heads": 8, "vocab_size": 32000},
}
WIDTHS = {"tiny": 704, "small": 1408, "1b": 6144}
Texts = list[list[int]]


def built(asked: argparse.Namespace) -> tuple[Run, Sampler]:
    """A llama of random weights."""
    settings = {f"model.{name}": value for name, value in SHAPES[asked.shape].items()}
    settings |= {"model.name": "llama", "model.ffn_hidden_size": WIDTHS[asked.shape], "kernels.attention": "sdpa"}
    settings |= {"trainer.precision": asked.precision, "trainer.device": asked.device, "trainer.seq_length": 512}
    sampler = Sampler(padded=True, graphs=True)
    run = sampling_run(tiny_config(settings), sampler)
    model = build_model(run)
    allocate_parts(run, model)
    initialize({name: one.data for name, one in model.parameters().items()}, model.placements, 0, 0)
    return run, sampler


def in_batches(sampler: Sampler, prompts: Texts, lengths: list[int], size: int, replays: Replays) -> Texts:
    """The texts, `size` at a time."""
    found: Texts = [[] for _ in prompts]
    for begin in range(0, len(prompts), size):
        numbers = range(begin, min(begin + size, len(prompts)))

        def take(row: int, token: int, first: int = begin) -> bool:
            found[first + row].append(token)
            return len(found[first + row]) >= lengths[first + row]

        keys = [sample_key(number) for number in numbers]
        batch = [prompts[number] for number in numbers]
        sample(sampler, batch, keys, max(lengths), 512, Sampling(1.0), take, replays=replays)
    return found


def in_lanes(lanes: Lanes, prompts: Texts, lengths: list[int]) -> Texts:
    """The texts, each when a lane is free."""
    texts = [LaneText(prompt, sample_key(number), Sampling(1.0)) for number, prompt in enumerate(prompts)]
    fill_lanes(lanes, texts, lambda number, *_: len(texts[number].taken) >= lengths[number])
    return [text.taken for text in texts]


def measured(name: str, work: Callable[[], Texts], facts: Callable[[], str] = str) -> Texts:
    """The texts of the second call, whose tokens per second are printed."""
    work()
    began = time.perf_counter()
    found = work()
    seconds, number = time.perf_counter() - began, sum(map(len, found))
    print(f"{name:<24} {number / seconds:9.0f} tokens/s  {seconds:7.2f} s  {facts()}", flush=True)
    return found


def main() -> None:
    """Measure the three ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--shape", default="small", choices=SHAPES)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--lanes", type=int, default=16)
    asked = parser.parse_args()
    drawn = random.Random(1)
    lengths = [min(256, max(1, int(drawn.lognormvariate(3.2, 1.0)))) for _ in range(asked.texts)]
    prompts = [[drawn.randrange(1, 2000) for _ in range(16)] for _ in lengths]
    run, sampler = built(asked)
    replays = replays_for(run, sampler)[0]
    print(
        f"{asked.texts} texts, {sum(lengths)} tokens: median {sorted(lengths)[len(lengths) // 2]}, most {max(lengths)}"
    )
    context, found = 16 + max(lengths), []
    found.append(measured("batches", lambda: in_batches(sampler, prompts, lengths, asked.lanes, replays)))
    for name, cache_tokens in (("lanes", None), ("lanes, pages", context * asked.lanes // 2)):
        lanes = Lanes(sampler, asked.lanes, context, replays=replays_for(run, sampler)[0], cache_tokens=cache_tokens)
        mib = lanes.allocate() / 2**20

        def facts(lanes: Lanes = lanes, mib: float = mib) -> str:
            return f"caches {mib:.0f} MiB, {lanes.num_put_back} put back"

        found.append(measured(name, lambda lanes=lanes: in_lanes(lanes, prompts, lengths), facts))
    print(
        f"equal texts: {sum(one == other for one, other in zip(found[0], found[1], strict=True))} and "
        f"{sum(one == other for one, other in zip(found[0], found[2], strict=True))} of {len(prompts)}"
    )


if __name__ == "__main__":
    with torch.no_grad():
        main()
