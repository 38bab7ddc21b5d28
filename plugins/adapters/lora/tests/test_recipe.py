"""The recipe 'lora': from the folder of a published model and conversations to a new folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("mplug_huggingface")
pytest.importorskip("mplug_packed")

from byte_level import byte_level  # noqa: E402

from mplug.cli import main  # noqa: E402
from mplug_testing.parity import require_parity  # noqa: E402

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
SMALL = ("trainer.steps=12", "trainer.seq_length=64", "trainer.global_batch_size=2", "trainer.precision=fp32")
SMALLER = (*SMALL, "adapters.lora.rank=4", "optimizer.lr=1e-2", "schedule.warmup_steps=1", "trainer.device=cpu")


def folder_of_a_tiny_model(folder: Path) -> None:
    """A llama with a tokenizer of bytes and a chat template."""
    tokenizer = byte_level(["How are you?", "Fine, thanks."], "<s>", "</s>", size=280)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(1)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 128}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=280, **heads, **sizes)).save_pretrained(folder)
    fast.save_pretrained(folder)


CHATS: list[Any] = [
    [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"It is {n}, sir."}] for n in range(30)
]


def written(path: Path) -> Path:
    path.write_text("".join(f"{json.dumps({'messages': chat})}\n" for chat in CHATS))
    return path


def run(*words: str) -> str:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done.output


def test_the_recipe_trains_adapters_on_answers_and_writes_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of_a_tiny_model(tmp_path / "model")
    written(tmp_path / "chats.jsonl")
    sets = [word for one in ("data.path=chats.jsonl", *SMALLER) for word in ("--set", one)]
    run("train", "--name", "chat", "--recipe", "lora", "--pretrained", "model", *sets)
    lines = [json.loads(line) for line in (tmp_path / "runs/chat/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.2
    config = (tmp_path / "runs/chat/config.yaml").read_text()
    assert "name: packed" in config
    assert "tokenizer: huggingface" in config
    assert str(tmp_path / "model") in config
    run("checkpoint", "export", "--to", "huggingface", "merged", "--name", "chat")
    run("checkpoint", "export", "--to", "peft", "adapters", "--name", "chat")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokens = tokenizer.apply_chat_template(CHATS[3], return_tensors="pt", return_dict=True)["input_ids"]
    with torch.no_grad():
        found = merged(tokens, labels=tokens).loss
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert found < base(tokens, labels=tokens).loss - 0.1
    unchanged = merged.state_dict()["model.embed_tokens.weight"]
    assert torch.equal(unchanged, base.state_dict()["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "adapters/adapter_config.json").read_text())["r"] == 4


PACKED: dict[str, Any] = {
    "model.name": "llama",
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.ffn_hidden_size": 48,
    "model.vocab_size": 259,
    "model.init_std": 0.06,
    "trainer.seq_length": 64,
    "kernels.attention": "reference",
    "data.name": "packed",
    "adapters.lora.rank": 3,
    "adapters.lora.dropout": 0.2,
}


WIDE = pytest.mark.wide("layouts")


@pytest.mark.wide("layouts")
@pytest.mark.parametrize(
    "layout", ["cp2", *(pytest.param(f"cp2{more}", marks=WIDE) for more in (" parallel.cp.method=all_gather", "dp2"))]
)
def test_packed_answers_under_context_parallelism_train_adapters_as_one_process_does(
    layout: str, tmp_path: Path
) -> None:
    require_parity({**PACKED, "data.path": str(written(tmp_path / "chats.jsonl"))}, layout)
