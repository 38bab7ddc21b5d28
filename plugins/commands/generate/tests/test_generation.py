"""Sampling with a cache gives the tokens of full recomputation: every family, unequal prompts, under layouts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from mplug_pp import PipelineParallel
from sampled import CONTEXT, FAMILIES, PROMPTS, SHAPE, TOKENS, built, texts

from mplug import UsageError, hookimpl
from mplug_nn import Attention, Cache, CacheSize
from mplug_sampling.decoding import Ranks, refuse_undivided, sample
from mplug_sampling.sampler import Sampler
from mplug_sampling.sampling import Sampling, sample_key
from mplug_testing import Fault, run_workers
from mplug_testing.cached import require_exact_cache


def recomputed(sampler: Sampler, prompts: list[list[int]], context: int = CONTEXT) -> list[list[int]]:
    """Each prompt alone, all positions again for every token."""
    before, sampler.uncached = sampler.uncached, "the test says so"
    found = texts(sampler, prompts, context)
    sampler.uncached = before
    return found


@pytest.mark.wide("families", quick=["gpt-oss", "deepseek", "gpt"])
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_unequal_prompts_with_a_cache_give_the_tokens_of_full_recomputation(family: str) -> None:
    _, sampler = built(FAMILIES[family])
    assert sampler.uncached == ""
    found = texts(sampler, PROMPTS)
    assert found == recomputed(sampler, PROMPTS)
    assert sampler.growing == "", "its caches are static"
    sampler.growing = "the test says so"
    assert found == texts(sampler, PROMPTS)
    assert len({token for text in found for token in text}) > 10


def of_rank(settings: dict[str, Any], prompts: list[list[int]]) -> list[list[int]]:
    run, sampler = built(settings)
    ranks = Ranks(run, sampler)
    refuse_undivided(sampler, ranks)
    return texts(sampler, prompts, ranks=ranks)


WIDE = pytest.mark.wide("layouts")
STAGES: dict[str, Any] = {"model.num_layers": 4}
"""Chunks of a pipeline schedule need layers."""
SCHEDULE = "parallel.pp.schedule"
STAGED = [("gpt", "1f1b"), ("llama", "interleaved"), ("gpt", "zb-v"), ("llama", "zb-v"), ("gpt", "zb-h1")]
UNDIVIDED = {"parallel.tp.sequence_parallel": False}
LAYOUTS: list[Any] = [
    ("tp2", "gpt", {}),
    *(pytest.param("pp2", name, {**STAGES, SCHEDULE: one}, marks=WIDE) for name, one in STAGED),
    ("tp2pp2", "gpt", {}),
    ("tp2", "deepseek", {}),
    ("ep2", "mixtral", {}),
    *(
        pytest.param(layout, family, changes, marks=WIDE)
        for layout, family, changes in (
            ("tp2pp2", "llama", {**STAGES, SCHEDULE: "interleaved"}),
            ("dp2pp2", "qwen", {}),
            ("pp3", "gemma", {**STAGES, SCHEDULE: "dualpipe-v", "model.num_layers": 6}),
            ("pp2", "deepseek", {**STAGES, SCHEDULE: "zb-v"}),
            ("pp2ep2dp2", "mixtral", {}),
            ("tp2ep2", "mixtral", UNDIVIDED),
            ("tp2ep2", "gpt-oss", {}),
            ("dp2tp2", "gemma", {}),
            ("zero2", "qwen", {}),
            ("tp4", "llama", {}),
            *(("tp2", name, {}) for name in ("mixtral", "llama", "qwen", "gemma", "gpt-oss")),
            ("tp2", "mixtral", {"model.capacity_factor": 1.0, "model.capacity_dropping": "position"}),
        )
    ),
]


@pytest.mark.wide("families", quick=["tp2pp2-gpt-changes6", "tp2-gpt-changes0"])
@pytest.mark.parametrize(("layout", "family", "changes"), LAYOUTS)
def test_a_layout_gives_the_tokens_of_one_process(layout: str, family: str, changes: dict[str, Any]) -> None:
    settings = {**FAMILIES[family], **changes, "parallel.layout": layout}
    alone = {name: value for name, value in settings.items() if not name.startswith("parallel.")}
    _, sampler = built(alone)
    expected = recomputed(sampler, PROMPTS[:3])
    worlds = {"tp4": 4, "dp2tp2": 4, "tp2pp2": 4, "dp2pp2": 4, "pp3": 3, "pp2ep2dp2": 4}
    world = worlds.get(layout, 2)  # the experts' view folds over the ranks of the other
    for found in run_workers(world, of_rank, settings, PROMPTS[:3]):
        assert found == expected


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt", marks=WIDE)])
def test_chunks_of_a_pipeline_keep_caches_of_their_own(family: str) -> None:
    """On one rank with two chunks: texts within and beyond the context, with a cache and without."""
    settings = {**FAMILIES[family], **STAGES}
    _, whole = built(settings)
    run, sampler = built({**settings, "parallel.layout": "pp1", SCHEDULE: "zb-v"})
    ranks = Ranks(run, sampler)
    assert ranks.divided is not None
    assert ranks.divided.crossing == ((), ("hidden",))
    for context in (CONTEXT, 11):
        assert texts(sampler, PROMPTS[:4], context, ranks=ranks) == recomputed(whole, PROMPTS[:4], context)
    sampler.uncached = "the test says so"
    assert texts(sampler, PROMPTS[:2], ranks=ranks) == recomputed(whole, PROMPTS[:2])


def test_a_chunk_without_inference_units_passes_activations_on() -> None:
    """The second of three chunks has only multi-token prediction, which sampling does not compute."""
    settings = {**FAMILIES["llama"], "model.num_mtp_layers": 1}
    chunks = {SCHEDULE: "interleaved", "parallel.pp.chunks": 3, "parallel.pp.split": [3, 1, 1]}
    _, whole = built(settings)
    run, sampler = built({**settings, **chunks, "parallel.layout": "pp1"})
    ranks = Ranks(run, sampler)
    assert ranks.divided is not None
    assert [len(units) for units in ranks.divided.units] == [3, 0, 1]
    assert texts(sampler, PROMPTS[:2], ranks=ranks) == texts(whole, PROMPTS[:2])


def test_inference_units_that_do_not_follow_the_stages_are_refused() -> None:
    run, sampler = built({**FAMILIES["llama"], **STAGES, "parallel.layout": "pp1", SCHEDULE: "zb-v"})
    embedding, *blocks, head = sampler.model.plan.inference
    for units, sentence in (
        ((embedding, *reversed(blocks), head), "is in chunk 0 of the pipeline, and the unit before it in chunk 1"),
        ((embedding, replace(head, name="other_head")), "'other_head' is in no unit that trains"),
    ):
        sampler.model.plan = replace(sampler.model.plan, inference=units)
        with pytest.raises(UsageError, match=sentence):
            Ranks(run, sampler)


def test_a_text_longer_than_the_context_continues_from_its_last_tokens() -> None:
    """As full recomputation of a window of the last tokens does, for prompts below and above the context."""
    for family in ("gpt", "gpt-oss"):
        _, sampler = built(FAMILIES[family])
        assert texts(sampler, PROMPTS[:4], context=11) == recomputed(sampler, PROMPTS[:4], context=11)


def test_the_samples_of_a_seed_do_not_depend_on_the_batch() -> None:
    _, sampler = built(FAMILIES["llama"])
    together, hot = texts(sampler, PROMPTS, sampling=Sampling(2.0, seed=4)), Sampling(2.0, seed=4)
    assert [texts(sampler, [prompt], sampling=hot)[0] for prompt in PROMPTS] == together
    assert texts(sampler, PROMPTS[::-1], sampling=hot) == together[::-1]
    assert texts(sampler, PROMPTS, sampling=replace(hot, seed=5)) != together


def test_a_text_that_ends_does_not_change_the_others() -> None:
    _, sampler = built(FAMILIES["gpt"])
    whole, found = texts(sampler, PROMPTS[:3]), [[], [], []]

    def take(number: int, token: int) -> bool:
        found[number].append(token)
        return len(found[number]) == (2, 99, 4)[number]

    sample(sampler, PROMPTS[:3], [sample_key(0)] * 3, TOKENS, CONTEXT, Sampling(1.0), take)
    assert found == [whole[0][:2], whole[1], whole[2][:4]]


# What a cache computes, and what it keeps.


def widths(sampler: Sampler, prompts: list[list[int]]) -> set[int]:
    seen: set[int] = set()
    block = sampler.model.module.get_submodule(sampler.model.plan.units[1].name)
    with_hook = block.register_forward_pre_hook(lambda _, given: seen.add(given[0].shape[1]))
    texts(sampler, prompts)
    with_hook.remove()
    return seen


def test_with_a_cache_a_call_computes_one_position_of_each_text() -> None:
    _, sampler = built(FAMILIES["llama"])
    assert widths(sampler, [[1, 2, 3], [4]]) == {3, 1}
    sampler.uncached = "the test says so"
    assert widths(sampler, [[1, 2, 3]]) == set(range(3, 3 + TOKENS))


def shapes(sampler: Sampler) -> dict[str, list[tuple[int, ...]]]:
    """The buffers of each cache while two texts are sampled; 48 tokens are 51 positions."""
    found: dict[str, list[tuple[int, ...]]] = {}

    def take(number: int, token: int) -> bool:
        for name, module in sampler.model.module.named_modules():
            cache = getattr(module, "cache", None)
            if cache is not None:
                found[name] = [tuple(buffer.shape) for buffer in cache._buffers]
        return False

    sample(sampler, [[1, 2, 3], [4]], [1, 2], 49, CONTEXT, Sampling(0.0), take)
    assert not any(getattr(module, "cache", None) for module in sampler.model.module.modules())
    return found


def test_windows_keep_their_rows_and_latent_attention_its_compressed_ones() -> None:
    assert shapes(built(FAMILIES["llama"])[1])["blocks.0.attn"] == [(2, 64, 2, 8)] * 2
    of_windows = shapes(built(FAMILIES["gemma"])[1])
    assert of_windows["blocks.0.attn"][0][1] <= 2 * 4
    assert of_windows["blocks.1.attn"][0][1] == 64
    assert shapes(built(FAMILIES["deepseek"])[1])["blocks.0.attn"] == [(2, 64, 1, 13 + 4)]


@pytest.mark.parametrize(("reach", "again"), [(None, 0), (None, 2), (3, 0), (3, 2), (0, 1)])
def test_a_cache_returns_exactly_the_rows_that_new_positions_may_see(reach: int | None, again: int) -> None:
    """Rows are numbers of positions; calls bring 7 positions, then one each, and `again` ones a second time."""
    cache, end = Cache(CacheSize(20, again), reach), 0
    for new in (7, *[1] * 13):
        back = again if end else 0
        cache.rewind(back)
        rows = torch.arange(end - back, end + new)[None, :, None]
        end += new
        (found,) = cache.extend(rows)
        assert found[0, :, 0].tolist() == list(range(end - found.shape[1], end))
        first = end - new - back  # the earliest query
        assert found.shape[1] >= end - max(0, first - (end if reach is None else reach))
        assert cache.length == end
    with pytest.raises(ValueError, match="for 20 positions cannot hold"):
        cache.extend(rows)
    with pytest.raises(ValueError, match="cannot forget"):
        cache.rewind(again + 1)


# What models declare.


def test_a_block_that_knows_no_cache_is_recomputed_and_gives_the_same_tokens() -> None:
    """A class with code of its own inherits no declaration."""

    class Own(Attention):
        def forward(self, *given: Any, **named: Any) -> Any:
            heads = self.qkv(given[0]).unflatten(-1, (-1, self.head_dim))
            count = self.out.weight.shape[1] // self.head_dim
            q, k, v = heads.split((count, *[(heads.shape[2] - count) // 2] * 2), dim=2)
            return self.out(self.attend(q, k, v, *given[1:3]).flatten(-2))

    class Silent(Own):
        mixes = frozenset()

    class Declared(Own):
        mixes, caches = frozenset(), True

    _, sampler = built(FAMILIES["llama"])
    expected = texts(sampler, PROMPTS[:2])
    reasons, growing = [], []
    for kind in (Own, Silent, Declared):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mplug_nn.attention.Attention", kind)
            _, other = built(FAMILIES["llama"])
        assert type(other.model.module.get_submodule("blocks.0.attn")) is kind
        reasons.append(other.uncached)
        growing.append(other.growing)
        assert texts(other, PROMPTS[:2]) == expected
    assert "no declaration states what 'blocks.*.attn'" in reasons[0]
    assert "does not declare that it serves a cache (`caches`)" in reasons[1]
    assert reasons[2] == ""
    assert growing[2] == "'Declared' does not declare that it serves a static cache (`static_cache`)"


def test_the_suite_catches_a_module_that_numbers_positions_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Numbering(Attention):
        mixes, caches = frozenset(), True

        def forward(self, x: Any, positions: Any, *given: Any) -> Any:
            return super().forward(x, torch.arange(x.shape[1])[None], *given)

    settings = {**SHAPE, **FAMILIES["llama"]}
    require_exact_cache(settings)
    monkeypatch.setattr("mplug_nn.attention.Attention", Numbering)
    with pytest.raises(Fault, match="with a cache, the logits of prompt 1 differ"):
        require_exact_cache(settings)


# Layouts and kernels that cannot sample.


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("cp2", r"divides the sequence of a sample \(cp=2\), which grows token by token"),
        ("fsdp2", "stores parts of .* that training gathers for each pass, and sampling gathers no weights"),
        ("pp2", r"divides the model into stages \(pp=2\), and does not run them forward for sampling"),
    ],
)
def test_a_layout_that_cannot_sample_is_refused_with_the_reason(
    layout: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stages only if their strategy cannot run them forward."""
    build = PipelineParallel.build_pipeline
    without = hookimpl(lambda self, run, model: replace(build(self, run, model), relay=None))
    monkeypatch.setattr(PipelineParallel, "build_pipeline", without)
    with pytest.raises(UsageError, match=sentence):
        built({**FAMILIES["llama"], "parallel.layout": layout})


def test_whether_a_model_has_a_cache_is_decided_for_all_its_stages() -> None:
    """Only the second stage has experts with a capacity, which mix samples; the first one must know."""
    layers = {**STAGES, "model.num_dense_layers": 2, "model.capacity_factor": 1.0}
    _, sampler = built({**FAMILIES["deepseek"], **layers, "parallel.layout": "pp2", "parallel.pp.split": [3, 3]})
    assert not any("experts" in name for name, _ in sampler.model.module.named_modules())
    assert "mixes the batch" in sampler.uncached
    _, other = built({**FAMILIES["mixtral"], "model.moe_balance": "micro_batch"})
    assert other.uncached == "", "the balancing loss mixes samples in training only"


def test_a_model_without_a_cache_is_refused_where_ranks_divide_positions() -> None:
    run, sampler = built({**FAMILIES["mixtral"], **UNDIVIDED, "parallel.layout": "tp2ep2"})
    assert sampler.multiple(run) == 2
    sampler.uncached = "the test says so"
    with pytest.raises(UsageError, match="samples without a cache, because the test says so"):
        refuse_undivided(sampler, Ranks(run, sampler))


def test_a_kernel_that_does_not_serve_a_cache_is_replaced_by_plain_torch() -> None:
    _, sampler = built({**FAMILIES["llama"], "kernels.attention": "flex"})
    suppliers = {one.supplier for one in sampler.model.slots if one.site.slot == "Attention.core"}
    assert suppliers == {"plain torch"}
    assert "supports documents only if there are as many keys as queries" in sampler.replaced[0]
    assert sampler.replaced[0].endswith("; plain torch computes it")
