"""Commands that read a folder or a file at an address give what they give for the same folder on the disk."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import Cli

pytest.importorskip("fsspec", reason="addresses need fsspec")
pytest.importorskip("s3fs", reason="the tests of S3 need s3fs")

from byte_level import byte_level
from mplug_store.folders import Folders
from published import model_of, save
from safetensors.torch import load_file

TEXT = "the quick brown fox jumps over the lazy dog; "
MEGATRON = Path(__file__).parents[3] / "formats" / "megatron" / "tests" / "data" / "llama"
SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24, "vocab_size": 30}
SHAPE |= {"num_kv_heads": 2, "rope_theta": 500.0, "norm_eps": 1e-5}
SETTINGS = {**{f"model.{name}": value for name, value in SHAPE.items()}, "model.preset": "null"}
SETTINGS |= {"trainer.seq_length": 12, "trainer.device": "cpu"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny llama folder of the transformers library, with a tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    own = {"vocab_size": 300, "num_key_value_heads": 2, "max_position_embeddings": 64}
    save(model_of(model_type="llama", bos_token_id=0, eos_token_id=1, **own, **sizes), folder, num_shards=1)
    byte_level([TEXT], "<s>", "</s>", size=300).save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    return folder


def moved(folder: Path, bucket: str) -> str:
    """The address of a folder that is in the bucket, and no longer on the disk."""
    address = f"{bucket}/{folder.parent.name}/{folder.name}"
    Folders().deliver(folder, address)
    shutil.rmtree(folder)
    return address


def output_of(cli: Cli, *words: str) -> str:
    done = cli(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.wide("data")
def test_generate_and_evaluate_read_a_model_and_a_text_at_addresses(
    tmp_path: Path, model: Path, bucket: str, cli: Cli
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "fox.txt").write_text(TEXT * 5)

    def outputs(folder: str, text: str) -> tuple[str, float]:
        generated = output_of(cli, "generate", "--pretrained", folder, "--prompt", "the quick", "--tokens", "9")
        output_of(cli, "evaluate", "--pretrained", folder, text, "--output", "found.json")
        return generated, json.loads((tmp_path / "found.json").read_text())["total"]["loss"]

    expected = outputs(str(model), "texts/fox.txt")
    assert expected[0].startswith("the quick")
    texts = moved(tmp_path / "texts", bucket)
    assert outputs(moved(model, bucket), f"{texts}/fox.txt") == expected


@pytest.mark.wide("data")
def test_a_checkpoint_of_another_library_is_imported_from_an_address(tmp_path: Path, bucket: str, cli: Cli) -> None:
    shutil.copytree(MEGATRON, tmp_path / "ckpt")
    words = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]

    def weights(folder: str, name: str) -> dict[str, list[float]]:
        output_of(cli, "checkpoint", "import", "--from", "megatron", folder, "--name", name, "--model", "llama", *words)
        (file,) = (tmp_path / "runs" / name / "checkpoints" / "step_00000000").glob("*.safetensors")
        return {key: tensor.tolist() for key, tensor in load_file(file).items()}

    expected = weights("ckpt", "of-disk")
    assert weights(moved(tmp_path / "ckpt", bucket), "of-store") == expected


@pytest.mark.wide("data")
def test_lm_eval_reads_a_model_at_an_address(tmp_path: Path, model: Path, bucket: str, cli: Cli) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "text.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    (tmp_path / "tasks" / "tiny.yaml").write_text(
        "{task: tiny, dataset_path: json, dataset_kwargs: {data_files: {test: tasks/text.jsonl}}, test_split: test, "
        "output_type: loglikelihood_rolling, doc_to_text: '', doc_to_target: '{{text}}', "
        "metric_list: [{metric: byte_perplexity}]}"
    )

    def perplexity(folder: str) -> float:
        words = ("--tasks", "tiny", "--include-path", "tasks", "--output", "found.json")
        output_of(cli, "lm-eval", *words, "--pretrained", folder)
        return json.loads((tmp_path / "found.json").read_text())["results"]["tiny"]["byte_perplexity,none"]

    expected = perplexity(str(model))
    assert perplexity(moved(model, bucket)) == expected
