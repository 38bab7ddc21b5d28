"""Forms of a published folder that could be read wrongly: each is honoured or refused, before anything trains."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers")

from mplug_huggingface_format.folder import INDEX, WHOLE
from published import (
    VOCAB,
    Made,
    edited,
    loaded,
    logits,
    require_fitting,
    rewritten,
    tensors,
)

from mplug.checkpoint import copies
from mplug.errors import UsageError

Cli = Callable[..., CompletedProcess[str]]
Folder = Callable[[str], Path]
TOKENS = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(3))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("families"))


@pytest.fixture
def folder(models: Made, tmp_path: Path) -> Folder:
    """A copy of a family's folder, in three files: `folder(family)`."""
    return lambda family: shutil.copytree(models[family][0], tmp_path / "folder")


def changed(path: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """The folder in one file, after a change of its tensors."""
    rewritten(path, change)
    return path


def unchanged(found: dict[str, Tensor]) -> None:
    """No change of a folder's tensors."""
    del found


def refusal(path: Path) -> str:
    """The sentence with which a folder is refused before a run starts."""
    with pytest.raises(UsageError) as refused:
        require_fitting(path)
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


# A head beside a tied embedding.


def with_head(found: dict[str, Tensor], factor: float = 1.0) -> None:
    found[HEAD] = found[EMBEDDING] * factor


def test_a_head_that_equals_the_tied_embedding_changes_nothing(folder: Folder, models: Made) -> None:
    path = changed(folder("qwen2"), with_head)
    require_fitting(path)
    expected = models["qwen2"][1](TOKENS).logits
    assert (logits(loaded(path)[1], TOKENS) - expected).abs().max() < 1e-5


def test_a_head_of_another_type_with_the_same_values_is_equal(folder: Folder) -> None:
    def add(found: dict[str, Tensor]) -> None:
        found[EMBEDDING] = found[EMBEDDING].bfloat16()
        found[HEAD] = found[EMBEDDING].double()

    loaded(changed(folder("qwen2"), add))


@pytest.mark.parametrize("place", [(0, 0), (VOCAB - 1, 31), (VOCAB // 2, 3)])
def test_a_head_that_differs_in_one_value_is_refused_with_both_names(
    place: tuple[int, int], folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is compared part by part: a real one has gigabytes."""
    monkeypatch.setattr(copies, "COMPARED", 700)

    def add(found: dict[str, Tensor]) -> None:
        with_head(found)
        found[HEAD][place] += 1e-6

    path = changed(folder("qwen2"), add)
    with pytest.raises(UsageError, match=f"'{HEAD}' and '{EMBEDDING}' have different values"):
        loaded(path)
    found = {rank for rank in range(4) if not _reads(path, "tp2pp2", rank)}
    assert found in ({0, 2}, {1, 3}), "the ranks of both stages that hold this row read it"


def _reads(path: Path, layout: str, rank: int) -> bool:
    try:
        loaded(path, layout, rank)
    except UsageError:
        return False
    return True


def test_every_rank_of_a_run_refuses_it(folder: Folder, tmp_path: Path, cli: Cli) -> None:
    """Only one of the two ranks holds the row that differs."""

    def add(found: dict[str, Tensor]) -> None:
        with_head(found)
        found[HEAD][-1] += 1

    changed(folder("qwen2"), add)
    (tmp_path / "text.txt").write_text("one and two\n" * 400)
    words = ("--set", "trainer.seq_length=32", "--set", "data.path=text.txt", "--set", "trainer.device=cpu")
    result = cli("train", "--pretrained", "folder", "--parallel", "tp2", "--name", "run", *words)
    assert result.returncode == 2, result.stdout + result.stderr
    assert f"'{HEAD}' and '{EMBEDDING}' have different values" in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


def test_the_user_may_leave_the_head_out(folder: Folder) -> None:
    path = changed(folder("qwen2"), lambda found: with_head(found, 2.0))
    loaded(path, checkpoint__pretrained__except=["lm_head"])


def test_a_head_of_another_shape_is_refused_before_the_start(folder: Folder) -> None:
    path = changed(folder("qwen2"), lambda found: found.update({HEAD: found[EMBEDDING][:-1].clone()}))
    assert f"'{HEAD}' has shape ({VOCAB - 1}, 32), but the model has ({VOCAB}, 32)" in refusal(path)
    path = changed(path, lambda found: found.update({HEAD: torch.ones(VOCAB, 32, dtype=torch.int32)}))
    assert f"'{HEAD}' has the type I32" in refusal(path)


def test_a_head_is_compared_in_a_folder_without_the_prefix_too(folder: Folder) -> None:
    def strip(found: dict[str, Tensor]) -> None:
        for name in [*found]:
            found[name.removeprefix("model.")] = found.pop(name)
        found[HEAD] = found["embed_tokens.weight"].clone()

    path = changed(folder("qwen2"), strip)
    loaded(path)
    changed(path, lambda found: found[HEAD].mul_(2))
    with pytest.raises(UsageError, match=f"'{HEAD}' and '{EMBEDDING}' have different values"):
        loaded(path)


def test_a_missing_head_is_refused_unless_it_is_tied(folder: Folder) -> None:
    path = changed(folder("llama"), lambda found: found.pop(HEAD))
    assert f"it lacks '{HEAD}'" in refusal(path)
    edited(path, tie_word_embeddings=True)
    require_fitting(path)


# Layers.


def layer_after_the_last(found: dict[str, Tensor]) -> None:
    last = {name: one for name, one in found.items() if name.startswith("model.layers.3.")}
    found |= {name.replace("layers.3.", "layers.4."): one.clone() for name, one in last.items()}


@pytest.mark.parametrize("family", ["llama", "deepseek-v3", "deepseek-v2"])
def test_a_layer_more_than_config_json_has_is_refused(family: str, folder: Folder) -> None:
    path = changed(folder(family), layer_after_the_last)
    assert "the model does not use 'model.layers.4." in refusal(path)


def prediction_layer(found: dict[str, Tensor]) -> None:
    """The layer of multi-token prediction after the last layer, with copies of the embedding and of the head."""
    layer_after_the_last(found)
    for name, shape in (("enorm", (32,)), ("hnorm", (32,)), ("shared_head.norm", (32,)), ("eh_proj", (32, 64))):
        found[f"model.layers.4.{name}.weight"] = torch.ones(shape)
    found["model.layers.4.embed_tokens.weight"] = found[EMBEDDING].clone()
    found["model.layers.4.shared_head.head.weight"] = found[HEAD].clone()


def test_the_layer_for_multi_token_prediction_repeats_embedding_and_head(folder: Folder) -> None:
    path = changed(folder("deepseek-v3"), prediction_layer)
    for depths in (0, 1):
        loaded(path, model__num_mtp_layers=depths)
    for name, other in (("embed_tokens", EMBEDDING), ("shared_head.head", HEAD)):
        copy = f"model.layers.4.{name}.weight"
        changed(path, lambda found, copy=copy: found[copy].mul_(2))
        loaded(path, model__num_mtp_layers=0)
        with pytest.raises(UsageError, match=f"'{copy}' and '{other}' have different values"):
            loaded(path, model__num_mtp_layers=1)
        changed(path, lambda found, copy=copy: found[copy].div_(2))


# Files.


def test_an_index_beside_a_single_file_is_refused_unless_it_names_this_file_alone(folder: Folder) -> None:
    path = folder("llama")
    save_file({"a": torch.ones(1)}, path / WHOLE)
    assert f"has '{WHOLE}', which '{INDEX}' does not name, so it could hold two models" in refusal(path)
    index = json.loads((path / INDEX).read_text())["weight_map"]
    (path / WHOLE).unlink()
    changed(path, unchanged)
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(index, WHOLE)}))
    require_fitting(path)
    (path / INDEX).write_text(json.dumps({"weight_map": index}))
    assert f"has '{WHOLE}', which" in refusal(path)


def test_files_of_another_download_are_refused(folder: Folder) -> None:
    path = folder("llama")
    shutil.copy(min(path.glob("*.safetensors")), path / "model-00004-of-00004.safetensors")
    assert f"has 'model-00004-of-00004.safetensors', which '{INDEX}' does not name" in refusal(path)
    changed(path, unchanged)
    shutil.copy(path / WHOLE, path / "model-00001-of-00002.safetensors")
    assert f"has '{WHOLE}' and 'model-00001-of-00002.safetensors' without an index" in refusal(path)


def test_files_that_are_no_part_of_the_model_are_not_read(folder: Folder) -> None:
    """Copies in the form of another library, of another precision, or as pickles."""
    path = folder("llama")
    for name in ("consolidated.safetensors", "model.fp16.safetensors", "pytorch_model.bin"):
        (path / name).write_bytes(b"not a model")
    require_fitting(path)


def test_a_tensor_in_two_files_is_refused(folder: Folder) -> None:
    path = folder("llama")
    names = json.loads((path / INDEX).read_text())["weight_map"]
    file = next(one for one in sorted({*names.values()}) if one != names[EMBEDDING])
    save_file({**load_file(path / file), EMBEDDING: torch.ones(VOCAB, 32)}, path / file)
    assert f"has the tensor '{EMBEDDING}', which '{INDEX}' has in '{names[EMBEDDING]}'" in refusal(path)


def test_a_tensor_in_another_file_than_the_index_says_is_refused(folder: Folder) -> None:
    path = folder("llama")
    index = json.loads((path / INDEX).read_text())
    files = sorted({*index["weight_map"].values()})
    index["weight_map"][HEAD] = next(one for one in files if one != index["weight_map"][HEAD])
    (path / INDEX).write_text(json.dumps(index))
    assert f"has the tensor '{HEAD}', which '{INDEX}' has in" in refusal(path)
    kept = dict(load_file(path / files[0]))
    kept.pop(EMBEDDING)
    index["weight_map"][HEAD] = tensors(path)[HEAD][0]
    (path / INDEX).write_text(json.dumps(index))
    save_file(kept, path / files[0])
    assert f"lacks '{EMBEDDING}', which '{INDEX}' has in it" in refusal(path)


def test_tensors_of_another_library_are_refused(folder: Folder) -> None:
    """Flax keeps matrices as [in, out]; a square one has the same shape."""
    path = changed(folder("llama"), unchanged)
    for library, is_read in (("pt", True), ("mlx", True), ("flax", False), ("tf", False)):
        save_file(load_file(path / WHOLE), path / WHOLE, {"format": library})
        if is_read:
            require_fitting(path)
        else:
            assert f"its tensors are those of '{library}', not of PyTorch; use a folder that was" in refusal(path)


def test_adapters_beside_the_model_are_refused(folder: Folder) -> None:
    path = folder("llama")
    (path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "has 'adapter_config.json' beside config.json: adapters, which would not be applied" in refusal(path)


# Tensors.


@pytest.mark.parametrize(
    ("family", "change", "fields", "sentence"),
    [
        ("llama", lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}), {}, "does not use"),
        ("llama", lambda t: t.update({f"{HEAD[:-7]}.bias": torch.ones(VOCAB)}), {}, "does not use 'lm_head.bias'"),
        ("llama", unchanged, {"attention_bias": True}, "it lacks 'model.layers.0.self_attn.k_proj.bias'"),
        ("llama", lambda t: t.update({"model.rotary_emb.scale": torch.ones(4)}), {}, "does not use 'model.rotary_emb"),
        ("llama", lambda t: t.update({"model._orig_mod.a": torch.ones(4)}), {}, "does not use 'model._orig_mod.a'"),
        ("llama", lambda t: t.update({"model.norm.weight": torch.ones(1, 32)}), {}, "has shape (1, 32)"),
        ("llama", lambda t: t.update({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}), {}, "F8_E4M3"),
        ("gemma3", lambda t: t.pop("model.layers.1.self_attn.q_norm.weight"), {}, "it lacks 'model.layers.1.self_attn"),
        ("gpt-oss", lambda t: t.pop("model.layers.2.self_attn.sinks"), {}, "it lacks 'model.layers.2.self_attn.sinks'"),
        ("deepseek-v3", lambda t: t.pop("model.layers.1.mlp.gate.e_score_correction_bias"), {}, "it lacks 'model.lay"),
        ("mixtral", lambda t: t.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight"), {}, "it lacks 'model.lay"),
        ("mixtral", unchanged, {"num_local_experts": 3}, "does not use 'model.layers.0.block_sparse_moe.experts"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    family: str, change: Callable[[dict[str, Tensor]], object], fields: dict[str, Any], sentence: str, folder: Folder
) -> None:
    path = changed(folder(family), change)
    edited(path, **fields)
    assert sentence in refusal(path)


def test_saved_frequencies_of_older_releases_are_not_read(folder: Folder, models: Made) -> None:
    """The library computes them from config.json, whatever the folder has."""
    path = changed(folder("llama"), lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    expected = models["llama"][1](TOKENS).logits
    assert (logits(loaded(path)[1], TOKENS) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_types_of_the_tensors_decide_and_not_the_field_of_config_json(dtype: str, folder: Folder) -> None:
    """`torch_dtype` and `dtype` say in which type the library would compute."""
    path = folder("llama")
    before = {name: one.clone() for name, one in loaded(path)[1].parameters().items()}
    edited(path, torch_dtype=dtype, dtype=dtype)
    after = loaded(path)[1].parameters()
    assert all(torch.equal(after[name], one) for name, one in before.items())


# Quantised weights.


def quantised(found: dict[str, Tensor]) -> None:
    """Blocks of 8 of one matrix of each layer, with factors of 1: a form that is read."""
    for name in [name for name in found if name.endswith("o_proj.weight")]:
        found[name] = found[name].to(torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = torch.ones([-(-size // 8) for size in found[name].shape])


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}
O_PROJ = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("change", "fields", "sentence"),
    [
        (unchanged, {}, ""),
        (unchanged, {"modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"}, ""),
        (
            lambda t: t.update({O_PROJ: t[O_PROJ].bfloat16()}),
            {},
            f"'{O_PROJ}' has the type BF16, but the quantised form",
        ),
        (
            lambda t: t.update({f"{O_PROJ}_scale_inv": t[f"{O_PROJ}_scale_inv"].to(torch.uint8)}),
            {},
            f"'{O_PROJ}_scale_inv' has the type U8",
        ),
        (lambda t: t.pop(f"{O_PROJ}_scale_inv"), {}, f"'{O_PROJ}' has the type F8_E4M3 without factors"),
        (lambda t: t.update({O_PROJ: t[O_PROJ].to(torch.float8_e5m2)}), {}, f"'{O_PROJ}' has the type F8_E5M2"),
        (unchanged, {"activation_scheme": "static"}, "an 'activation_scheme' other than 'dynamic'"),
        (unchanged, {"weight_block_size": None}, "not in e4m3 with a 'weight_block_size' of two numbers"),
        (unchanged, {"expert_dtype": "fp4"}, "the field 'expert_dtype' of its quantization_config is unknown"),
        (unchanged, {"quant_method": "bitsandbytes"}, "no decoder of quantised weights is named 'bitsandbytes'"),
        (unchanged, {"quant_method": None}, "it lacks the field 'quantization_config.quant_method'"),
    ],
)
def test_quantised_tensors_have_the_types_of_their_method(
    change: Callable[[dict[str, Tensor]], object], fields: dict[str, Any], sentence: str, folder: Folder
) -> None:
    path = changed(folder("llama"), quantised)
    changed(path, change)
    edited(path, quantization_config={**FP8, **fields})
    if sentence:
        assert sentence in refusal(path)
    else:
        loaded(path)


@pytest.mark.parametrize("value", ["awq", [], False])
def test_a_quantisation_that_is_no_mapping_is_refused(value: object, folder: Folder) -> None:
    path = folder("llama")
    edited(path, quantization_config=value)
    assert "its field 'quantization_config' is " in refusal(path)


def test_packed_experts_are_unsigned_bytes(folder: Folder) -> None:
    path = folder("gpt-oss")
    edited(path, quantization_config={"quant_method": "mxfp4"})
    name = "model.layers.0.mlp.experts.gate_up_proj"  # [4, 32, 96]

    def pack(found: dict[str, Tensor], dtype: torch.dtype = torch.uint8) -> None:
        found.pop(name, None)
        found[f"{name}_blocks"] = torch.zeros(4, 96, 1, 16, dtype=dtype)
        found[f"{name}_scales"] = torch.zeros(4, 96, 1, dtype=torch.uint8)

    require_fitting(changed(path, pack))
    assert f"'{name}_blocks' has the type I8, but the quantised form has uint8" in refusal(
        changed(path, lambda found: pack(found, torch.int8))
    )
    both = changed(path, lambda found: (pack(found), found.update({name: torch.zeros(4, 32, 96)})))
    assert f"the model does not use '{name}'" in refusal(both)
    edited(path, quantization_config={"quant_method": "mxfp4", "group_size": 16})
    changed(path, pack)
    assert "the field 'group_size' of its quantization_config is unknown for 'mxfp4'" in refusal(path)
