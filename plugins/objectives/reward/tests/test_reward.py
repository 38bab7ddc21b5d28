"""Losses, gradients and figures of reward models, beside formulas in plain torch; and the same under layouts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mplug import Run, UsageError, Widths
from mplug.model.build import build_model
from mplug.training.assembly import Parts, build
from mplug.training.batch_parts import without_extra_targets
from mplug_pretrained import ExportOptions, format_named
from mplug_pretrained.adapter_files import load_adapters
from mplug_pretrained.public_load import fill_from, open_published, weights_of
from mplug_pretrained.transfer import fill_theirs
from mplug_testing.harness import in_fp64, tiny_run, train_steps
from mplug_testing.objectives import ObjectiveSuite

PAIRS: dict[str, Any] = {
    "data.name": "mock",
    "data.documents": 5,
    "data.pairs": True,
    "kernels.default": None,
    "trainer.seq_length": 24,
    "optimizer.lr": 0.02,
    "objectives.reward.center_coefficient": 0.05,
    "objectives.reward.init_std": 0.5,
}
LORA: dict[str, Any] = {"adapters.lora.rank": 3}
SCORE = "head.loss.score.weight"


class TestReward(ObjectiveSuite):
    """Two micro batches of packed pairs."""

    plugin = "reward"
    settings = PAIRS
    layouts = ("tp2", "cp2", "pp2", "zero2", "fsdp2")


def last_hidden(parts: Parts, tokens: Tensor) -> Tensor:
    """[n] -> the normalised hidden vector [D] of the last token of a document that is computed alone."""
    batch = {"tokens": tokens[None], "positions": torch.arange(len(tokens))[None]}
    values: dict[str, Any] = {**batch, "keys": torch.zeros(1, dtype=torch.int64)}
    for unit in parts.model.plan.units[:-1]:
        module = parts.model.module.get_submodule(unit.name)
        values[unit.outputs[0]] = module(*(values[name] for name in unit.inputs))
    head: Any = parts.model.module.get_submodule(parts.model.plan.units[-1].name)
    return head.norm(values["hidden"])[0][0, -1]  # type: ignore[no-any-return]


def pairs_of(batch: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The tokens of both answers of each pair."""
    found = []
    for tokens, lengths in zip(batch["tokens"], batch["document_lengths"], strict=True):
        own = tokens.split(lengths.tolist())
        found += [(own[at], own[at + 1]) for at in range(0, len(own) // 2 * 2, 2) if len(own[at]) and len(own[at + 1])]
    return found


@pytest.mark.wide("suites", quick=["whole"])
@pytest.mark.parametrize("adapters", [{}, LORA], ids=["whole", "lora"])
def test_losses_gradients_and_figures_are_those_of_the_formula(adapters: dict[str, Any]) -> None:
    """Each answer is computed alone. With adapters, the head is trained beside them."""
    parts = build(tiny_run(in_fp64({**PAIRS, **adapters})))
    batches = [*parts.train_loader.loader.take(8)]
    parts.stepper.forward_backward(parts.train_loader.step_of(batches), 1)
    found = {piece.name: piece.gradient.clone() for piece in parts.pieces}
    weight = dict(parts.model.module.named_parameters())[SCORE]
    scores = torch.stack(
        [
            torch.stack([weight[0] @ last_hidden(parts, tokens) for tokens in pair])
            for batch in batches
            for pair in pairs_of(batch)
        ]
    )
    chosen, rejected = scores.unbind(dim=1)
    losses = torch.log(1 + torch.exp(rejected - chosen)) + 0.05 * (chosen + rejected) ** 2
    parts.model.sinks.begin_step()
    losses.sum().backward()
    scores, chosen, rejected, losses = (one.detach() for one in (scores, chosen, rejected, losses))
    assert SCORE in found
    assert "head.project.weight" not in found
    whole = torch.cat([piece.gradient.flatten() for piece in parts.pieces]).norm()
    for piece in parts.pieces:
        assert float((found[piece.name] - piece.gradient).norm()) <= 1e-11 * float(whole), piece.name

    parts.stepper.forward_backward(parts.train_loader.step_of(batches), 1)
    result = parts.stepper.update(0.0, 0.0)
    assert (float(result.loss), int(result.tokens)) == (pytest.approx(float(losses.mean()), rel=1e-12), len(losses))
    figures = {
        "accuracy": (chosen > rejected).double().mean(),
        "margin": (chosen - rejected).mean(),
        "mean_reward": scores.mean(),
    }
    for figure, value in figures.items():
        assert float(result.statistics[figure]) == pytest.approx(float(value), rel=1e-11), figure


def of_file(path: Path, **fields: Any) -> dict[str, Any]:
    lines = [{"prompt": "ab", "chosen": "cde" * n, "rejected": "fg" * n, "margin": n / 4} for n in range(1, 5)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    settings = {name: value for name, value in PAIRS.items() if name not in ("data.documents", "data.pairs")}
    settings |= {"data.name": "preferences", "data.path": str(path), "data.validation_path": str(path)}
    return {
        **settings,
        "trainer.global_batch_size": 4,
        "data.max_pairs": 1,
        "data.keep_end": True,
        "trainer.seq_length": 32,
        **fields,
    }


def test_margins_of_lines_are_subtracted_and_answers_are_scored_at_their_end_mark(tmp_path: Path) -> None:
    settings = of_file(tmp_path / "pairs.jsonl", **{"data.margin": True, "objectives.reward.center_coefficient": 0.0})
    parts = build(tiny_run(in_fp64(settings)))
    batches = [*parts.train_loader.loader.take(4)]
    weight, losses = dict(parts.model.module.named_parameters())[SCORE], []
    for batch in batches:
        for chosen, rejected in pairs_of(batch):
            assert int(chosen[-1]) == int(rejected[-1]) == 256  # the end of text of the tokenizer of bytes
            number = (len(chosen) - 3) // 3
            with torch.no_grad():
                scores = [float(weight[0] @ last_hidden(parts, tokens)) for tokens in (chosen, rejected)]
            losses.append(torch.nn.functional.softplus(torch.tensor(scores[1] - scores[0] + number / 4).double()))
    parts.stepper.forward_backward(parts.train_loader.step_of(batches), 1)
    result = parts.stepper.update(0.0, 0.0)
    assert len(losses) == int(result.tokens) == 4
    assert float(result.loss) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-7)


def test_data_without_the_last_token_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"scores an answer at its last token.*set data\.keep_end=true"):
        tiny_run(of_file(tmp_path / "pairs.jsonl", **{"data.keep_end": False}))


def test_samples_that_only_fill_up_an_evaluation_count_no_pair() -> None:
    parts = build(tiny_run(in_fp64({**PAIRS, "trainer.micro_batch_size": 4})))
    whole = next(iter(parts.train_loader.loader.take(8)))
    (cut,) = without_extra_targets([whole], 3)
    three = {name: one[:3] if len(one) == 4 else one for name, one in whole.items()}
    found, expected = (parts.stepper.outputs(parts.train_loader.step_of([one]))[0] for one in (cut, three))
    assert int(found["num_targets"]) == int(expected["num_targets"]) > 0
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-12)


REFUSED: dict[str, dict[str, Any]] = {
    "needs micro batches with 'sequences', which data/mock does not supply": {"data.pairs": False},
    "has no loss for tokens further ahead; set model.num_mtp_layers=0": {
        "model.name": "llama",
        "model.ffn_hidden_size": 40,
        "model.num_mtp_layers": 1,
    },
    "has weights of the losses of targets": {"data.loss_weights": True},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_computed_is_refused_before_it_starts(sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        build_model(tiny_run({**PAIRS, **REFUSED[sentence]}))


def written(parts: Parts, run: Run, folder: Path) -> Path:
    """A folder with the model of a run in Hugging Face's form."""
    values = {name: one.data for name, one in parts.model.parameters().items()} | parts.model.states()
    export = format_named("huggingface").format.export(run, parts.model, ExportOptions(None, 1 << 30))

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return values[name][tuple(slice(one, one + size) for one, size in zip(start, shape, strict=True))]

    def value_of(tensor: str, dtype: str) -> Tensor:
        found = torch.empty(export.conversion.shape(tensor), dtype=getattr(torch, dtype))
        fill_theirs(export.conversion.public[tensor], found, read)
        return found

    folder.mkdir()
    export.write(folder, value_of)
    return folder


def begun_with(folder: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    """The parameters of a model that begins with a folder."""
    run = tiny_run(in_fp64({**settings, "trainer.seed": 5}))
    parts = build(run)
    _, opened = open_published(folder)
    fill_from(opened, run, parts.model, weights_of(parts.model))
    return {name: one.data for name, one in parts.model.parameters().items()}


def require_equal_scores(settings: dict[str, Any], folder: Path) -> None:
    """An export gives the library's scores, and begins a run with the same weights."""
    transformers = pytest.importorskip("transformers")
    run = tiny_run(in_fp64(settings))
    parts = build(run)
    own = {name: one.data.clone() for name, one in parts.model.parameters().items()}
    written(parts, run, folder)
    library = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    library.set_experts_implementation("eager")  # grouped products compute no fp64
    tokens = torch.arange(3, 20)
    with torch.no_grad():
        expected = own[SCORE] @ last_hidden(parts, tokens)
        found = library(tokens[None]).logits[0]
    assert found.shape == (1,)
    assert float(abs(found - expected)[0]) < 1e-5 * float(abs(expected)[0])  # the library computes angles in fp32

    again = begun_with(folder, settings)
    unequal = {name for name, one in own.items() if not torch.equal(one, again[name])}
    assert unequal <= {"head.project.weight"}, "the folder has no projection"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.wide("families", quick=["untied"])
def test_an_export_gives_the_librarys_scores_and_begins_a_run(tied: bool, tmp_path: Path) -> None:
    require_equal_scores({**PAIRS, **UNTIED, "model.tie_embeddings": tied}, tmp_path / "scores")


KINDS = ["deepseek_v2", "deepseek_v3", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "mixtral"]
KINDS += ["qwen2", "qwen3", "qwen3_moe", "qwen3_next"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.wide("families", quick=[])
def test_an_export_of_a_family_gives_the_librarys_scores(kind: str, tmp_path: Path) -> None:
    from config_fields import SILENT, described, forms, tiny

    settings = {
        f"model.{name}": value for name, value in described(tiny(kind, **SILENT.get(kind, {}))).model_dump().items()
    }
    require_equal_scores({**PAIRS, **settings, "model.name": forms()[kind][0]}, tmp_path / "scores")


def test_the_folder_of_a_language_model_begins_a_reward_model(tmp_path: Path) -> None:
    settings = {**UNTIED, "kernels.default": None}
    run = tiny_run(in_fp64(settings))
    parts = build(run)
    own = {name: one.data.clone() for name, one in parts.model.parameters().items()}
    again = begun_with(written(parts, run, tmp_path / "logits"), {**PAIRS, **UNTIED})
    assert again.keys() - own.keys() == {SCORE}
    assert all(torch.equal(one, again[name]) for name, one in own.items())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft")
@pytest.mark.parametrize("kind", ["lora", "dora", "classes"])
@pytest.mark.wide("families", quick=["lora"])
def test_adapters_and_scores_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    """PEFT computes our scores with our folder, and what it saves then begins a run with the same values."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    from peft_models import write_adapters

    classes = {"data.name": "mock", "data.vocab_size": 3, "objectives.classify.labels": ["a", "b", "c"]}
    objective = classes if kind == "classes" else PAIRS
    settings = {**objective, **UNTIED, **LORA, "adapters.lora.dora": kind == "dora", "kernels.default": None}
    plain = tiny_run(in_fp64({**UNTIED, "kernels.default": None}))
    base = written(build(plain), plain, tmp_path / "base")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_adapters(build_model(tiny_run(in_fp64(settings))), ours)
    parts = with_adapters(ours, settings)
    tokens, own = torch.arange(3, 20), {name: one.data for name, one in parts.model.parameters().items()}
    library = transformers.AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=len(own[SCORE]), dtype=torch.float64
    )
    model = peft.PeftModel.from_pretrained(library, ours).double().eval()
    with torch.no_grad():
        expected = own[SCORE] @ last_hidden(parts, tokens)
        assert torch.allclose(model(tokens[None]).logits[0], expected, rtol=1e-5)
        with model.disable_adapter():
            assert not torch.allclose(model(tokens[None]).logits[0], expected, rtol=1e-2)
    model.save_pretrained(theirs)
    assert json.loads((theirs / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    again = with_adapters(theirs, {**settings, "adapters.lora.base": str(base)}).model.parameters()
    assert all(torch.equal(one, again[name]) for name, one in own.items() if "adapter" in name or name == SCORE)


def with_adapters(folder: Path, settings: dict[str, Any]) -> Parts:
    """The parts of a run that begins with a folder of PEFT."""
    run = tiny_run(in_fp64({**settings, "adapters.lora.path": str(folder)}))
    parts = build(run)
    load_adapters(run, parts.model, parts.pieces)
    return parts


def test_adapters_of_a_language_model_begin_a_reward_model(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from peft_models import write_adapters

    settings, chat = {**PAIRS, **UNTIED, **LORA}, tmp_path / "chat"
    write_adapters(build_model(tiny_run(in_fp64({**UNTIED, **LORA, "kernels.default": None}))), chat)
    found = (build(tiny_run(in_fp64(settings))), with_adapters(chat, settings))
    first, own = (one.model.parameters()[SCORE] for one in found)
    assert torch.equal(first, own)


def test_an_export_that_the_library_has_no_class_for_is_refused() -> None:
    settings = {**PAIRS, **UNTIED, "model.name": "granite"}
    for form, more in (("huggingface", {}), ("peft", LORA)):
        run = tiny_run({**settings, **more})
        with pytest.raises(UsageError, match="no class with a head of scores for 'GraniteForCausalLM'"):
            format_named(form).format.export(run, build(run).model, ExportOptions(None, 1 << 30))


def test_a_frozen_head_would_freeze_the_scores_and_is_refused() -> None:
    with pytest.raises(UsageError, match=f"'head' also freezes the scores '{SCORE}'"):
        build_model(tiny_run({**PAIRS, "model.frozen": ["head"]}))


def test_beside_a_narrower_model_scores_learn_at_the_rate_of_a_table() -> None:
    """With the base model's own widths, a run trains as without one; a vector of scores has m outputs and one input."""
    base = {"model.mup_base": {"hidden_size": 32}}
    plain, beside = (train_steps({**PAIRS, **UNTIED, **more}) for more in ({}, base))
    assert beside.losses == plain.losses
    wide = build_model(tiny_run({**PAIRS, **UNTIED, "model.mup_base": {"hidden_size": 16}}))
    assert wide.placements[SCORE].parameter.widths == Widths(2.0, 1.0)


UNTIED: dict[str, Any] = {
    "model.name": "llama",
    "model.vocab_size": 64,
    "model.hidden_size": 32,
    "model.num_layers": 2,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.ffn_hidden_size": 40,
}
