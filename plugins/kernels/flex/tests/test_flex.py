"""flex_attention: the suite, its block masks, how often it compiles, and what it refuses."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from mplug_flex import Flex, masks, programs
from mplug_flex.attention import attention
from mplug_flex.masks import BLOCK, Form, Mask, mask_of
from offers import attention as site
from offers import note, refusal, run

from mplug import Site
from mplug_nn import AttentionInputs, AttentionSpec
from mplug_nn.attention import scaled_dot_product
from mplug_nn.parts import Places
from mplug_nn.specification import DOCUMENTS, KEY_LENGTH, unseen, unseen_by_position
from mplug_testing import KernelSuite, kernel_cases
from mplug_testing.harness import EXACT, difference, train_ranks, train_steps

DOCUMENTS_OF_5 = {"data.documents": 5}
CASES = {
    "one KV head",
    "a soft cap and a window",
    "attention sinks and a window",
    "groups of positions, a window and documents",
    "ALiBi of six heads",
    "a relative bias, documents and no causal mask",
    "keys wider than values",
}
"""Cases of the suite that have every field of a specification; the wide set has all cases."""


@pytest.mark.wide("suites")
class TestFlex(KernelSuite):
    plugin = "flex"
    dtypes = ("fp32", "bf16", "fp64")


@pytest.mark.wide("suites", tests=["test_it_has_the_capabilities_that_it_grants"])
class TestFlexInAFewCases(KernelSuite):
    plugin = "flex"
    dtypes = ("fp32",)

    @pytest.fixture(autouse=True)
    def few_cases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        some = [case for case in kernel_cases.cases() if case.name in CASES]
        assert {case.name for case in some} == CASES
        monkeypatch.setattr(kernel_cases, "cases", lambda: some)


# Block masks.

FORMS = {
    "causal": Form(1.0),
    "full": Form(1.0, causal=False),
    "window": Form(1.0, window=100),
    "window of three blocks": Form(1.0, window=3 * BLOCK),
    "window, full": Form(1.0, causal=False, window=150),
}
GROUPED = {
    "groups": Form(1.0, grouped=True),
    "groups and a window": Form(1.0, window=20, grouped=True),
    "groups and a window of two blocks": Form(1.0, window=2 * BLOCK, grouped=True),
}
GROUPS = torch.stack(
    (
        torch.tensor([-1] * 100 + [0] * 90 + [-1] * 3 + [1] * 60 + [2] * 47),
        torch.tensor([3] * 30 + [-1] * 200 + [4] * 2 + [-1] * 67 + [5]),
    )
)
"""Of 300 queries: groups across the borders of blocks, next to each other, and of one position."""
LENGTHS = {"packed": ((200, 1, 99, 0), (300, 0, 0, 0)), "": None}


def visible(mask: Mask, form: Form, queries: int, keys: int) -> torch.Tensor:
    """The pairs that a specification names: [B, S, T]."""
    found = torch.ones(len(mask.tensors[0]), queries, keys, dtype=torch.bool)
    spec = AttentionSpec(1.0, 8, 8, causal=form.causal, window=form.window, position_groups=form.grouped)
    inputs = AttentionInputs(position_groups=GROUPS if form.grouped else None)
    for hidden in unseen(spec, inputs, queries, keys, torch.device("cpu")):
        found = found & ~(hidden[:, 0] if hidden.dim() == 4 else hidden)
    if form.packed:
        found &= mask.numbers[0][:, :, None] == mask.numbers[1][:, None]
    return found


def computed(mask: Mask, named: torch.Tensor) -> torch.Tensor:
    """The pairs that a kernel computes: those named in the partial blocks of the mask, and all of its full blocks."""
    partial, full = (dense(*mask.tensors[first : first + 2])[:, 0] for first in (0, 2))
    spread = [blocks.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2) for blocks in (partial, full)]
    inside = [pairs[:, : named.shape[1], : named.shape[2]] for pairs in spread]
    return named & inside[0] | inside[1]


def dense(count: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[B, 1, R, C], true for the columns that a row lists."""
    listed = torch.arange(index.shape[-1]) < count[..., None]
    return torch.zeros(index.shape, dtype=torch.bool).scatter(-1, index.long(), listed)


@pytest.mark.parametrize("packed", LENGTHS)
@pytest.mark.parametrize("more", [0, 217])
@pytest.mark.parametrize("form", [*FORMS, *GROUPED])
def test_a_block_mask_computes_exactly_the_pairs_that_the_specification_names(
    form: str, more: int, packed: str
) -> None:
    """And the mask of backward is its transpose."""
    queries, rows = 300, LENGTHS[packed]
    lengths = None if rows is None else (torch.tensor(rows), torch.tensor([(*row, more) for row in rows]))
    own = replace({**FORMS, **GROUPED}[form], packed=lengths is not None)
    mask = mask_of(own, queries, queries + more, lengths, torch.device("cpu"), GROUPS if own.grouped else None)
    expected = visible(mask, own, queries, queries + more)
    assert torch.equal(computed(mask, expected), expected)
    for first in (0, 2):
        count, index, of_keys, rows_of_keys = (mask.tensors[first + n] for n in (0, 1, 4, 5))
        assert torch.equal(dense(count, index), dense(of_keys, rows_of_keys).transpose(-1, -2))


@pytest.mark.parametrize("form", [*FORMS, *GROUPED])
def test_a_block_mask_of_a_part_follows_the_positions_of_its_queries_and_keys(form: str) -> None:
    """A part has two chunks of a zigzag, or a chunk and the keys before it."""
    own = replace({**FORMS, **GROUPED}[form], placed=True)
    numbers = torch.cat((GROUPS, GROUPS + 10), dim=1)  # of 600 positions
    for queries, keys in (((range(170), range(430, 600)),) * 2, ((range(300, 600),), (range(170), range(200, 290)))):
        at, of = (torch.cat([torch.arange(part.start, part.stop) for part in ranges]) for ranges in (queries, keys))
        pair = (numbers[:, at], numbers[:, of]) if own.grouped else None
        places = Places(queries, keys, own.window, pair)
        mask = mask_of(own, len(at), len(of), None, torch.device("cpu"), places=places)
        expected = torch.ones(len(mask.tensors[0]), len(at), len(of), dtype=torch.bool)
        together = places.together() if own.grouped else None
        for hidden in unseen_by_position(of - at[:, None], own.causal, own.window, together):
            expected = expected & ~(hidden[:, 0] if hidden.dim() == 4 else hidden)
        assert torch.equal(computed(mask, expected), expected)


def test_empty_blocks_are_skipped_and_full_blocks_need_no_mask_function() -> None:
    mask = mask_of(Form(1.0, window=2 * BLOCK), 8 * BLOCK, 8 * BLOCK, None, torch.device("cpu"))
    partial, _, full, *_ = mask.tensors
    assert partial[0, 0].tolist() == [1, 1, 2, 2, 2, 2, 2, 2]  # the diagonal, and the edge of the window
    assert full[0, 0].tolist() == [0, 1, 1, 1, 1, 1, 1, 1]
    lengths = torch.tensor([[4 * BLOCK, 4 * BLOCK]])
    packed = mask_of(Form(1.0, packed=True), 8 * BLOCK, 8 * BLOCK, (lengths, lengths), torch.device("cpu"))
    assert (packed.tensors[0] + packed.tensors[2])[0, 0].tolist() == [1, 2, 3, 4, 1, 2, 3, 4]


# How often it compiles.


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    make = masks._mask

    def counted(*arguments: Any) -> Mask:
        found.append(make(*arguments))
        return found[-1]

    monkeypatch.setattr(masks, "_mask", counted)
    monkeypatch.setattr(programs, "PROGRAMS", {})
    return found


def test_layers_steps_and_documents_of_other_lengths_share_a_program_and_layers_share_a_mask(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 layers, 2 steps of 4 micro batches, an evaluation: two programs, and a mask per micro batch."""
    settings, forwards = {"data.documents": 3}, []
    program = programs.forward_program

    def counted(*arguments: Any) -> programs.Program:
        forwards.append(arguments)
        return program(*arguments)

    monkeypatch.setattr("mplug_flex.attention.forward_program", counted)
    found = train_steps({**settings, "kernels.attention": "flex"})
    assert [key[0] for key in programs.PROGRAMS] == ["forward", "backward"]
    assert len(forwards) == 4 * len(made) >= 4 * len(found.losses) * 4
    assert len({tuple(mask.numbers[0].flatten().tolist()) for mask in made}) == 8  # evaluations repeat samples
    plain = train_steps({**settings, "kernels.default": None})
    assert found.losses == pytest.approx(plain.losses, rel=EXACT)


@pytest.mark.wide("compile")
@pytest.mark.filterwarnings("ignore")  # those of torch's tracer
def test_compiled_layers_share_a_program_and_a_mask_until_the_lengths_change(made: list[Any]) -> None:
    spec = AttentionSpec(0.3, 8, 8, documents=True)

    def two_layers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        inputs = AttentionInputs(document_lengths=lengths)
        return attention(attention(q, k, v, spec, inputs), k, v, spec, inputs)

    compiled = torch.compile(two_layers, backend="aot_eager", fullgraph=True)
    q, k, v = (torch.randn(2, 13, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    lengths = torch.tensor([[5, 1, 7], [13, 0, 0]])
    for changed in (lengths.clone(), torch.tensor([[1, 1, 11], [2, 2, 9]])):
        lengths.copy_(changed)  # in place, as a static input of a graph
        found, expected = compiled(q, k, v, lengths), two_layers(q, k, v, lengths.clone())
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        for ours, plain in zip(
            torch.autograd.grad(found.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
        ):
            torch.testing.assert_close(ours, plain)
    assert [key[0] for key in programs.PROGRAMS] == ["forward", "backward"]
    assert len(made) == 4  # two of `lengths`, and one of each of its copies
    torch.compiler.reset()


def test_another_form_or_shape_is_another_program(made: list[Any]) -> None:
    spec = AttentionSpec(0.3, 8, 8)
    x = torch.randn(1, 5, 2, 8)
    for asked in (spec, spec, replace(spec, window=3), replace(spec, window=3)):
        attention(x, x.clone(), x.clone(), asked, AttentionInputs())
    assert len(programs.PROGRAMS) == 2
    attention(x[:, :4], x[:, :4].clone(), x[:, :4].clone(), spec, AttentionInputs())
    assert len(programs.PROGRAMS) == 3
    assert len(made) == 3


def test_sinks_take_all_weight_from_scores_that_are_far_below_them() -> None:
    """The log-sum-exps differ by 200: exponentials of either alone would overflow or vanish in fp32."""
    spec = AttentionSpec(0.3, 8, 8, sinks=True)
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    for size in (200.0, -200.0):
        outcomes = []
        for core in (attention, scaled_dot_product):
            sinks = torch.full((2,), size, requires_grad=True)
            output = core(q, k, v, spec, AttentionInputs(sinks=sinks))
            outcomes.append((output.detach(), *torch.autograd.grad(output.sum(), sinks)))
        torch.testing.assert_close(*outcomes)


@pytest.mark.filterwarnings("ignore")  # torch would rather compile these operators
def test_the_operators_that_a_gpu_compiles_are_those_of_the_composition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of a GPU, traced without values and run uncompiled: all features at once, in fp64."""
    from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

    def traced(make: Any, compute: programs.Program, tensors: tuple[torch.Tensor, ...]) -> programs.Program:
        return trace(partial(programs._traced, mode="fake"), compute, tensors)

    trace = programs._in_thread
    monkeypatch.setattr(programs, "PROGRAMS", {})
    monkeypatch.setattr(programs, "_operators", lambda _: (flex_attention, flex_attention_backward))
    monkeypatch.setattr(programs, "_in_thread", traced)
    features: dict[str, Any] = {"window": 4, "documents": True, "soft_cap": 2.0, "sinks": True, "bias": "relative"}
    q, k, v = (torch.randn(2, 13, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    leaves = [q, k, v, torch.randn(4, dtype=torch.float64), torch.randn(4, 7, dtype=torch.float64)]
    for leaf in leaves:
        leaf.requires_grad_()
    inputs = AttentionInputs(None, torch.tensor([[5, 1, 7], [13, 0, 0]]), *leaves[3:])
    outcomes = []
    for core in (attention, scaled_dot_product):
        output = core(q, k, v, AttentionSpec(0.3, 8, 8, **features), inputs)
        outcomes.append((output, *torch.autograd.grad(output.square().sum(), leaves)))
    torch.testing.assert_close(*outcomes, rtol=EXACT, atol=EXACT)
    assert len(programs.PROGRAMS) == 2


# What it refuses.


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a Hopper GPU and Triton, as the plugin sees it."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("mplug_flex.limits.triton_builds", lambda: True)
    return monkeypatch


OFFERS = Flex(Flex.Config()).offer()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("at", "during", "words"),
    [
        (site("linear attention"), run(), "does not offer linear attention"),
        (site("mine bias"), run("cpu"), "does not offer mine bias"),
        (site(DOCUMENTS, KEY_LENGTH), run("cpu"), "as many keys as queries"),
        (site(dropout=0.1), run("cpu"), "does not support dropout … 0.1"),
        (site(), run("mps"), "needs a CUDA GPU or a CPU … 'mps'"),
        (site(), run(precision="fp64"), "fp32 … trainer.precision=fp64 is wider"),
        (site(head_dim=8), run(), "head dims of 16 to 256 … has 8"),
        (site(head_dim=512), run(), "head dims of 16 to 256 … has 512"),
        (site(value_width=8), run(), "value widths of 16 to 256 … has 8"),
        (site("relative bias"), run(deterministic=True), "atomic … trainer.deterministic"),
    ],
)
def test_what_it_cannot_compute_is_refused_with_the_reason(at: Site, during: Any, words: str) -> None:
    assert all(word in refusal(OFFERS, at, during) for word in words.split(" … "))


def test_it_serves_what_it_does_not_refuse_and_notes_that_it_is_not_compiled_on_a_cpu(
    hopper: pytest.MonkeyPatch,
) -> None:
    for at in (site(), site("relative bias", "window", "attention sinks", "log-sum-exp"), site(KEY_LENGTH)):
        assert note(OFFERS, at, run()) == ""
        assert note(OFFERS, at, run("cpu", "fp64")) == "not compiled on a CPU"
    assert note(OFFERS, site(), run(deterministic=True)) == ""
    hopper.setattr("mplug_flex.limits.triton_builds", lambda: False)
    assert "needs Triton" in refusal(OFFERS, site(), run())
    hopper.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    assert "8.0 and newer, and this GPU has 7.5" in refusal(OFFERS, site(), run())


# Layouts.

ALIBI_POSITIONS = {"model.position": "alibi"}
COMPILED = {"trainer.compile": "aot_eager"}


@pytest.mark.wide("layouts")
@pytest.mark.filterwarnings("ignore")  # those of torch's tracer
@pytest.mark.parametrize(
    ("layout", "ranks", "settings"),
    [
        ("cp2", 2, {}),
        ("cp4", 4, DOCUMENTS_OF_5),
        ("cp2", 2, {**DOCUMENTS_OF_5, **COMPILED}),
        ("cp2", 2, {**DOCUMENTS_OF_5, **ALIBI_POSITIONS, "parallel.cp.method": "ulysses"}),
        ("tp2", 2, {**DOCUMENTS_OF_5, **ALIBI_POSITIONS}),
        ("pp2", 2, {**DOCUMENTS_OF_5, **COMPILED}),
        ("fsdp2", 2, {**DOCUMENTS_OF_5, **ALIBI_POSITIONS}),
        ("tp2", 2, {**DOCUMENTS_OF_5, "memory.recompute": {}}),
    ],
    ids=str,
)
def test_a_layout_has_the_numbers_of_one_process_in_plain_torch(
    layout: str, ranks: int, settings: dict[str, Any]
) -> None:
    plain = {name: value for name, value in settings.items() if name.startswith(("model", "data"))}
    alone = train_steps({**plain, "kernels.default": None})
    found = train_ranks(ranks, {**settings, "parallel.layout": layout, "kernels.attention": "flex"})
    assert difference(found, alone) == ""
