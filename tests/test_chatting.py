"""A run on conversations is asked by its own template, and its answers end where the template ends them."""

import json
from pathlib import Path

from command_line import Cli

from mplug.registry.entry_points import Registry
from mplug_tokenization.chat import ChatVocabulary
from mplug_tokenization.templates import Template, read_template

STEPS = (
    "--steps=60",
    "--lr=1e-2",
    "--seq-length=64",
    "--batch-size=4",
    "schedule.warmup_steps=2",
    "trainer.eval_every=0",
)
MODEL = ("model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=2", "model.vocab_size=259")


def vocabulary(template: Template) -> ChatVocabulary:
    registry = Registry()
    bytes_of_text = registry.load(registry.find("tokenizers", "bytes"))
    return ChatVocabulary(bytes_of_text(bytes_of_text.Config()).build_tokenizer(), template.special, template)


def test_answers_end_with_the_mark_of_the_template() -> None:
    for name, mark in (("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>")):
        found = vocabulary(read_template(name, {}))
        assert [found.texts[token] for token in found.end_tokens] == [mark]
        text = found.decode(found.encode_chat([{"role": "user", "content": "Why?"}]))
        assert "Why?" + mark in text
        assert text.count("assistant") == 1
    assert (
        vocabulary(Template("plain", "{% for m in messages %}{{ m.content }}\n{% endfor %}")).end_tokens == frozenset()
    )
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    seen = vocabulary(read_template("chatml", {}))
    tokens = seen.encode_chat([{"role": "user", "content": parts}])
    place = tokens.index(-1)
    assert seen.decode(tokens[:place]) == "<|im_start|>user\n"
    assert seen.decode(tokens[place + 1 :]) == "What?<|im_end|>\n<|im_start|>assistant\n"


def test_a_run_on_conversations_answers_a_question_and_stops(cli_here: Cli, tmp_path: Path) -> None:
    said = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(said)}\n" * 64)
    words = (
        "--data",
        "packed",
        "--data",
        "chats.jsonl",
        "--name",
        "chat",
        "trainer.device=cpu",
        "trainer.log_every=60",
    )
    trained = cli_here("train", *words, *STEPS, *MODEL)
    assert trained.returncode == 0, trained.stderr
    assert " targets/s)  " in trained.stdout
    assert trained.stdout.endswith('; sample from it with: mplug generate --name chat --chat --prompt "..."\n')
    (tmp_path / "runs" / "newer").mkdir()
    (tmp_path / "runs" / "newer" / "config.yaml").write_text((tmp_path / "runs" / "chat" / "config.yaml").read_text())
    ask = ("generate", "--tokens", "20", "--temperature", "0", "--device", "cpu")
    answer = cli_here(*ask, "--chat", "--prompt", "Why?")
    assert (answer.returncode, answer.stdout) == (0, "So.\n"), answer.stderr
    assert "reading 'runs/chat': the newer run 'runs/newer' has no checkpoint" in answer.stderr
    exact = cli_here(*ask, "--name", "chat", "--chat", "--prompt", "Why?", "--precision", "fp64")
    assert (exact.returncode, exact.stdout) == (0, "So.\n"), exact.stderr
    written = cli_here(*ask, "--name", "chat", "--prompt", "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
    assert written.stdout.endswith("assistant\nSo.\n")
    (tmp_path / "prompts.txt").write_text("Why?\n")
    many = cli_here(*ask, "--name", "chat", "--chat", "--prompts", "prompts.txt", "--output", "answers.jsonl")
    assert (many.returncode, many.stdout) == (0, "wrote 1 text to 'answers.jsonl'\n"), many.stderr
    line = json.loads((tmp_path / "answers.jsonl").read_text())
    assert (line["completion"], line["ended"]) == ("So.", "end")
