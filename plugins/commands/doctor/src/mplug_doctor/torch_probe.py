"""What torch says of itself and of the GPUs. It runs in a process of its own: `python -m mplug_doctor.torch_probe`."""

import os
import shutil
import sysconfig
from pathlib import Path

import torch

from mplug.commands import human_bytes
from mplug_doctor.apart import answer
from mplug_doctor.findings import Findings


def torch_and_gpus() -> Findings:
    """Torch, its CUDA and NCCL, each GPU, and which GPUs access the memory of each other."""
    findings = Findings()
    facts = {"torch": torch.__version__, "built for CUDA": str(torch.version.cuda or "no: for the CPU only")}
    facts["threads"] = str(torch.get_num_threads())
    facts["collectives"] = ", ".join(_backends()) or "none"
    findings.add("torch", facts)
    if torch.version.cuda is None:
        if shutil.which("nvidia-smi"):
            findings.problem(
                "this machine has a driver for NVIDIA GPUs, and torch is built for the CPU only",
                "install torch for CUDA: https://pytorch.org/get-started/locally",
            )
        return findings
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            findings.problem(f"torch finds no GPU: {_why_none()}", "compare the driver with the version of CUDA above")
        findings.add("GPUs", {"number": "0"})
        return findings
    findings.add("torch", {"NCCL": ".".join(map(str, torch.cuda.nccl.version()))})
    _gpus(findings)
    return findings


def _gpus(findings: Findings) -> None:
    count, names = torch.cuda.device_count(), set[str]()
    supported = {arch.rpartition("_")[2] for arch in torch.cuda.get_arch_list()}
    for number in range(count):
        it = torch.cuda.get_device_properties(number)
        names.add(it.name)
        free, total = torch.cuda.mem_get_info(number)
        capability = f"{it.major}.{it.minor}"
        text = f"{it.name}, compute capability {capability}, {human_bytes(free)} free of {human_bytes(total)}"
        findings.add("GPUs", {f"GPU {number}": text})
        if not any(arch.rstrip("af") and int(arch.rstrip("af")) // 10 == it.major for arch in supported):
            findings.problem(f"torch has no kernels for GPU {number} ({capability})", "install a newer torch for CUDA")
        if free < total * 9 // 10:
            findings.problem(
                f"other processes hold {human_bytes(total - free)} of GPU {number}",
                "end them ('nvidia-smi' lists them), or leave the GPU out with CUDA_VISIBLE_DEVICES",
            )
    if len(names) > 1:
        findings.problem(f"the GPUs are of different kinds: {', '.join(sorted(names))}", "train on GPUs of one kind")
    apart = [
        f"{one} and {other}"
        for one in range(count)
        for other in range(one + 1, count)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    if count > 1:
        reached = "all access the memory of each other" if not apart else f"no access between {', '.join(apart)}"
        findings.add("GPUs", {"peers": reached})
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing = "C compiler" if compiler is None else "header Python.h"
        findings.problem(f"kernels cannot be compiled: there is no {missing}", "install gcc and the headers of Python")


def _backends() -> list[str]:
    dist = torch.distributed
    known = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available, "mpi": dist.is_mpi_available}
    return [name for name, is_there in known.items() if is_there()] if dist.is_available() else []


def _why_none() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return "it gives no reason"


if __name__ == "__main__":
    answer(torch_and_gpus())
