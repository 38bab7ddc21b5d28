"""Losses of files are those of the transformers library, under every layout; those of a run are its own."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("mplug_huggingface_format")

import torch
import transformers
from byte_level import byte_level
from library_models import wide
from mplug_evaluate.command import Asked, _job, command
from mplug_evaluate.report import report
from mplug_evaluate.work import Found, Job, Measured, _refuse_later_tokens, measured, objective_of, prepared
from published import model_of, save
from torch.nn.functional import cross_entropy

from mplug import UsageError
from mplug.model.build import build_model
from mplug_testing.harness import as_rank, tiny_config, tiny_run
from mplug_testing.workers import run_workers

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft")  # in the libraries
LENGTH = 16
TEXT = "the quick brown fox jumps over the lazy dog; " * 3 + "é!"
FP64 = ("--precision", "fp64", "--device", "cpu", "--set", "kernels.default=null", "--set", "trainer.compile=never")
WIDE = pytest.mark.wide("layouts")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama folder of the transformers library with a tokenizer, and two files of text in it."""
    made = tmp_path_factory.mktemp("llama")
    tokenizer = byte_level([TEXT], "<s>", size=300)
    fields = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    save(model_of(model_type="llama", vocab_size=300, num_key_value_heads=2, **fields), made, num_shards=1)
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "a.txt").write_text(TEXT)
    (made / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("brown dog", TEXT[7:90])))
    return made


def job_of(*arguments: str | int | Path) -> Job:
    asked = Asked(**command.make_context("evaluate", [*map(str, arguments)]).params)
    asked.refuse_contradictions()
    return _job(asked, None)[0]


def found_by(job: Job) -> Found:
    return measured(as_rank(prepared(job)), job)


def found_by_all(jobs: list[Job]) -> list[Found]:
    return [found_by(job) for job in jobs]


def library_loss(folder: Path, file: str, stride: int, adapters: Path | None = None) -> tuple[float, int]:
    """(mean loss, targets) of a file by the transformers library in fp64: a pass for each window of each document."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if adapters is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapters).double()
    tokenizer, text = Tokenizer.from_file(str(folder / "tokenizer.json")), (folder / file).read_text()
    texts = [json.loads(line)["text"] for line in text.splitlines()] if file.endswith(".jsonl") else [text]
    losses = list[float]()
    with torch.no_grad(), wide("llama"):
        for one in texts:
            tokens, done = torch.tensor(tokenizer.encode(one).ids), 0  # `done` tokens are predicted
            for begin in range(0, len(tokens), stride):
                window = tokens[begin : begin + LENGTH + 1]
                of_tokens = cross_entropy(model(window[None, :-1]).logits[0], window[1:], reduction="none").tolist()
                losses += of_tokens[done - begin :]
                done = begin + len(of_tokens)
                if done + 1 == len(tokens):
                    break
    return sum(losses) / len(losses), len(losses)


def require_losses(folder: Path, job: Job, results: list[Found]) -> None:
    assert job.documents is not None
    expected = [library_loss(folder, file.path.name, LENGTH) for file in job.documents]
    total = sum(loss * targets for loss, targets in expected) / sum(targets for _, targets in expected)
    for found in results:
        layout = found.layout
        assert [one.loss for one in found.rows] == [pytest.approx(loss, rel=1e-10) for loss, _ in expected], layout
        assert [one.num_tokens for one in found.rows] == [targets for _, targets in expected], layout
        assert found.total.loss == pytest.approx(total, rel=1e-10), layout


LAYOUTS = ("tp2", "pp2", "cp2", "dp2", "fsdp2")


@pytest.mark.wide("layouts", quick=["1-layouts0"])
@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (1, ("",)),
        (2, LAYOUTS),
        pytest.param(2, ("zero2",), marks=WIDE),
        pytest.param(4, ("tp2pp2", "cp2fsdp2", "pp2dp2", "tp2dp2"), marks=WIDE),
    ],
)
def test_files_have_the_loss_of_the_transformers_library_under_every_layout(
    folder: Path, world: int, layouts: tuple[str, ...]
) -> None:
    own = (
        "--pretrained",
        folder,
        "--seq-length",
        LENGTH,
        "--batch-size",
        3,
        *FP64,
        folder / "a.txt",
        folder / "b.jsonl",
    )
    jobs = [job_of("--parallel", layout, *own) for layout in layouts]
    ranks = run_workers(world, found_by_all, jobs) if world > 1 else [found_by_all(jobs)]
    for job, *results in zip(jobs, *ranks, strict=True):
        require_losses(folder, job, results)


PRESETS = {"bert": "tiny", "gpt": "nano"}


@pytest.mark.parametrize("name", PRESETS)
def test_texts_are_refused_for_an_encoder(name: str) -> None:
    """It sees the token that it would predict."""
    run = tiny_run({"model.name": name, "model.preset": PRESETS[name], "data.name": "mock"})
    with pytest.raises(UsageError, match="sees later tokens") if name == "bert" else nullcontext():
        _refuse_later_tokens(run, build_model(run))


def test_windows_of_a_stride_overlap(folder: Path) -> None:
    own = ("--pretrained", folder, "--seq-length", LENGTH, *FP64, folder / "a.txt")
    job = job_of("--stride", 5, *own)
    (found,) = found_by(job).rows
    expected, whole = library_loss(folder, "a.txt", 5), library_loss(folder, "a.txt", LENGTH)
    assert (found.loss, found.num_tokens) == (pytest.approx(expected[0], rel=1e-10), expected[1])
    assert expected[1] == whole[1]
    assert abs(expected[0] - whole[0]) > 1e-4, "more context changes the loss"
    with pytest.raises(UsageError, match="--stride 17 is more than the 16 tokens"):
        prepared(job_of("--stride", 17, *own))


def test_bits_per_byte_are_those_of_the_text_that_is_predicted(folder: Path) -> None:
    """The tokenizer states no token in front of a document, so the first one, 'the', is not predicted."""
    job = job_of("--pretrained", folder, *FP64, folder / "a.txt")
    (found,) = found_by(job).rows
    size = len(TEXT.encode()) - 3
    assert found.num_bytes == size
    assert found.bits_per_byte == pytest.approx(found.loss * found.num_tokens / math.log(2) / size)
    assert found.perplexity == pytest.approx(math.exp(found.loss))


def test_a_published_model_is_evaluated_with_adapters_of_peft(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=True)
    adapted = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), lora)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.3)
    adapted.save_pretrained(tmp_path)
    fields = ("path=" + str(tmp_path), "rank=4", "alpha=8", "dora=true")
    sets = [word for one in fields for word in ("--set", f"adapters.lora.{one}")]
    own = ("--pretrained", folder, "--adapt", "lora", "--seq-length", LENGTH, *FP64, folder / "a.txt")
    (found,) = found_by(job_of(*own, *sets)).rows
    assert found.loss == pytest.approx(library_loss(folder, "a.txt", LENGTH, tmp_path)[0], rel=1e-10)
    assert abs(found.loss - library_loss(folder, "a.txt", LENGTH)[0]) > 1e-3
    with pytest.raises(UsageError, match="name no folder with trained ones"):
        found_by(job_of(*own, *sets[2:]))


TINY = ("num_layers=2", "hidden_size=32", "num_attention_heads=4", "vocab_size=259")
SHORT = ("steps=2", "eval_every=2", "eval_samples=6", "compile=never", "seq_length=32", "precision=fp64")
CHAT = [[{"role": "user", "content": "ab" * n}, {"role": "assistant", "content": "ba" * n}] for n in range(1, 40)]


@pytest.fixture
def trained(tmp_path: Path, cli: Cli) -> list[dict[str, float]]:
    """The records of the run 'first' on packed conversations, and two files beside it."""
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in CHAT))
    (tmp_path / "a.txt").write_text(TEXT)
    fields = (*(f"model.{one}" for one in TINY), *(f"trainer.{one}" for one in SHORT), "data.path=chats.jsonl")
    run = cli("train", "--name", "first", "--data", "packed", *(word for one in fields for word in ("--set", one)))
    assert run.returncode == 0, run.stderr
    lines = (tmp_path / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def result_of(run: Cli, folder: Path, *arguments: str) -> dict[str, Any]:
    done = run("evaluate", *arguments, "--output", "found.json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    assert f"{found['total']['loss']:.4f}" in done.stdout
    return found


def test_a_run_has_its_own_validation_loss_and_that_of_other_data(
    tmp_path: Path, cli_here: Cli, trained: list[dict[str, float]]
) -> None:
    own = result_of(cli_here, tmp_path, "--name", "first")
    assert own["total"]["loss"] == pytest.approx(trained[-1]["val_loss"], rel=1e-10)
    assert own["weights"] == "runs/first/checkpoints/step_00000002"
    text = ("--data", "text", "--set", "data.path=a.txt", "--set", "data.validation_percent=50")
    (other,) = result_of(cli_here, tmp_path, *text, "--samples", "3")["results"]
    assert (other["tokens"], other["data"]) == (3 * 32, "data/text, validation: 3 samples")
    (file,) = result_of(cli_here, tmp_path, "a.txt", "--step", "2")["results"]
    assert (file["tokens"], file["bytes"]) == (len(TEXT.encode()) - 1, len(TEXT.encode()) - 1)
    refused = cli_here("evaluate", "--samples", "all", "--stride", "3")
    assert (refused.returncode, refused.stderr.count("--stride divides files")) == (2, 1)


@WIDE
def test_processes_that_the_command_starts_have_the_loss_of_one(
    tmp_path: Path, cli: Cli, trained: list[dict[str, float]]
) -> None:
    found = result_of(cli, tmp_path, "--parallel", "tp2", "--batch-size", "1")
    assert found["total"]["loss"] == pytest.approx(trained[-1]["val_loss"], rel=1e-10)
    alone, divided = (result_of(cli, tmp_path, "a.txt", *more)["total"] for more in ((), ("--parallel", "fsdp2")))
    assert alone["loss"] == pytest.approx(divided["loss"], rel=1e-10)


def test_accuracy_is_the_share_of_labels_with_the_highest_logit(folder: Path) -> None:
    """Beside the share of the most common label, and the loss of a model that knows the frequencies alone."""
    from transformers import AutoModelForCausalLM

    mock = ("--data", "mock", "--set", "data.vocab_size=3", "--samples", 6, "--seq-length", LENGTH, "--batch-size", 2)
    job = job_of("--pretrained", folder, *mock, *FP64, "--accuracy")
    (found,) = found_by(job).rows
    run = as_rank(prepared(job))
    batches = [*run.hooks.call.build_loader(run=run, split="validation").take(6)]
    labels = torch.cat([batch["labels"] for batch in batches])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad(), wide("llama"):
        logits = model(torch.cat([batch["tokens"] for batch in batches])).logits
    assert found.shares is not None
    assert found.shares.accuracy == pytest.approx(float((logits.argmax(-1) == labels).double().mean()), rel=1e-6)
    shares = labels.flatten().bincount().double() / labels.numel()
    assert found.shares.most_common == pytest.approx(float(shares.max()), rel=1e-6)
    unigram = torch.distributions.Categorical(shares).entropy()
    assert found.shares.unigram_loss == pytest.approx(float(unigram), rel=1e-6)


def test_accuracy_needs_the_whole_model_on_each_rank(folder: Path) -> None:
    job = job_of("--pretrained", folder, "--data", "mock", *FP64, "--accuracy", "--parallel", "tp2")
    with pytest.raises(UsageError, match="--accuracy needs the whole model on each rank"):
        found_by(job)


def test_a_run_with_an_objective_is_said_to_train_by_another_loss(capsys: pytest.CaptureFixture[str]) -> None:
    (row,), plain = (Measured("a.txt", 1, 3, 0.5, None),), tiny_config({})
    trained = tiny_config({"data.name": "mock", "data.pairs": True, "data.documents": 5, "objectives.dpo.beta": 0.3})
    for config, expected in ((plain, False), (trained, True)):
        report(Found((row,), "w", False, "", "fp64", 8, None, objective_of(config)), None)
        said = "the loss is the model's own, of all targets alike; the run trains by that of objectives/dpo"
        assert (said in capsys.readouterr().out) is expected
