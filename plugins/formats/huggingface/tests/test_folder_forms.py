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
from published import VOCAB, Made, edited, loaded, logits, require_fitting, rewritten, tensors

from mplug.errors import UsageError
from mplug_pretrained import copies

Cli = Callable[..., CompletedProcess[str]]
Change = Callable[[dict[str, Tensor]], object]
Folder = Callable[[str], Path]
TOKENS = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(3))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER, O_PROJ = "transformer.h.0", "model.layers.0.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("families"))


@pytest.fixture
def folder(models: Made, tmp_path: Path) -> Folder:
    return lambda family: shutil.copytree(models[family][0], tmp_path / "folder")


def changed(path: Path, change: Change = lambda _: None) -> Path:
    rewritten(path, change)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as refused:
        require_fitting(path)
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


# Changes of a folder, for the table below.


def fields(**values: Any) -> Callable[[Path], object]:
    return lambda path: edited(path, **values)


def put(name: str, value: Tensor) -> Callable[[Path], object]:
    return lambda path: rewritten(path, lambda found: found.update({name: value}))


def drop(name: str) -> Callable[[Path], object]:
    return lambda path: rewritten(path, lambda found: found.pop(name))


def index(weight_map: object) -> Callable[[Path], object]:
    return lambda path: (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def pickled(path: Path) -> None:
    for file in [*path.glob("*.safetensors"), path / INDEX]:
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(b"")


def cut_short(path: Path) -> None:
    file = min(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])


def file_of_another_download(path: Path) -> None:
    shutil.copy(min(path.glob("*.safetensors")), path / "model-00004-of-00004.safetensors")


def two_files_without_an_index(path: Path) -> None:
    shutil.copy(changed(path) / WHOLE, path / "model-00001-of-00002.safetensors")


def index_of_absent_files(path: Path) -> None:
    kept = (path / INDEX).read_text()
    changed(path)
    (path / INDEX).write_text(kept)


def tensor_in_two_files(path: Path) -> None:
    names = json.loads((path / INDEX).read_text())["weight_map"]
    file = next(one for one in sorted({*names.values()}) if one != names[EMBEDDING])
    save_file({**load_file(path / file), EMBEDDING: torch.ones(VOCAB, 32)}, path / file)


def index_that_names_another_file(path: Path) -> None:
    names = json.loads((path / INDEX).read_text())["weight_map"]
    index({**names, HEAD: next(one for one in sorted({*names.values()}) if one != names[HEAD])})(path)


def tensor_that_the_index_has(path: Path) -> None:
    file = path / json.loads((path / INDEX).read_text())["weight_map"][EMBEDDING]
    save_file({name: one for name, one in load_file(file).items() if name != EMBEDDING}, file)


def layer_after_the_last(found: dict[str, Tensor]) -> None:
    last = {name: one for name, one in found.items() if name.startswith("model.layers.3.")}
    found |= {name.replace("layers.3.", "layers.4."): one.clone() for name, one in last.items()}


def one_layer_more(path: Path) -> None:
    rewritten(path, layer_after_the_last)


def of_library(name: str) -> Callable[[Path], object]:
    """Flax keeps matrices as [in, out]; a square one has the same shape."""
    return lambda path: save_file(load_file(changed(path) / WHOLE), path / WHOLE, {"format": name})


BY_THE_COMMAND: list[tuple[str, Callable[[Path], object], str]] = [
    ("gpt2", lambda f: min(f.glob("*.safetensors")).unlink(), "lacks 'model-00001-of-00003.safetensors'"),
    ("gpt2", fields(sparse_attention=4), "its field 'sparse_attention' is unknown to the family"),
    ("gpt2", put(f"{LAYER}.a", torch.ones(7)), f"the model does not use '{LAYER}.a'"),
]
REFUSED: list[tuple[str, Callable[[Path], object], str]] = [
    *BY_THE_COMMAND,
    ("gpt2", cut_short, "exceed the file; download the file again"),
    ("gpt2", pickled, "has its weights in 'pytorch_model.bin', a pickle, which can run code"),
    ("gpt2", lambda f: [file.unlink() for file in f.glob("model*")], "but no safetensors files"),
    ("gpt2", index([]), "has no valid 'weight_map'"),
    ("gpt2", index({"a": "../x.safetensors"}), "has no valid 'weight_map'"),
    ("gpt2", lambda f: (f / "config.json").write_text("{"), "download the file again"),
    ("llama", lambda f: save_file({"a": torch.ones(1)}, f / WHOLE), f"'{INDEX}' does not name, so it could hold two"),
    ("llama", index_of_absent_files, f"has '{WHOLE}', which"),
    ("llama", file_of_another_download, f"has 'model-00004-of-00004.safetensors', which '{INDEX}' does not name"),
    ("llama", two_files_without_an_index, f"has '{WHOLE}' and 'model-00001-of-00002.safetensors' without an index"),
    ("llama", tensor_in_two_files, f"has the tensor '{EMBEDDING}', which '{INDEX}' has in 'model-0000"),
    ("llama", index_that_names_another_file, f"has the tensor '{HEAD}', which '{INDEX}' has in"),
    ("llama", tensor_that_the_index_has, f"lacks '{EMBEDDING}', which '{INDEX}' has in it"),
    ("llama", of_library("flax"), "its tensors are those of 'flax', not of PyTorch; use a folder that was"),
    ("llama", of_library("tf"), "its tensors are those of 'tf', not of PyTorch"),
    ("llama", lambda f: (f / "adapter_config.json").write_text("{}"), "beside config.json: adapters, which would not"),
    # config.json
    ("gpt2", fields(architectures=["BloomForCausalLM"], model_type="bloom"), "no installed model family reads 'Bloom"),
    ("gpt2", fields(architectures=None, model_type=None), "names no architecture"),
    ("gpt2", fields(n_head=5), "describes no model of models/gpt: num_attention_heads=5 does not divide"),
    ("gpt2", fields(scale_attn_weights=False), "'scale_attn_weights' is false, but the family supports true only"),
    ("llama", fields(quantization_config="awq"), "its field 'quantization_config' is "),
    ("llama", fields(quantization_config=False), "its field 'quantization_config' is "),
    ("gpt2", fields(quantization_config={"quant_method": "gptq"}), "weights is named 'gptq' (known: fp8 and mxfp4)"),
    # Tensors.
    ("gpt2", drop(f"{LAYER}.mlp.c_fc.weight"), f"'{LAYER}.mlp.c_fc.weight'; name them in checkpoint.pretrained.except"),
    (
        "gpt2",
        lambda f: rewritten(f, lambda t: t.update(a=t.pop("transformer.wte.weight"), b=torch.ones(1))),
        "it lacks 'transformer.wte.weight'; the model does not use 'a' and 'b'",
    ),
    ("llama", fields(attention_bias=True), "it lacks 'model.layers.0.self_attn.k_proj.bias'"),
    ("llama", put("model.rotary_emb.scale", torch.ones(4)), "does not use 'model.rotary_emb"),
    ("llama", put("model.norm.weight", torch.ones(1, 32)), "has shape (1, 32)"),
    ("llama", put("model.norm.weight", torch.ones(32).to(torch.float8_e4m3fn)), "F8_E4M3"),
    ("deepseek-v3", drop("model.layers.1.mlp.gate.e_score_correction_bias"), "it lacks 'model.layers.1.mlp.gate"),
    ("mixtral", drop("model.layers.1.block_sparse_moe.experts.3.w2.weight"), "it lacks 'model.layers.1.block"),
    ("mixtral", fields(num_local_experts=3), "does not use 'model.layers.0.block_sparse_moe.experts"),
    ("deepseek-v3", one_layer_more, "does not use 'model.layers.4."),
    # A head that is absent, or beside a tied embedding.
    ("llama", drop(HEAD), f"it lacks '{HEAD}'"),
    (
        "qwen2",
        put(HEAD, torch.ones(VOCAB - 1, 32)),
        f"'{HEAD}' has shape ({VOCAB - 1}, 32), but the model has ({VOCAB}",
    ),
    ("qwen2", put(HEAD, torch.ones(VOCAB, 32, dtype=torch.int32)), f"'{HEAD}' has the type I32"),
]


@pytest.mark.parametrize(("family", "change", "sentence"), REFUSED)
def test_a_folder_that_does_not_fit_is_refused_in_one_sentence(
    family: str, change: Callable[[Path], object], sentence: str, folder: Folder
) -> None:
    path = folder(family)
    change(path)
    assert sentence in refusal(path)


@pytest.mark.parametrize(("family", "change", "sentence"), BY_THE_COMMAND)
def test_the_command_refuses_it_before_it_starts_a_run(
    family: str, change: Callable[[Path], object], sentence: str, folder: Folder, tmp_path: Path, cli_here: Cli
) -> None:
    change(folder(family))
    result = cli_here("train", "--pretrained", "folder", "--set", "trainer.seq_length=32", "--parallel", "tp2")
    assert result.returncode == 2, result.stdout + result.stderr
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert not (tmp_path / "runs").exists()


def copies_in_other_forms(path: Path) -> None:
    for name in ("consolidated.safetensors", "model.fp16.safetensors", "pytorch_model.bin"):
        (path / name).write_bytes(b"not a model")


def index_of_one_file(path: Path) -> None:
    index(dict.fromkeys(tensors(changed(path)), WHOLE))(path)


def without_head_but_tied(path: Path) -> None:
    drop(HEAD)(path)
    edited(path, tie_word_embeddings=True)


@pytest.mark.parametrize(
    "change", [copies_in_other_forms, index_of_one_file, without_head_but_tied, of_library("pt"), of_library("mlx")]
)
def test_other_forms_of_the_same_model_are_accepted(change: Callable[[Path], object], folder: Folder) -> None:
    path = folder("llama")
    change(path)
    require_fitting(path)


# A head beside a tied embedding, with its values or with others.


def with_head(found: dict[str, Tensor], factor: float = 1.0) -> None:
    found[HEAD] = found[EMBEDDING] * factor


def of_other_types(found: dict[str, Tensor]) -> None:
    found[EMBEDDING] = found[EMBEDDING].bfloat16()
    found[HEAD] = found[EMBEDDING].double()


def test_a_head_that_equals_the_tied_embedding_changes_nothing(folder: Folder, models: Made) -> None:
    path = changed(folder("qwen2"), with_head)
    require_fitting(path)
    expected = models["qwen2"][1](TOKENS).logits
    assert (logits(loaded(path)[1], TOKENS) - expected).abs().max() < 1e-5
    loaded(changed(path, lambda found: with_head(found, 2.0)), checkpoint__pretrained__except=["lm_head"])
    loaded(changed(path, of_other_types))


@pytest.mark.wide("fuzz", quick=["place1"])
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


@pytest.mark.wide("fuzz")
def test_every_rank_of_a_run_refuses_it(folder: Folder, tmp_path: Path, cli: Cli) -> None:
    """Only one of the two ranks holds the row that differs."""
    changed(folder("qwen2"), lambda found: (with_head(found), found[HEAD][-1].add_(1)))
    (tmp_path / "text.txt").write_text("one and two\n" * 400)
    words = ("--set", "trainer.seq_length=32", "--set", "data.path=text.txt", "--set", "trainer.device=cpu")
    result = cli("train", "--pretrained", "folder", "--parallel", "tp2", "--name", "run", *words)
    assert result.returncode == 2, result.stdout + result.stderr
    assert f"'{HEAD}' and '{EMBEDDING}' have different values" in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


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


# The layer for multi-token prediction: the one after the last.


def prediction_layer(found: dict[str, Tensor]) -> None:
    """A copy of the last layer times 2, and copies of the embedding and of the head. The library writes none."""
    layer_after_the_last(found)
    found |= {name: one * 2 for name, one in found.items() if name.startswith("model.layers.4.")}
    for name, shape in (("enorm", (32,)), ("hnorm", (32,)), ("shared_head.norm", (32,)), ("eh_proj", (32, 64))):
        found[f"model.layers.4.{name}.weight"] = torch.randn(shape)
    found["model.layers.4.embed_tokens.weight"] = found[EMBEDDING].clone()
    found["model.layers.4.shared_head.head.weight"] = found[HEAD].clone()


@pytest.mark.wide("families")
def test_the_layer_for_multi_token_prediction_is_read_if_the_model_has_one(folder: Folder, models: Made) -> None:
    path = changed(folder("deepseek-v3"), prediction_layer)
    assert not [name for name in loaded(path)[1].parameters() if name.startswith("ahead.")]
    own, stored = loaded(path, model__num_mtp_layers=1)[1].parameters(), tensors(path)
    assert torch.equal(own["ahead.depths.0.merge.weight"], stored["model.layers.4.eh_proj.weight"][1])
    assert torch.equal(own["ahead.depths.0.norm.weight"], stored["model.layers.4.shared_head.norm.weight"][1])
    for name in ("attn.kv_up.weight", "moe.experts.up", "norm2.weight"):
        assert torch.equal(own[f"ahead.depths.0.block.{name}"], 2 * own[f"blocks.3.{name}"])
    with pytest.raises(UsageError, match=r"it lacks 'model.layers.4.eh_proj.weight'"):
        loaded(models["deepseek-v3"][0], model__num_mtp_layers=1)
    for part, other in (("embed_tokens", EMBEDDING), ("shared_head.head", HEAD)):
        copy = f"model.layers.4.{part}.weight"
        changed(path, lambda found, copy=copy: found[copy].mul_(2))
        loaded(path, model__num_mtp_layers=0)
        with pytest.raises(UsageError, match=f"'{copy}' and '{other}' have different values"):
            loaded(path, model__num_mtp_layers=1)
        changed(path, lambda found, copy=copy: found[copy].div_(2))


def test_dense_blocks_of_kimi_linear_are_read_under_the_name_that_the_library_saves(folder: Folder) -> None:
    def one_dense(found: dict[str, Tensor]) -> None:
        at = "model.layers.0.block_sparse_moe."
        for name in [name for name in found if name.startswith(at)]:
            del found[name]
        for name, shape in (("gate", (48, 32)), ("up", (48, 32)), ("down", (32, 48))):
            found[f"{at}{name}_proj.weight"] = torch.randn(shape)

    def published(found: dict[str, Tensor]) -> None:
        for name in [name for name in found if name.startswith("model.layers.0.block_sparse_moe.")]:
            found[name.replace("block_sparse_moe", "mlp")] = found.pop(name)

    path = changed(folder("kimi-linear"), one_dense)
    edited(path, mlp_layer_types=["dense", "sparse", "sparse"])
    saved = loaded(path)[1].parameters()
    own = loaded(changed(path, published))[1].parameters()
    assert all(torch.equal(own[name], one) for name, one in saved.items())


def prediction_block_beside(found: dict[str, Tensor]) -> None:
    """A copy of the block with attention times 2, as Qwen3-Next names it."""
    at = "model.layers.3."
    found |= {name.replace(at, "mtp.layers.0."): one * 2 for name, one in found.items() if name.startswith(at)}
    for name, shape in (("pre_fc_norm_embedding", (32,)), ("pre_fc_norm_hidden", (32,)), ("norm", (32,))):
        found[f"mtp.{name}.weight"] = torch.randn(shape)
    found["mtp.fc.weight"] = torch.randn(32, 64)


def test_the_block_for_multi_token_prediction_of_qwen3_next_is_read_if_the_model_has_one(folder: Folder) -> None:
    path = changed(folder("qwen3-next"), prediction_block_beside)
    assert not [name for name in loaded(path)[1].parameters() if name.startswith("ahead.")]
    own, stored = loaded(path, model__num_mtp_layers=1)[1].parameters(), tensors(path)
    for ours, theirs in (("merge", "fc"), ("token_norm", "pre_fc_norm_embedding"), ("norm", "norm")):
        assert torch.equal(own[f"ahead.depths.0.{ours}.weight"], stored[f"mtp.{theirs}.weight"][1])
    for name in ("attn.qkv.weight", "moe.experts.up", "moe.shared_gate.weight", "norm2.weight"):
        assert torch.equal(own[f"ahead.depths.0.block.{name}"], 2 * own[f"blocks.3.{name}"])
    with pytest.raises(UsageError, match="has no published form"):
        loaded(path, model__num_mtp_layers=2)


PARTS = {"0": "2", "1": "1"}
"""Part of a depth -> a block of the same kind: attention and experts."""


def prediction_parts(found: dict[str, Tensor]) -> None:
    """Copies of blocks times 2, as Nemotron 3 names them."""
    for part, block in PARTS.items():
        at = f"backbone.layers.{block}."
        copies = {name.removeprefix(at): one * 2 for name, one in found.items() if name.startswith(at)}
        found |= {f"mtp.layers.{part}.{name}": one for name, one in copies.items()}
    for name in ("0.enorm", "0.hnorm", "1.final_layernorm"):
        found[f"mtp.layers.{name}.weight"] = torch.randn(32)
    found["mtp.layers.0.eh_proj.weight"] = torch.randn(32, 64)


def test_the_parts_for_multi_token_prediction_of_nemotron_are_read_if_the_model_has_some(folder: Folder) -> None:
    path = changed(folder("nemotron"), prediction_parts)
    edited(path, num_nextn_predict_layers=1, mtp_layers_block_type=["attention", "moe"])
    assert not [name for name in loaded(path)[1].parameters() if name.startswith("ahead.")]
    model, stored = loaded(path, model__num_mtp_layers=1)[1], tensors(path)
    own = {**model.parameters(), **model.states()}
    for ours, theirs in (("merge", "0.eh_proj"), ("token_norm", "0.enorm"), ("norm", "1.final_layernorm")):
        assert torch.equal(own[f"ahead.depths.0.{ours}.weight"], stored[f"mtp.layers.{theirs}.weight"][1])
    for part, block in PARTS.items():
        at = f"ahead.depths.0.block.branches.{part}."
        copies = {name.removeprefix(at): one for name, one in own.items() if name.startswith(at)}
        assert len(copies) > 2
        assert [n for n, one in copies.items() if not torch.equal(one, 2 * own[f"blocks.{block}.{n}"])] == []
    with pytest.raises(UsageError, match=r"it lacks 'mtp\.layers\.2\.e"):
        loaded(path, model__num_mtp_layers=2)


# What of a folder is not read.


def test_saved_frequencies_of_older_releases_are_not_read(folder: Folder, models: Made) -> None:
    """The library computes them from config.json, whatever the folder has."""
    path = folder("llama")
    put("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))(path)
    assert (logits(loaded(path)[1], TOKENS) - models["llama"][1](TOKENS).logits).abs().max() < 1e-5


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
SCALES = f"{O_PROJ}_scale_inv"


def cast(name: str, dtype: torch.dtype) -> Change:
    return lambda found: found.update({name: found[name].to(dtype)})


@pytest.mark.parametrize(
    ("change", "own", "sentence"),
    [
        (None, {}, ""),
        (None, {"modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"}, ""),
        (cast(O_PROJ, torch.bfloat16), {}, f"'{O_PROJ}' has the type BF16, but the quantised form"),
        (cast(SCALES, torch.uint8), {}, f"'{SCALES}' has the type U8"),
        (lambda t: t.pop(SCALES), {}, f"'{O_PROJ}' has the type F8_E4M3 without factors"),
        (cast(O_PROJ, torch.float8_e5m2), {}, f"'{O_PROJ}' has the type F8_E5M2"),
        (None, {"activation_scheme": "static"}, "an 'activation_scheme' other than 'dynamic'"),
        (None, {"weight_block_size": None}, "not in e4m3 with a 'weight_block_size' of two numbers"),
        (None, {"expert_dtype": "fp4"}, "the field 'expert_dtype' of its quantization_config is unknown"),
        (None, {"quant_method": None}, "it lacks the field 'quantization_config.quant_method'"),
    ],
)
def test_quantised_tensors_have_the_types_of_their_method(
    change: Change | None, own: dict[str, Any], sentence: str, folder: Folder
) -> None:
    path = changed(changed(folder("llama"), quantised), change or (lambda _: None))
    edited(path, quantization_config={**FP8, **own})
    if sentence:
        assert sentence in refusal(path)
    else:
        loaded(path)


def test_packed_experts_are_unsigned_bytes(folder: Folder) -> None:
    path, name = folder("gpt-oss"), "model.layers.0.mlp.experts.gate_up_proj"  # [4, 32, 96]
    edited(path, quantization_config={"quant_method": "mxfp4"})

    def pack(found: dict[str, Tensor], dtype: torch.dtype = torch.uint8) -> None:
        found.pop(name, None)
        found[f"{name}_blocks"] = torch.zeros(4, 96, 1, 16, dtype=dtype)
        found[f"{name}_scales"] = torch.zeros(4, 96, 1, dtype=torch.uint8)

    require_fitting(changed(path, pack))
    changed(path, lambda found: pack(found, torch.int8))
    assert f"'{name}_blocks' has the type I8, but the quantised form has uint8" in refusal(path)
    changed(path, lambda found: (pack(found), found.update({name: torch.zeros(4, 32, 96)})))
    assert f"the model does not use '{name}'" in refusal(path)
    edited(path, quantization_config={"quant_method": "mxfp4", "group_size": 16})
    assert "the field 'group_size' of its quantization_config is unknown for 'mxfp4'" in refusal(changed(path, pack))
