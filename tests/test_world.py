"""Where a process finds itself: what launchers really say, what is refused, and how processes share a machine.

Open MPI 4.1.8 and 5.0.11 and MPICH 5.0.2 have printed the environments of mpirun and mpiexec.
Slurm's are those of the section "output environment variables" of srun(1).
"""

import json
import os
import socket
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from mplug import RunError, UsageError
from mplug.distributed.world import World
from mplug_launch import joining, meeting
from mplug_launch.joining import joined
from mplug_launch.launchers import first_host, launched, tasks_per_node
from mplug_launch.meeting import Member, decide, gpu_of, interfaces, meet, member, num_threads, open_store

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "39217",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI = {f"OMPI_COMM_WORLD_LOCAL_{name}": value for name, value in {"RANK": "1", "SIZE": "2"}.items()}
OPEN_MPI_4 = OPEN_MPI | {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_MCA_orte_hnp_uri": "2071592960.0;tcp://10.77.0.1:38687;tcp6://[fd77::1]:51229",
    "OMPI_MCA_orte_local_daemon_uri": "2071592960.1;tcp://10.77.0.2:48255;tcp6://[fd77::2]:54583",
    "PMIX_HOSTNAME": "node02",
    "PMIX_NAMESPACE": "2071592961",
    "PMIX_RANK": "3",
    "PMIX_SERVER_URI2": "2071592960.1;tcp4://127.0.0.1:43115",
}
OPEN_MPI_5 = OPEN_MPI | {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMIX_HOSTNAME": "node01",
    "PMIX_NAMESPACE": "prterun-node01-25721@1",
    "PMIX_RANK": "1",
    "PMIX_SERVER_URI2": "prterun-node01-25721@0.1;tcp4://127.0.0.1:36659",
    "PRTE_LAUNCHED": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "11", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "4242",
    "SLURM_JOB_NODELIST": "gpu[01-04]",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "gpu[02-03]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",  # where srun runs
    "SLURM_SRUN_COMM_PORT": "41234",  # srun listens there itself
}
PMI2 = {"PMI_RANK": "5", "PMI_SIZE": "7", "PMI_FD": "9"}
"""What srun adds with --mpi=pmi2."""
BATCH = {name: SRUN[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NODEID")} | {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
"""A batch script: its programs are in no step, or in the steps of mpirun's daemons."""


ON_SRUN = World(5, 7, 1, "srun", 3, "gpu02", 25251, "4242.1", True)
ON_TORCHRUN = World(3, 4, 1, "torchrun", 2, "node01", 39217, "none")
ONE_TASK = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
ONE_NODE = {"SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_STEP_NODELIST": "gpu02", "SLURM_NODEID": "0"}
OF_OPEN_MPI_5 = World(1, 2, 1, "mpirun", 2, "127.0.0.1", 28704, "prterun-node01-25721@1")
WORLDS: dict[str, tuple[dict[str, str], World | None]] = {
    "alone": ({}, None),
    "batch script": (BATCH, None),
    "one task": (SRUN | ONE_TASK, None),
    "torchrun": (TORCHRUN, ON_TORCHRUN),
    "torchrun inside srun": (SRUN | TORCHRUN, ON_TORCHRUN),
    "Open MPI 4": (OPEN_MPI_4, World(3, 4, 1, "mpirun", 2, "10.77.0.1", 23200, "2071592961", True)),
    "Open MPI 5": (OPEN_MPI_5, OF_OPEN_MPI_5),
    "Open MPI 5 inside a batch script": (
        BATCH | OPEN_MPI_5 | {"OMPI_COMM_WORLD_SIZE": "4"},
        replace(OF_OPEN_MPI_5, size=4, address="gpu01", derived=True),
    ),
    "MPICH": (MPICH, World(1, 2, 1, "mpiexec", 2, "127.0.0.1", 29500)),
    "srun": (SRUN, ON_SRUN),
    "srun --mpi=pmi2": (SRUN | PMI2, ON_SRUN),
    "srun --resv-ports": (SRUN | {"SLURM_STEP_RESV_PORTS": "12004-12005"}, replace(ON_SRUN, port=12004)),
    "the user's address": (
        SRUN | {"MASTER_ADDR": "fd00::1", "MASTER_PORT": "1234"},
        replace(ON_SRUN, address="fd00::1", port=1234, derived=False),
    ),
    "srun on one machine": (SRUN | ONE_NODE, replace(ON_SRUN, local_size=7, address="127.0.0.1", derived=False)),
}


@pytest.mark.parametrize("name", WORLDS)
def test_a_process_finds_its_place_and_the_address_in_what_its_launcher_says(name: str) -> None:
    environment, expected = WORLDS[name]
    assert launched(environment) == expected


REFUSED = {
    "Open MPI 5 on two machines": (OPEN_MPI_5 | {"OMPI_COMM_WORLD_SIZE": "4"}, ["mpirun", "-x MASTER_ADDR=HOST"]),
    "MPICH on two machines": (MPICH | {"PMI_SIZE": "4"}, ["mpiexec", "-genv MASTER_ADDR HOST"]),
    "loopback addresses": (
        OPEN_MPI_4 | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1,169.254.0.1:5"},
        ["no address", "-x MASTER_ADDR=HOST"],
    ),
    "several components": (SRUN | {"SLURM_HET_SIZE": "2"}, ["srun", "no address", "MASTER_ADDR"]),
    "a rank without its place": ({"RANK": "0", "WORLD_SIZE": "2"}, ["LOCAL_RANK is not set", "torchrun"]),
    "a rank beyond the size": ({**TORCHRUN, "RANK": "4"}, ["rank 4 of 4", "unset"]),
    "a local rank beyond its size": ({**TORCHRUN, "LOCAL_RANK": "2"}, ["rank 2 of 2 on this machine"]),
    "a rank in words": ({**TORCHRUN, "RANK": "two"}, ["RANK='two' is not a number"]),
    "a port in words": ({**TORCHRUN, "MASTER_PORT": "free"}, ["MASTER_PORT='free' is not a port"]),
    "no address": ({name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}, ["MASTER_ADDR"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_environment_that_does_not_say_where_processes_meet_is_refused_at_once(case: str) -> None:
    environment, words = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        launched(environment)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_two_jobs_of_slurm_and_two_steps_of_a_job_have_different_ports() -> None:
    jobs = [
        SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(7000, 7900) for step in (0, 9)
    ]
    ports = [world.port for job in jobs if (world := launched(job))]
    assert len(set(ports)) == len(jobs)
    assert 20000 <= min(ports) <= max(ports) < 30000


HOSTS = {
    "node[01-04,07],gpu3": "node01",
    "gpu3,node[01-04]": "gpu3",
    "rack[2-3]node[0-7]-ib": "rack2node0-ib",
    "a[9]": "a9",
    "host-1.example.org": "host-1.example.org",
    "": None,
    "[": None,
}


def test_the_first_host_and_the_tasks_of_each_node_in_slurms_short_form() -> None:
    assert {hosts: first_host(hosts) for hosts in HOSTS} == HOSTS
    assert tasks_per_node("4(x2),3") == [4, 4, 3]
    assert tasks_per_node("2") == [2]
    assert tasks_per_node("4(x2") is tasks_per_node("") is None


# Who shares a machine.


def at(host: str, gpu: str = "", **fields: Any) -> Member:
    one = Member(host, f"boot-{host}", (0, 1), "cuda" if gpu else "cpu", gpu, int(bool(gpu)), f"ip-{host}")
    return replace(one, **fields)


def refusal_of(*members: Member) -> str | None:
    """The refusal, which is the same everywhere."""
    (refusal,) = {decision.refusal for decision in decide(members).values()}
    return refusal


def test_every_process_uses_the_one_gpu_that_it_sees_if_that_is_its_own() -> None:
    """srun --gpus-per-task=1: local rank 3 sees one GPU, which has the number 0."""
    assert [gpu_of(rank, 1) for rank in range(4)] == [0, 0, 0, 0]
    assert [gpu_of(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert refusal_of(at("a", "GPU-1"), at("a", "GPU-2"), at("b", "GPU-1")) is None


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (
            [at("b", "GPU-1"), at("a", "GPU-1"), at("a", "GPU-2"), at("a", "GPU-1")],
            ["2 processes on a", "the same GPU", "3 processes run", "rank 1 sees 1 GPU;"],
        ),
        ([at("a", "GPU-1"), at("b")], ["rank 1 on b", "'cpu'", "rank 0 on a", "'cuda'", "trainer.device=cpu"]),
    ],
)
def test_processes_that_share_a_gpu_or_compute_on_other_devices_are_refused(
    members: list[Member], words: list[str]
) -> None:
    refusal = refusal_of(*members)
    assert refusal is not None
    assert [word for word in words if word not in refusal] == []


EIGHT = tuple(range(8))


@pytest.mark.parametrize(
    ("own", "everyone", "default", "threads"),
    [
        (EIGHT, [EIGHT] * 4, 8, 2),
        (EIGHT, [EIGHT] * 4, 4, 1),  # torch leaves hyperthreads out
        (EIGHT[:2], [EIGHT[:2], EIGHT[2:4], EIGHT[4:]], 2, 2),  # srun has bound each task: nothing is left to divide
        (EIGHT[:6], [EIGHT[:6], EIGHT[4:]], 6, 5),
        (EIGHT, [EIGHT] * 16, 8, 1),
    ],
)
def test_threads_are_the_share_of_the_cpus_on_which_a_process_may_run(
    own: tuple[int, ...], everyone: list[tuple[int, ...]], default: int, threads: int
) -> None:
    assert num_threads(own, everyone, default) == threads


def test_only_processes_of_the_same_machine_divide_its_cpus() -> None:
    """Containers on one machine divide its CPUs, too, whatever their host names are."""
    four = [at("a"), at("a"), at("a", machine="boot-b"), at("c", machine="boot-b"), at("d")]
    decisions = decide(four)
    assert [len(decisions[member.place].cpus) for member in four] == [2, 2, 2, 2, 1]


def test_a_machine_on_which_the_master_is_loopback_learns_an_address_elsewhere() -> None:
    members = [at("a", address=""), at("a", address=""), at("b"), at("c")]
    found = {place.partition("/")[0]: decision.elsewhere for place, decision in decide(members).items()}
    assert found == {"a": "ip-c", "b": "ip-c", "c": "ip-b"}


def test_a_master_that_is_reached_on_one_machine_only_is_refused_on_several() -> None:
    members = [at("a", address=""), at("b", address="")]
    world = World(0, 2, 0, "srun", 1, "127.0.0.1")
    with pytest.raises(UsageError, match=r"MASTER_ADDR='127.0.0.1' is an address that only a itself can reach"):
        interfaces(world, members[0], decide(members)[members[0].place])
    assert interfaces(world, members[0], decide(members[:1])[members[0].place]) == {}


# The meeting itself.


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> World:
    """Rank 0 of two, at a port that is free; the environment is as before afterwards."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(meeting, "PATIENCE", timedelta(seconds=1))
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return World(0, 2, 0, "srun", 2, port=probe.getsockname()[1])


def test_a_port_of_another_job_is_refused_by_its_number(here: World) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("0.0.0.0", here.port))
        taken.listen()
        with pytest.raises(UsageError, match=rf"port {here.port} of {socket.gethostname()}.*in use; set MASTER_PORT"):
            open_store(here)


def test_a_derived_address_that_is_not_rank_0s_own_is_refused(here: World) -> None:
    for address, words in {"203.0.113.9": "another machine", "no-such-host.invalid": "an unknown host"}.items():
        with pytest.raises(UsageError, match=f"give '{address}' as .*, where this is {words}; set MASTER_ADDR"):
            open_store(replace(here, address=address, derived=True))


def test_ranks_that_do_not_come_are_named(here: World) -> None:
    with pytest.raises(RunError, match=rf"waited 1 s at 127.0.0.1, port {here.port}, for rank 1 of 2"):
        meet(here, open_store(here), member(here.address, "cpu", "", 0))
    with pytest.raises(
        RunError, match=rf"rank 1 on .* has not reached rank 0 at 127.0.0.1, port {here.port}, within 1 s"
    ):
        open_store(replace(here, rank=1))


def test_a_process_uses_its_share_of_threads_unless_the_user_has_chosen(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, before = replace(here, size=1, local_size=1), torch.get_num_threads()
    monkeypatch.setattr(joining, "num_threads", lambda own, everyone, n: n + 3 if [list(own)] == everyone else 1)
    with joined(alone, "cpu"):
        assert torch.get_num_threads() == before, "OMP_NUM_THREADS is set, as torchrun does"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    with joined(alone, "cpu"):
        assert torch.get_num_threads() == before + 3
    torch.set_num_threads(before)


def test_processes_that_start_again_do_not_read_what_the_attempt_before_has_written(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of torchrun keeps its store."""
    store, read = HashStore(), list[bool]()

    def meeting_once(world: World, found: Any, own: Member) -> Any:
        read.append(found.check(["written"]))
        found.set("written", "1")
        return meet(world, found, own)

    monkeypatch.setattr(joining, "open_store", lambda _: store)
    monkeypatch.setattr(joining, "meet", meeting_once)
    for restart in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        with joined(replace(here, size=1, local_size=1), "cpu"):
            pass
    assert read == [False, False]


def test_all_ranks_hear_the_refusal_of_rank_0(here: World) -> None:
    store = open_store(here)
    store.set("member_1", json.dumps(at("b", "GPU-1").__dict__))
    own = member(here.address, "cpu", "", 0)
    assert own.cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert own.address == ""
    with pytest.raises(UsageError, match="rank 1 on b computes on 'cuda'"):
        meet(here, store, own)
    with pytest.raises(UsageError, match="rank 1 on b computes on 'cuda'"):
        meet(replace(here, rank=1), store, at("b", "GPU-1"))
