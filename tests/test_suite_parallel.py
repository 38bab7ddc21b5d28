"""The suite of strategies has teeth: what an author gets wrong in `nova-ulys` is caught, and named."""

from collections.abc import Callable
from dataclasses import dataclass
from unittest import SkipTest

import pytest
from mplug_testing import Fault, ParallelSuite
from mplug_testing.harness import tiny_run

from mplug import UsageError
from mplug.model.build import build_model


class Ulysses(ParallelSuite):
    plugin = "ulys"
    refused = {"ulys8": ("ulys=8", "4 query heads")}


@dataclass(frozen=True)
class Planted:
    """A fault: what stands in the source and what the author wrote instead; the test that catches it, and its words."""

    old: str
    new: str
    test: str
    said: str
    argument: str | None = None


AXIS = 'Axis("ulys", config.parallel.degrees["ulys"], entries={"sequence": contiguous}, distance=10)'
CONFIGURED = "        self.config = config\n"
OFFER = """    def offer(self, run: "Run") -> "list[Wrap]":
        \"\"\"All-to-alls around every attention core.\"\"\"
        from nova_ulys.exchange import around_attention

        return [around_attention(run)]
"""
CORE = """\
    def core(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        \"\"\"q [B, S/R, H, K], k and v [B, S/R, G, K] -> [B, S/R, H, K].\"\"\"
"""


def hook(*lines: str) -> str:
    """A hook that the plugin has beside its others."""
    return "\n".join([CONFIGURED, "    @hookimpl", *(f"    {line}" for line in lines), ""])


FAULTS = {
    "it imports torch where it is imported": Planted(
        "from pydantic import BaseModel, ConfigDict\n",
        "import torch\nfrom pydantic import BaseModel, ConfigDict\n",
        "test_neither_importing_nor_configuring_it_imports_torch",
        "importing 'ulys' imports torch",
    ),
    "an axis of one size at any degree": Planted(
        'config.parallel.degrees["ulys"]',
        "2",
        "test_its_degree_is_the_size_of_its_axes",
        "in layout 'ulys4' its axes have 2 ranks in the view 'dense'; they must have 4",
    ),
    "axes that add up over calls": Planted(
        f"        return [{AXIS}]",
        f"        self.axes = [*getattr(self, 'axes', []), {AXIS}]\n        return self.axes",
        "test_its_axes_are_the_same_on_every_call",
        "three calls return different axes of 'ulys2'",
    ),
    "an axis that goes by another strategy's name": Planted(
        'Axis("ulys"',
        'Axis("dp"',
        "test_its_axes_share_no_name_with_anothers",
        "parallel/dp adds an axis 'dp' too",
    ),
    "an index map that cuts the remainder off": Planted(
        '"sequence": contiguous',
        '"sequence": lambda n, size, index: (range(index * (n // size), (index + 1) * (n // size)),)',
        "test_its_index_maps_give_every_index_to_one_rank",
        "the index map of axis 'ulys' along 'sequence' assigns index 4 of 5 to 0 of 2 ranks",
    ),
    "frozen parameters that are copied before they have values": Planted(
        CONFIGURED,
        hook(
            'def wrap_model(self, model: "Model") -> None:',
            "    import torch",
            "    for part in model.module.modules():",
            "        for name, held in part._parameters.items():",
            "            if held is not None and not held.requires_grad:",
            "                part._parameters[name] = torch.nn.Parameter(held.detach().clone(), requires_grad=False)",
        ),
        "test_frozen_parameters_stay_and_the_others_train_as_in_one_process",
        "the loss of step 1 on rank 0 is",
    ),
    "parts of the sequence that overlap": Planted(
        '"sequence": contiguous',
        '"sequence": lambda n, size, index: (range(max(0, index * (n // size) - 1), (index + 1) * (n // size)),)',
        "test_all_ranks_together_read_every_token_once",
        "the token at position 7 of sample 0 is read by ranks 0 and 1",
    ),
    "an offer that asks the process group for the rank": Planted(
        'run.mesh.index(run.rank, "ulys")',
        'run.group("ulys").rank()',
        "test_its_layouts_are_data",
        "building rank 0 without processes, from run.mesh and the plan alone, raises AttributeError",
    ),
    "placements that depend on who computes them": Planted(
        CONFIGURED,
        hook(
            'def shard_model(self, run: "Run", model: "Model") -> None:',
            "    from dataclasses import replace",
            "    for name, placement in model.placements.items():",
            "        model.placements[name] = replace(placement, stage_axis='ulys', stages=(run.rank,))",
        ),
        "test_its_layouts_are_data",
        "ranks 0 and 1 compute different placements of",
    ),
    "an offer that already takes effect": Planted(
        OFFER,
        "    def offer(self, run, model):\n"
        "        from nova_ulys.exchange import around_attention\n\n"
        "        offered = around_attention(run)\n"
        "        for module in model.module.modules():\n"
        "            if hasattr(module, 'core'):\n"
        "                module.core = offered.wrap(module.core)\n"
        "        return [offered]\n",
        "test_its_offers_are_pure_and_true",
        "`offer` changes Attention.core of 'blocks.0.attn'",
    ),
    "a misspelt slot": Planted(
        '"Attention.core"',
        '"Attention.cores"',
        "test_its_offers_are_pure_and_true",
        "offers a wrap for 'Attention.cores', and no block of the model or of an installed package declares this slot; "
        "did you mean 'Attention.core'?",
    ),
    "a forgotten answer": Planted(
        "        return True\n",
        "",
        "test_its_offers_are_pure_and_true",
        "`supports` for Attention.core of 'blocks.0.attn' returns None",
    ),
    "a closure for every site": Planted(
        OFFER,
        "    def offer(self, run, model):\n"
        "        from dataclasses import replace\n\n"
        "        from nova_ulys.exchange import around_attention\n\n"
        "        names = [f'{unit.name}.attn' for unit in model.plan.units]\n"
        "        only = [lambda site, run, name=name: site.name == name for name in names]\n"
        "        return [replace(around_attention(run), supports=supports) for supports in only]\n",
        "test_its_offers_are_pure_and_true",
        "the sites of 'blocks.*.attn' get 4 different callables for Attention.core",
    ),
    "heads that are not counted": Planted(
        "if heads % size:",
        "if size > 8:",
        "test_what_does_not_fit_is_refused_before_launch",
        "layout 'ulys8' does not fit the run, and the plugin does not refuse it before launch",
        "ulys8",
    ),
    "a refusal without numbers": Planted(
        "return f\"ulys={size} does not divide the {heads} query heads of a rank; use ulys={' or '.join(fitting)}\"",
        'return "too few heads"',
        "test_what_does_not_fit_is_refused_before_launch",
        "the refusal of layout 'ulys8' lacks 'ulys=8' and '4 query heads'",
        "ulys8",
    ),
    "gradients that are summed twice": Planted(
        CONFIGURED,
        hook(
            'def wrap_model(self, run: "Run", model: "Model") -> None:',
            "    import torch.distributed as dist",
            "    for sink in model.sinks.values():",
            "        sink.listeners.append(lambda sink: dist.all_reduce(sink.buffer, group=run.group('ulys')))",
        ),
        "test_a_layout_gives_the_run_of_one_process",
        "under layout 'ulys2': the gradient of 'embedding.token.weight' at step 1 has an error of",
        "ulys2",
    ),
    "a step for every micro batch": Planted(
        CONFIGURED,
        hook(
            'def build_stepper(self, run: "Run", model: "Model", default: object) -> object:',
            "    from dataclasses import replace",
            "    whole = default.forward_backward",
            "    alone = lambda batch: [replace(batch, is_last=True)]",
            "    default.forward_backward = lambda batches, step: [whole(alone(batch), step) for batch in batches]",
            "    return default",
        ),
        "test_each_gradient_is_final_once_a_step",
        "announces 4 final gradients in step 1 on rank 0",
    ),
    "a stepper that makes up what units get": Planted(
        CONFIGURED,
        hook(
            'def build_stepper(self, run: "Run", model: "Model", default: object) -> object:',
            "    whole = default.entries",
            "    default.entries = lambda batch, step: {n: x for n, x in whole(batch, step).items() if n != 'draws'}",
            "    return default",
        ),
        "test_what_kernels_draw_is_other_wherever_work_is",
        "under layout 'ulys2' kernels that draw random numbers themselves draw the same numbers in unit 'blocks.0', "
        "samples 0, 1 of step 1, on rank 0 as in unit 'embedding', samples 0, 1 of step 1, on rank 0; run units on "
        "the entries of Default",
    ),
    "dropout that forgets which heads these are": Planted(
        "first_head + index * q.shape[HEADS]",
        "first_head",
        "test_a_variant_gives_the_run_of_one_process",
        "under layout 'ulys2' with 'dropout': the loss of step 1",
        "dropout",
    ),
    "too few KV heads for the ranks": Planted(
        "repeats = kv_repeats(q.shape[HEADS], k.shape[HEADS], size)",
        "repeats = 1",
        "test_a_variant_gives_the_run_of_one_process",
        "under layout 'ulys2' with 'one-kv-head': rank",
        "one-kv-head",
    ),
    "a wrap inside out": Planted(
        "layer=50",
        "layer=150",
        "test_a_layout_gives_the_run_of_one_process",
        "a wrap of Attention.core outside of tensor parallelism has set `first_head`; give this wrap a layer below 100",
        "ulys2tp2",
    ),
    "the size of the first micro batch taken for that of all": Planted(
        CORE,
        f"    sizes: list[int] = []\n\n{CORE}"
        "        sizes.append(len(q))\n"
        "        q = q.reshape(sizes[0], *q.shape[1:])\n",
        "test_micro_batches_may_differ_in_size",
        "under layout 'ulys2' with micro batches of different sizes: rank",
    ),
    "an assertion where a refusal belongs": Planted(
        CONFIGURED,
        hook(
            'def configure(self, config: "RunConfig") -> None:',
            "    assert config.trainer.seq_length % config.parallel.degrees['ulys'] == 0",
        ),
        "test_an_odd_degree_is_refused_or_gives_the_run_of_one_process",
        "parallel/ulys fails in 'configure'",
    ),
    "values that are rounded on the way": Planted(
        "q, k, v = (ops.exchange(x, group, HEADS, SEQUENCE) for x in (q, k, v))",
        "q, k, v = (ops.exchange(x.bfloat16(), group, HEADS, SEQUENCE).to(x.dtype) for x in (q, k, v))",
        "test_a_degree_of_one_changes_nothing",
        "the run under layout 'ulys1' is not bitwise equal to one process: the loss of step 1",
    ),
}


IN_ANOTHER_ORDER = Planted(
    CONFIGURED,
    hook(
        'def build_stepper(self, run: "Run", model: "Model", default: object) -> object:',
        "    from dataclasses import replace",
        "    whole = default.forward_backward",
        "    def turned(batches):",
        "        back = list(batches)[::-1]",
        "        return [replace(one, number=n, is_last=n == len(back) - 1) for n, one in enumerate(back)]",
        "    default.forward_backward = lambda batches, step: whole(turned(batches), step)",
        "    return default",
    ),
    "test_what_kernels_draw_is_other_wherever_work_is",
    "than in one process, so they depend on the order of execution",
)
ON_RANKS_ALONE = Planted(
    "from pydantic import BaseModel, ConfigDict\n",
    "import multiprocessing\n\nfrom pydantic import BaseModel, ConfigDict\n\n"
    "if multiprocessing.parent_process() is not None:\n    import no_such_module\n",
    "test_a_layout_gives_the_run_of_one_process",
    "No module named 'no_such_module'",
    "ulys2",
)
FAULTS["a plugin that does not import on a rank"] = ON_RANKS_ALONE
TAKEN_EARLY = Planted(
    CONFIGURED,
    hook(
        'def build_stepper(self, run: "Run", model: "Model", default: object) -> object:',
        "    whole = default.evaluate",
        "    default.evaluate = lambda batches: whole(list(batches))",
        "    return default",
    ),
    "test_a_layout_gives_the_run_of_one_process",
    "the stepper takes micro batches of an evaluation long before it computes them: a run that is asked to stop",
    "ulys2",
)
MORE_FAULTS = {
    "micro batches in another order": IN_ANOTHER_ORDER,
    "an evaluation that takes all micro batches first": TAKEN_EARLY,
}
EVERY_FAULT = [*FAULTS, *(pytest.param(fault, marks=pytest.mark.wide("suites")) for fault in MORE_FAULTS)]


@pytest.mark.parametrize("fault", EVERY_FAULT)
def test_the_suite_catches(fault: str, plant: Callable[..., None]) -> None:
    planted = {**FAULTS, **MORE_FAULTS}[fault]
    plant("nova-ulys", planted.old, planted.new)
    arguments = [] if planted.argument is None else [planted.argument]
    with pytest.raises(Fault) as caught:
        getattr(Ulysses(), planted.test)(*arguments)
    print(f"\n{fault}: {caught.value}")
    assert planted.said in str(caught.value)


DROPOUT, ONE_KV_HEAD = (ParallelSuite.variants[name] for name in ("dropout", "one-kv-head"))


class BesideTensorParallelism(ParallelSuite):
    plugin = "ulys"
    layouts = ("ulys2tp2",)
    variants = {
        "divided-stream": DROPOUT,
        "whole-stream": {**DROPOUT, **ONE_KV_HEAD, "parallel.tp.sequence_parallel": False},
    }


@pytest.mark.parametrize("variant", BesideTensorParallelism.variants)
def test_heads_and_sequence_are_divided_by_two_strategies_at_once(variant: str, plant: Callable[..., None]) -> None:
    plant("nova-ulys")
    BesideTensorParallelism().test_a_variant_gives_the_run_of_one_process(variant)


def test_a_strategys_reason_names_no_kernel_as_the_remedy(plant: Callable[..., None]) -> None:
    plant("nova-ulys")
    with pytest.raises(UsageError) as caught:
        build_model(tiny_run({"parallel.layout": "ulys8"}))
    assert str(caught.value).endswith("ulys=8 does not divide the 4 query heads of a rank; use ulys=1 or 2 or 4")


@pytest.mark.wide("suites")
def test_the_package_as_it_is_passes_the_whole_suite(own_tests: Callable[..., str]) -> None:
    assert "failed" not in own_tests("nova-ulys")


# Refusals.


class NamingLayouts(ParallelSuite):
    plugin = "ulys"
    layouts = ("ulys2", "ulys8")
    variants = {
        **ParallelSuite.variants,
        "own": {"model.num_attention_heads": 1, "model.num_kv_heads": 1},
    }


def test_what_the_author_names_may_not_be_refused(plant: Callable[..., None]) -> None:
    """Neither a layout nor a variant; what the suite tries on its own account may."""
    plant("nova-ulys")
    suite = NamingLayouts()
    for test in (suite.test_a_layout_gives_the_run_of_one_process, suite.test_a_layout_is_data):
        with pytest.raises(Fault, match=r"layout 'ulys8' .*is refused; set 'settings' or 'layouts' .*ulys=8"):
            test("ulys8")
        with pytest.raises(SkipTest, match=r"layout 'ulys8dp2' .*is refused: .*ulys=8"):
            test("ulys8dp2")
    with pytest.raises(Fault, match=r"^layout 'ulys8' is refused"):
        suite.test_its_layouts_are_data()
    with pytest.raises(
        Fault, match=r"^under layout 'ulys2' with 'own' the run is refused; .*ulys=2 does not divide the 1 query heads"
    ):
        suite.test_a_variant_gives_the_run_of_one_process("own")
