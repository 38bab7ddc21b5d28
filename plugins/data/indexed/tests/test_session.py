"""A first session: texts to a tokenizer, to a corpus, to a run on two processes, resumed, and to text again."""

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from mplug_indexed.beside import tokenizer_of
from mplug_indexed.preprocess.job import Job, preprocess
from mplug_indexed.preprocess.sources import find_sources
from warm import run_module

from mplug import UsageError
from mplug_tokenization import describe_tokenizer, keep_tokenizer


@pytest.mark.wide("session")
def test_the_session_of_the_docs_makes_a_corpus_trains_and_samples(tmp_path: Path) -> None:
    def mplug(*words: str, status: int = 0) -> str:
        finished = run_module("mplug", *words, cwd=tmp_path, environment={**os.environ, "OMP_NUM_THREADS": "1"})
        assert finished.returncode == status, finished.stdout + finished.stderr
        return finished.stdout + finished.stderr

    texts = [f"{a} times {b} is {a * b}, and {a} plus {b} is {a + b}." for a in range(30) for b in range(30)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    mplug("data", "train-tokenizer", "texts.jsonl", "--vocab-size", "384")
    tokenizer = ("--tokenizer", "huggingface", "--tokenizer-file", "tokenizer.json")
    made = mplug("data", "preprocess", "texts.jsonl", *tokenizer, "--append-eod", "--workers", "2")
    told = shlex.split(next(line for line in made.splitlines() if line.startswith("train on it: mplug ")))[4:]
    assert told == ["train", "--data", "indexed", "--set", "data.path=texts", "--set", "model.vocab_size=384"]
    mplug("data", "preprocess", "texts.jsonl", *tokenizer, "--append-eod", "--output", "again")
    (tmp_path / "tokenizer.json").unlink()
    assert texts[0] in mplug("data", "inspect", "texts")
    assert "every token is below 384" in mplug("data", "verify", "texts")
    small = {
        "trainer.steps": 4,
        "trainer.seq_length": 32,
        "trainer.global_batch_size": 4,
        "trainer.eval_every": 0,
        "checkpoint.every": 2,
    }
    words = tuple(f"--set={name}={value}" for name, value in small.items())
    refused = mplug(*told[:-2], *words, "--set=model.vocab_size=256", status=2)
    assert "made with a tokenizer of 384 tokens, and model.vocab_size=256 is smaller" in refused
    mplug(*told, *words, "--parallel", "dp2", "--name", "first")
    mplug("train", "--resume", "--name", "first", "--set=trainer.steps=6")
    run = tmp_path / "runs" / "first"
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    record = json.loads((run / "record.json").read_text())["tokenizer"]
    beside = json.loads((tmp_path / "texts.tokenizer.json").read_text())
    assert (record["name"], record["vocab_size"], record["eod"]) == ("huggingface", 384, 0)
    assert record["fingerprint"] == beside["fingerprint"]
    assert mplug("generate", "--prompt", "2 times 3 is", "--tokens", "5").startswith("2 times 3 is")
    mplug("data", "merge", "texts", "again", "--output", "twice")
    mplug("data", "blend", "texts=0.7", "twice=0.3", "--tokens", "1000", "--write", "blend.yaml")
    mplug("train", "--config", "blend.yaml", *words, "--name", "blend", "--set=trainer.steps=1")


def test_corpora_of_two_tokenizers_are_refused_before_launch(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("text")
    sources = find_sources([str(tmp_path / "t.txt")], None, None)
    first = describe_tokenizer("bytes", {})
    preprocess(Job(tmp_path / "one", sources, first))
    preprocess(Job(tmp_path / "two", sources, first))
    assert tokenizer_of([tmp_path / "one", tmp_path / "two", tmp_path / "none"], 300) == tokenizer_of(
        [tmp_path / "one"], None
    )
    keep_tokenizer(replace(first, options={"other": 1}), tmp_path / "two")
    with pytest.raises(UsageError, match="so their token numbers differ in meaning"):
        tokenizer_of([tmp_path / "one", tmp_path / "two"], None)
