"""Every field of a config.json is honoured as the transformers library honours it, or refused by name."""

import dataclasses
import re
from typing import Any

import pytest

pytest.importorskip("transformers")

from config_fields import TINY, described, distance, forms, library_config, read, tiny, without
from transformers import GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mplug_nn import SHARED_FIELDS
from mplug_nn.public_form import PublicForm, UnusedField, same_value

TOLERANCE = 1e-10
FORMS = forms()


def form_of(kind: str) -> PublicForm:
    return FORMS[kind][1]


# The table, beside the library's classes.


def test_every_form_has_a_tiny_model_here() -> None:
    assert set(FORMS) == set(TINY)


@pytest.mark.parametrize("kind", FORMS)
def test_every_field_of_the_librarys_class_is_in_one_row_with_the_librarys_default(kind: str) -> None:
    form, library = form_of(kind), CONFIG_MAPPING[kind]
    known = {*form.fields, *form.aliases}
    assert not set(form.fields) & set(form.aliases)
    declared = dataclasses.fields(library)
    saved = library().to_dict()
    names = {*saved, *(one.name for one in declared), *library.attribute_map, *library.attribute_map.values()}
    assert names <= known, f"no row has {names - known}"
    for one in declared:
        row = form.fields.get(form.aliases.get(one.name, one.name))
        if row is not None and not isinstance(row, UnusedField):
            assert row.default is one.default or same_value(row.default, one.default), one.name


def test_fields_of_generation_have_no_effect() -> None:
    assert set(GenerationConfig._get_default_generation_params()) <= set(SHARED_FIELDS)


@pytest.mark.parametrize("kind", [kind for kind in FORMS if kind != "gpt2"])
def test_the_base_of_rotary_positions_has_the_librarys_default(kind: str) -> None:
    default, rows = CONFIG_MAPPING[kind].default_theta, form_of(kind).fields
    if kind == "gemma3_text":
        assert rows["rope_local_base_freq"].default == default["local"]
        default = default["global"]
    assert rows["rope_theta"].default == default


# What the library makes of a config.json is what we read.

LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4}
BASES = {"rope_theta": 1e3, "rope_local_base_freq": 50.0}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e3}
TYPES = ["full_attention", "sliding_attention", "full_attention"]
SIZES = ("intermediate_size", "num_key_value_heads")

READ: dict[str, dict[str, Any]] = {
    "gpt2, n_inner absent": without("gpt2", "n_inner"),
    "gpt2, aliases": without("gpt2", "n_embd", "n_layer", hidden_size=16, num_hidden_layers=2),
    "llama, null heads": tiny("llama", num_key_value_heads=None, head_dim=None),
    "llama, the older form of llama3": tiny(
        "llama", rope_theta=500.0, rope_scaling={**LLAMA3, "original_max_position_embeddings": 16}
    ),
    "llama, the original length is absent": tiny("llama", rope_parameters={**LLAMA3, "rope_theta": 500.0}),
    "llama, the base is absent": tiny("llama", rope_parameters=LLAMA3),
    "llama, the type has its older name": tiny("llama", rope_scaling={"type": "linear", "factor": 2.0}),
    "llama, yarn's zeros and nulls": tiny(
        "llama",
        rope_parameters={**YARN, "beta_slow": 0, "beta_fast": None, "mscale": 0, "truncate": None, "factor": None},
    ),
    "llama, yarn's mscales": tiny("llama", rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}),
    "llama, an empty rope_scaling": tiny("llama", rope_scaling={}, rope_theta=50.0),
    "llama, another gate": tiny("llama", hidden_act="gelu"),
    "qwen2, max_window_layers is 28": tiny("qwen2", **WINDOWS, num_hidden_layers=30),
    "qwen2, max_window_layers is 1": tiny("qwen2", **WINDOWS, max_window_layers=1),
    "qwen2, a window of 0 blocks": tiny("qwen2", use_sliding_window=True, sliding_window=None, max_window_layers=0),
    "qwen2, layer_types": tiny("qwen2", **WINDOWS, layer_types=TYPES),
    "qwen2, head_dim": tiny("qwen2", head_dim=16),
    "qwen3, max_window_layers is 28": tiny("qwen3", **WINDOWS, num_hidden_layers=30),
    "qwen3, layer_types is null": tiny("qwen3", **WINDOWS, layer_types=None, max_window_layers=2),
    "qwen3, kv heads and head_dim are absent": without("qwen3", "head_dim", *SIZES, num_attention_heads=32),
    "qwen3_moe, windows in all blocks": tiny("qwen3_moe", **WINDOWS),
    "qwen3_moe, dense blocks": tiny("qwen3_moe", mlp_only_layers=[0], decoder_sparse_step=2),
    "qwen3_moe, no experts": tiny("qwen3_moe", num_experts=0),
    "qwen3_moe, the alias of num_experts": without("qwen3_moe", "num_experts", num_local_experts=6),
    "qwen3_moe, another gate": tiny("qwen3_moe", hidden_act="gelu_new", mlp_only_layers=[0]),
    "mixtral, kv heads are absent": without("mixtral", "num_key_value_heads", num_attention_heads=16),
    "mixtral, an older base": tiny("mixtral", rope_theta=100.0),
    "mixtral, null head_dim": tiny("mixtral", head_dim=None),
    "gemma2, caps are null": tiny("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma2, biases": tiny("gemma2", attention_bias=True, query_pre_attn_scalar=24),
    "gemma2, another gate": tiny("gemma2", hidden_activation="gelu"),
    "gemma3, another gate": tiny("gemma3_text", hidden_activation="silu"),
    "gemma2, scaled": tiny("gemma2", rope_parameters=LINEAR, layer_types=TYPES),
    "gemma3, the older form": tiny("gemma3_text", **BASES, rope_scaling={"rope_type": "linear", "factor": 8.0}),
    "gemma3, sliding_attention alone": tiny("gemma3_text", rope_parameters={"sliding_attention": {"rope_theta": 50.0}}),
    "gemma3, null entries": tiny(
        "gemma3_text", **BASES, rope_parameters={"sliding_attention": None, "full_attention": None}
    ),
    "gemma3, full_attention alone": tiny(
        "gemma3_text", rope_local_base_freq=50.0, rope_parameters={"full_attention": LINEAR}
    ),
    "gemma3, an older pattern": tiny("gemma3_text", sliding_window_pattern=2),
    "gemma3, a saved pattern beside layer_types": tiny("gemma3_text", _sliding_window_pattern=2, layer_types=TYPES),
    "gemma3, six layers of the default pattern": tiny("gemma3_text", num_hidden_layers=6, attention_bias=True),
    "gpt-oss, the default scaling and epsilon": tiny("gpt_oss"),
    "gpt-oss, plain rotary positions": tiny("gpt_oss", rope_parameters={"rope_type": "default", "rope_theta": 150.0}),
    "gpt-oss, no options": tiny("gpt_oss", rope_parameters={}),
    "gpt-oss, the older form": tiny("gpt_oss", rope_theta=150.0, rope_scaling={**YARN, "truncate": False}),
    "gpt-oss, no biases": tiny("gpt_oss", attention_bias=False, rope_parameters=YARN),
    "gpt-oss, layer_types is null": tiny("gpt_oss", layer_types=None),
    "deepseek-v2, groups": tiny("deepseek_v2", topk_method="group_limited_greedy", n_group=4, topk_group=2),
    "deepseek-v2, groups without a method": tiny("deepseek_v2", n_group=4, topk_group=2),
    "deepseek-v2, kv heads are absent": without("deepseek_v2", "num_key_value_heads"),
    "deepseek-v2, shared experts are absent": tiny("deepseek_v2", norm_topk_prob=None),
    "deepseek-v2, scaled": tiny("deepseek_v2", rope_scaling={**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}),
    "deepseek-v2, no experts": tiny("deepseek_v2", first_k_dense_replace=3),
    "deepseek-v3, no experts": tiny("deepseek_v3", first_k_dense_replace=7),
    "deepseek-v3, another gate": tiny("deepseek_v3", hidden_act="gelu_pytorch_tanh"),
    "deepseek-v3, groups and scale are absent": without(
        "deepseek_v3", "n_group", "topk_group", n_routed_experts=16, num_experts_per_tok=5
    ),
    "deepseek-v3, gates that are null are not normalised": tiny("deepseek_v3", norm_topk_prob=None),
    "deepseek-v3, null is no interleaving": tiny("deepseek_v3", rope_interleave=None),
    "deepseek-v3, no interleaving": tiny("deepseek_v3", rope_interleave=False, norm_topk_prob=False),
    "deepseek-v3, experts from the fourth block on": without(
        "deepseek_v3", "first_k_dense_replace", num_hidden_layers=4, routed_scaling_factor=1.0
    ),
    "deepseek-v3, scaled": tiny("deepseek_v3", rope_scaling={**YARN, "mscale_all_dim": 0.9}, q_lora_rank=None),
}


@pytest.mark.parametrize("case", READ)
def test_what_the_library_makes_of_a_config_is_what_we_read(case: str) -> None:
    """The library fills in what is absent and saves it. We read the same from both."""
    saved = library_config(READ[case]).to_dict()
    assert described(saved).computes_like(described(READ[case]))


QUICK = {
    "qwen2, max_window_layers is 1",
    "qwen3_moe, windows in all blocks",
    "gemma3, sliding_attention alone",
    "gpt-oss, plain rotary positions",
    "deepseek-v3, gates that are null are not normalised",
    "deepseek-v3, null is no interleaving",
    "deepseek-v3, groups and scale are absent",
    "llama, yarn's zeros and nulls",
}


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.wide("families")) for case in READ]
)
def test_the_model_of_a_config_has_the_librarys_logits_and_gradients(case: str) -> None:
    assert distance(READ[case]) < TOLERANCE


# What we do not compute, or the library ignores, is refused.

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown field": (tiny("llama", sparse_attention=4), "its field 'sparse_attention' is unknown to the family"),
    "an unknown field that is null": (tiny("llama", layer_types=None), "its field 'layer_types' is unknown"),
    "a misspelt field": (tiny("llama", hiden_size=4), "did you mean 'hidden_size'"),
    "a flag that is a number": (tiny("llama", mlp_bias=1), "'mlp_bias' is 1, but the family supports true or false"),
    "a size that is null": (tiny("llama", hidden_size=None), "'hidden_size' is null, but must be an integer of at"),
    "dropout": (tiny("qwen3", attention_dropout=0.1), "'attention_dropout' is 0.1, but the family supports 0.0 only"),
    "an alias with another value": (tiny("qwen3_moe", num_local_experts=7), "are one, but have the values 6 and 7"),
    "another kind": ({**tiny("llama"), "model_type": "llama4"}, "'model_type' is 'llama4'"),
    "another architecture": (
        tiny("qwen2", architectures=["Qwen3ForCausalLM"]),
        "'model_type' is 'qwen2', but 'architectures' is [\"Qwen3ForCausalLM\"]",
    ),
    "pruned heads": (tiny("gpt2", pruned_heads={"0": [1]}), "'pruned_heads' is {\"0\": [1]}, but"),
    "layers of their own": (tiny("llama", per_layer_config={"0": {"hidden_size": 8}}), "'per_layer_config' is"),
    # rotary positions
    "a base that is null": (tiny("llama", rope_theta=None), "'rope_theta' is null, but must be a number above 0"),
    "a base of 1": (tiny("llama", rope_scaling=YARN, rope_theta=1.0), "YaRN, which rope_theta=1 does not allow"),
    "an original length of 0": (
        tiny("llama", rope_scaling={**YARN, "original_max_position_embeddings": 0}),
        "'rope_scaling.original_max_position_embeddings' is 0, but must be a number above 0",
    ),
    "equal factors of llama3": (
        tiny("llama", rope_scaling={**LLAMA3, "high_freq_factor": 1.0}),
        "has a high_freq_factor that is not above low_freq_factor",
    ),
    "a factor of 0": (
        tiny("llama", rope_scaling={"rope_type": "linear", "factor": 0}),
        "'rope_scaling.factor' is 0, but must be a number above 0",
    ),
    "an absent factor": (tiny("llama", rope_scaling={"type": "linear"}), "lacks the field 'rope_scaling.factor'"),
    "an unsupported type": (
        tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        "'rope_parameters.rope_type' is 'dynamic', but the family supports",
    ),
    "two types": (tiny("llama", rope_scaling={**YARN, "type": "linear"}), "has two types, 'yarn' and 'linear'"),
    "an option of another type": (
        tiny("llama", rope_scaling={"type": "linear", "factor": 2.0, "mscale": 1.0}),
        "'rope_scaling.mscale' is unknown for rotary positions of the type 'linear'",
    ),
    "both forms": (
        tiny("llama", rope_scaling=YARN, rope_parameters=LLAMA3),
        "'rope_parameters' and 'rope_scaling' contradict each other",
    ),
    "positions by layer types": (
        tiny("qwen3", rope_parameters={"full_attention": YARN}),
        "'rope_parameters.full_attention' is unknown",
    ),
    "a scaled base in Mixtral": (tiny("mixtral", rope_scaling=YARN), "it scales its rotary positions ('yarn')"),
    # Qwen
    "windows without a window": (tiny("qwen3", layer_types=TYPES), "'layer_types' has blocks with windows, but it has"),
    "types of another number": (tiny("qwen3", layer_types=TYPES[:2]), "'layer_types' is not a list of 3 of full_att"),
    "windows of older releases": (
        tiny("qwen3_moe", **WINDOWS, max_window_layers=2),
        "'max_window_layers' is not 0, and releases of the library differ",
    ),
    "a null width of Qwen2": (tiny("qwen2", head_dim=None), "'head_dim' is null, but must be an integer"),
    "positions of images": (tiny("qwen2", use_mrope=True), "'use_mrope' is true, but the family supports false only"),
    # Gemma
    "a cap that the library ignores": (
        tiny("gemma3_text", attn_logit_softcapping=50.0),
        "'attn_logit_softcapping' is 50.0, but the family supports null only (the library ignores",
    ),
    "a saved pattern without layer_types": (
        tiny("gemma3_text", _sliding_window_pattern=2),
        "'_sliding_window_pattern' is 2, which the library ignores",
    ),
    "flat positions of Gemma 3": (
        tiny("gemma3_text", rope_parameters={"rope_type": "default", "rope_theta": 1e3}),
        "'rope_parameters.rope_type' is unknown",
    ),
    "a type that the library ignores": (
        tiny("gemma3_text", rope_scaling={"type": "linear", "factor": 8.0}),
        "'rope_scaling' lacks 'rope_type', without which the library ignores it",
    ),
    "scaled windows": (
        tiny("gemma3_text", rope_parameters={"sliding_attention": LINEAR}),
        "it scales the rotary positions of blocks with windows",
    ),
    "no window in Gemma": (tiny("gemma2", sliding_window=None), "'sliding_window' is null, but must be an integer"),
    "bidirectional attention": (tiny("gemma2", use_bidirectional_attention=True), "'use_bidirectional_attention' is"),
    # gpt-oss
    "a gate that the library ignores": (tiny("gpt_oss", hidden_act="gelu"), "only (the library ignores other values"),
    "a limit of its own": (tiny("gpt_oss", swiglu_limit=5.0), "'swiglu_limit' is 5.0, but the family supports 7.0"),
    "another name of the choices": (
        tiny("gpt_oss", experts_per_token=4),
        "'experts_per_token' is 4, but the family supports 2 only, which is num_experts_per_tok",
    ),
    # DeepSeek
    "V2 without interleaving": (
        tiny("deepseek_v2", rope_interleave=False),
        "'rope_interleave' is false, but the family supports true only (the library has no such field",
    ),
    "V2 with normalised gates": (tiny("deepseek_v2", norm_topk_prob=True), "the library never normalises the gates"),
    "V2 without a number of choices": (
        without("deepseek_v2", "num_experts_per_tok"),
        "it lacks the field 'num_experts_per_tok'",
    ),
    "V2 with groups that are null": (
        tiny("deepseek_v2", topk_method="group_limited_greedy", n_group=4),
        "which needs 'n_group' and 'topk_group'",
    ),
    "V3 without kv heads": (
        without("deepseek_v3", "num_key_value_heads"),
        "'num_key_value_heads' is absent, which means 128, but the family supports 4 only",
    ),
    "V3 with groups of one": (tiny("deepseek_v3", n_group=8), "its field 'n_group' (8) leaves a group of its "),
    "V3 with a width of its own": (tiny("deepseek_v3", head_dim=8), "supports 4 only, which is qk_rope_head_dim"),
    "V3 with a null factor": (
        tiny("deepseek_v3", rope_scaling={**YARN, "factor": None, "mscale_all_dim": 1.0}),
        "'rope_scaling.factor' is null, but 'mscale_all_dim' needs it",
    ),
}


@pytest.mark.parametrize("kind", [kind for kind in FORMS if kind != "gpt2"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_share_of_rotated_coordinates_is_refused_because_the_library_ignores_it(kind: str, inside: bool) -> None:
    options = {"rope_type": "default", "partial_rotary_factor": 0.5}
    parameters = {"full_attention": options} if kind == "gemma3_text" else options
    given = tiny(kind, rope_parameters=parameters) if inside else tiny(kind, partial_rotary_factor=0.5)
    with pytest.raises(ValueError, match=r"partial_rotary_factor' is 0\.5, but the family supports .*1\.0 only"):
        read(given)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_in_a_sentence_with_its_name(case: str) -> None:
    from mplug_nn.public_form import form_of as choose

    given, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(sentence)) as refused:
        choose(tuple(form for _, form in FORMS.values()), given).read(given)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("kind", FORMS)
def test_null_is_refused_or_means_what_the_library_makes_of_it(kind: str) -> None:
    """For every field that is read, one after the other."""
    form = form_of(kind)
    for name, row in form.fields.items():
        if isinstance(row, UnusedField):
            continue
        given = tiny(kind, **{name: None})
        try:
            found = described(given)
        except ValueError:
            continue
        assert found.computes_like(described(library_config(given).to_dict())), name
