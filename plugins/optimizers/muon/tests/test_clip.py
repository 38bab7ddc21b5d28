"""QK-clip: the largest attention logit of each head as a statistic, and weights that shrink by it.

The set `pairs` compares each strategy with one process.
"""

from typing import Any

import pytest
import tiny_models
import torch
from layout_words import COMPILING
from torch import Tensor

from mplug import UsageError
from mplug.model.build import build_model
from mplug.training.assembly import Parts, build
from mplug_nn import Attention, AttentionInputs, AttentionSpec, LargestLogits
from mplug_testing.harness import EXACT, tiny_run
from mplug_testing.parity import require_parity

CLIP: dict[str, Any] = {"optimizer.name": "muon", "optimizer.qk_clip": 0.05, "model.qk_norm": False}
"""A bound that the tiny run exceeds in every head."""
FP64: dict[str, Any] = {"trainer.precision": "fp64"}
LATENT: dict[str, Any] = {
    "optimizer.name": "muon",
    "optimizer.qk_clip": 0.05,
    **tiny_models.of_model(tiny_models.TABLES["deepseek"]),
    "model.num_kv_heads": None,
}
LATENT_QUERIES: dict[str, Any] = {**LATENT, "model.q_lora_rank": None}


# The statistic.


def scores_of(q: Tensor, k: Tensor, spec: AttentionSpec, lengths: list[list[int]] | None) -> Tensor:
    """The largest logits by loops over all pairs: [H]."""
    batch, length, heads, _ = q.shape
    found = torch.full((heads,), float("-inf"), dtype=torch.float64)
    for b in range(batch):
        numbers = [n for n, size in enumerate(lengths[b]) for _ in range(size)] if lengths else [0] * length
        for s in range(length):
            for t in range(length):
                hidden = (spec.causal and t > s) or numbers[s] != numbers[t]
                if spec.window is not None:
                    hidden |= s - t >= spec.window if spec.causal else abs(s - t) >= spec.window
                if not hidden:
                    for h in range(heads):
                        key = k[b, t, h // (heads // k.shape[2])]
                        found[h] = max(found[h], float(q[b, s, h] @ key) * spec.scale)
    return found


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [None, [[4, 5], [7, 2]]])
def test_the_statistic_is_the_largest_logit_of_the_pairs_that_a_head_sees(
    window: int | None, causal: bool, lengths: list[list[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mplug_nn.largest_logits.LARGEST", 2 * 4 * 9 * 2)  # two queries at a time
    draw = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, 9, heads, 5, dtype=torch.float64, generator=draw) for heads in (4, 2))
    spec = AttentionSpec(0.3, 5, 5, causal=causal, window=window)
    kept = LargestLogits(4, spec)
    kept(q, k, spec, AttentionInputs(document_lengths=None if lengths is None else torch.tensor(lengths)))
    expected = scores_of(q, k, spec, lengths)
    torch.testing.assert_close(kept.values, expected.clamp(min=0), rtol=EXACT, atol=0)
    kept(q / 2, k, spec, AttentionInputs())  # a smaller one changes nothing
    assert float(kept.values.min()) >= float(expected.clamp(min=0).min())


def test_a_recomputation_computes_no_maximum() -> None:
    attention = Attention(8, 2, 2, 4, bias=False, qk_norm=False, theta=None)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    attention.largest_logits = LargestLogits(2, attention.spec)
    x = torch.randn(1, 3, 8, requires_grad=True)
    arguments = (torch.arange(3)[None], torch.zeros(1, dtype=torch.int64))
    y = torch.utils.checkpoint.checkpoint(attention, x, *arguments, use_reentrant=False)
    seen = attention.largest_logits.values.clone()
    assert seen.max() > 0
    attention.largest_logits.values.zero_()
    y.sum().backward()
    assert float(attention.largest_logits.values.max()) == 0


# The update.


def updated(settings: dict[str, Any]) -> tuple[Parts, dict[str, Tensor]]:
    """A run after one update, and its masters."""
    parts = build(tiny_run({**FP64, **settings}))
    parts.stepper.forward_backward(parts.train_loader.take(8), 1)
    parts.stepper.update(0.01, 0.1)
    return parts, {piece.name: piece.master.clone() for piece in parts.pieces}


def test_queries_and_keys_of_a_group_shrink_by_their_largest_logit() -> None:
    parts, clipped = updated(CLIP)
    _, free = updated({name: value for name, value in CLIP.items() if name != "optimizer.qk_clip"})
    heads, groups, width = 4, 2, 8
    for name, weight in clipped.items():
        if not name.endswith("attn.qkv.weight"):
            torch.testing.assert_close(weight, free[name], rtol=0, atol=0)
            continue
        values = parts.model.module.get_buffer(name.replace("qkv.weight", "largest_logits.values"))
        gamma = (0.05 / values.view(groups, 2).amax(dim=1)).clamp(max=1)
        assert float(gamma.max()) < 1
        of_rows = torch.cat(
            (
                gamma.sqrt().repeat_interleave(heads // groups * width),
                gamma.sqrt().repeat_interleave(width),
                torch.ones(groups * width, dtype=torch.float64),
            )
        )
        torch.testing.assert_close(weight, free[name] * of_rows[:, None], rtol=EXACT, atol=0)


@pytest.mark.wide("suites", quick=["latent queries"])
@pytest.mark.parametrize("settings", [LATENT, LATENT_QUERIES], ids=["latent queries", "queries"])
def test_latent_attention_spares_the_key_that_all_heads_share(settings: dict[str, Any]) -> None:
    parts, clipped = updated({**settings, "optimizer.qk_clip_alpha": 0.25})
    _, free = updated({name: value for name, value in settings.items() if name != "optimizer.qk_clip"})
    name = "blocks.1.attn."
    queries = name + ("q.weight" if settings["model.q_lora_rank"] is None else "q_up.weight")
    gamma = (0.05 / parts.model.module.get_buffer(f"{name}largest_logits.values")).clamp(max=1)[:, None, None]
    assert float(gamma.max()) < 1

    def by_head(key: str) -> tuple[Tensor, Tensor]:
        return clipped[key].unflatten(0, (4, -1)), free[key].unflatten(0, (4, -1))

    own, whole = by_head(queries)
    torch.testing.assert_close(own[:, :8], whole[:, :8] * gamma**0.25, rtol=EXACT, atol=0)
    torch.testing.assert_close(own[:, 8:], whole[:, 8:] * gamma, rtol=EXACT, atol=0)
    own, whole = by_head(f"{name}kv_up.weight")
    torch.testing.assert_close(own[:, :8], whole[:, :8] * gamma**0.75, rtol=EXACT, atol=0)
    assert torch.equal(own[:, 8:], whole[:, 8:])
    assert torch.equal(clipped[f"{name}kv_down.weight"], free[f"{name}kv_down.weight"])


def test_the_bias_of_queries_and_keys_shrinks_too() -> None:
    _, clipped = updated({**CLIP, "model.bias": True})
    _, free = updated({**CLIP, "model.bias": True, "optimizer.qk_clip": 1e6})
    own, whole = clipped["blocks.0.attn.qkv.bias"], free["blocks.0.attn.qkv.bias"]
    assert torch.all(own[:48].abs() < whole[:48].abs())
    assert torch.equal(own[48:], whole[48:])


# Layouts.


SEPARATE = {**CLIP, "optimizer.separate": ["heads", "kv_heads"]}


@pytest.mark.wide("layouts")
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("tp2", {**CLIP, "model.num_kv_heads": 1}),
        *((layout, CLIP) for layout in ("zero2pp2", "tp4", "cp4", "tp2pp2", "tp2zero2", "fsdp2tp2", "cp2tp2")),
        *((layout, LATENT) for layout in ("tp2", "cp2", "pp2", "zero2", "fsdp2", "cp2tp2")),
        *((layout, SEPARATE) for layout in ("tp2", "zero2")),
    ],
    ids=str,
)
def test_a_layout_gives_the_weights_of_one_process(layout: str, settings: dict[str, Any]) -> None:
    """Where the set `pairs` has one strategy only, or none of these shapes."""
    require_parity(settings, layout)


DOCUMENTS: dict[str, Any] = {
    "data.documents": 5,
    "trainer.micro_batch_size": 2,
    "parallel.cp.method": "all_gather",
    "parallel.cp.divide": "documents",
    "parallel.cp.equal_length": 16,
}
"""Two samples of a micro batch that ranks divide in different ways."""
WINDOWS: dict[str, Any] = {
    **tiny_models.DECODER,
    "model.name": "llama",
    "model.window": 5,
    "model.attention_types": ["window", "full"],
    "model.attention_sinks": True,
}
PARTS: dict[str, dict[str, Any]] = {
    "all": CLIP,
    "windows": {**CLIP, **WINDOWS},
    "latent": LATENT,
    "compiled": {**CLIP, "trainer.compile": "aot_eager"},
}


@COMPILING
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("layout", ["cp2", "cp4", "cp2tp2", "cp2pp2"])
@pytest.mark.wide("layouts", quick=["cp2-all"])
def test_documents_that_stay_whole_give_the_weights_of_one_process(layout: str, parts: str) -> None:
    require_parity({**PARTS[parts], **DOCUMENTS}, layout)


# Refusals.


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model.qk_norm": True}, "'blocks.0.attn' normalises queries and keys"),
        ({"model.frozen": ["blocks.1.attn"]}, "'blocks.1.attn.qkv.weight' is frozen"),
        (
            {"optimizer.groups": [{"match": "blocks.2.attn", "optimizer": {"name": "adamw"}}]},
            "'blocks.2.attn.qkv.weight' has an optimizer of its own",
        ),
        (
            {"optimizer.name": "adamw", "optimizer.qk_clip": None},
            "optimizer.qk_clip",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_clipped_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        build_model(tiny_run({**CLIP, **settings}))


def test_a_group_of_muon_does_not_clip() -> None:
    group = {"match": "blocks.2.attn", "optimizer": {"name": "muon", "qk_clip": 100.0}}
    with pytest.raises(UsageError, match="applies to the optimizer of the run only"):
        build_model(tiny_run({"optimizer.groups": [group]}))


@pytest.mark.gpu
def test_the_statistic_of_a_gpu_is_that_of_the_cpu() -> None:
    draw = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, 96, heads, 32, generator=draw).bfloat16() for heads in (4, 2))
    spec = AttentionSpec(0.3, 32, 32, window=40)
    on_cpu, on_gpu = LargestLogits(4, spec), LargestLogits(4, spec).cuda()
    on_cpu(q, k, spec, AttentionInputs())
    on_gpu(q.cuda(), k.cuda(), spec, AttentionInputs())
    torch.testing.assert_close(on_gpu.values.cpu(), on_cpu.values, rtol=1e-5, atol=0)
