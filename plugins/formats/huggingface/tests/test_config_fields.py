"""Every field of a config.json is honoured as the transformers library honours it, or refused by name."""

from typing import Any
from unittest.mock import sentinel

import pytest

pytest.importorskip("transformers")

from config_fields import TINY, described, distance, forms, library_config, read, tiny, without
from form_claims import assert_null_is_of_library, assert_refused, assert_rows_of_library
from transformers import GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mplug_nn import SHARED_FIELDS
from mplug_nn.decoders.public_fields import PARTIAL
from mplug_nn.public_form import PublicForm
from mplug_nn.public_form import form_of as choose
from mplug_nn.public_rows import ReadField, UnusedField

TOLERANCE = 1e-10
FORMS = forms()
ROTARY = [kind for kind, (_, form) in FORMS.items() if isinstance(form.fields.get("rope_theta"), ReadField)]


def form_of(kind: str) -> PublicForm:
    return FORMS[kind][1]


# The table, beside the library's classes.


def test_every_form_has_a_tiny_model_here() -> None:
    assert set(FORMS) == set(TINY)


@pytest.mark.parametrize("kind", FORMS)
def test_every_field_of_the_librarys_class_is_in_one_row_with_the_librarys_default(kind: str) -> None:
    assert_rows_of_library(form_of(kind), CONFIG_MAPPING[kind])


def test_fields_of_generation_have_no_effect() -> None:
    assert set(GenerationConfig._get_default_generation_params()) <= set(SHARED_FIELDS)


@pytest.mark.parametrize("kind", ROTARY)
def test_the_base_of_rotary_positions_has_the_librarys_default(kind: str) -> None:
    default, rows = CONFIG_MAPPING[kind].default_theta, form_of(kind).fields
    if kind == "gemma3_text":
        assert rows["rope_local_base_freq"].default == default["local"]
        default = default["global"]
    assert rows["rope_theta"].default == default


# What the library makes of a config.json is what we read.

LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ZEROS: dict[str, Any] = {"beta_slow": 0, "beta_fast": None, "mscale": 0, "truncate": None, "factor": None}
MSCALES = {"mscale": 0.7, "mscale_all_dim": 0.9}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4}
BASES = {"rope_theta": 1e3, "rope_local_base_freq": 50.0}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e3}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "mrope_interleaved": True}
MIXED = ["full_attention", "linear_attention", "linear_attention"]
TYPES = ["full_attention", "sliding_attention", "full_attention"]
GROUPED = {"topk_method": "group_limited_greedy", "n_group": 4}
LENGTH = "original_max_position_embeddings"
ABSENT = sentinel.absent
"""The value of a field that a config.json lacks."""
Case = tuple[str, dict[str, Any]]


def config_of(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    absent = [name for name, value in fields.items() if value is ABSENT]
    return without(kind, *absent, **{name: value for name, value in fields.items() if value is not ABSENT})


COMPUTED: list[Case] = [
    ("llama", {"rope_parameters": {**YARN, **ZEROS}}),
    ("qwen2", {**WINDOWS, "max_window_layers": 1}),
    ("qwen3_moe", WINDOWS),
    ("qwen3_next", {"mlp_only_layers": [2], "attention_bias": True}),
    ("kimi_linear", {}),
    ("nemotron_h", {}),
    ("granitemoehybrid", {}),
    ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope", "rope_theta": 1e3}),
    ("qwen3_5_moe_text", {"rope_parameters": {**MROPE, "rope_theta": 1e3, "partial_rotary_factor": 0.5}}),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_theta": 50.0}}}),
    ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 150.0}}),
    ("deepseek_v3", {"norm_topk_prob": None}),
    ("deepseek_v3", {"rope_interleave": None}),
    ("deepseek_v3", {"n_group": ABSENT, "topk_group": ABSENT, "n_routed_experts": 16, "num_experts_per_tok": 5}),
]
"""Cases whose models the quick tests compute; the wide set computes those of all."""
READ: list[Case] = [
    *COMPUTED,
    ("gpt2", {"n_inner": ABSENT}),
    ("gpt2", {"n_embd": ABSENT, "n_layer": ABSENT, "hidden_size": 16, "num_hidden_layers": 2}),
    ("llama", {"num_key_value_heads": None, "head_dim": None}),
    ("llama", {"rope_theta": 500.0, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16}}),
    ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("llama", {"rope_parameters": {**YARN, **MSCALES}}),
    ("llama", {"rope_scaling": {}, "rope_theta": 50.0}),
    ("llama", {"hidden_act": "gelu"}),
    ("qwen2", {**WINDOWS, "num_hidden_layers": 30}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
    ("qwen2", {**WINDOWS, "layer_types": TYPES}),
    ("qwen2", {"head_dim": 16}),
    ("qwen3", {**WINDOWS, "num_hidden_layers": 30}),
    ("qwen3", {**WINDOWS, "layer_types": None, "max_window_layers": 2}),
    (
        "qwen3",
        {"head_dim": ABSENT, "intermediate_size": ABSENT, "num_key_value_heads": ABSENT, "num_attention_heads": 32},
    ),
    ("qwen3_moe", {"mlp_only_layers": [0], "decoder_sparse_step": 2}),
    ("qwen3_moe", {"num_experts": 0}),
    ("qwen3_moe", {"num_experts": ABSENT, "num_local_experts": 6}),
    ("qwen3_moe", {"hidden_act": "gelu_new", "mlp_only_layers": [0]}),
    ("nemotron_h", {"layers_block_type": ABSENT, "hybrid_override_pattern": "M*-E", "num_hidden_layers": 4}),
    ("nemotron_h", {"layers_block_type": ABSENT, "layer_types": ["mamba", "attention"]}),
    ("nemotron_h", {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]}),
    ("nemotron_h", {"num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "*-"}),
    ("nemotron_h", {"layers_block_type": ABSENT, "norm_topk_prob": False, "n_group": 1, "conv_kernel": 3}),
    ("nemotron_h", {"moe_latent_size": 12}),
    ("nemotron_h", {"n_groups": ABSENT, "mamba_n_groups": 1, "topk_group": 2, "num_key_value_heads": 4}),
    ("kimi_linear", {"layer_types": None, "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2]}}),
    ("kimi_linear", {"linear_attn_config": {"head_dim": 5, "num_heads": 2, "short_conv_kernel_size": 3}}),
    ("kimi_linear", {"layer_types": None, "mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": 10}),
    ("kimi_linear", {"num_local_experts": ABSENT, "num_experts": 8, "first_k_dense_replace": 3, "n_group": 1}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "rope_theta": 1e3, "attention_multiplier": 1}),
    ("granite", {"num_key_value_heads": None, "head_dim": 16, "hidden_act": "gelu"}),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention", "mamba"], "mamba_d_head": 16}),
    ("granitemoehybrid", {"layer_types": ABSENT, "layers_block_type": ["attention"] * 3, "attention_bias": True}),
    ("granitemoehybrid", {"layer_types": None, "mamba_expand": 1, "mamba_d_conv": 3, "num_experts_per_tok": 3}),
    ("qwen3_next", {}),
    ("qwen3_next", {"num_experts": 0, "layer_types": MIXED}),
    ("qwen3_next", {"decoder_sparse_step": 2, "norm_topk_prob": False, "partial_rotary_factor": 1.0}),
    ("qwen3_next", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.75}),
    ("qwen3_5_text", {"layer_types": MIXED, "tie_word_embeddings": True, "linear_conv_kernel_dim": 3}),
    ("qwen3_5_text", {"rope_theta": 1e3, "rope_scaling": {**MROPE, "type": "default"}, "attn_output_gate": True}),
    ("mixtral", {"num_key_value_heads": ABSENT, "num_attention_heads": 16}),
    ("mixtral", {"rope_theta": 100.0}),
    ("mixtral", {"head_dim": None}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma2", {"attention_bias": True, "query_pre_attn_scalar": 24}),
    ("gemma2", {"hidden_activation": "gelu"}),
    ("gemma2", {"rope_parameters": LINEAR, "layer_types": TYPES}),
    ("gemma3_text", {"hidden_activation": "silu"}),
    ("gemma3_text", {**BASES, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("gemma3_text", {**BASES, "rope_parameters": {"sliding_attention": None, "full_attention": None}}),
    ("gemma3_text", {"rope_local_base_freq": 50.0, "rope_parameters": {"full_attention": LINEAR}}),
    ("gemma3_text", {"sliding_window_pattern": 2}),
    ("gemma3_text", {"_sliding_window_pattern": 2, "layer_types": TYPES}),
    ("gemma3_text", {"num_hidden_layers": 6, "attention_bias": True}),
    ("gpt_oss", {}),
    ("gpt_oss", {"rope_parameters": {}}),
    ("gpt_oss", {"rope_theta": 150.0, "rope_scaling": {**YARN, "truncate": False}}),
    ("gpt_oss", {"attention_bias": False, "rope_parameters": YARN}),
    ("gpt_oss", {"layer_types": None}),
    ("deepseek_v2", {**GROUPED, "topk_group": 2}),
    ("deepseek_v2", {"n_group": 4, "topk_group": 2}),
    ("deepseek_v2", {"num_key_value_heads": ABSENT}),
    ("deepseek_v2", {"norm_topk_prob": None}),
    ("deepseek_v2", {"rope_scaling": {**YARN, **MSCALES}}),
    ("deepseek_v2", {"first_k_dense_replace": 3}),
    ("deepseek_v3", {"first_k_dense_replace": 7}),
    ("deepseek_v3", {"hidden_act": "gelu_pytorch_tanh"}),
    ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False}),
    ("deepseek_v3", {"first_k_dense_replace": ABSENT, "num_hidden_layers": 4, "routed_scaling_factor": 1.0}),
    ("deepseek_v3", {"rope_scaling": {**YARN, "mscale_all_dim": 0.9}, "q_lora_rank": None}),
]


@pytest.mark.parametrize("case", READ, ids=str)
def test_what_the_library_makes_of_a_config_is_what_we_read(case: Case) -> None:
    """The library fills in what is absent and saves it. We read the same from both."""
    given = config_of(*case)
    assert described(library_config(given).to_dict()).computes_like(described(given))


WIDE = [pytest.param(case, marks=pytest.mark.wide("families")) for case in READ[len(COMPUTED) :]]


@pytest.mark.parametrize("case", [*COMPUTED, *WIDE], ids=str)
def test_the_model_of_a_config_has_the_librarys_logits_and_gradients(case: Case) -> None:
    assert distance(config_of(*case)) < TOLERANCE


# What we do not compute, or the library ignores, is refused.

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"sparse_attention": 4}, "its field 'sparse_attention' is unknown to the family"),
    ("llama", {"layer_types": None}, "its field 'layer_types' is unknown"),
    ("llama", {"hiden_size": 4}, "did you mean 'hidden_size'"),
    ("llama", {"mlp_bias": 1}, "'mlp_bias' is 1, but the family supports true or false"),
    ("llama", {"hidden_size": "32"}, "its field 'hidden_size' is '32', but must be an integer of at least 1"),
    ("llama", {"hidden_size": None}, "'hidden_size' is null, but must be an integer of at"),
    ("qwen3", {"attention_dropout": 0.1}, "'attention_dropout' is 0.1, but the family supports 0.0 only"),
    ("qwen3_moe", {"num_local_experts": 7}, "are one, but have the values 6 and 7"),
    ("llama", {"model_type": "llama4"}, "'model_type' is 'llama4'"),
    ("qwen2", {"architectures": ["Qwen3ForCausalLM"]}, "'qwen2', but 'architectures' is [\"Qwen3ForCausalLM\"]"),
    ("gpt2", {"pruned_heads": {"0": [1]}}, "'pruned_heads' is {\"0\": [1]}, but"),
    ("llama", {"per_layer_config": {"0": {"hidden_size": 8}}}, "'per_layer_config' is"),
    # Rotary positions.
    ("llama", {"rope_theta": None}, "'rope_theta' is null, but must be a number above 0"),
    ("llama", {"rope_scaling": YARN, "rope_theta": 1.0}, "YaRN, which rope_theta=1 does not allow"),
    ("llama", {"rope_scaling": {**YARN, LENGTH: 0}}, f"'rope_scaling.{LENGTH}' is 0, but must be a number above 0"),
    ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor that is not above low_freq"),
    ("llama", {"rope_scaling": {**LINEAR, "factor": 0}}, "'rope_scaling.factor' is 0, but must be a number above 0"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "lacks the field 'rope_scaling.factor'"),
    ("llama", {"rope_parameters": {**LINEAR, "rope_type": "dynamic"}}, "rope_type' is 'dynamic', but the family supp"),
    ("llama", {"rope_scaling": {**YARN, "type": "linear"}}, "has two types, 'yarn' and 'linear'"),
    ("llama", {"rope_scaling": {**LINEAR, "mscale": 1.0}}, "mscale' is unknown for rotary positions of the type 'lin"),
    ("llama", {"rope_scaling": YARN, "rope_parameters": LLAMA3}, "'rope_parameters' and 'rope_scaling' contradict"),
    ("qwen3", {"rope_parameters": {"full_attention": YARN}}, "'rope_parameters.full_attention' is unknown"),
    ("mixtral", {"rope_scaling": YARN}, "it scales its rotary positions ('yarn')"),
    # Qwen
    ("qwen3", {"layer_types": TYPES}, "'layer_types' has blocks with windows, but it has"),
    ("qwen3", {"layer_types": TYPES[:2]}, "'layer_types' is not a list of 3 of full_att"),
    ("qwen3_moe", {**WINDOWS, "max_window_layers": 2}, "is not 0, and releases of the library differ"),
    ("qwen2", {"head_dim": None}, "'head_dim' is null, but must be an integer"),
    ("qwen2", {"use_mrope": True}, "'use_mrope' is true, but the family supports false only"),
    ("qwen3_next", {"layer_types": TYPES}, "'layer_types' is not a list of 3 of linear_attention, full_attention"),
    ("qwen3_next", {"hidden_act": "gelu"}, "it is also the activation of the short convolutions"),
    ("qwen3_next", {"partial_rotary_factor": 0.2}, "is 0.2, which turns 3 of 16 coordinates of a head"),
    ("qwen3_5_text", {"attn_output_gate": False}, "'attn_output_gate' is false, but the family supports true only"),
    ("qwen3_5_text", {"mtp_use_dedicated_embeddings": True}, "the blocks share the embedding of the model"),
    ("qwen3_5_moe_text", {"mamba_ssm_dtype": "bfloat16"}, "scans compute in fp32"),
    # Kimi Linear
    ("kimi_linear", {"layer_types": TYPES}, "'layer_types' is not a list of 3 of linear_attention, full_attention"),
    ("kimi_linear", {"mlp_layer_types": ["dense"]}, "'mlp_layer_types' is not a list of 3 of dense, sparse"),
    ("kimi_linear", {"linear_attn_config": {"gate": 1}}, "'linear_attn_config.gate' is unknown to the family"),
    ("kimi_linear", {"linear_attn_config": {"head_dim": 0}}, "'linear_attn_config.head_dim' is 0, but must be an int"),
    (
        "kimi_linear",
        {"layer_types": None, "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1, 2]}},
        "do not name 3 blocks once each",
    ),
    ("kimi_linear", {"mla_use_nope": False}, "'mla_use_nope' is false, but the family supports true only"),
    # Nemotron
    ("nemotron_h", {"hybrid_override_pattern": "M"}, "'layers_block_type' and 'hybrid_override_pattern' contradict"),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX"}, "has other letters than M, *, -, E"),
    ("nemotron_h", {"layers_block_type": TYPES}, "'layers_block_type' is not a list of linear_attention, full_att"),
    (
        "nemotron_h",
        {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["moe"], "mtp_hybrid_override_pattern": "*E"},
        "'mtp_layers_block_type' and 'mtp_hybrid_override_pattern' contradict",
    ),
    ("nemotron_h", {"num_nextn_predict_layers": 1, "mtp_layers_block_type": TYPES}, "'mtp_layers_block_type' is not a"),
    ("nemotron_h", {"num_hidden_layers": 5}, "'num_hidden_layers' is 5, but the pattern of its blocks has 4 of them"),
    ("nemotron_h", {"tie_word_embeddings": True}, "supports false only (the library ignores other values)"),
    ("nemotron_h", {"moe_latent_size": 0}, "'moe_latent_size' is 0"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "'mlp_hidden_act' is 'silu', but the family supports \"relu2\" only"),
    ("nemotron_h", {"n_group": 6}, "its field 'n_group' (6) leaves a group of its 6 experts fewer than 2"),
    ("nemotron_h", {"norm_eps": 0.1}, "'norm_eps' is 0.1, but the family supports 1e-05 only, which is layer_norm_ep"),
    # Granite
    ("granitemoehybrid", {"mamba_d_head": 8}, "'mamba_n_heads' is 4, but 'mamba_expand' needs heads of 8 that fill 64"),
    (
        "granitemoehybrid",
        {"layer_types": TYPES},
        "'layer_types' is not a list of 3 of linear_attention, full_attention",
    ),
    ("granitemoehybrid", {"hidden_act": "gelu"}, "it is also the activation of the short convolutions"),
    ("granitemoehybrid", {"mamba_conv_bias": False}, "'mamba_conv_bias' is false, but the family supports true only"),
    ("granitemoehybrid", {"time_step_limit": [0.1, 1.0]}, "'time_step_limit' is [0.1, 1.0], but"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "'position_embedding_type' is 'alibi'"),
    # Gemma
    (
        "gemma3_text",
        {"attn_logit_softcapping": 50.0},
        "is 50.0, but the family supports null only (the library ignores",
    ),
    ("gemma3_text", {"_sliding_window_pattern": 2}, "'_sliding_window_pattern' is 2, which the library ignores"),
    ("gemma3_text", {"rope_parameters": LINEAR}, "'rope_parameters.rope_type' is unknown"),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "'rope_scaling' lacks 'rope_type', without w"),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": LINEAR}}, "the rotary positions of blocks with windows"),
    ("gemma2", {"sliding_window": None}, "'sliding_window' is null, but must be an integer"),
    ("gemma2", {"use_bidirectional_attention": True}, "'use_bidirectional_attention' is"),
    # gpt-oss
    ("gpt_oss", {"hidden_act": "gelu"}, "only (the library ignores other values"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "'swiglu_limit' is 5.0, but the family supports 7.0"),
    ("gpt_oss", {"experts_per_token": 4}, "is 4, but the family supports 2 only, which is num_experts_per_tok"),
    # DeepSeek
    ("deepseek_v2", {"rope_interleave": False}, "supports true only (the library has no such field"),
    ("deepseek_v2", {"norm_topk_prob": True}, "the library never normalises the gates"),
    ("deepseek_v2", {"num_experts_per_tok": ABSENT}, "it lacks the field 'num_experts_per_tok'"),
    ("deepseek_v2", GROUPED, "which needs 'n_group' and 'topk_group'"),
    ("deepseek_v3", {"num_key_value_heads": ABSENT}, "is absent, which means 128, but the family supports 4 only"),
    ("deepseek_v3", {"n_group": 8}, "its field 'n_group' (8) leaves a group of its "),
    ("deepseek_v3", {"head_dim": 8}, "supports 4 only, which is qk_rope_head_dim"),
    ("deepseek_v3", {"rope_scaling": {**YARN, **MSCALES, "factor": None}}, "is null, but 'mscale_all_dim' needs it"),
]


@pytest.mark.parametrize(
    "kind", [kind for kind in FORMS if FORMS[kind][1].fields.get("partial_rotary_factor") == PARTIAL]
)
@pytest.mark.parametrize("inside", [False, True])
def test_a_share_of_rotated_coordinates_is_refused_because_the_library_ignores_it(kind: str, inside: bool) -> None:
    options = {"rope_type": "default", "partial_rotary_factor": 0.5}
    parameters = {"full_attention": options} if kind == "gemma3_text" else options
    given = tiny(kind, rope_parameters=parameters) if inside else tiny(kind, partial_rotary_factor=0.5)
    with pytest.raises(ValueError, match=r"partial_rotary_factor' is 0\.5, but the family supports .*1\.0 only"):
        read(given)


@pytest.mark.parametrize(("kind", "fields", "sentence"), REFUSED)
def test_what_cannot_be_honoured_is_refused_in_a_sentence_with_its_name(
    kind: str, fields: dict[str, Any], sentence: str
) -> None:
    given = config_of(kind, fields)
    all_forms = tuple(form for _, form in FORMS.values())
    assert_refused(lambda fields: choose(all_forms, fields).read(fields), given, sentence)


@pytest.mark.parametrize("kind", FORMS)
def test_null_is_refused_or_means_what_the_library_makes_of_it(kind: str) -> None:
    """For every field that is read, one after the other."""
    names = [name for name, row in form_of(kind).fields.items() if not isinstance(row, UnusedField)]
    assert_null_is_of_library(
        names, lambda name: tiny(kind, **{name: None}), described, lambda given: library_config(given).to_dict()
    )
