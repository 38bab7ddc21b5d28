"""A family that contains another one by its name: config, sources, errors, resume, plan, and a stranger's decoder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import Cli
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mplug import Family, UsageError
from mplug.config.family import contained_in
from mplug.model.build import build_model
from mplug.registry.bind_section import bind
from mplug.run.record import provenance
from mplug_nn import plan_within
from mplug_pretrained import ExternalMap, ExternalNames, Fused, Interleaved, Transposed
from mplug_saving.changes import changes_on_resume
from mplug_testing.harness import tiny_config, tiny_run
from mplug_testing.parity import require_parity

SIZES = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 48, "vocab_size": 260}
VISION = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "ffn_hidden_size": 24,
    "image_size": 12,
    "patch_size": 4,
}


def settings(decoder: Any, **more: Any) -> dict[str, Any]:
    return {
        "model.name": "llava",
        "model.decoder": decoder,
        "model.vision": VISION,
        "model.image_token": 256,
        "data.name": "mock",
        "data.media": 2,
        "data.media_sides": [8, 24],
        "trainer.seq_length": 32,
        **more,
    }


# The config.


def test_the_section_chooses_a_family_and_its_preset_and_each_value_has_its_source(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    chosen = {"name": "qwen", "preset": "3-0.6b", "num_layers": 3}
    file.write_text(yaml.safe_dump({"model": {"name": "llava", "decoder": chosen}}))
    options = ("--config", str(file), "--data", "mock", "--set", "data.media=2")
    result = cli("config", "show", *options, "--sources")
    assert (result.returncode, result.stderr) == (0, "")
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in result.stdout.splitlines()}
    assert rows["model.decoder.name"] == f'"qwen" {file}:3'
    assert rows["model.decoder.num_layers"] == f"3 {file}:4"
    assert rows["model.decoder.hidden_size"] == "1024 preset 3-0.6b"
    assert rows["model.decoder.rope_theta"] == "1000000.0 default of models/qwen"
    assert rows["model.projector_bias"] == "true default of models/llava"
    assert "model.decoder.preset" not in rows


def test_what_is_shown_is_a_config_file_of_the_same_run() -> None:
    config = tiny_config(settings({"name": "qwen", **SIZES}))
    assert tiny_config({"model": config.resolved()["model"], "data": config.resolved()["data"]}).model == config.model
    assert config.resolved()["model"]["decoder"]["name"] == "qwen"
    assert "qk_norm" in config.resolved()["model"]["decoder"]


def test_another_name_or_preset_drops_what_lower_sources_say_of_the_decoder() -> None:
    tiny = {"model.name": "llava", "model.preset": "tiny", "data.name": "mock", "data.media": 2}
    assert tiny_config(tiny).model.decoder.config.num_layers == 4
    renamed = tiny_config({**tiny, "model.decoder.name": "qwen", "model.image_token": 5}).model
    assert (renamed.decoder.name, renamed.decoder.config.num_layers) == ("qwen", 12)
    other = tiny_config({**tiny, "model.decoder.preset": "3.2-1b", "model.decoder.num_layers": 2}).model.decoder
    assert (other.name, other.config.num_layers, other.config.hidden_size) == ("llama", 2, 2048)


HERE = "(the suite's settings)"
"""The source of every setting here."""
REFUSED: dict[str, tuple[Any, str]] = {
    "a misspelt family": (
        {"name": "qwn"},
        f"model.decoder.name {HERE}: no plugin 'qwn' of kind 'models' is installed; did you mean 'qwen'?",
    ),
    "a misspelt preset": (
        {"name": "qwen", "preset": "3-0.6c"},
        f"model.decoder.preset {HERE}: 'qwen' has no preset '3-0.6c'; did you mean '3-0.6b'?",
    ),
    "a misspelt field": (
        {"name": "qwen", "num_layer": 3},
        f"model.decoder.num_layer {HERE}: unknown field; did you mean 'num_layers'?",
    ),
    "a wrong value": (
        {"name": "qwen", "num_layers": 0},
        f"model.decoder.num_layers {HERE}: must be greater than 0",
    ),
    "a boolean": (
        {"name": "qwen", "num_layers": True},
        f"model.decoder.num_layers {HERE}: must be a valid integer",
    ),
    "no name": (
        {"num_layers": 3},
        f"model.decoder.name {HERE}: is required: the name of a model family",
    ),
    "a word": ("qwen", f"model.decoder {HERE}: must be a section (a mapping of fields), not 'qwen'"),
    "fields that do not fit": (
        {"name": "qwen", **SIZES, "num_kv_heads": 3},
        f"model.decoder {HERE}: num_kv_heads=3 does not divide num_attention_heads=4",
    ),
    "what does not fit the family around it": (
        {"name": "qwen", **SIZES, "vocab_size": 200},
        "image_token=256 is not less than the decoder's vocab_size=200",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_section_is_refused_in_one_sentence_with_its_field(case: str) -> None:
    decoder, sentence = REFUSED[case]
    with pytest.raises(UsageError) as refused:
        tiny_config(settings(decoder))
    assert sentence in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_the_hook_configure_of_the_family_inside_is_called() -> None:
    learned = {"name": "gpt", **SIZES, "position": "learned", "max_position_embeddings": 16}
    with pytest.raises(UsageError, match=r"seq_length=32 is longer than model.decoder.max_position_embeddings=16"):
        tiny_run(settings(learned))


def test_a_family_may_contain_families_at_any_depth_and_a_field_of_them_may_be_null() -> None:
    class Outer(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)
        inner: Family | None = Field(None, description="another family")

    assert bind(Outer, {"inner": None})[0].inner is None
    tower = {"name": "llava", "decoder": {"name": "llama", **SIZES}, "image_token": 3}
    config, problems = bind(Outer, {"inner": tower})
    assert not problems
    assert [steps for steps, _ in contained_in(config)] == [("inner", "decoder"), ("inner",)]
    again, problems = bind(Outer, config.model_dump(mode="json"))
    assert (again, problems) == (config, [])
    _, problems = bind(Outer, {"inner": {**tower, "decoder": {"name": "llama", "num_layers": -1}}})
    assert [problem.path for problem in problems] == [("inner", "decoder", "num_layers")]
    with pytest.raises(ValidationError):  # only the host binds it
        Outer.model_validate({"inner": tower})


# Resume, and the record.


def test_a_resumed_run_keeps_the_decoder_that_it_began_with() -> None:
    before = tiny_run(settings({"name": "qwen", **SIZES}))
    manifest = {"config": before.config.resolved(), "provenance": provenance(before), "step": 3}
    assert [one["plugin"] for one in manifest["provenance"]["plugins"]].count("models/qwen") == 1
    again = tiny_run(settings({"name": "qwen", **SIZES}))
    assert not changes_on_resume(Path("step"), manifest, again, ()).lines()
    wider = tiny_run(settings({"name": "qwen", **SIZES, "rope_theta": 7.0}))
    with pytest.raises(UsageError, match=r"model.decoder.rope_theta: 1000000.0 -> 7.0 \(the suite's settings\)"):
        changes_on_resume(Path("step"), manifest, wider, ())
    assert changes_on_resume(Path("step"), manifest, wider, ("model.decoder",)).lines()
    del manifest["config"]["model"]["decoder"]["qk_norm"]  # a checkpoint of a release without this field
    assert not changes_on_resume(Path("step"), manifest, again, ()).lines()
    other = tiny_run(settings({"name": "llama", **SIZES}))
    with pytest.raises(UsageError, match=r"model.decoder.name: qwen -> llama"):
        changes_on_resume(Path("step"), manifest, other, ())


# The plan.


def test_the_plan_of_the_decoder_is_inside_of_that_of_the_whole() -> None:
    model = build_model(tiny_run(settings({"name": "qwen", **SIZES, "tie_embeddings": True})))
    names = [unit.name for unit in model.plan.units]
    assert names[-5:] == ["decoder.embedding", "join", "decoder.blocks.0", "decoder.blocks.1", "decoder.head"]
    assert ("decoder.embedding.token.weight", "decoder.head.project.weight") in model.plan.tied
    alone = tiny_run({"model": {"name": "qwen", **SIZES, "tie_embeddings": True}, "trainer.seq_length": 32})
    inner = build_model(alone).plan
    assert model.plan.flops == inner.flops
    within = plan_within(inner, "decoder")
    assert within.parameters.items() <= model.plan.parameters.items()
    assert within.external is not None
    assert inner.external is not None
    assert set(within.external.tensors) == {f"decoder.{name}" for name in inner.external.tensors}


def test_public_names_of_every_kind_are_renamed() -> None:
    names = ExternalNames(
        {
            "a": "a",
            "b": Transposed("b"),
            "c": Fused("c", Transposed("d")),
            "e": Interleaved("e"),
            "f": (ExternalMap((), "f", ()),),
            "g": None,
        },
        "model.",
        ("h",),
        {"i": "a"},
        {"j": "k"},
    )
    assert names.renamed(str.upper) == ExternalNames(
        {
            "a": "A",
            "b": Transposed("B"),
            "c": Fused("C", Transposed("D")),
            "e": Interleaved("E"),
            "f": (ExternalMap((), "F", ()),),
            "g": None,
        },
        "model.",
        ("H",),
        {"I": "a"},
        {"J": "K"},
    )


# A decoder of a stranger.

PEREGRINE = {**SIZES, "name": "peregrine", "head_dim": 8}


def test_a_tower_combines_with_the_decoder_of_a_third_party(plant: Callable[..., None]) -> None:
    plant("nova-peregrine")
    run = tiny_run(settings(PEREGRINE))
    (_, family), *_ = contained_in(run.config.model)
    assert (family.label, family.entry.distribution) == ("models/peregrine", "nova-peregrine")
    model = build_model(run)
    assert {"join", "tower.projector", "decoder.readout"} <= {unit.name for unit in model.plan.units}
    assert torch.device("meta") in {parameter.device for parameter in model.parameters().values()}


@pytest.mark.parametrize(
    "layout",
    [
        "pp2",
        pytest.param("tp2 parallel.tp.sequence_parallel=false", marks=pytest.mark.wide("layouts")),
        pytest.param("fsdp2", marks=pytest.mark.wide("layouts")),
    ],
)
@pytest.mark.wide("layouts")
def test_the_decoder_of_a_third_party_computes_the_same_under_a_layout(plant: Any, layout: str) -> None:
    plant("nova-peregrine")
    require_parity(settings({**PEREGRINE, "num_kv_heads": 2}), layout)


def test_what_a_strangers_decoder_does_not_state_is_refused_as_it_is_without_a_tower(plant: Any) -> None:
    plant("nova-peregrine")
    decoder = {**PEREGRINE, "num_kv_heads": 2}
    alone = {f"model.{name}": value for name, value in decoder.items()}
    for of_model, at in ((alone, ""), (settings(decoder), "decoder.")):
        with pytest.raises(UsageError) as refused:
            build_model(tiny_run({**of_model, "parallel.layout": "tp2"}))
        assert f"whether '{at}layers.*' (ParallelBlock) and '{at}readout' (Readout) mix it" in str(refused.value)
        assert str(refused.value).endswith("or set parallel.tp.sequence_parallel=false")


def test_decoders_that_no_tower_can_be_joined_to_are_refused() -> None:
    ahead = {"name": "qwen", **SIZES, "num_mtp_layers": 1}
    with pytest.raises(UsageError, match=r"model.decoder: models/qwen predicts tokens further ahead"):
        build_model(tiny_run(settings(ahead)))
    inside = {"name": "llava", "decoder": {"name": "llama", **SIZES}, "vision": VISION, "image_token": 3}
    with pytest.raises(UsageError, match=r"model.decoder: models/llava reads a stream of its own"):
        build_model(tiny_run(settings(inside)))
