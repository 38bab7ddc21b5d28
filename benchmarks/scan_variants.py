"""Every variant of every kernel by which kernels/fla computes scans and convolutions, alone: right, wrong, or failing.

    python benchmarks/scan_variants.py [--kinds delta convolution] [--workers 8] [--seconds 170] [--out variants.json]
    python benchmarks/scan_variants.py --stages [--variants 1]      (a layer: eager, compiled, several steps)

flash-linear-attention has up to 36 variants of a kernel (tiles, warps, depth of the pipeline), and Triton keeps the
fastest without a look at its results. The first command runs a scan of B=4, S=4,096, 8 key and 16 value heads of 128
forward and backward, once for each variant of each kernel that the scan calls, with all other kernels in their
smallest variant, and compares the results of the first sample with a scan in plain torch in fp32. A variant that ends
with an illegal memory access takes its process with it; another process goes on. Then one process times the right ones.
It also tries decays per head on releases of Triton for which the library refuses them.

The second command uses what the plugin uses. Each stage is a process with CUDA_LAUNCH_BLOCKING=1, and prints a line:
the convolution alone, the scan alone, a layer in eager mode, the compiled layer, and 8 steps of 4 compiled layers.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from importlib import import_module
from itertools import count
from math import log2
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mplug_nn import ConvolutionSpec, GatedDeltaNet, MixerInputs, ScanSpec, chunked_scan, short_convolution

B, S, G, H, K, V, D = 4, 4096, 8, 16, 128, 128, 2048
KINDS = ("delta", "channel delta", "decay", "channel decay", "convolution")
BAND, BAND_OF_DECAYS = 0.012, 0.025
"""The largest error of a result in bf16, as a share of its norm; gradients of decays are differences of large sums."""
STAGES = ("convolution", "scan", "layer", "compiled", "steps")


class Chain:
    """The forward and backward pass of a scan or a convolution by the library, and what is right."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        generator = torch.Generator("cuda").manual_seed(1)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cuda")

        if kind == "convolution":
            channels = 2 * G * K + H * V
            self.spec: Any = ConvolutionSpec(4)
            wide = drawn(B, S, channels + H * V + 2 * H).bfloat16()[..., :channels]  # a view, as in a layer
            self.leaves = {"x": wide, "weight": drawn(channels, 4).bfloat16()}
            return
        by_channel = kind.startswith("channel")
        self.spec = ScanSpec(kind, K**-0.5, K, V)  # type: ignore[arg-type]
        q, k = (torch.nn.functional.normalize(drawn(B, S, G, K), dim=-1).bfloat16() for _ in range(2))
        decay = -0.1 * drawn(B, S, H).abs()
        decay = decay[..., None].expand(-1, -1, -1, K).contiguous() if by_channel else decay
        self.leaves = {"q": q, "k": k, "v": drawn(B, S, H, V).bfloat16(), "decay": decay}
        if "delta" in kind:
            self.leaves["write"] = drawn(B, S, H).sigmoid().bfloat16()

    def run(self) -> dict[str, Tensor]:
        """Output and gradients, by the plugin's operators."""
        given = {name: x.detach().requires_grad_() for name, x in self.leaves.items()}
        if self.kind == "convolution":
            y, _ = import_module("mplug_fla.convolution").convolution(given["x"], given["weight"], None, self.spec)
        else:
            write = given.get("write")
            scan = import_module("mplug_fla.scans").scan
            y, _ = scan(given["q"], given["k"], given["v"], given["decay"], write, self.spec, MixerInputs())
        return self.with_gradients(y, given)

    def with_gradients(self, y: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradient of y is the same for all samples, so that each is a known function of it."""
        seed = torch.Generator("cuda").manual_seed(2)
        gradient = torch.randn(1, *y.shape[1:], generator=seed, device="cuda").expand_as(y).to(y.dtype)
        grads = torch.autograd.grad(y, [*given.values()], gradient)
        return {"y": y} | dict(zip(given, grads, strict=True))

    def exact(self) -> dict[str, Tensor]:
        """The same for the first sample, in plain torch and fp32; a weight's gradient is that of all samples."""
        if self.kind == "convolution":
            given = {name: x.float().detach().requires_grad_() for name, x in self.leaves.items()}
            y, _ = short_convolution(given["x"], given["weight"], None, self.spec)
            return self.with_gradients(y, given)
        given = {name: x[:1].float().detach() for name, x in self.leaves.items()}
        by_channel = self.kind.startswith("channel")
        kind = self.kind.removeprefix("channel ")
        given["decay"] = given["decay"][..., 0] if by_channel else given["decay"]
        given = {name: x.requires_grad_() for name, x in given.items()}
        spec = ScanSpec(kind, self.spec.scale, K, V)  # type: ignore[arg-type]
        y, _ = chunked_scan(given["q"], given["k"], given["v"], given["decay"], given.get("write"), spec)
        return self.with_gradients(y, given)

    def errors(self, found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
        """The error of each result as a share of its norm."""
        result = {}
        for name, exact in right.items():
            one = found[name] if name == "weight" else found[name][: len(exact)]
            if name == "decay" and one.dim() > exact.dim():
                one = one.sum(-1)
            result[name] = share(one, exact)
        return result


def share(found: Tensor, exact: Tensor) -> float:
    """The error of a result as a share of the norm of what is right."""
    return float(((found.float() - exact).norm() / exact.norm()).detach())


def simplest(variant: Any) -> tuple[float, ...]:
    """The order of variants in which the first one serves the kernels that are not under test: 2 warps, 2 stages."""
    tiles = sum(abs(log2(size) - 6) for name, size in variant.kwargs.items() if name.startswith("B"))
    return abs(log2(variant.num_warps) - 1), variant.num_stages, tiles


def described(variant: Any) -> str:
    """'BK=64 BV=128 warps=2 stages=3'."""
    tiles = [f"{name}={size}" for name, size in variant.kwargs.items()]
    return " ".join([*tiles, f"warps={variant.num_warps}", f"stages={variant.num_stages}"])


def worker() -> None:
    """Answer tasks on stdin, a JSON line each, on stdout: the kernels of a kind, or a variant of a kernel."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what compilers print
    for module in import_module("mplug_fla.library").MODULES:
        import_module(module)
    vars(import_module("fla.ops.common.chunk_o"))["TRITON_ABOVE_3_7_1"] = True  # no refusal: that is what is measured
    tuners = dict(reversed(list(import_module("mplug_fla.variants").tuners())))
    variants = {name: list(tuner.configs) for name, tuner in tuners.items()}
    for name, tuner in tuners.items():
        tuner.configs = sorted(variants[name], key=simplest)[:1]
    calls, watched = Calls(tuners), ""
    chains: dict[str, tuple[Chain, dict[str, Tensor]]] = {}
    for line in sys.stdin:
        task = json.loads(line)
        answer: dict[str, Any] = dict(task)
        try:
            if task["kind"] not in chains:
                chain = Chain(task["kind"])
                chains[task["kind"]] = chain, chain.exact()
            chain, right = chains[task["kind"]]
            watched = task.get("kernel", "")
            if watched:
                tuner = tuners[watched]
                before, tuner.configs = tuner.configs, [variants[watched][task["number"]]]
                tuner.cache.clear()
            calls.begin(watched)
            found = chain.run()
            torch.cuda.synchronize()
            answer["errors"] = chain.errors(found, right)
            if task.get("times"):
                for _ in range(task["times"]):
                    chain.run()
                answer["us"] = calls.median()
            if not watched:
                answer["kernels"] = {
                    name: [described(one) for one in variants[name]] for name in calls.names if len(variants[name]) > 1
                }
        except Exception as error:  # a variant may fail in any way; the answer says how
            answer["failed"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:160]
        finally:
            if watched:
                tuner.configs = before
                tuner.cache.clear()
        out.write(json.dumps(answer) + "\n")
        if "CUDA" in answer.get("failed", ""):
            os._exit(1)  # the context is lost


class Calls:
    """Which kernels are called, and the time of one of them on the GPU."""

    def __init__(self, tuners: dict[str, Any]) -> None:
        self.names: list[str] = []
        self.watched = ""
        self.events: list[tuple[Any, Any]] = []
        for name, tuner in tuners.items():
            tuner.run = self.recorded(name, tuner.run)

    def begin(self, watched: str) -> None:
        """Forget what was recorded, and time the calls of this kernel from now on."""
        self.names, self.events, self.watched = [], [], watched

    def recorded(self, name: str, run: Any) -> Any:
        """The method `run` of a kernel's tuner, with a record."""

        def called(*arguments: Any, **named: Any) -> Any:
            if name not in self.names:
                self.names.append(name)
            if name != self.watched:
                return run(*arguments, **named)
            torch.cuda._sleep(400_000)  # the launch is on the way when the clock begins
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = run(*arguments, **named)
            end.record()
            self.events.append((begin, end))
            return result

        return called

    def median(self) -> float:
        """Microseconds of a call."""
        torch.cuda.synchronize()
        times: list[float] = sorted(1e3 * begin.elapsed_time(end) for begin, end in self.events)
        return times[len(times) // 2]


class Process:
    """A worker, started again when it has ended."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        """The answer to a task; a worker that ends without one has crashed."""
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, __file__, "--worker"]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else task | {"failed": "the process ended"}
        if "CUDA" in answer.get("failed", ""):
            self.process.wait()
        return answer

    def close(self) -> None:
        """End the worker."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def judged(answer: dict[str, Any]) -> str:
    """'right', 'wrong', or why it failed."""
    if "failed" in answer:
        return str(answer["failed"])
    beyond = [
        f"{name} {error:.3f}"
        for name, error in answer["errors"].items()
        if not error < (BAND_OF_DECAYS if name == "decay" else BAND)
    ]
    return "wrong: " + ", ".join(beyond) if beyond else "right"


def survey(chosen: argparse.Namespace) -> None:
    """Phase 1: which variants are right, by several processes. Phase 2: the time of the right ones, by one process."""
    begin = time.monotonic()
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__} | releases()), flush=True)
    tasks: queue.PriorityQueue[tuple[int, dict[str, Any]]] = queue.PriorityQueue()
    found: list[dict[str, Any]] = []
    names: dict[str, dict[str, list[str]]] = {}
    order = count()

    def serve(kinds: list[str]) -> None:
        process = Process()
        for kind in kinds:
            answer = process.ask({"kind": kind})
            print(json.dumps({"kind": kind, "smallest": judged(answer)}), flush=True)
            names[kind] = answer.get("kernels", {})
            for kernel, variants in names[kind].items():
                for number in range(len(variants)):
                    task = {"kind": kind, "kernel": kernel, "number": number}
                    tasks.put((next(order), task))
        while time.monotonic() - begin < 0.8 * chosen.seconds:
            try:
                *_, task = tasks.get(timeout=0.5)
            except queue.Empty:
                if len(names) == len(chosen.kinds):
                    break
                continue
            found.append(process.ask(task))
        process.close()

    shares = [chosen.kinds[place :: chosen.workers] for place in range(chosen.workers)]
    threads = [threading.Thread(target=serve, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    process = Process()
    for answer in sorted(found, key=lambda one: (one["kind"], one["kernel"], one["number"])):
        if judged(answer) == "right" and time.monotonic() - begin < chosen.seconds:
            again = process.ask({key: answer[key] for key in ("kind", "kernel", "number")} | {"times": 3})
            answer["us"] = again.get("us")
    process.close()
    lines = [table(kind, kernel, names[kind][kernel], found) for kind in names for kernel in names[kind]]
    for line in lines:
        print(json.dumps(line), flush=True)
    print(json.dumps({"untried": tasks.qsize(), "seconds": round(time.monotonic() - begin)}), flush=True)
    if chosen.out:
        Path(chosen.out).write_text(json.dumps(lines, indent=1))


def table(kind: str, kernel: str, variants: list[str], found: list[dict[str, Any]]) -> dict[str, Any]:
    """What was found about a kernel: right variants with their microseconds, fastest first, and the others."""
    answers = [one for one in found if (one["kind"], one["kernel"]) == (kind, kernel)]
    right = {variants[one["number"]]: one.get("us") for one in answers if judged(one) == "right"}
    fast = dict(sorted(right.items(), key=lambda pair: pair[1] or 1e9))
    others = {variants[one["number"]]: judged(one) for one in answers if judged(one) != "right"}
    return {"kind": kind, "kernel": kernel, "tried": f"{len(answers)} of {len(variants)}", "right": fast, "not": others}


def releases() -> dict[str, str]:
    """The releases of Triton and of the library."""
    from importlib.metadata import version

    return {name: version(name) for name in ("triton", "fla-core")}


def stage(name: str, kept: int | None) -> None:
    """One stage, in this process, as the plugin computes it; prints a line."""
    limits, variants = import_module("mplug_fla.limits"), import_module("mplug_fla.variants")
    if reason := limits.missing():
        raise SystemExit(reason)
    if kept is not None:
        variants.keep(kept)
    begin = time.monotonic()
    if name in ("convolution", "scan"):
        kind = "convolution"
        if name == "scan":
            kind = "channel delta" if limits.takes_channels(ScanSpec("delta", 1.0, K, V)) else "delta"
        chain = Chain(kind)
        result: dict[str, Any] = chain.errors(chain.run(), chain.exact())
    else:
        result = layers(name)
    torch.cuda.synchronize()
    print(json.dumps({"stage": name, "seconds": round(time.monotonic() - begin, 1)} | result), flush=True)


def layers(name: str) -> dict[str, Any]:
    """A mixer by the plugin beside one in plain torch and fp32; or the losses of some steps of four of them."""
    torch.manual_seed(0)
    mixers = [made() for _ in range(4 if name == "steps" else 1)]
    for mixer in mixers:
        filled(mixer)
        if name != "layer":
            mixer.compile(fullgraph=True, dynamic=False)
    if name == "steps":
        optimizer = torch.optim.AdamW([one for mixer in mixers for one in mixer.parameters()], lr=1e-3)
        x = torch.randn(B, S, D, device="cuda", dtype=torch.bfloat16)
        losses = []
        for _ in range(8):
            y = x
            for mixer in mixers:
                y = y + mixer(y)
            loss = (y - 0.5 * x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(round(float(loss), 4))
        return {"losses": losses, "finite": all(loss == loss and loss < 1e4 for loss in losses)}
    plain = made().float()
    plain.load_state_dict(mixers[0].state_dict())
    x = torch.randn(1, S, D, device="cuda", dtype=torch.bfloat16)
    mixers[0](torch.randn(B, S, D, device="cuda", dtype=torch.bfloat16)).sum().backward()  # the size that failed
    mixers[0].zero_grad()
    results = []
    for mixer, rows in ((mixers[0], x), (plain, x.float())):
        given = {"x": rows.detach().requires_grad_()} | dict(mixer.named_parameters())
        y = mixer(given["x"])
        seed = torch.Generator("cuda").manual_seed(2)
        gradient = torch.randn(y.shape, generator=seed, device="cuda").to(y.dtype)
        results.append({"y": y} | dict(zip(given, torch.autograd.grad(y, [*given.values()], gradient), strict=True)))
    found, right = results
    return {
        key: round(float((found[key].float() - one).detach().norm() / one.detach().norm()), 4)
        for key, one in right.items()
    }


class Mixed(GatedDeltaNet):
    """A gated delta net as a function of its rows."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """[B, S, D] -> [B, S, D]."""
        return self.mixed(x, None)


def made() -> Mixed:
    """The mixer of benchmarks/mixers.py, in bf16."""
    mixer = Mixed(D, G, H, K, V)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.uniform_(-0.02, 0.02)
        mixer.norm.fill_(1.0)
    return mixer.to("cuda", torch.bfloat16)


def filled(mixer: Mixed) -> None:
    """The slots of a mixer by kernels/fla."""
    scans, limits = import_module("mplug_fla.scans"), import_module("mplug_fla.limits")
    mixer.scan.core = scans.scan_by_channel if limits.takes_channels(mixer.scan.spec) else scans.scan
    mixer.conv.core = import_module("mplug_fla.convolution").convolution


def staged(chosen: argparse.Namespace) -> None:
    """All stages at once, each in a process of its own."""
    environment = os.environ | {"CUDA_LAUNCH_BLOCKING": "1"}
    more = [] if chosen.variants is None else ["--variants", str(chosen.variants)]
    processes = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--stage", name, *more], env=environment, stderr=subprocess.PIPE, text=True
        )
        for name in STAGES
    }
    for name, process in processes.items():
        try:
            _, errors = process.communicate(timeout=chosen.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            errors = f"not done after {chosen.seconds} s"
        if process.returncode:
            lines = [line for line in errors.splitlines() if line.strip()]
            print(json.dumps({"stage": name, "failed": lines[-1] if lines else "", "trace": lines[-12:]}), flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", default=["delta", "channel delta", "convolution"], choices=KINDS)
    parser.add_argument("--workers", type=int, default=8, help="processes that share the GPU")
    parser.add_argument("--seconds", type=int, default=170, help="when to end, tried or not")
    parser.add_argument("--variants", type=int, help="variants of a kernel in the stages; else all")
    parser.add_argument("--out", help="file for the figures, in JSON")
    parser.add_argument("--stages", action="store_true", help="stages of a layer instead of the variants of kernels")
    parser.add_argument("--stage", choices=STAGES, help="one stage, in this process")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        worker()
    elif chosen.stage:
        stage(chosen.stage, chosen.variants)
    elif chosen.stages:
        staged(chosen)
    else:
        survey(chosen)


if __name__ == "__main__":
    main()
