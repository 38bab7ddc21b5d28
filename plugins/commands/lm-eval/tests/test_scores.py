"""Scores are those of the harness's own backend for Hugging Face models, document by document, also under layouts."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import torch
import yaml
from byte_level import byte_level
from library_models import wide
from mplug_lm_eval.command import Asked, command
from mplug_lm_eval.harness import find_tasks
from mplug_lm_eval.work import Job, prepared, results_of
from published import model_of, save
from tokenizers.processors import TemplateProcessing

from mplug_testing.harness import as_rank
from mplug_testing.workers import run_workers

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # in the libraries
WIDE = pytest.mark.wide("layouts")
TEXT = "the quick brown fox jumps over the lazy dog; "
QUESTIONS = [
    {"question": "the quick brown", "choices": [" fox", " dog jumps", " lazy"], "answer": 0},
    {"question": "over the lazy ", "choices": ["dog", "fox; the quick", "e"], "answer": 1},
    {"question": "é ü jumps", "choices": [" over", " the", " quick brown fox"], "answer": 2},
    {"question": "fox", "choices": [" jumps", " over", ";"], "answer": 0},
]
TASKS: dict[str, dict[str, Any]] = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        "num_fewshot": 1,
        "fewshot_split": "test",
    },
    "tiny_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "tiny_last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{greedy}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "tiny_until": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["e", "\n\n"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
}
ALL = ",".join(TASKS)
LENGTH = 64
"""Most tokens of the model: the first text of `tiny_rolling` has several windows."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama folder of the transformers library, whose tokenizer adds '<s>' in front, and tasks with local data."""
    made = tmp_path_factory.mktemp("llama")
    fields = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    own = {"vocab_size": 300, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    model = model_of(model_type="llama", bos_token_id=0, eos_token_id=1, pad_token_id=1, **own, **fields)
    save(model, made, num_shards=1)
    tokenizer = byte_level([TEXT], "<s>", "</s>", size=300)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(made / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    (made / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    tasks = made / "tasks"
    tasks.mkdir()
    texts = [TEXT * 4, "brown dog", "<s>jumps over"]
    greedy = [greedy_after(made, one["question"]) for one in QUESTIONS[:2]] + [" over", ""]
    documents = {
        "tiny_rolling": [{"text": text} for text in texts],
        "tiny_last_word": [{**one, "greedy": word or "x"} for one, word in zip(QUESTIONS, greedy, strict=True)],
    }
    for name, task in TASKS.items():
        lines = documents.get(name, QUESTIONS)
        (tasks / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tasks / f"{name}.jsonl")}}}
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, "test_split": "test", **data, **task}))
    return made


def greedy_after(folder: Path, text: str) -> str:
    """The most probable token after a text, by the transformers library, if it is a text of its own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(**tokenizer(text, return_tensors="pt")).logits
    return str(tokenizer.decode([int(logits[0, -1].argmax())]))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is downloaded, and the library's cache of data sets is a new one."""
    import datasets

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return


def job_of(folder: Path, *arguments: str) -> Job:
    own = ("--pretrained", str(folder), "--include-path", str(folder / "tasks"), "--precision", "fp64", "--log-samples")
    own += ("--bootstrap-iters", "10")
    fixed = ("--device", "cpu", "--set", "kernels.default=null", "--output", str(folder / "results.json"))
    asked = Asked(**command.make_context("lm-eval", [*own, *fixed, *arguments]).params)
    asked.refuse_contradictions()
    return asked.job(None)[0]


def results(job: Job) -> dict[str, Any] | None:
    run, sampler = prepared(job)
    found = results_of(as_rank(run), sampler, job)
    return None if found is None else {name: found[name] for name in ("results", "samples", "n-shot")}


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    """The results of the harness's own backend, in fp64."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    own = HFLM(pretrained=str(folder), dtype="float64", device="cpu", batch_size=3)
    manager, names = find_tasks(tuple(TASKS), (folder / "tasks",))
    with wide("llama"):
        found = simple_evaluate(model=own, tasks=names, task_manager=manager, bootstrap_iters=10)
    assert found is not None
    return dict(found)


def require_results(found: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    assert found is not None
    for name in TASKS:
        scores, wanted = found["results"][name], expected["results"][name]
        assert scores.keys() == wanted.keys()
        for metric, value in scores.items():
            if isinstance(value, float):
                assert value == pytest.approx(wanted[metric], rel=1e-9, nan_ok=True), (name, metric)
        for one, other in zip(found["samples"][name], expected["samples"][name], strict=True):
            assert one["arguments"] == other["arguments"], "the same prompts"
            for answer, right in zip(flat(one["resps"]), flat(other["resps"]), strict=True):
                assert answer == (pytest.approx(right, rel=1e-9) if isinstance(right, float) else right), name


def flat(answers: Any) -> list[Any]:
    """The numbers and texts in nested answers."""
    if isinstance(answers, list | tuple):
        return [part for one in answers for part in flat(one)]
    return [answers]


@pytest.mark.wide("families")
def test_scores_are_those_of_the_harness_for_hugging_face_models(folder: Path, expected: dict[str, Any]) -> None:
    found = results(job_of(folder, "--tasks", ALL, "--batch-size", "3"))
    require_results(found, expected)
    texts = [flat(one["resps"])[0] for one in expected["samples"]["tiny_until"]]
    assert len(set(texts)) > 1, "the tiny model writes something"
    greedy = [flat(one["resps"])[1] for one in expected["samples"]["tiny_last_word"]]
    assert set(map(str, greedy)) == {"True", "False"}, "both cases occur"


@WIDE
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_scores_do_not_depend_on_the_layout(folder: Path, expected: dict[str, Any], layout: str) -> None:
    found, others = run_workers(2, results, job_of(folder, "--tasks", ALL, "--parallel", layout))
    require_results(found, expected)
    assert others is None


def test_the_command_prints_the_table_and_writes_the_json_of_the_harness(
    folder: Path, tmp_path: Path, cli_here: Callable[..., Any], expected: dict[str, Any]
) -> None:
    own = ("--pretrained", str(folder), "--include-path", str(folder / "tasks"), "--precision", "fp64")
    done = cli_here("lm-eval", "--tasks", "tiny_ch*", *own, "--limit", "2", "--num-fewshot", "0", "--output", "a.json")
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "a.json").read_text())
    assert (written["n-shot"]["tiny_choice"], written["n-samples"]["tiny_choice"]["effective"]) == (0, 2)
    (row,) = (line for line in done.stdout.splitlines() if "|acc_norm|" in line)
    assert f"{written['results']['tiny_choice']['acc_norm,none']:.4g}" in row
    assert "samples" not in written
    room = cli_here("lm-eval", "--tasks", "tiny_until", *own, "--max-length", "12")
    assert (room.returncode, "generates 12 tokens, and the model reads 12" in room.stderr) == (2, True)


@WIDE
def test_an_unknown_task_is_refused_and_processes_that_the_command_starts_give_the_scores_of_one(
    folder: Path, tmp_path: Path, cli: Callable[..., Any], expected: dict[str, Any]
) -> None:
    own = ("--pretrained", str(folder), "--include-path", str(folder / "tasks"), "--precision", "fp64")
    refused = cli("lm-eval", "--tasks", "tiny_choice,tiny_chioce", *own)
    assert (refused.returncode, "has no task 'tiny_chioce'" in refused.stderr) == (2, True)
    done = cli("lm-eval", "--tasks", ALL, *own, "--parallel", "tp2", "--output", "a.json", "--log-samples")
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "a.json").read_text())
    for name in ("tiny_choice", "tiny_rolling", "tiny_until"):
        for metric, value in written["results"][name].items():
            if isinstance(value, float) and "stderr" not in metric:
                assert value == pytest.approx(expected["results"][name][metric], rel=1e-9), (name, metric)
