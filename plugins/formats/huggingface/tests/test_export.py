"""An export writes a config.json only if the transformers library computes the run's model from it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from pydantic import ValidationError

pytest.importorskip("transformers")

from config_fields import described, distance, forms, plugin_of, tiny
from mplug_huggingface_format import HuggingFace

from mplug_nn import written_config
from mplug_nn.public_rows import ReadField

TOLERANCE = 1e-10
FORMS = forms()
ROTARY = [kind for kind, (_, form) in FORMS.items() if isinstance(form.fields.get("rope_theta"), ReadField)]
YARN: dict[str, Any] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

FLAGS = (
    *("qk_norm", "moe_router_bias", "moe_router_normalize", "post_norms", "tie_embeddings", "scale_embeddings"),
    *("qkv_bias", "attention_out_bias", "mlp_bias", "expert_projection_bias", "attention_sinks", "rope_interleaved"),
    "bias",
)
OTHERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(FLAGS, (True, False)),
    "num_layers": (2,),
    "hidden_size": (64,),
    "num_attention_heads": (2,),
    "num_kv_heads": (1, None),
    "head_dim": (8, None),
    "vocab_size": (62,),
    "rope_theta": (321.0,),
    "norm_eps": (1e-3,),
    "init_std": (0.03,),
    "ffn_hidden_size": (28, None),
    "moe_ffn_hidden_size": (20, None),
    "moe_latent_size": (None, 12),
    "num_dense_layers": (0, 1, 2),
    "num_experts": (0, 16),
    "num_experts_per_token": (3,),
    "num_shared_experts": (0, 1, 2),
    "shared_expert_gate": (True, False),
    "moe_shared_ffn_hidden_size": (None, 20),
    "moe_router_score": ("softmax", "sigmoid", "softmax_of_chosen"),
    "moe_router_num_groups": (1, 2),
    "moe_router_top_groups": (1, 2),
    "moe_router_group_best": (1, 2),
    "moe_router_scale": (1.7,),
    "moe_router_jitter": (0.1,),
    "moe_balance": ("none",),
    "aux_loss_coefficient": (0.07,),
    "z_loss_coefficient": (0.07,),
    "expert_bias_rate": (0.0, 0.01),
    "expert_bias": (None, True, False),
    "capacity_factor": (1.25,),
    "capacity_dropping": ("position",),
    "activation": ("gelu", "gelu_tanh", "swiglu", "geglu_tanh", "clamped_swiglu", "relu2"),
    "norm": ("rmsnorm", "offset_rmsnorm", "layernorm"),
    "attention_scale": (None, 24**-0.5, 0.3),
    "attention_soft_cap": (None, 2.0),
    "logit_soft_cap": (None, 3.0),
    "window": (None, 3),
    "mixer_types": (("attention",), ("gated_delta", "attention")),
    "linear_num_key_heads": (None, 1),
    "linear_num_value_heads": (None, 2),
    "linear_key_head_dim": (None, 4),
    "linear_value_head_dim": (None, 4),
    "linear_conv_width": (4, 3),
    "attention_output_gate": (True, False),
    "pattern": ("M*-E", "E", "*-", "M"),
    "mtp_pattern": ("*-", "*E"),
    "time_step_min": (0.0, 0.25),
    "published_scans": ("by_head", "apart"),
    "published_as": (None, "granite", "granitemoehybrid"),
    "embedding_multiplier": (3.0,),
    "residual_multiplier": (0.4,),
    "logits_divisor": (3.0,),
    "attention_types": (("full",), ("window",), ("full", "window", "window"), ("full", "window")),
    "position_types": (("rotary", "none"), ("none",)),
    "feed_forward_types": (None, ("mlp", "experts"), ("mlp",)),
    "rope_scaling": (None, YARN, {"type": "linear", "factor": 3.0}),
    "rope_fraction": (0.5,),
    "window_rope_theta": (None, 55.0),
    "num_mtp_layers": (1,),
    "mtp_loss_coefficient": (0.2,),
    "position": ("rotary", "alibi", "learned"),
    "max_position_embeddings": (32,),
    "mup_base": ({"ffn_hidden_size": 8}, {"moe_ffn_hidden_size": 8}),
    "dropout": (0.2,),
    "attention_dropout": (0.2,),
    "q_lora_rank": (None, 6),
    "kv_lora_rank": (6,),
    "qk_nope_head_dim": (6,),
    "qk_rope_head_dim": (6,),
    "v_head_dim": (4,),
}
"""By setting, values of which at least one differs from that of a tiny model."""


def of_training(kind: str) -> set[str]:
    """The settings of a form that only training uses."""
    form = FORMS[kind][1]
    rows = (row for row in form.fields.values() if isinstance(row, ReadField) and row.training)
    return {*form.training, *(name for row in rows for name in row.settings)}


def changed(kind: str) -> list[tuple[str, Any, Any]]:
    """(setting, value, Config) of the tiny model of a kind with one other setting, for all that the family allows."""
    base, found = described(tiny(kind)), []
    model = type(base)
    for name in model.model_fields:
        if name == "vision":  # models that see are tested with their families
            continue
        others = [value for value in OTHERS[name] if value != getattr(base, name)]
        assert others, name
        for value in others:
            try:
                found.append((name, value, model(**{**base.model_dump(), name: value})))
            except ValidationError:
                continue
    assert len({name for name, _, _ in found}) > 0.8 * len(model.model_fields)
    return found


def outcome(plugin: Any, config: Any) -> dict[str, Any] | str:
    try:
        return written_config(plugin, config)
    except ValueError as reason:
        return str(reason)


@pytest.mark.wide("configs", quick=["deepseek_v3", "gpt_oss", "granitemoehybrid", "llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("kind", FORMS)
def test_a_setting_is_written_or_refused_by_its_name_or_has_no_effect(kind: str) -> None:
    base, plugin, free = described(tiny(kind)), plugin_of(kind), of_training(kind)
    for name, value, config in changed(kind):
        fields = outcome(plugin, config)
        if isinstance(fields, str):
            assert re.search(rf"{FORMS[kind][1].architecture} cannot express .*{name}", fields), (name, value, fields)
            assert not base.computes_like(config), f"{name}={value} changes nothing, but: {fields}"
            assert name not in free, (name, fields)
        else:
            assert described(fields, config).computes_like(config), (name, value)


@pytest.mark.wide("families")
@pytest.mark.parametrize("kind", FORMS)
def test_what_is_written_is_the_librarys_model_with_each_setting(kind: str) -> None:
    """Logits and gradients in fp64, for every setting that is not refused."""
    compared = 0
    for name, value, config in changed(kind):
        if name in ("num_mtp_layers", "capacity_dropping"):  # losses of training; nothing is dropped
            continue
        fields = outcome(plugin_of(kind), config)
        if isinstance(fields, str):
            continue
        assert distance(fields, config) < TOLERANCE, (name, value)
        compared += 1
    assert compared > 10


@pytest.mark.parametrize("kind", ROTARY)
def test_releases_without_rope_parameters_read_the_same_rotary_positions(kind: str) -> None:
    """They ignore this field, and would take their default base without scaling."""
    base = described(tiny(kind))
    scalings = (None,) if kind == "mixtral" else (None, YARN, {"type": "linear", "factor": 3.0})
    for scaling in scalings:
        changes = {"rope_theta": 321.0} if scaling is None else {"rope_theta": 321.0, "rope_scaling": scaling}
        changes |= {"rope_scaling": None} if kind == "gpt_oss" and scaling is None else {}
        config = type(base)(**{**base.model_dump(), **changes})
        fields = written_config(plugin_of(kind), config)
        older = {name: value for name, value in fields.items() if name != "rope_parameters"}
        if kind == "gpt_oss" and scaling is None:  # without the field, the library of the tests takes its YaRN
            assert older["rope_scaling"] is None
            continue
        assert described(older, config).computes_like(config)


def test_the_usual_factor_of_scores_is_exported_however_it_is_spelled() -> None:
    gemma = described(tiny("gemma2"))
    for scale in (None, gemma.head_dim**-0.5):
        config = type(gemma)(**{**gemma.model_dump(), "attention_scale": scale})
        assert written_config(plugin_of("gemma2"), config)["query_pre_attn_scalar"] == gemma.head_dim


def test_what_the_library_would_compute_otherwise_is_not_exported() -> None:
    """One setting at a time is tested above."""
    config = described(tiny("qwen3_moe"))
    windows = {"window": 4, "attention_types": ("full", "window")}
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM cannot express model\.attention_types="):
        written_config(plugin_of("qwen3_moe"), type(config)(**{**config.model_dump(), **windows}))


PRESETS = sorted({(FORMS[kind][0], kind) for kind in ("llama", "qwen3", "mixtral", "gemma2", "gpt_oss", "deepseek_v3")})
NOT_PUBLISHED = {"mixtral": ("fine16b", "tiny")}
"""Presets of shapes that no class of the library has."""


@pytest.mark.wide("configs", quick=["deepseek-deepseek_v3", "gemma-gemma2", "gpt-oss-gpt_oss"])
@pytest.mark.parametrize(("family", "kind"), PRESETS)
def test_every_preset_of_a_published_model_is_exported(family: str, kind: str) -> None:
    plugin = plugin_of(kind)
    for name, preset in plugin.presets.items():
        if "vision" in preset["model"]:  # tested with the family
            continue
        config = plugin.Config(**preset["model"])
        fields = outcome(plugin, config)
        assert isinstance(fields, str) is (name in NOT_PUBLISHED.get(family, ())), (name, fields)
        assert isinstance(fields, str) or described(fields, config).computes_like(config), name


# The commands.


def test_explain_says_whether_the_model_can_be_exported(tmp_path: Path, cli_here: Cli) -> None:
    given = tiny("qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(given))
    words = ("explain", "--pretrained", str(tmp_path), "--set", "trainer.seq_length=32")
    export = "'mplug checkpoint export --to huggingface'"
    assert f"{export} writes Qwen3MoeForCausalLM" in cli_here(*words).stdout
    shown = cli_here(*words, "--set", "model.capacity_factor=1.25").stdout
    assert f"{export} refuses this run: the model of models/qwen has no" in shown
    assert "cannot express model.capacity_factor=1.25" in shown


@pytest.mark.wide("configs")
def test_a_run_that_begins_with_a_published_model_says_at_its_start_that_it_cannot_be_exported(
    tmp_path: Path, cli_here: Cli
) -> None:
    from published import FAMILIES, save

    save(FAMILIES["qwen3-moe"](), tmp_path / "folder", 1)
    (tmp_path / "text").write_text("some words " * 200)
    settings = ("seq_length=32", "steps=1", "eval_every=0", "global_batch_size=2")
    words = ("train", *(word for one in settings for word in ("--set", f"trainer.{one}")), "--set", "data.path=text")
    altered = (*words, "--set", "model.capacity_factor=1.25")
    sentence = "'mplug checkpoint export --to huggingface' will refuse this run: "
    first = cli_here(*altered, "--pretrained", "folder", "--name", "altered")
    assert first.returncode == 0, first.stderr
    assert sentence in first.stdout
    assert "cannot express model.capacity_factor=1.25" in first.stdout
    refused = cli_here("checkpoint", "export", "--to", "huggingface", "exported", "--name", "altered")
    assert refused.returncode == 2
    assert "cannot express model.capacity_factor=1.25" in refused.stderr
    shutil.rmtree(tmp_path / "folder")
    model = tiny_of_folder(tmp_path / "runs" / "altered")
    second = cli_here(*altered, *model, "--pretrained", "runs/altered", "--name", "second")
    assert second.returncode == 0, second.stderr
    assert sentence in second.stdout


def tiny_of_folder(run: Path) -> list[str]:
    """The options that give a run the model of another run."""
    import yaml

    model = yaml.safe_load((run / "config.yaml").read_text())["model"]
    model.pop("capacity_factor")
    name = model.pop("name")
    settings = [f"model.{field}={json.dumps(value)}" for field, value in model.items()]
    return ["--model", name, *(word for one in settings for word in ("--set", one))]


@pytest.mark.parametrize(("name", "continues"), [("LlamaForCausalLM", True), ("LlamaForSequenceClassification", False)])
def test_sampling_is_advised_for_models_that_continue_texts_alone(name: str, continues: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    (tmp_path / "tokenizer.json").write_text("{}")
    run: Any = None  # the folder says it
    clauses = HuggingFace(run).usage(run, str(tmp_path))
    assert f"transformers.{name}.from_pretrained" in clauses[0]
    assert any("mplug generate" in one for one in clauses) is continues
