"""Text from published models: that of the library, and what is refused before weights are read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import Cli
from torch import Tensor

transformers = pytest.importorskip("transformers")

from published import Made  # noqa: E402
from published_cases import quick  # noqa: E402

# Generation.


def with_tokenizer(folder: Path) -> Any:
    """Give a folder a byte-level tokenizer, with a start token that its post-processor adds, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "</s>", "<|user|>", "<|answer|>"]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate([*special, *alphabet])}, []))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = (
        "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|answer|>{% endif %}"
    )
    made.save_pretrained(folder)
    return made


@pytest.mark.wide("families")
@pytest.mark.parametrize("family", quick("gpt2"))
def test_greedy_text_is_that_of_the_library(family: str, models: Made, tmp_path: Path, cli_here: Cli) -> None:
    """64 tokens, once after a prompt and once as an answer in the folder's chat template; then up to an end token."""
    tokenizer, theirs = with_tokenizer(shutil.copytree(models[family][0], tmp_path / "folder")), models[family][1]
    prompt = tokenizer("What is 2 + 3?", return_tensors="pt").input_ids
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": " Hello "}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids

    def expected(tokens: Tensor) -> Tensor:
        """[tokens of the prompt and 64 more]."""
        options = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "pad_token_id": 0}
        return theirs.generate(tokens, max_new_tokens=64, **options)[0]

    fields = json.loads((tmp_path / "folder" / "config.json").read_text())
    kernel = ("--attention", "reference") if fields.get("sliding_window") else ()
    words = ("generate", "--pretrained", "folder", "--tokens", "64", "--temperature", "0", *kernel, "--prompt")
    result = cli_here(*words, "What is 2 + 3?")
    assert result.returncode == 0, result.stderr
    assert result.stdout == tokenizer.decode(expected(prompt), skip_special_tokens=True) + "\n"
    answer = expected(chat)[chat.shape[1] :]
    result = cli_here(*words, " Hello ", "--chat")
    assert result.returncode == 0, result.stderr
    assert result.stdout == tokenizer.decode(answer, skip_special_tokens=True) + "\n"
    end, place = max(((int(token), answer.tolist().index(token)) for token in answer), key=lambda pair: pair[1])
    assert place > 0
    (tmp_path / "folder" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    shorter = cli_here(*words, " Hello ", "--chat").stdout
    assert shorter == tokenizer.decode(answer[:place], skip_special_tokens=True) + "\n"


@pytest.mark.wide("families")
def test_many_prompts_give_the_texts_that_each_gives_alone(models: Made, tmp_path: Path, cli_here: Cli) -> None:
    """From a file, in a batch, in lanes with and without pages, under tp2, and each alone."""
    with_tokenizer(shutil.copytree(models["gpt2"][0], tmp_path / "folder"))
    (tmp_path / "some.txt").write_text("Why?\nWhat is 2 + 3?\nWhy?\n")
    words = ("generate", "--pretrained", "folder", "--tokens", "12", "--seed", "3", "--temperature", "2")
    files = ("--prompts", "some.txt", "--output")
    result = cli_here(*words, *files, "all.jsonl", "--batch-size", "3")
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["Why?", "What is 2 + 3?", "Why?"]
    assert lines[0]["completion"] != lines[2]["completion"], "a prompt that comes again gets another text"
    alone = cli_here(*words, "--prompt", lines[1]["prompt"])
    assert alone.stdout == lines[1]["prompt"] + lines[1]["completion"] + "\n", alone.stderr
    result = cli_here(*words, *files, "divided.jsonl", "--batch-size", "2", "--parallel", "tp2")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "divided.jsonl").read_text() == (tmp_path / "all.jsonl").read_text()
    for more in (("--batch-size", "1"), ("--batch-size", "2", "--cache-tokens", "32")):
        result = cli_here(*words, *files, "lanes.jsonl", *more)
        assert result.returncode == 0, result.stderr
        assert (tmp_path / "lanes.jsonl").read_text() == (tmp_path / "all.jsonl").read_text()
    stop = lines[1]["completion"][5:7]
    printed = cli_here(*words, "--prompts", "some.txt", "--stop", stop).stdout.splitlines()
    shorter = json.loads(printed[1])
    assert (shorter["completion"], shorter["ended"]) == (lines[1]["completion"].partition(stop)[0], "stop")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--prompts", "some.txt", "--prompt", "a"), "--prompt is one prompt, and --prompts a file of them"),
        (("--output", "o"), "--output is the file for the texts of --prompts"),
        (("--cache-tokens", "9"), "--cache-tokens is the room that the texts of --prompts share"),
        (("--prompts", "some.txt", "--output", "some.txt"), "both name 'some.txt'"),
        (("--prompts", "some.txt", "--output", "none/o"), "cannot write --output 'none/o'"),
        (("--prompts", "long.txt"), "'long.txt', line 2 has 101 tokens, and the model supports 96"),
        (("--prompt", "a\udcff"), "--prompt has bytes that are no characters in UTF-8"),
        (("--parallel", "cp2"), "divides the sequence of a sample (cp=2)"),
        (("--prompts", "some.txt", "--output", "earlier", "--parallel", "cp2"), "divides the sequence of a sample"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_weights_are_read(
    words: tuple[str, ...], sentence: str, models: Made, tmp_path: Path, cli_here: Cli
) -> None:
    with_tokenizer(shutil.copytree(models["gpt2"][0], tmp_path / "folder"))
    (tmp_path / "some.txt").write_text("Why?\n")
    (tmp_path / "long.txt").write_text("a\n" + "x" * 100)
    (tmp_path / "earlier").write_text("texts of another command")
    refused = cli_here("generate", "--pretrained", "folder", *words)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert sentence in refused.stderr
    assert len(refused.stderr.splitlines()) == 1, refused.stderr
    assert (tmp_path / "earlier").read_text() == "texts of another command"
    assert (tmp_path / "some.txt").read_text() == "Why?\n"


def test_a_run_that_begins_with_a_published_model_reads_text_by_the_tokenizer_of_the_folder(
    models: Made, tmp_path: Path, cli_here: Cli
) -> None:
    """Bytes would be other tokens of the model: it would train on noise."""
    with_tokenizer(shutil.copytree(models["gpt2"][0], tmp_path / "folder"))
    words = ("config", "show", "--pretrained", "folder", "--set", "trainer.seq_length=64")
    shown = cli_here(*words)
    assert shown.returncode == 0, shown.stderr
    data = yaml.safe_load(shown.stdout)["data"]
    assert data["tokenizer"] == "huggingface"
    assert data["tokenizer_options"]["path"] == str(tmp_path / "folder" / "tokenizer.json")
    own = yaml.safe_load(cli_here(*words, "--set", "data.tokenizer=bytes", "--set", "data.tokenizer_options={}").stdout)
    assert (own["data"]["tokenizer"], own["data"]["tokenizer_options"]) == ("bytes", {})


def test_what_cannot_be_generated_is_refused(models: Made, tmp_path: Path, cli_here: Cli) -> None:
    folder = shutil.copytree(models["gpt2"][0], tmp_path / "folder")
    template = folder / "chat_template.jinja"

    def refused(sentence: str, *options: str, of: str = "folder") -> None:
        result = cli_here("generate", *(("--pretrained", of) if of else ()), *options)
        assert result.returncode == 2, result.stdout + result.stderr
        assert sentence in result.stderr

    refused("has no tokenizer that an installed plugin reads (tokenizer.json)")
    with_tokenizer(folder)
    refused("the model supports 96; shorten it", "--prompt", "x" * 100)
    refused("and --name and --step a run; use one of them", "--name", "first")
    (tmp_path / "runs" / "told").mkdir(parents=True)
    (tmp_path / "runs" / "told" / "config.yaml").write_text("")
    refused("it is a run: use --name told", of="runs/told")
    refused("'absent' does not exist", of="absent")
    template.write_text("{{ raise_exception('no users') }}")
    refused("the chat template of 'folder' fails for these messages: no users; change the messages", "--chat")
    template.unlink()
    refused("'folder' has no chat template", "--chat")
