"""Megatron checkpoints of two tensor-parallel ranks (make_data.py made them) become runs of ours."""

import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Evil
from command_line import Cli
from mplug_megatron_format.folder import MegatronFolder
from published import logits
from safetensors.torch import load_file

from mplug.config.defaults import saved_settings
from mplug.errors import UsageError
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug_pretrained.inference import load_for_inference
from mplug_saving.folder import read_valid
from mplug_testing import FormatSuite

DATA = Path(__file__).parent / "data"
SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24, "vocab_size": 30}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**SHAPE, "num_kv_heads": 2, "rope_theta": 500.0, "norm_eps": 1e-5},
    "gpt": {
        **SHAPE,
        "position": "learned",
        "max_position_embeddings": 12,
        "bias": True,
        "tie_embeddings": True,
        "activation": "gelu",
    },
}


class TestMegatron(FormatSuite):
    plugin = "megatron"
    folder = str(DATA / "llama")


def words(kind: str, folder: Path, **changes: Any) -> list[str]:
    """The command that imports a checkpoint; the settings of the default run's preset do not apply."""
    settings = {**KINDS[kind], **changes}
    own = [word for name, value in settings.items() for word in ("--set", f"model.{name}={value}")]
    options = ["--name", "imported", "--model", kind, "--set", "model.preset=null", "--set", "trainer.seq_length=12"]
    return ["checkpoint", "import", "--from", "megatron", str(folder), *options, "--set", "trainer.device=cpu", *own]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_the_imported_run_are_those_of_megatron(kind: str, tmp_path: Path, cli_here: Cli) -> None:
    result = cli_here(*words(kind, DATA / kind))
    assert result.returncode == 0, result.stderr
    assert f"parameters of '{DATA / kind}/iter_0000007'" in result.stdout
    path = tmp_path / "runs" / "imported" / "checkpoints" / "step_00000000"
    assert read_valid(path)["step"] == 0
    model = load_for_inference(prepare(resolve(Registry(), saved_settings(path.parent.parent), {})), path)
    model.module.eval()
    expected = load_file(DATA / kind / "expected.safetensors")
    assert expected["logits"].std() > 0.5
    assert (logits(model, expected["tokens"]) - expected["logits"]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_layers": 3}, "model.num_layers: 3, but the checkpoint has 2"),
        ({"num_kv_heads": 4, "rope_theta": 1e4}, "num_kv_heads: 4, but the checkpoint has 2.*rope_theta: 10000.0"),
        ({"ffn_hidden_size": 32}, r"linear_fc1.weight' has shape \(2, 48, 16\), but 'blocks.0.mlp.up.weight' needs"),
        ({"vocab_size": 40}, r"'embedding.word_embeddings.weight' has shape \(32, 16\), but 'embedding.token.weight'"),
        ({"tie_embeddings": True}, "the model does not use 'output_layer.weight'"),
        ({"qk_norm": True}, "it has no counterpart of 'blocks.0.attn.k_norm', 'blocks.0.attn.q_norm'"),
    ],
)
def test_another_model_is_refused_before_anything_is_written(
    changes: dict[str, Any], sentence: str, tmp_path: Path, cli_here: Cli
) -> None:
    result = cli_here(*words("llama", DATA / "llama", **changes))
    assert result.returncode == 2
    assert re.search(sentence, result.stderr, re.DOTALL), result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "llama" / "iter_0000007", tmp_path / "checkpoint")
    (folder / ".metadata").write_bytes(pickle.dumps({"a": Evil(tmp_path / "owned")}))
    with pytest.raises(UsageError, match=r"cannot read '.*metadata'.*copy the checkpoint again"):
        MegatronFolder(folder)
    torch.save({"args": Evil(tmp_path / "owned")}, folder / "common.pt")
    shutil.copy(DATA / "llama" / "iter_0000007" / ".metadata", folder / ".metadata")
    assert MegatronFolder(folder).arguments == {}
    assert not (tmp_path / "owned").exists()


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "llama" / "iter_0000007", tmp_path / "checkpoint")
    for file in folder.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:2000])
    read, name = MegatronFolder(folder), "decoder.final_layernorm.weight"
    with pytest.raises(UsageError, match=r"distcp'.*copy the checkpoint again"):
        read.read(name, (0,), read.shapes[name])
    with pytest.raises(UsageError, match="no Megatron checkpoint in the format torch_dist; name the folder"):
        MegatronFolder(tmp_path)


def test_the_arguments_are_numbers_texts_and_flags() -> None:
    """The checkpoint's arguments also have an enumeration of a class that is not installed here, and a dtype."""
    arguments = MegatronFolder(DATA / "llama").arguments
    assert arguments["num_layers"] == 2
    assert arguments["normalization"] == "RMSNorm"
    assert not {"attention_backend", "params_dtype"} & arguments.keys()
