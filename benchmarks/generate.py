"""Sampling with a cache and by full recomputation: `python benchmarks/generate.py [--device cuda] [--tokens 512]`.

Prints milliseconds per token after the first one, and tokens per second. On a GPU it compares the bytes that a token
must read (all weights and the filled rows of the cache) with the bandwidth of the memory: that of `--bandwidth` (GB/s),
and that of a copy on this machine. The weights are random.
"""

import argparse
import time

import torch

from mplug.errors import listed
from mplug.model.build import allocate_parts, build_model
from mplug.model.memory import initialize
from mplug.model.model import Model
from mplug.run.run import Run
from mplug_sampling.decoding import sample
from mplug_sampling.fast_steps import compiled_step
from mplug_sampling.sampler import Sampler, sampling_run
from mplug_sampling.sampling import Sampling, sample_key
from mplug_sampling.token_steps import Replays, replays_for
from mplug_testing.harness import tiny_config

SHAPES = {
    "small": {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "num_kv_heads": 4, "vocab_size": 8192},
    "7b": {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_kv_heads": 8, "vocab_size": 32000},
}
WIDTHS = {"small": 1408, "7b": 14336}
COPIED = 1 << 30
"""Bytes of the copy that measures the memory's bandwidth."""


def built(asked: argparse.Namespace, length: int) -> tuple[Run, Sampler]:
    """A llama of random weights that samples one prompt at a time."""
    fields = {**SHAPES[asked.shape], "ffn_hidden_size": WIDTHS[asked.shape], "init_std": 0.02}
    settings = {"model.name": "llama", **{f"model.{name}": value for name, value in fields.items()}}
    settings |= {"trainer.precision": asked.precision, "trainer.device": asked.device, "trainer.seq_length": length}
    settings |= {"trainer.compile": "inductor" if asked.compile else "never", "trainer.tune_kernels": asked.tune}
    if asked.kernels:
        settings |= {"kernels.default": asked.kernels, "kernels.attention": "sdpa"}
    sampler = Sampler(graphs=True)
    run = sampling_run(tiny_config(settings), sampler)
    model = build_model(run)
    allocate_parts(run, model)
    if asked.shape == "small":
        initialize({name: one.data for name, one in model.parameters().items()}, model.placements, 0, 0)
    else:
        for parameter in model.parameters().values():
            parameter.data.normal_(std=0.02)
    return run, sampler


class Measured:
    """The seconds per token after the first one, whose time is that of the prompt, and the tokens."""

    def __init__(self, sampler: Sampler, asked: argparse.Namespace, replays: Replays, tokens: int) -> None:
        self.tokens: list[int] = []
        times: list[float] = []
        prompt = [number % 1000 + 1 for number in range(asked.prompt)]

        def take(number: int, token: int) -> bool:
            times.append(time.perf_counter())
            self.tokens.append(token)
            return False

        context, sampling = asked.prompt + asked.tokens, Sampling(asked.temperature)
        sample(sampler, [prompt], [sample_key(0)], tokens, context, sampling, take, replays=replays)
        self.seconds = (times[-1] - times[0]) / (tokens - 1)

    def __str__(self) -> str:
        return f"{1000 * self.seconds:.3f} ms per token, {1 / self.seconds:.1f} tokens/s"


def bytes_per_token(run: Run, model: Model, asked: argparse.Namespace) -> float:
    """The weights without the table of tokens, and the keys and values of the positions before a token, on average."""
    weights = sum(one.nbytes for name, one in model.parameters().items() if not name.startswith("embedding"))
    shape = SHAPES[asked.shape]
    width = 2 * shape["num_kv_heads"] * shape["hidden_size"] // shape["num_attention_heads"]
    of_position = shape["num_layers"] * width * run.precision.activation_dtype.itemsize
    return weights + of_position * (asked.prompt + asked.tokens / 2)


def copy_bandwidth() -> float:
    """Bytes per second that a copy on the GPU reads and writes."""
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    target, events = torch.empty_like(source), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for event in events:
        for _ in range(10):
            target.copy_(source)
        event.record()
    torch.cuda.synchronize()
    return 10 * 2 * COPIED / (events[0].elapsed_time(events[1]) / 1000)


def profile(sampler: Sampler, asked: argparse.Namespace, replays: Replays) -> None:
    """Print the time on the GPU and the number of launches of each kernel, per token."""
    tokens = 17
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        Measured(sampler, asked, replays, tokens)
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)
    print("microseconds per token, launches per token, kernel (the prompt's kernels are among them)")
    for row in rows[: asked.profile]:
        print(f"{row.self_device_time_total / tokens:10.1f} {row.count / tokens:8.1f}  {row.key[:110]}")


def main() -> None:
    """Measure, and print one line per way of sampling."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--kernels", help="the default kernel plugin, beside sdpa for attention")
    parser.add_argument("--compile", action="store_true", help="compile the step of a token")
    parser.add_argument("--tune", action="store_true", help="with --compile: tune the kernels (trainer.tune_kernels)")
    parser.add_argument("--prompt", type=int, default=8, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=512, help="tokens to sample")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--bandwidth", type=float, help="of the GPU's memory, in GB/s (H200: 4800)")
    parser.add_argument("--only-cached", action="store_true", help="omit the full recomputation")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="print the N kernels that take longest")
    parser.add_argument("--threads", type=int, help="threads of torch on a CPU; default: torch's choice")
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    run, sampler = built(asked, asked.prompt + asked.tokens)
    compiled, reason = compiled_step(run, sampler)
    if asked.compile and not compiled:
        raise SystemExit(f"the step of a token is not compiled, because {reason}")
    recorded, reasons = replays_for(run, sampler, compiled)
    if asked.device == "cuda" and reasons:
        print(f"no graph replays the step of a token, because {listed(reasons)}", flush=True)
    found = {}
    for way in ("growing caches", "static caches", "a CUDA graph"):
        if (way == "static caches" and sampler.growing) or (way == "a CUDA graph" and recorded.make is None):
            continue
        replays, reason = recorded if way == "a CUDA graph" else Replays(compiled=recorded.compiled), sampler.growing
        sampler.growing = reason or ("they are measured" if way == "growing caches" else "")
        warmup = 6 if way == "growing caches" else asked.tokens  # as many tokens have the same recording
        Measured(sampler, asked, replays, warmup)  # kernels compile, and the step is recorded
        found[way] = Measured(sampler, asked, replays, asked.tokens)
        sampler.growing = reason
        print(f"with {way}: {found[way]}", flush=True)
        if asked.device == "cuda":
            report_bandwidth(bytes_per_token(run, sampler.model, asked), found[way].seconds, asked.bandwidth)
    if recorded.make is not None and found["a CUDA graph"].tokens != found["static caches"].tokens:
        raise SystemExit("the graph gives other tokens than eager steps")
    if asked.profile:
        profile(sampler, asked, recorded)
    if not asked.only_cached:
        sampler.uncached = "full recomputation is measured"
        whole = Measured(sampler, asked, Replays(), asked.tokens)
        fastest = min(one.seconds for one in found.values())
        print(f"without a cache: {whole}; {whole.seconds / fastest:.1f} times as long")


def report_bandwidth(read: float, seconds: float, stated: float | None) -> None:
    """Print the achieved bandwidth, and its shares of the stated one and of a copy's."""
    reached, copied = read / seconds, copy_bandwidth()
    shares = f"{reached / copied:.0%} of a copy's {copied / 1e9:.0f} GB/s"
    if stated:
        shares = f"{reached / (stated * 1e9):.0%} of {stated:.0f} GB/s, {shares}"
    print(f"  reads {read / 1e9:.2f} GB per token at {reached / 1e9:.0f} GB/s: {shares}", flush=True)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
