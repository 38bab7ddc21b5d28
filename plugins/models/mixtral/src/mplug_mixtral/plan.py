"""The decoder's plan: its units, the named axes of its parameters and buffers, its FLOPs."""

from typing import TYPE_CHECKING

from mplug import Buffer, Flops, Init, Parameter, Plan, Segment, Unit

if TYPE_CHECKING:
    from mplug_mixtral.config import MixtralConfig

ONES = Init("constant", value=1.0)
TOKENS = ("batch", "sequence")
ALL_EXPERTS = "router_expert"
"""The router's axis of experts: every rank holds all of it, even if the experts are split over ranks."""


def make_plan(config: "MixtralConfig") -> Plan:
    """The plan of a decoder."""
    blocks = [Unit(f"blocks.{n}", ("hidden", "positions", "keys"), ("hidden",)) for n in range(config.num_layers)]
    body = (Unit("embedding", ("tokens",), ("hidden",)), *blocks)
    return Plan(
        units=(*body, Unit("head", ("hidden", "labels"), ("loss", "num_targets"))),
        inference=(*body, Unit("head", ("hidden",), ("logits",), method="logits")),
        parameters=_parameters(config),
        buffers=_buffers(config),
        context={
            "tokens": TOKENS,
            "labels": TOKENS,
            "positions": TOKENS,
            "sample_ids": ("batch",),
            "keys": ("batch",),
        },
        activations={
            "hidden": ("batch", "sequence", "embed"),
            "loss": (),
            "num_targets": (),
            "logits": ("batch", "sequence", "vocab"),
        },
        flops=_flops(config),
    )


def _parameters(config: "MixtralConfig") -> dict[str, Parameter]:
    weight = Init("normal", std=config.init_std)
    residual = Init("normal", std=config.init_std / (2 * config.num_layers) ** 0.5)  # GPT-2, section 2.3
    width = config.head_width
    heads = Segment("heads", config.num_attention_heads, width)
    keys_or_values = Segment("kv_heads", config.kv_heads, width, uneven="copy")
    vocab = Segment("vocab", config.vocab_size, uneven="pad")
    parameters = {
        "embedding.token.weight": Parameter((vocab, "embed"), weight),
        "blocks.*.norm1.weight": Parameter(("embed",), ONES),
        "blocks.*.attn.qkv.weight": Parameter(((heads, keys_or_values, keys_or_values), "embed"), weight),
        "blocks.*.attn.out.weight": Parameter(("embed", heads), residual),
        "blocks.*.norm2.weight": Parameter(("embed",), ONES),
        "head.norm.weight": Parameter(("embed",), ONES),
        "head.project.weight": Parameter((vocab, "embed"), weight),
        **_experts(config, weight, residual),
    }
    if config.num_dense_layers:
        parameters |= _mlp("blocks.*.mlp", config.ffn_hidden_size, weight, residual)
    if config.qk_norm:
        parameters["blocks.*.attn.q_norm"] = Parameter(("head_dim",), ONES, over=(*TOKENS, "heads"))
        parameters["blocks.*.attn.k_norm"] = Parameter(("head_dim",), ONES, over=(*TOKENS, "kv_heads"))
    return parameters


def _experts(config: "MixtralConfig", weight: Init, residual: Init) -> dict[str, Parameter]:
    wide = Segment("expert_mlp", config.expert_width)
    parameters = {
        "blocks.*.moe.router.weight": Parameter((ALL_EXPERTS, "embed"), weight),
        "blocks.*.moe.experts.up": Parameter(("expert", (wide, wide), "embed"), weight),
        "blocks.*.moe.experts.down": Parameter(("expert", "embed", wide), residual),
    }
    if config.num_shared_experts:
        parameters |= _mlp("blocks.*.moe.shared", config.shared_width, weight, residual)
    if config.shared_expert_gate:
        parameters["blocks.*.moe.shared_gate.weight"] = Parameter(("gate", "embed"), weight)
    return parameters


def _mlp(name: str, width: int, weight: Init, residual: Init) -> dict[str, Parameter]:
    mlp = Segment("mlp", width)
    return {
        f"{name}.up.weight": Parameter(((mlp, mlp), "embed"), weight),
        f"{name}.down.weight": Parameter(("embed", mlp), residual),
    }


def _buffers(config: "MixtralConfig") -> dict[str, Buffer]:
    buffers = {
        "blocks.*.moe.router.load": Buffer((ALL_EXPERTS,), over=TOKENS),
        "blocks.*.moe.router.losses": Buffer(("loss",), over=TOKENS, per_target=True),
    }
    if config.expert_bias_rate:
        buffers["blocks.*.moe.router.bias"] = Buffer((ALL_EXPERTS,))
    if config.moe_balance == "global_batch":
        buffers["blocks.*.moe.router.last_load"] = Buffer((ALL_EXPERTS,))
    return buffers


def _flops(config: "MixtralConfig") -> Flops:
    """6 FLOPs a token and weight that it is multiplied with, and causal attention counted once."""
    hidden, queries = config.hidden_size, config.num_attention_heads * config.head_width
    attention = hidden * (queries + 2 * config.kv_heads * config.head_width) + queries * hidden
    active = config.num_experts_per_token * config.expert_width + config.shared_width
    sparse = hidden * (config.num_experts + 3 * active + config.shared_expert_gate)
    num_dense = config.num_dense_layers
    mlps = num_dense * 3 * hidden * config.ffn_hidden_size + (config.num_layers - num_dense) * sparse
    per_token = 6 * (config.num_layers * attention + mlps + hidden * config.vocab_size)
    return Flops(per_token, 6 * config.num_layers * queries)
