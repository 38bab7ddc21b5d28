"""Tokens to their experts and back: every choice reaches its expert once, whichever ranks there are.

The experts here multiply by a number each, so that what must come out for a token is known from the token alone.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mplug_ep.wraps
import pytest
import torch
import torch.distributed as dist
from deep_ep_stand_in import by_stand_in
from hypothesis import given, settings
from hypothesis import strategies as st
from mailboxes import by_messages
from mplug_ep.bounds import Bounds
from mplug_ep.wraps import wraps_of_ep, wraps_of_etp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mplug import Axis, Mesh, Wrap, contiguous
from mplug.distributed.groups import Groups
from mplug.run.run import Run
from mplug_nn import Experts, Gating, MixtureOfExperts, Router
from mplug_testing import run_workers

D = 3
EP, EP4 = (Axis("ep", size, splits=("expert",), distance=10, views=("sparse",)) for size in (2, 4))
ETP = Axis("etp", 2, splits=("expert_mlp",), views=("sparse",))
COPIES = Axis("acme", 2, splits=("heads",))
STREAM = Axis("acme", 2, splits=("heads",), activations=("sequence",))


def data(size: int) -> Axis:
    return Axis("dp", size, entries={"batch": contiguous}, distance=20)


MESHES = {
    "ep4": (data(4), EP4),
    "ep2": (data(4), EP),
    "ep2etp2": (data(4), EP, ETP),
    "etp2": (data(4), ETP),
    "ep4 over a divided sequence": (data(2), STREAM, EP4),
    "ep4 over copies": (data(2), COPIES, EP4),
    "ep2etp2 over copies": (data(2), COPIES, EP, ETP),
    "ep2 over copies": (data(2), COPIES, EP),
    "etp2 over copies": (data(2), COPIES, ETP),
}
"""Layouts of four ranks."""


HOW = (
    *("all_to_all", "bounded", "symmetric", "once_per_rank", "deepep", "all_gather"),
    *("all_to_all overlapped", "bounded overlapped"),
)
"""Values of `parallel.ep.dispatch`, some with `parallel.ep.overlap`."""


@dataclass(frozen=True)
class Case:
    """What the tokens of one layer choose: of each data-parallel rank [N, k] numbers of experts; E is a dropped one."""

    num_experts: int
    chosen: tuple[tuple[tuple[int, ...], ...], ...]


def scales(num_experts: int) -> Tensor:
    """What each expert multiplies by."""
    return torch.arange(1, num_experts + 1, dtype=torch.float64).sqrt()


def experts_of(run: Run, how: str, num_experts: int) -> tuple[Experts, list[Tensor]]:
    """Experts as this rank has them, between the strategies' wraps; and a list that the counts of a call are put in."""
    mesh, rank, model = run.mesh, run.rank, SimpleNamespace(placements={})
    bounds, (dispatch, _, overlap) = None, how.partition(" ")
    mplug_ep.wraps.open_mailbox = by_messages
    by_stand_in()
    if dispatch in ("bounded", "symmetric"):
        bounds = Bounds(SimpleNamespace(module=SimpleNamespace(training=True)), room=4.0)  # type: ignore[arg-type]
        bounds.check(run)
    wraps = []
    if "ep" in mesh.axes:
        wraps += wraps_of_ep(run, model, dispatch, bounds, bool(overlap))
    wraps += wraps_of_etp(run, model) if "etp" in mesh.axes else []
    each = num_experts // (mesh.axes["ep"].size if "ep" in mesh.axes else 1)
    first, parts = each * mesh.index(rank, "ep"), mesh.axes["etp"].size if "etp" in mesh.axes else 1
    experts, seen = Experts(D, D, num_experts, "gelu"), list[Tensor]()

    def compute(rows: Tensor, counts: Tensor, *_: object) -> Tensor:
        seen.append(counts)
        own = scales(num_experts)[first : first + each].repeat_interleave(counts) / parts
        assert len(own) <= len(rows)
        padding = rows.new_full((len(rows) - len(own),), float("nan"))  # nothing may read it
        return rows * torch.cat((own, padding))[:, None]

    experts.compute = compute
    wrapped(experts, wraps)
    return experts, seen


def wrapped(experts: Experts, wraps: list[Wrap]) -> None:
    for wrap in sorted(wraps, key=lambda wrap: wrap.layer):
        slot = wrap.slot.rpartition(".")[2]
        setattr(experts, slot, wrap.wrap(getattr(experts, slot)))


def drawn(chosen: Tensor, part: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [N, D], gates [N, k] (0 where a choice was dropped) and a gradient [N, D] of a data-parallel rank."""
    generator = torch.Generator().manual_seed(part)
    tokens, gradient = torch.randn(2, len(chosen), D, generator=generator, dtype=torch.float64)
    return tokens, torch.rand(chosen.shape, generator=generator, dtype=torch.float64), gradient


def part_of(mesh: Mesh, rank: int) -> int:
    """Which of the tokens a rank has in front of its experts."""
    return rank if "acme" in mesh.axes and mesh.axes["acme"].activations else mesh.batch_shard(rank)[0]


def routed(layouts: list[tuple[str, str]], cases: list[Case]) -> dict[tuple[str, str], list[int]]:
    """Be one rank: check what comes out and its gradients, and say how many rows this rank's experts have got."""
    rank, groups = dist.get_rank(), Groups(dist.get_rank())
    rows: dict[tuple[str, str], list[int]] = {}
    for name, how in layouts:
        run = Run(None, None, Mesh.of(MESHES[name], 4), "cpu", rank, groups=groups)  # type: ignore[arg-type]
        rows[name, how] = [rows_of(run, how, case, f"{name} {how}: {case}") for case in cases]
    return rows


def rows_of(run: Run, how: str, case: Case, told: str) -> int:
    experts, seen = experts_of(run, how, case.num_experts)
    part = part_of(run.mesh, run.rank)
    chosen = torch.tensor(case.chosen[part], dtype=torch.int64).view(-1, len(case.chosen[0][0]))
    kept = chosen < case.num_experts
    x, gates, gradient = drawn(chosen, part)
    leaves = [tensor.requires_grad_() for tensor in (x, gates * kept)]
    weights = torch.cat((scales(case.num_experts), torch.zeros(1, dtype=torch.float64)))[chosen]
    expected = (leaves[0][:, None] * (leaves[1] * weights)[..., None]).sum(dim=1)
    wanted = torch.autograd.grad(expected, leaves, gradient)
    y = experts(leaves[0], chosen, leaves[1])
    found = torch.autograd.grad(y, leaves, gradient)
    torch.testing.assert_close((y, *found), (expected, *wanted), msg=lambda text: f"{told}: {text}")
    return int(seen[0].sum())


@st.composite
def case(draw: st.DrawFn) -> Case:
    experts, tokens = draw(st.sampled_from([4, 8])), 2 * draw(st.integers(1, 4))
    k = draw(st.integers(1, 3))
    popular = draw(st.sampled_from([None, 0, experts - 1]))
    number = st.integers(0, experts) if popular is None else st.just(popular)
    token = st.tuples(*[number] * k)
    return Case(experts, draw(st.tuples(*[st.tuples(*[token] * tokens)] * 4)))


EMPTY = Case(8, tuple(((5, 8), (8, 5), (5, 5), (8, 8)) for _ in range(4)))
"""All rows to one expert of one rank, some choices dropped."""
SEVERAL = Case(8, tuple(((5, 4, 1), (0, 7, 6), (2, 8, 3), (8, 8, 8)) for _ in range(4)))
"""Tokens with several experts on a rank, and on none."""
NOTHING = Case(4, tuple(((4, 4), (4, 4)) for _ in range(4)))
"""Every choice dropped."""


def require_routed(layouts: list[tuple[str, str]], cases: list[Case]) -> None:
    found = run_workers(4, routed, layouts, cases)
    for name, how in layouts:
        mesh = Mesh.of(MESHES[name], 4)
        parts, copies = {part_of(mesh, rank) for rank in range(4)}, mesh.axes["etp"].size if "etp" in mesh.axes else 1
        for number, one in enumerate(cases):
            kept = sum(expert < one.num_experts for part in parts for token in one.chosen[part] for expert in token)
            assert sum(rows[name, how][number] for rows in found) == kept * copies


@settings(max_examples=2, derandomize=True)
@given(cases=st.lists(case(), min_size=4, max_size=4))
@pytest.mark.wide("experts")
def test_a_token_gets_what_its_experts_make_of_it_weighted_by_its_gates(cases: list[Case]) -> None:
    divided = [name for name in MESHES if "ep" in name.replace("etp", "")]
    layouts = [(name, how) for name in divided for how in HOW]
    layouts += [(name, "") for name in MESHES if name not in divided]
    require_routed(layouts, [EMPTY, NOTHING, *cases])


def test_rows_reach_their_experts_among_the_ranks_of_their_group_and_come_back_in_every_way() -> None:
    ways = ("bounded", "symmetric", "once_per_rank", "deepep", "all_to_all overlapped", "bounded overlapped")
    layouts = [("ep4", "symmetric"), ("ep2etp2", "once_per_rank"), *(("ep2 over copies", how) for how in ways)]
    require_routed(layouts, [EMPTY, NOTHING, SEVERAL])


def test_ranks_may_have_different_numbers_of_tokens() -> None:
    tokens = (((0, 1), (2, 3)), ((3, 3),) * 6, ((1, 2),), ((4, 4),))
    require_routed([("ep4", "all_to_all"), ("ep4", "once_per_rank")], [Case(4, tokens)])


# Overlap with the shared experts, and of the parts of a micro batch with each other.

EVENTS = {
    "start_rows": "send",
    "await_rows": "await",
    "grouped_product": "experts",
    "mm": "shared",
    "start_return": "return",
    "start_copy": "send",
    "wait_tensor": "await",
    "start_push": "push",
    "await_push": "await",
}
"""What the operators of a mixture do, by their names. The router multiplies by the operator of the shared experts."""


class Recorded(TorchDispatchMode):
    """What operators do, in order; equal ones that follow each other count once."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        event = EVENTS.get(func.name().partition(".")[0].rpartition("::")[2])
        if event is not None and self.events[-1:] != [event]:
            self.events.append(event)
        return func(*args, **(kwargs or {}))


Found = tuple[list[Tensor], list[str], list[str]]


def mixed(dispatch: str, overlap: bool, parts: int) -> Found:
    """Be one rank: the output and gradients of a mixture, and what happens forward and backward."""
    rank, groups = dist.get_rank(), Groups(dist.get_rank())
    run = Run(None, None, Mesh.of((data(2), EP), 2), "cpu", rank, groups=groups)  # type: ignore[arg-type]
    moe = MixtureOfExperts(Router(D, Gating(4, 2)), D, 5, "relu2", shared_ffn_dim=4).double()
    for number, parameter in enumerate(moe.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    own = slice(2 * rank, 2 * rank + 2)
    moe.experts.up, moe.experts.down = (nn.Parameter(one[own].detach()) for one in (moe.experts.up, moe.experts.down))
    model: Any = SimpleNamespace(placements={}, module=moe)
    mplug_ep.wraps.open_mailbox = by_messages
    bounds = None if dispatch == "all_to_all" else Bounds(model, room=2.0)
    if bounds is not None:
        bounds.check(run)
    for wrap in wraps_of_ep(run, model, dispatch, bounds, overlap, parts):
        block, _, slot = wrap.slot.partition(".")
        module = moe if block == "MixtureOfExperts" else moe.experts
        setattr(module, slot, wrap.wrap(getattr(module, slot)))
    x = torch.randn(2, 7, D, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).requires_grad_()
    with Recorded() as forward:
        y = moe(x, torch.arange(7)[None], torch.arange(2), None)
    with Recorded() as backward:
        y.square().sum().backward()
    return [y.detach(), x.grad, *(one.grad for one in moe.parameters())], forward.events, backward.events


def all_mixed(calls: list[tuple[str, bool, int]]) -> list[Found]:
    return [mixed(*call) for call in calls]


def test_the_parts_of_a_micro_batch_travel_while_others_are_computed_with_the_same_bits() -> None:
    ways = ("all_to_all", "bounded", "symmetric")
    calls = [(dispatch, overlap, parts) for dispatch in ways for parts in (1, 2, 3) for overlap in (False, True)]
    for rank in run_workers(2, all_mixed, calls):
        found = dict(zip(calls, rank, strict=True))
        for dispatch, _, parts in calls:
            one, whole = found[dispatch, True, parts][0], found["all_to_all", False, 1][0]
            assert all(map(torch.equal, one, found[dispatch, False, parts][0])), (dispatch, parts)
            for tensor, expected in zip(one, whole, strict=True):
                torch.testing.assert_close(tensor, expected, rtol=1e-13, atol=1e-13)
        for dispatch in ways:
            send, back = ("push", "push") if dispatch == "symmetric" else ("send", "return")
            _, forward, backward = found[dispatch, True, 1]
            assert forward == ["shared", send, "shared", "await", "experts", back, "await"], "the router is first"
            assert backward == [send, "await", "experts", back, "shared", "await", "shared"]
            _, forward, backward = found[dispatch, True, 2]
            each = ["await", "experts", back]
            assert forward == ["shared", send, "shared", *each, *each, "await"]
            assert backward == [send, *each, *each, "shared", "await", "shared"]
