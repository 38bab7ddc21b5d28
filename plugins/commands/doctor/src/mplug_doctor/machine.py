"""Probes of the machine that need no torch: processors, memory, disks, limits, environment."""

import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
from pathlib import Path

from mplug.commands import human_bytes
from mplug_doctor.findings import Findings
from mplug_estimates import host_memory

GIB = 1 << 30
LEAST_DISK = 5 * GIB
LEAST_SHARED = 64 << 20
LEAST_FILES = 1024
LEAST_MEMORY = 2 * GIB
PRINTED = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"),
    *("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    *("PYTORCH_NO_CUDA_MEMORY_CACHING", "NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE"),
    *(
        "NCCL_IB_DISABLE",
        "NCCL_IB_HCA",
        "NCCL_SOCKET_IFNAME",
        "NCCL_NET",
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_NVLS_ENABLE",
    ),
    *("NCCL_CUMEM_ENABLE", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"),
    *("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
    *("TORCH_SYMM_MEM_DISABLE_MULTICAST", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TORCH_LOGS"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("SLURM_NTASKS", "SLURM_NNODES", "OMPI_COMM_WORLD_SIZE", "PYTHONHASHSEED"),
)
"""The environment variables that the report prints. No other is read into it, because any may hold a secret."""
HARMFUL = {
    "CUDA_LAUNCH_BLOCKING": ("the CPU waits for every kernel, so training is slow", ("1",)),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("every tensor is allocated by the driver, so training is slow", ("1",)),
    "NCCL_P2P_DISABLE": ("GPUs send through the memory of the CPU", ("1",)),
    "NCCL_SHM_DISABLE": ("processes of one machine send through the network", ("1",)),
    "TORCH_NCCL_BLOCKING_WAIT": ("the CPU waits for every collective", ("1",)),
    "CUDA_VISIBLE_DEVICES": ("no GPU is visible", ("", "-1")),
}
"""Variables that make training slow or GPUs invisible, by their values."""


def processors() -> Findings:
    """The processors that this process may use."""
    findings = Findings()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {"processors": f"{usable} of {os.cpu_count()} usable", "architecture": platform.machine()}
    found = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    quota = _text(Path("/sys/fs/cgroup/cpu.max")).split()
    if found:
        facts["model"] = found[1]
    if len(quota) == 2 and quota[0] != "max":
        facts["limit of the control group"] = f"{int(quota[0]) / int(quota[1]):g} processors"
    findings.add("CPU", {**facts, "system": f"{platform.system()} {platform.release()}"})
    return findings


def memory() -> Findings:
    """Main memory, with the limits of control groups."""
    findings, found = Findings(), host_memory()
    if found.total is None or found.available is None:
        findings.add("Memory", {"main memory": "the system does not state it"})
        return findings
    facts = {"total": f"{human_bytes(found.total)} ({found.source})", "available": human_bytes(found.available)}
    findings.add("Memory", {**facts, "free swap space": human_bytes(found.swap or 0)})
    if found.available < LEAST_MEMORY:
        findings.problem(
            f"only {human_bytes(found.available)} of main memory are available on {found.source}",
            "end other programs, or raise the limit of the container or job",
        )
    return findings


def disks() -> Findings:
    """Free space for runs, temporary files and shared memory."""
    findings = Findings()
    runs = Path("runs") if Path("runs").is_dir() else Path()
    places = {"runs": (runs, LEAST_DISK), "temporary files": (Path(tempfile.gettempdir()), LEAST_DISK // 5)}
    for name, (path, least) in {**places, "/dev/shm": (Path("/dev/shm"), LEAST_SHARED)}.items():
        if not path.is_dir():
            findings.add("Disk", {name: "absent"})
            continue
        usage = shutil.disk_usage(path)
        findings.add("Disk", {name: f"{human_bytes(usage.free)} free of {human_bytes(usage.total)}"})
        if usage.free < least:
            remedy = (
                "start the container with a larger --shm-size"
                if name == "/dev/shm"
                else "free space, or use another disk"
            )
            findings.problem(f"only {human_bytes(usage.free)} are free for {name}", remedy)
        if name != "/dev/shm" and not os.access(path, os.W_OK):
            findings.problem(f"the folder of {name} cannot be written", "change its permissions, or use another folder")
    return findings


def limits() -> Findings:
    """Limits of this process."""
    findings = Findings()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    facts = {"open files": f"{_limit(soft)} (at most {_limit(hard)})"}
    facts["locked memory"] = _limit(locked) if locked == resource.RLIM_INFINITY else human_bytes(locked)
    findings.add("Limits", facts)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        findings.problem(f"a process may open only {soft} files", f"raise the limit: ulimit -n {LEAST_FILES}")
    return findings


def environment() -> Findings:
    """The variables of `PRINTED` that are set."""
    findings = Findings()
    found = {name: os.environ[name] for name in PRINTED if name in os.environ}
    findings.add("Environment", found or {"variables": "none of those that concern training is set"})
    for name, (effect, values) in HARMFUL.items():
        if found.get(name) in values:
            findings.problem(f"{name}={found[name]}: {effect}", f"unset {name}, unless you set it for a test")
    return findings


def driver() -> Findings:
    """What nvidia-smi says of the driver, and of the links between GPUs."""
    findings, program = Findings(), shutil.which("nvidia-smi")
    if program is None:
        findings.add("GPU driver", {"nvidia-smi": "not found"})
        return findings
    query = ("--query-gpu=index,name,driver_version,memory.total,memory.used", "--format=csv,noheader")
    finished = subprocess.run([program, *query], capture_output=True, text=True, timeout=30)
    if finished.returncode:
        words = (finished.stdout + finished.stderr).strip().splitlines()
        findings.problem(
            f"nvidia-smi fails: {(words or ['no message'])[-1]}", "install or restart the driver of the GPU"
        )
        return findings
    findings.add("GPU driver", {"nvidia-smi": finished.stdout.strip()})
    links = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=30)
    if not links.returncode:
        text = re.sub(r"\x1b\[[0-9;]*m", "", links.stdout).strip()
        findings.add("GPU driver", {"links": "\n" + text.expandtabs(8)})
    return findings


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
