"""Published folders with missing, contradicting or damaged files: each is refused in a sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from changed_folders import (
    EMBEDDING,
    HEAD,
    LAYER,
    Folder,
    changed,
    drop,
    index,
    layer_after_the_last,
    of_library,
    put,
    refusal,
)
from mplug_huggingface_format.folder import INDEX, WHOLE
from published import VOCAB, edited, rewritten

# Changes of a folder, for the table below.


def fields(**values: Any) -> Callable[[Path], object]:
    return lambda path: edited(path, **values)


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


def one_layer_more(path: Path) -> None:
    rewritten(path, layer_after_the_last)


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
