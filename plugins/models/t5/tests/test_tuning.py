"""T5 learns pairs, and `mplug generate` writes the answers that it has learned."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mplug.cli import main

ANSWERS = {"what has Ada?": "blue", "what has Bob?": "a red car", "what has Cid?": "seven", "what has Dora?": "none"}
SETTINGS = {
    "model.num_layers": 1,
    "data.path": "pairs.jsonl",
    "data.validation_path": "pairs.jsonl",
    "data.encoder_length": 16,
    "trainer.seq_length": 12,
    "trainer.steps": 100,
    "trainer.global_batch_size": 8,
    "trainer.micro_batch_size": 8,
    "trainer.device": "cpu",
    "trainer.precision": "fp32",
    "trainer.compile": "never",
    "trainer.eval_every": 0,
    "optimizer.lr": 5e-3,
    "schedule.warmup_steps": 10,
}


def called(*words: str) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output


@pytest.mark.wide("families")
def test_a_tuned_model_answers_as_its_pairs_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"input": text, "target": answer}) for text, answer in ANSWERS.items()] * 8
    Path("pairs.jsonl").write_text("\n".join(lines))
    Path("prompts.txt").write_text("\n".join(ANSWERS))
    chosen = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    called("train", "--model", "t5", "--preset", "tiny", "--data", "pairs", "--name", "pairs", *chosen)
    how = ("--temperature", "0", "--tokens", "12", "--device", "cpu", "--output", "answers.jsonl")
    called("generate", "--name", "pairs", "--prompts", "prompts.txt", *how)
    written = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert {one["prompt"]: one["completion"] for one in written} == ANSWERS
    assert all(one["ended"] == "end" for one in written)
