"""The features whose pairs are tested, as data: their values, and the settings of a case.

The features of `MATHEMATICS` decide what a run computes. All others decide only how it computes it: the reference of a
case has their defaults, in one process.
"""

from collections.abc import Mapping
from typing import Any

from covering import Case

Settings = dict[str, Any]

LAYERS, BATCH, LENGTH, VOCABULARY = 3, 8, 16, 67
"""An odd vocabulary is padded under tensor parallelism."""

BASE: Settings = {
    "model.num_layers": LAYERS,
    "model.vocab_size": VOCABULARY,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.init_std": 0.06,
    "trainer.precision": "fp64",
    "trainer.seq_length": LENGTH,
    "trainer.global_batch_size": BATCH,
    "trainer.eval_samples": BATCH,
    "schedule.warmup_steps": 0,
    "checkpoint.asynchronous": False,
}

EXPERTS: Settings = {
    "model.num_experts": 4,
    "model.num_experts_per_token": 2,
    "model.moe_ffn_hidden_size": 12,
    "model.aux_loss_coefficient": 0.05,
    "model.z_loss_coefficient": 0.02,
}
DENSE: Settings = {"model.ffn_hidden_size": 40}
FAMILIES: dict[str, Settings] = {
    "qwen-experts": {
        **DENSE,
        **EXPERTS,
        "model.name": "qwen",
        "model.feed_forward_types": ["mlp", "experts"],
        "model.moe_balance": "global_batch",
    },
    "gpt": {"model.name": "gpt", "model.bias": True, "model.dropout": 0.1},
    "gpt alibi": {"model.name": "gpt", "model.position": "alibi", "model.activation": "swiglu"},
    "llama": {**DENSE, "model.name": "llama", "model.qk_norm": False, "model.rope_fraction": 0.5},
    "qwen": {**DENSE, "model.name": "qwen", "model.qkv_bias": True},
    "mixtral": {**DENSE, **EXPERTS, "model.name": "mixtral", "model.num_shared_experts": 1},
    "gemma": {
        **DENSE,
        "model.name": "gemma",
        "model.qk_norm": True,
        "model.logit_soft_cap": 3.0,
        "model.window_rope_theta": 100.0,
    },
    "gpt-oss": {**DENSE, **EXPERTS, "model.name": "gpt-oss", "model.head_dim": 8, "model.rope_scaling": None},
    "deepseek": {
        **DENSE,
        **EXPERTS,
        "model.name": "deepseek",
        "model.num_kv_heads": None,
        "model.qk_norm": False,
        "model.num_dense_layers": 1,
        "model.q_lora_rank": 12,
        "model.kv_lora_rank": 12,
        "model.qk_nope_head_dim": 8,
        "model.qk_rope_head_dim": 4,
        "model.v_head_dim": 6,
        "model.num_shared_experts": 1,
        "model.moe_router_num_groups": 2,
        "model.moe_router_top_groups": 1,
        "model.expert_bias_rate": 0.01,
    },
}
GENERAL = {"qwen-experts", "llama", "qwen", "gemma", "gpt-oss", "deepseek"}
"""The families with the fields of `GeneralDecoderConfig`."""

PLAIN: Settings = {"model.attention_types": ["full"], "model.attention_sinks": False}
WINDOWS: Settings = {"model.attention_types": ["window", "full"], "model.window": 4}
SINKS: Settings = {"model.attention_sinks": True}
MIXING: dict[str, Settings] = {
    "full": PLAIN,
    "windows": {**PLAIN, **WINDOWS},
    "sinks": {**PLAIN, **SINKS},
    "windows+sinks": {**WINDOWS, **SINKS},
    "soft cap": {**PLAIN, "model.attention_soft_cap": 3.0},
}
LORA: Settings = {"adapters.lora.rank": 3, "adapters.lora.alpha": 6.0}
ADAPTERS: dict[str, Settings] = {
    "none": {},
    "lora": {**LORA, "adapters.lora.dropout": 0.1},
    "lora of experts": {**LORA, "adapters.lora.targets": ["linear", "experts"]},
    "dora": {**LORA, "adapters.lora.dora": True},
}
FROZEN: dict[str, Settings] = {
    "none": {},
    "bottom": {"model.frozen": ["embedding", "blocks.0"]},
    "attention": {"model.frozen": ["blocks.*.attn"]},
    "head": {"model.frozen": ["head"]},
}
OPTIMIZERS: dict[str, Settings] = {
    "adamw": {"optimizer.name": "adamw", "optimizer.lr": 1e-3, "optimizer.eps": 1e-3},
    "sgd": {"optimizer.name": "sgd", "optimizer.lr": 0.1},
    "muon": {"optimizer.name": "muon", "optimizer.lr": 1e-3, "optimizer.adamw_eps": 1e-3},
}
RECOMPUTE: dict[str, Settings] = {
    "none": {},
    "full": {"memory.recompute.mode": "full"},
    "selective": {"memory.recompute.mode": "selective", "memory.recompute.slots": ["attention", "activation"]},
}
DATA: dict[str, Settings] = {
    "none": {},
    "dp2": {"parallel.layout": "dp2"},
    "zero2 stage 1": {"parallel.layout": "zero2", "parallel.zero.stage": 1},
    "zero2 stage 2": {"parallel.layout": "zero2", "parallel.zero.stage": 2},
    "fsdp2": {"parallel.layout": "fsdp2"},
}
TENSOR: dict[str, Settings] = {
    "none": {},
    "tp2": {"parallel.layout": "tp2"},
    "tp2 whole sequences": {"parallel.layout": "tp2", "parallel.tp.sequence_parallel": False},
}
CONTEXT: dict[str, Settings] = {"none": {}} | {
    f"cp2 {method}": {"parallel.layout": "cp2", "parallel.cp.method": method}
    for method in ("ring", "all_gather", "ulysses")
}
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-limited", "zb-v", "dualpipe-v")
PIPELINE: dict[str, Settings] = {"none": {}} | {
    f"pp2 {name}": {"parallel.layout": "pp2", "parallel.pp.schedule": name} for name in SCHEDULES
}
PIPELINE["pp2 zb-limited"]["parallel.pp.limit"] = 2
HEAD_ALONE = "pp2 1f1b, head alone"
PIPELINE[HEAD_ALONE] = {"parallel.layout": "pp2", "parallel.pp.schedule": "1f1b"}
"""Its second stage is the head alone, so the stages share every parameter that multi-token prediction ties."""
EXPERT_PARALLEL: dict[str, Settings] = {
    "none": {},
    "ep2": {"parallel.layout": "ep2"},
    "ep2 all_gather": {"parallel.layout": "ep2", "parallel.ep.dispatch": "all_gather"},
    "etp2": {"parallel.layout": "etp2"},
}
SIMPLE: dict[str, dict[str, Settings]] = {
    "optimizer": OPTIMIZERS,
    "compile": {"never": {}, "aot_eager": {"trainer.compile": "aot_eager"}},
    "recompute": RECOMPUTE,
    "kernels": {"reference": {"kernels.default": "reference"}, "sdpa": {"kernels.default": "sdpa"}},
    "data": DATA,
    "tensor": TENSOR,
    "context": CONTEXT,
    "pipeline": PIPELINE,
    "experts": EXPERT_PARALLEL,
}
STRATEGIES = ("data", "tensor", "context", "pipeline", "experts")
MATHEMATICS = ("family", "mixing", "ahead", "tied", "packed", "adapter", "frozen", "optimizer")
FEATURES: dict[str, tuple[str, ...]] = {
    "family": tuple(FAMILIES),
    "mixing": tuple(MIXING),
    "ahead": ("0", "1", "2"),
    "tied": ("no", "yes"),
    "packed": ("no", "yes"),
    "adapter": tuple(ADAPTERS),
    "frozen": tuple(FROZEN),
    "micro batches": ("1", "2", "4"),
    **{name: tuple(values) for name, values in SIMPLE.items()},
    "resume": ("same layout", "from one process", "as dp"),
}
COSTLY = ("compile",)
"""Features whose other values cost more than everything else of a case."""
PRODUCT = {
    "pipeline": FEATURES["pipeline"][1:],
    "ahead": ("0", "2"),
    "tied": FEATURES["tied"],
    "packed": FEATURES["packed"],
    "compile": FEATURES["compile"],
}
"""Every combination of these values is in a case of the array's second part."""
MEANING = {
    "family": "the model's family; `qwen-experts` has MLPs and experts in turn",
    "mixing": "what attention sees: everything, windows of 4 in every second block, sinks; or a soft cap of scores",
    "ahead": "depths of multi-token prediction",
    "tied": "the embedding table is the output projection",
    "packed": "samples of three documents",
    "adapter": "LoRA of all linears with dropout, LoRA of linears and experts, or DoRA",
    "frozen": "frozen parts: the embedding and the first block, all attentions, or the head",
    "micro batches": "micro batches of a step on each rank",
    "optimizer": "what updates the weights",
    "compile": "units compiled with this backend",
    "recompute": "activations that backward computes again",
    "kernels": "`kernels.default`",
    "data": "strategy of data parallelism",
    "tensor": "tensor parallelism, with the residual stream divided or whole",
    "context": "context parallelism, by method",
    "pipeline": "pipeline parallelism, by schedule",
    "experts": "expert parallelism, by dispatch, and expert tensor parallelism",
    "resume": "how the run resumes after step 1: its own checkpoint under its layout, that of one process under its "
    "layout, or its own checkpoint under data parallelism",
}


def small_enough(case: Case) -> bool:
    """At most two strategies: a case has at most 4 ranks."""
    return sum(case.get(name, "none") != "none" for name in STRATEGIES) <= 2


def named_cases(data: Mapping[str, Any]) -> dict[str, Case]:
    """All cases of the file by name: `pair-007`, `product-012`."""
    lists = {"pair": data["pairs"], "product": data["product"]}
    return {f"{name}-{number:03}": case for name, cases in lists.items() for number, case in enumerate(cases)}


def few_with_every_value(cases: Mapping[str, Case]) -> set[str]:
    """The names of few cases in which every value occurs: each is the one with the most new values for its cost."""
    missing = {item for case in cases.values() for item in case.items()}
    chosen: set[str] = set()
    while missing:
        best = max(cases, key=lambda name: len(missing & cases[name].items()) / _cost(cases[name]))
        chosen.add(best)
        missing -= cases[best].items()
    return chosen


def _cost(case: Case) -> float:
    """CPU seconds of a case, roughly: compiled units cost the most, and the more, the larger their graphs are."""
    strategies = sum(case[name] != "none" for name in STRATEGIES)
    larger = sum(case[name] != FEATURES[name][0] for name in ("ahead", "adapter", "recompute", "packed"))
    return float(2**strategies * (0.5 if case["compile"] == "never" else 8 + 4 * larger))


def settings_of(case: Case) -> Settings:
    """The settings of the run of a case."""
    return {**_mathematics(case), **_execution(case)}


def reference_of(case: Case) -> Settings:
    """The settings of the reference: one process, one micro batch, everything in plain torch."""
    plain = {"kernels.default": None, "parallel.layout": "", "trainer.micro_batch_size": BATCH}
    return {**_mathematics(case), **plain}


def resumed_settings(case: Case, world_size: int) -> Settings:
    """The settings of the run that continues the case after its first step."""
    if case["resume"] != "as dp" or world_size == 1:
        return settings_of(case)
    alone = {**case, **dict.fromkeys(STRATEGIES, "none")}
    divided = {"parallel.layout": f"dp{world_size}", "trainer.micro_batch_size": BATCH // world_size}
    return {**settings_of(alone), **divided}


def _mathematics(case: Case) -> Settings:
    family = case["family"]
    found = {**BASE, **FAMILIES[family], **OPTIMIZERS[case["optimizer"]]}
    if family in GENERAL or case["mixing"] != "full":
        found |= MIXING[case["mixing"]]
    if case["ahead"] != "0":
        found["model.num_mtp_layers"] = int(case["ahead"])
    if family != "mixtral" or case["tied"] == "yes":
        found["model.tie_embeddings"] = case["tied"] == "yes"
    if case["packed"] == "yes":
        found["data.documents"] = 3
    found |= ADAPTERS[case["adapter"]]
    return found | FROZEN[case["frozen"]]


def _execution(case: Case) -> Settings:
    found: Settings = {}
    words = []
    for name, values in SIMPLE.items():
        own = dict(values[case[name]])
        words.append(own.pop("parallel.layout", ""))
        found |= own
    if case["pipeline"] == HEAD_ALONE:
        found["parallel.pp.split"] = [LAYERS + 1 + (case["ahead"] != "0"), 1]
    ranks = 2 if case["data"] != "none" or _is_ep_alone(case) else 1
    return {
        **found,
        "parallel.layout": "".join(words),
        "trainer.micro_batch_size": BATCH // ranks // int(case["micro batches"]),
    }


def _is_ep_alone(case: Mapping[str, str]) -> bool:
    """Whether the ranks of experts are data-parallel ranks of the dense view, which nothing else divides."""
    divides = any(case[name] != "none" for name in ("tensor", "context"))
    return case["experts"] != "none" and case["data"] == "none" and not divides
