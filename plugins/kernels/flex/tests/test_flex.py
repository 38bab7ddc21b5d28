"""flex_attention: the suite, its block masks, how often it compiles, and what it refuses."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mplug_flex import Flex, masks, programs
from mplug_flex.attention import attention
from mplug_flex.masks import BLOCK, Form, Mask, mask_of

from mplug import Site
from mplug_nn import AttentionInputs, AttentionSpec
from mplug_nn.attention import scaled_dot_product
from mplug_nn.specification import DOCUMENTS, KEY_LENGTH, unseen
from mplug_testing import KernelSuite, kernel_cases, precision_named
from mplug_testing.harness import EXACT, difference, train_ranks, train_steps

DOCUMENTS_OF_5 = {"data.documents": 5}
CASES = {
    "one KV head",
    "a soft cap and a window",
    "attention sinks and a window",
    "ALiBi of six heads",
    "a relative bias, documents and no causal mask",
    "keys wider than values",
}
"""Cases of the suite that have every field of a specification; the wide set has all cases."""


@pytest.mark.wide("suites")
class TestFlex(KernelSuite):
    plugin = "flex"
    dtypes = ("fp32", "bf16", "fp64")


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
LENGTHS = {"packed": ((200, 1, 99, 0), (300, 0, 0, 0)), "": None}


def seen(mask: Mask, form: Form, queries: int, keys: int) -> torch.Tensor:
    """The pairs that a kernel computes by the block mask: [B, S, T]."""
    count, index, full_count, full_index, *_ = mask.tensors
    found = torch.zeros(len(count), mask_rows(queries) * BLOCK, mask_rows(keys) * BLOCK, dtype=torch.bool)
    spec = AttentionSpec(1.0, 8, 8, causal=form.causal, window=form.window)
    visible = torch.ones(found.shape, dtype=torch.bool)
    for hidden in unseen(spec, AttentionInputs(), queries, keys, torch.device("cpu")):
        visible[:, :queries, :keys] &= ~hidden
    if mask.numbers:
        visible[:, :queries, :keys] &= mask.numbers[0][:, :, None] == mask.numbers[1][:, None]
    for sample in range(len(count)):
        for row in range(count.shape[-1]):
            rows = slice(row * BLOCK, (row + 1) * BLOCK)
            for column in index[sample, 0, row, : count[sample, 0, row]].tolist():
                columns = slice(column * BLOCK, (column + 1) * BLOCK)
                found[sample, rows, columns] = visible[sample, rows, columns]
            for column in full_index[sample, 0, row, : full_count[sample, 0, row]].tolist():
                found[sample, rows, column * BLOCK : (column + 1) * BLOCK] = True
    return found[:, :queries, :keys]


def mask_rows(length: int) -> int:
    return -(-length // BLOCK)


@pytest.mark.parametrize("packed", LENGTHS)
@pytest.mark.parametrize("more", [0, 217])
@pytest.mark.parametrize("form", FORMS)
def test_a_block_mask_computes_exactly_the_pairs_that_the_specification_names(
    form: str, more: int, packed: str
) -> None:
    queries = 300
    rows = LENGTHS[packed]
    lengths = None if rows is None else (torch.tensor(rows), torch.tensor([(*row, more) for row in rows]))
    mask = mask_of(FORMS[form], queries, queries + more, lengths, torch.device("cpu"))
    spec = AttentionSpec(1.0, 8, 8, causal=FORMS[form].causal, window=FORMS[form].window)
    expected = torch.ones(2 if packed else 1, queries, queries + more, dtype=torch.bool)
    for hidden in unseen(spec, AttentionInputs(), queries, queries + more, torch.device("cpu")):
        expected &= ~hidden
    if packed:
        own, others = mask.numbers
        expected &= own[:, :, None] == others[:, None]
    assert torch.equal(seen(mask, FORMS[form], queries, queries + more), expected)


def test_empty_blocks_are_skipped_and_full_blocks_need_no_mask_function() -> None:
    mask = mask_of(Form(1.0, window=2 * BLOCK), 8 * BLOCK, 8 * BLOCK, None, torch.device("cpu"))
    partial, _, full, *_ = mask.tensors
    assert partial[0, 0].tolist() == [1, 1, 2, 2, 2, 2, 2, 2]  # the diagonal, and the edge of the window
    assert full[0, 0].tolist() == [0, 1, 1, 1, 1, 1, 1, 1]
    lengths = torch.tensor([[4 * BLOCK, 4 * BLOCK]])
    packed = mask_of(Form(1.0, packed=True), 8 * BLOCK, 8 * BLOCK, (lengths, lengths), torch.device("cpu"))
    assert (packed.tensors[0] + packed.tensors[2])[0, 0].tolist() == [1, 2, 3, 4, 1, 2, 3, 4]


@pytest.mark.parametrize("packed", LENGTHS)
def test_the_block_mask_of_backward_is_the_transpose(packed: str) -> None:
    rows = LENGTHS[packed]
    lengths = None if rows is None else (torch.tensor(rows), torch.tensor(rows))
    tensors = mask_of(Form(1.0, window=100), 300, 300, lengths, torch.device("cpu")).tensors
    for (count, index), (of_keys, queries) in (
        (tensors[0:2], tensors[4:6]),
        (tensors[2:4], tensors[6:8]),
    ):
        assert torch.equal(dense(count, index), dense(of_keys, queries).transpose(-1, -2))


def dense(count: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[B, 1, R, C], true for the columns that a row lists."""
    listed = torch.arange(index.shape[-1]) < count[..., None]
    return torch.zeros(index.shape, dtype=torch.bool).scatter(-1, index.long(), listed)


# How often it compiles.


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks that are made during a test, which begins without programs."""
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


def site(needs: tuple[str, ...] = (), width: int = 64, value_width: int | None = None, dropout: float = 0.0) -> Site:
    spec = AttentionSpec(0.1, width, value_width or width, dropout=dropout)
    return Site("blocks.*.attn", "Attention.core", SimpleNamespace(spec=spec), "blocks.0.attn", frozenset(needs))


def run(device: str = "cuda", precision: str = "bf16", deterministic: bool = False) -> Any:
    trainer = SimpleNamespace(precision=precision, deterministic=deterministic)
    config = SimpleNamespace(trainer=trainer)
    return SimpleNamespace(device=device, config=config, precision=precision_named(precision))


def answer(at: Site, during: Any) -> bool | str:
    (offer,) = Flex(Flex.Config()).offer()
    return offer.answer(at, during)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a Hopper GPU and Triton, as the plugin sees it."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("mplug_flex.limits.triton_builds", lambda: True)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("at", "during", "words"),
    [
        (site(("linear attention",)), run(), ("does not offer linear attention",)),
        (site(("mine bias",)), run("cpu"), ("does not offer mine bias",)),
        (site((DOCUMENTS, KEY_LENGTH)), run("cpu"), ("as many keys as queries",)),
        (site(dropout=0.1), run("cpu"), ("does not support dropout", "0.1")),
        (site(), run("mps"), ("needs a CUDA GPU or a CPU", "'mps'")),
        (site(), run(precision="fp64"), ("fp32", "trainer.precision=fp64 is wider")),
        (site(width=8), run(), ("head dims of 16 to 256", "has 8")),
        (site(width=512), run(), ("head dims of 16 to 256", "has 512")),
        (site(value_width=8), run(), ("value widths of 16 to 256", "has 8")),
        (site(("relative bias",)), run(deterministic=True), ("atomic", "trainer.deterministic")),
    ],
)
def test_what_it_cannot_compute_is_refused_with_the_reason(at: Site, during: Any, words: tuple[str, ...]) -> None:
    reason = answer(at, during)
    assert isinstance(reason, str)
    for word in words:
        assert word in reason


@pytest.mark.usefixtures("hopper")
def test_it_serves_what_it_does_not_refuse() -> None:
    for at in (site(), site(("relative bias", "window", "attention sinks", "log-sum-exp")), site((KEY_LENGTH,))):
        assert answer(at, run()) is True
        assert answer(at, run("cpu", "fp64")) is True
    assert answer(site(), run(deterministic=True)) is True


def test_old_gpus_and_machines_without_a_compiler_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    assert "8.0 and newer, and this GPU has 7.5" in str(answer(site(), run()))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    monkeypatch.setattr("mplug_flex.limits.triton_builds", lambda: False)
    assert "needs Triton" in str(answer(site(), run()))


def test_its_note_tells_that_it_is_not_compiled_on_a_cpu() -> None:
    (offer,) = Flex(Flex.Config()).offer()
    assert [offer.note(site(), run(device)) for device in ("cpu", "cuda")] == ["not compiled on a CPU", ""]


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
