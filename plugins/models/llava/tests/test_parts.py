"""Parts of a model begin with folders of their own: a tower of CLIP or SigLIP, and any decoder.

The reference is a whole model of the transformers library, whose parts the library writes to folders of their own.
`pytest --wide families` tries every kind of folder, and `--wide layouts` every layout.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from command_line import Cli
from torch import Tensor

transformers = pytest.importorskip("transformers")

from begun_runs import begun  # noqa: E402
from beside_library import changed  # noqa: E402
from exported_folders import ONE_STEP  # noqa: E402
from llava_models import CONFIGS, IMAGE, config_of, library_in_fp64, library_of, micro_batch  # noqa: E402
from mplug_llava.published_towers import CLIP_ALONE, SIGLIP_ALONE  # noqa: E402
from published import edited, resolved, rewritten  # noqa: E402

from mplug import UsageError  # noqa: E402
from mplug.cli.train_start import beginning  # noqa: E402
from mplug.config.defaults import saved_settings  # noqa: E402
from mplug.model.build import allocate_parts, build_model  # noqa: E402
from mplug.model.model import Model  # noqa: E402
from mplug.registry.resolve import resolve  # noqa: E402
from mplug.run.prepare import prepare  # noqa: E402
from mplug.run.run import Run  # noqa: E402
from mplug.training.assembly import build  # noqa: E402
from mplug.training.loop import train  # noqa: E402
from mplug_nn import SHARED_FIELDS, PublicForm, ReadField  # noqa: E402
from mplug_pretrained.beginnings import about_weights, words_of  # noqa: E402
from mplug_pretrained.public_load import left_out, load_public_for_inference  # noqa: E402
from mplug_pretrained.weights import load_weights, newest_pretrained, refuse_another_model  # noqa: E402
from mplug_testing import run_workers  # noqa: E402
from mplug_testing.harness import installed_plugins, logical  # noqa: E402

WIDE = pytest.mark.wide("families")
LAYOUTS = pytest.mark.wide("layouts")
FP64 = {"trainer.precision": "fp64"}


class Made(NamedTuple):
    """The library's whole model, and the folders of its tower, of the model around its tower, and of its decoder."""

    library: Any
    tower: Path
    whole: Path
    decoder: Path


def made(kind: str, parent: Path) -> Made:
    """The folders of a kind of model, in fp64."""
    given = changed(CONFIGS[kind], {"text_config.initializer_range": 0.2, "vision_config.initializer_range": 0.2})
    with library_in_fp64(given):
        library = library_of(given)
    tower, decoder, vision = library.model.vision_tower, library.model.language_model, given["vision_config"]
    whole_decoder = transformers.AutoModelForCausalLM.from_config(library.config.text_config).double()
    whole_decoder.model.load_state_dict(decoder.state_dict())
    if not library.config.text_config.tie_word_embeddings:
        whole_decoder.lm_head.load_state_dict(library.lm_head.state_dict())
    of_clip = vision["model_type"].startswith("clip")
    config, owner = (
        (transformers.CLIPConfig, transformers.CLIPModel)
        if of_clip
        else (transformers.SiglipConfig, transformers.SiglipModel)
    )
    text = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    around = owner(config(vision_config=dict(vision), text_config={**text, "vocab_size": 9})).double()
    around.vision_model.load_state_dict(tower.state_dict())
    found = Made(library, parent / "tower", parent / "whole", parent / "decoder")
    for model, folder in ((tower, found.tower), (around, found.whole), (whole_decoder, found.decoder)):
        model.save_pretrained(folder)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made("llama", tmp_path_factory.mktemp("llama"))


def settings_of(vision: Path | None, decoder: Path | None, **more: Any) -> dict[str, Any]:
    """The settings of a run whose parts begin with folders; for None, the part has the sizes of the folder's."""
    given = {"vision": vision, "decoder": decoder}
    found = {
        "trainer.device": "cpu",
        "kernels.default": None,
        "trainer.seq_length": 60,
        "trainer.global_batch_size": 4,
        "model.name": "llava",
        "model.image_token": IMAGE,
        "data.name": "mock",
        "data.media": 2,
        "data.media_sides": [8, 24],
        "checkpoint.pretrained.parts": {part: str(folder) for part, folder in given.items() if folder is not None},
        **FP64,
    }
    return {name: value for name, value in {**found, **more}.items() if value is not None}


def run_with(settings: dict[str, Any]) -> Run:
    return prepare(resolved(settings))


def loaded(settings: dict[str, Any]) -> Model:
    """The model with the weights of its folders, for inference."""
    run = run_with(settings)
    model, path = build_model(run), newest_pretrained(run)
    refuse_another_model(path, model, run.config.checkpoint.pretrained)
    allocate_parts(run, model)
    load_public_for_inference(run, model, path)
    model.module.eval()
    return model


def with_projector(model: Model, library: Any) -> Model:
    """The model with the projector of the library's."""
    theirs = dict(library.model.multi_modal_projector.named_parameters())
    ours = model.parameters()
    for name, one in theirs.items():
        end = name.replace("linear_1", "up").replace("linear_2", "down")
        ours[f"tower.projector.{end}"].data.copy_(one.data)
    return model


def require_logits(kind: str, model: Model, library: Any) -> None:
    seen = micro_batch(config_of(CONFIGS[kind]), (2, 0, 1))
    with torch.no_grad(), library_in_fp64(CONFIGS[kind]):
        expected = library(**seen.theirs).logits
        found = model.logits(seen.ours)
    assert expected.abs().max() > 0.1
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()


# What is read.


def as_released(found: dict[str, Tensor]) -> None:
    """Names of a tower as releases of the library before 5 wrote them, with the positions that they saved."""
    for name in [*found]:
        found[f"vision_model.{name}"] = found.pop(name)
    found["vision_model.embeddings.position_ids"] = torch.arange(17)[None]


def test_the_tower_and_the_decoder_are_what_the_library_loads(folders: Made) -> None:
    model = loaded(settings_of(folders.tower, folders.decoder))
    require_logits("llama", with_projector(model, folders.library), folders.library)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        pytest.param("llama", "whole"),
        *(pytest.param(kind, form, marks=WIDE) for kind in ("qwen2", "qwen3") for form in ("tower", "whole")),
        *(pytest.param(kind, "released", marks=WIDE) for kind in ("llama", "qwen3")),
    ],
)
def test_every_kind_of_folder_is_what_the_library_loads(kind: str, form: str, folders: Made, tmp_path: Path) -> None:
    """A tower alone, with the names of either release, and the tower of a whole model; decoders with a tied table."""
    own = folders if kind == "llama" else made(kind, tmp_path)
    tower = own.whole if form == "whole" else own.tower
    if form == "released":
        tower = shutil.copytree(tower, tmp_path / "released")
        rewritten(tower, as_released)
    vision = config_of(CONFIGS[kind]).vision
    more = {"model.vision.feature_layer": vision.feature_layer, "model.vision.features": vision.features}
    model = loaded(settings_of(tower, own.decoder, **more))
    require_logits(kind, with_projector(model, own.library), own.library)


@pytest.mark.wide("families")
def test_an_export_of_a_first_stage_has_both_parts_and_the_library_loads_it(
    folders: Made, tmp_path: Path, cli_here: Cli
) -> None:
    """Only the projector is trained. A resumed run keeps the model, also when the folders are gone."""
    own = [shutil.copytree(folder, tmp_path / folder.name) for folder in (folders.tower, folders.decoder)]
    frozen = {"model.frozen": ["tower.patches", "tower.blocks", "decoder"]}
    settings = {**settings_of(*own, **frozen, **ONE_STEP), "optimizer.lr": 0.1}
    run = run_with(settings)
    run.directory = tmp_path / "runs" / "stage"
    train(run)
    for folder in own:
        shutil.rmtree(folder)
    again = resolve(installed_plugins(), saved_settings(run.directory), {})
    assert again.model == run.config.model
    result = cli_here("checkpoint", "export", "--to", "huggingface", "exported")
    assert result.returncode == 0, result.stderr
    found = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "exported", dtype=torch.float64)
    expected = folders.library.state_dict()
    for name, one in found.state_dict().items():
        assert torch.equal(one, expected[name].double()) is ("projector" not in name), name


@pytest.mark.parametrize(
    "layout",
    ["tp2", *(pytest.param(one, marks=LAYOUTS) for one in ("pp2", "fsdp2", "zero2", "tp2pp2", "fsdp2tp2", "dp2cp2"))],
)
def test_ranks_of_a_layout_hold_what_one_process_does(folders: Made, layout: str) -> None:
    settings = settings_of(folders.whole, folders.decoder)
    placements = build_model(run_with(settings)).placements
    alone = begun(settings)
    ranks = run_with({**settings, "parallel.layout": layout}).mesh.world_size
    divided = run_workers(ranks, begun, {**settings, "parallel.layout": layout})
    for name, one in placements.items():
        assert torch.equal(logical(divided, name, one.shape), logical([alone], name, one.shape)), name


@pytest.mark.parametrize(
    ("form", "kind"), [(CLIP_ALONE, "CLIPVisionConfig"), (SIGLIP_ALONE, "SiglipVisionConfig")], ids=["clip", "siglip"]
)
def test_absent_fields_of_a_tower_have_the_defaults_of_the_librarys_class(form: PublicForm, kind: str) -> None:
    library = getattr(transformers, kind)()
    assert {*library.to_dict()} <= {*form.fields, "model_type"}
    for name, row in form.fields.items():
        if isinstance(row, ReadField) and name not in SHARED_FIELDS:
            assert getattr(library, name, row.default) == row.default, name


# What has no folder.


def test_a_part_without_a_folder_has_initial_values_and_the_run_says_so(folders: Made) -> None:
    decoder = {
        "name": "gpt",
        "hidden_size": 32,
        "num_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 61,
        "max_position_embeddings": 64,
    }
    settings = settings_of(folders.tower, None, **{"model.decoder": decoder})
    run, initial = run_with(settings), build(run_with(settings))
    parts, path = build(run), newest_pretrained(run)
    load_weights(run, parts.model, parts.pieces, path)
    values, before = ({one.name: one.values for one in some.held()} for some in (parts, initial))
    for name in values:
        is_read = name.startswith("tower.") and not name.startswith(("tower.projector.up", "tower.projector.down"))
        assert torch.equal(values[name], before[name]) is not is_read or name.endswith("bias"), name
    anew = ["decoder", "tower.projector.down", "tower.projector.up"]
    assert sorted(left_out(path, parts.model, run.config.checkpoint.pretrained)) == anew
    sentence = "'decoder', 'tower.projector.down' and 'tower.projector.up' have initial values, because no folder has"
    assert about_weights(run, parts.model, path)[0].startswith(sentence)
    assert beginning(None, words_of(path)) == f"with the weights of '{folders.tower}' (vision)"


def test_patterns_leave_out_parts_of_a_folder(folders: Made) -> None:
    only = {"checkpoint.pretrained.except": ["decoder.head", "lm_head.weight"]}
    run = run_with(settings_of(folders.tower, folders.decoder, **only))
    path, model = newest_pretrained(run), build_model(run)
    assert "decoder.head" in left_out(path, model, run.config.checkpoint.pretrained)


def test_the_folder_of_the_decoder_says_which_tokenizer_the_data_has(folders: Made, tmp_path: Path) -> None:
    own = [shutil.copytree(folder, tmp_path / folder.name) for folder in (folders.tower, folders.decoder)]
    for folder in own:
        (folder / "tokenizer.json").write_text("{}")
    data = resolved(settings_of(*own, **{"data.name": "text", "data.media": None, "data.media_sides": None})).data
    assert data.tokenizer_options == {"path": str(own[1] / "tokenizer.json")}


def test_settings_of_the_user_and_of_a_preset_stand_beside_those_of_folders(folders: Made) -> None:
    settings = settings_of(folders.tower, folders.decoder, **{"model.vision.feature_layer": -1, "model.preset": "tiny"})
    found = run_with(settings).config.model
    assert (found.vision.feature_layer, found.vision.num_layers, found.image_token) == (-1, 4, IMAGE)
    assert (found.decoder.config.num_layers, found.decoder.config.hidden_size) == (3, 32)


# What is refused.


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda found: found.__delitem__(name)


def added(found: dict[str, Tensor]) -> None:
    found["encoder.layers.0.extra"] = torch.zeros(2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without("embeddings.class_embedding"), "it lacks 'vision_model.embeddings.class_embedding'"),
        (added, "the model does not use 'vision_model.encoder.layers.0.extra'"),
    ],
    ids=["missing", "extra"],
)
def test_a_tower_with_other_tensors_is_refused(
    folders: Made, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], sentence: str
) -> None:
    tower = shutil.copytree(folders.tower, tmp_path / "tower")
    rewritten(tower, change)
    with pytest.raises(UsageError, match=rf"checkpoint\.pretrained\.parts\.vision '.*' does not fit .*{sentence}"):
        loaded(settings_of(tower, folders.decoder))


def test_folders_and_settings_that_do_not_fit_are_refused_in_a_sentence(folders: Made, tmp_path: Path) -> None:
    vision, decoder = "checkpoint.pretrained.parts.vision", "checkpoint.pretrained.parts.decoder"
    fine = settings_of(folders.tower, folders.decoder)
    edited(tower := shutil.copytree(folders.tower, tmp_path / "tower"), use_rope=True)
    whole = shutil.copytree(folders.whole, tmp_path / "whole")
    edited(whole, vision_config_dict={"hidden_size": 8})
    cases: list[tuple[dict[str, Any], str]] = [
        ({"checkpoint.pretrained.parts": {"visoin": "x", "decoder": str(folders.decoder)}}, "'x': it does not exist"),
        (
            {"checkpoint.pretrained.parts": {"visoin": str(folders.tower)}},
            "models of models/llava have no part 'visoin' .*; did you mean 'vision'.* 'decoder' and 'vision'",
        ),
        ({vision: str(tmp_path)}, "no installed format reads it; use a published folder"),
        ({vision: str(tower)}, "for 'vision': its field 'use_rope' is unknown"),
        ({vision: str(whole)}, "'vision_config_dict' describes another tower than 'vision_config'"),
        (
            {vision: str(folders.decoder)},
            "its field 'model_type' is 'llama', but the family supports .* or \"clip\" or",
        ),
        ({decoder: str(folders.tower)}, "no installed model family reads 'CLIPVisionModel'"),
        ({"model.vision.num_layers": 3}, r"  model\.vision\.num_layers \(the test\): 3, but the weights need 4$"),
        ({"model.decoder.num_layers": 2}, r"  model\.decoder\.num_layers \(the test\): 2, but the weights need 3$"),
        ({"model.decoder.preset": "tiny"}, r"model\.decoder\.preset \(the test\) contradicts"),
        ({"checkpoint.pretrained.path": "x"}, "which has this part; remove one of both"),
        ({"model.name": "gpt", "model.image_token": None}, "models of models/gpt have no part 'vision' .* none"),
    ]
    for settings, sentence in cases:
        given = {name: one for name, one in {**fine, **settings}.items() if one is not None}
        with pytest.raises(UsageError, match=sentence):
            run_with(given)
