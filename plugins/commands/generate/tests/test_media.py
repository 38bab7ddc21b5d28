"""Texts after prompts with pictures: a cache, layouts and recordings give the tokens of full recomputation."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import seeing_runs
import torch
from mplug_mock import Mock
from seeing_runs import QWEN_VL, WINDOWS

from mplug import Run, UsageError, hookimpl
from mplug.model.build import allocate_parts, build_model
from mplug.model.memory import initialize
from mplug.run.prepare import prepare
from mplug.training.loop import train
from mplug_sampling.decoding import ALONE, Alone, Ranks, sample
from mplug_sampling.sampler import Sampler, processor_of, sampling_run
from mplug_sampling.sampling import Sampling, sample_key
from mplug_sampling.streams import Media
from mplug_sampling.token_steps import Replays
from mplug_streams import Medium, own_rows
from mplug_testing import run_workers
from mplug_testing.harness import as_rank, tiny_config
from mplug_testing.recording import Operations

Image = pytest.importorskip("PIL.Image")
MODEL: dict[str, Any] = {
    **QWEN_VL,
    "model.init_std": 0.3,
    "trainer.seq_length": 128,
    "trainer.precision": "fp64",
    "trainer.device": "cpu",
    "trainer.global_batch_size": 4,
    "trainer.micro_batch_size": 1,
    "kernels.default": None,
}
TOWER = {**seeing_runs.TOWER, "init_std": 0.3}
TOKENS, CONTEXT = 7, 128
SIZES: list[list[tuple[int, int]]] = [[], [(16, 24)], [(8, 8), (24, 8)], [(24, 16)]]
"""The pictures of four prompts; that of the last prompt stands at its end."""
PLACES: list[list[int]] = [[], [2], [0, 3], [4]]


def built(changes: dict[str, Any], *, media: bool = True) -> tuple[Run, Sampler]:
    """A run that samples, and its sampler, whose model has initial weights."""
    sampler = Sampler(padded=True, media=media)
    run = as_rank(sampling_run(tiny_config({**MODEL, "model.vision": TOWER, **changes}), sampler))
    model = build_model(run)
    allocate_parts(run, model)
    initialize({name: one.data for name, one in model.parameters().items()}, model.placements, run.rank, 3)
    return run, sampler


def picture(size: tuple[int, int], seed: int) -> torch.Tensor:
    return torch.randint(256, (1, *size, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def prompts_of(run: Run) -> tuple[list[list[int]], list[list[Medium]]]:
    processor, prompts, media = processor_of(run), [], []
    for number, (sizes, places) in enumerate(zip(SIZES, PLACES, strict=True)):
        text = [(37 * number + 11 * place) % 250 for place in range(4 if number == 3 else 3 + 4 * number)]
        own = [processor.prepare(picture(size, 10 * number + seed)) for seed, size in enumerate(sizes)]
        for place, medium in reversed(list(zip(places, own, strict=True))):
            text[place:place] = medium.tokens
        prompts.append(text)
        media.append(own)
    return prompts, media


def texts(
    run: Run,
    sampler: Sampler,
    chosen: slice = slice(None),
    ranks: Alone = ALONE,
    replays: Replays | None = None,
) -> list[list[int]]:
    """The tokens that follow each prompt."""
    prompts, media = prompts_of(run)
    prompts, media = prompts[chosen], media[chosen]
    found: list[list[int]] = [[] for _ in prompts]
    plan = sampler.model.plan
    given = Media(
        processor_of(run), plan, media.__getitem__, partial(own_rows, plan=plan, mesh=run.mesh, rank=run.rank)
    )

    def take(number: int, token: int) -> bool:
        found[number].append(token)
        return False

    keys = [sample_key(0)] * len(prompts)
    sample(sampler, prompts, keys, TOKENS, CONTEXT, Sampling(1.0), take, ranks, replays, given)
    return found


def recomputed(changes: dict[str, Any]) -> list[list[int]]:
    """The texts of one process, which computes tower and text again for every token."""
    run, sampler = built(changes)
    sampler.uncached = "the test says so"
    return texts(run, sampler)


KINDS = {"3": {}, "2.5": {"model.vision": {**TOWER, **WINDOWS}, "model.rope_division": "contiguous"}}


@pytest.mark.wide("families", quick=["3"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_gives_the_tokens_of_full_recomputation_and_runs_the_tower_once(kind: str) -> None:
    run, sampler = built(KINDS[kind])
    assert sampler.uncached == sampler.growing == ""
    calls: list[int] = []
    sampler.model.module.get_submodule("tower.merger").register_forward_hook(lambda *_: calls.append(1))
    expected = recomputed(KINDS[kind])
    assert texts(run, sampler) == expected
    assert len(calls) == 1
    sampler.growing = "the test says so"
    assert texts(run, sampler) == expected
    assert len(calls) == 2
    assert [texts(run, sampler, slice(one, one + 1))[0] for one in range(4)] == expected, "each alone"
    assert len({token for text in expected for token in text}) > 10


def of_rank(changes: dict[str, Any]) -> list[list[int]]:
    run, sampler = built(changes)
    return texts(run, sampler, ranks=Ranks(run, sampler))


WIDE = pytest.mark.wide("layouts")


@pytest.mark.wide("families")
@pytest.mark.parametrize(
    ("layout", "world", "changes"),
    [
        ("tp2", 2, {}),
        ("pp2", 2, {}),
        pytest.param(
            "tp4", 4, {"model.num_kv_heads": 4, "model.vision": {**TOWER, "num_attention_heads": 4}}, marks=WIDE
        ),
        pytest.param("tp2pp2", 4, KINDS["2.5"], marks=WIDE),
        pytest.param("dp2", 2, {}, marks=WIDE),
        pytest.param("pp4", 4, {}, marks=WIDE),
        pytest.param("pp2", 2, {"parallel.pp.schedule": "zb-v", "model.num_layers": 4}, marks=WIDE),
    ],
)
def test_a_layout_gives_the_tokens_of_one_process(layout: str, world: int, changes: dict[str, Any]) -> None:
    alone = {name: value for name, value in changes.items() if not name.startswith("parallel.")}
    expected = recomputed(alone)
    for found in run_workers(world, of_rank, {**changes, "parallel.layout": layout}):
        assert found == expected


def test_a_replayed_step_reads_the_positions_of_its_own_batch() -> None:
    run, sampler = built({})
    replays = Replays(Operations)
    for chosen in (slice(0, 2), slice(2, 4), slice(0, 2)):
        assert texts(run, sampler, chosen, replays=replays) == texts(run, sampler, chosen)
    assert replays.num_recorded == 3


def test_texts_that_a_window_would_cut_are_refused() -> None:
    run, sampler = built({})
    prompts, media = prompts_of(run)
    given = Media(processor_of(run), sampler.model.plan, media.__getitem__, dict)
    with pytest.raises(ValueError, match="cannot be longer than the context of 9 tokens"):
        sample(sampler, prompts, [1] * 4, TOKENS, 9, Sampling(), lambda *_: False, media=given)


def test_a_model_without_a_tower_is_refused() -> None:
    for changes in ({"model.vision": None}, {"model.name": "llama", "model.rope_division": None}):
        settings = {**MODEL, "model.vision": None, **changes}
        if "model.name" in changes:
            settings = {name: x for name, x in settings.items() if "vision" not in name and "rope" not in name}
        with pytest.raises(UsageError, match=r"prompts have images, and the model of models/.* has no part that sees"):
            sampling_run(tiny_config(settings), Sampler(media=True))


def test_a_unit_that_reads_a_stream_at_every_token_is_refused() -> None:
    _, sampler = built({})
    plan = sampler.model.plan
    block = next(unit for unit in plan.inference if unit.name == "blocks.1")
    crossed = replace(block, inputs=(*block.inputs, "vision"))
    units = tuple(crossed if unit is block else unit for unit in plan.inference)
    run, _ = built({})
    sampler.model.plan = replace(plan, inference=units)
    with pytest.raises(UsageError, match=r"the unit 'blocks.1' of models/qwen-vl needs 'vision' for every token"):
        sampler.adapt_model(run, sampler.model)


def test_text_alone_needs_no_tower() -> None:
    """Also of a run whose data has pictures."""
    _, sampler = built({"data.media": 2, "data.media_sides": [8, 24]}, media=False)
    assert [unit.name for unit in sampler.model.plan.inference][:2] == ["embedding", "blocks.0"]


# Runs of one's own.


class Letters:
    """Every byte is a token."""

    vocab_size, eod = 256, None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(tokens).decode("latin-1")

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        parts = [part for message in messages for part in message["content"]]
        return [token for part in parts for token in (self.encode(part["text"]) if "text" in part else [-1])]


@hookimpl
def letters(self: Mock) -> Letters:
    """The hook `build_tokenizer`, which the data plugin of random tokens lacks."""
    del self
    return Letters()


@pytest.mark.wide("families")
def test_a_run_continues_texts_with_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli_here: Callable[..., Any]
) -> None:
    """A picture changes the text; it stands before the text of the command line, and between parts of a file."""
    monkeypatch.setattr(Mock, "build_tokenizer", letters, raising=False)
    run = prepare(
        tiny_config({**MODEL, "model.vision": TOWER, "data.media": 1, "data.media_sides": [8, 24], "trainer.steps": 1}),
        directory=tmp_path / "runs" / "seen",
    )
    train(run)
    for name, seed in (("a", 1), ("b", 2)):
        Image.fromarray(picture((16, 16), seed)[0].numpy()).save(tmp_path / f"{name}.png")
    words = ("generate", "--tokens", "12", "--temperature", "0", "--device", "cpu")
    texts = {}
    for name in ("a", "b"):
        result = cli_here(*words, "--image", f"{name}.png", "--prompt", "xy")
        assert result.returncode == 0, result.stderr
        texts[name] = result.stdout
        assert texts[name].startswith("xy")
    assert texts["a"] != texts["b"]
    chat = cli_here(*words, "--chat", "--image", "a.png", "--prompt", "xy")  # its template supports texts only
    assert (chat.returncode, "xy" + chat.stdout) == (0, texts["a"]), chat.stderr
    parts = {name: {"type": "image", "image": f"{name}.png"} for name in "ab"}
    text = {"type": "text", "text": "xy"}
    lines = [[parts["a"], text], [text, parts["b"]], "xy", [parts["b"], text], [parts["a"], text]]
    (tmp_path / "some.jsonl").write_text("\n".join(json.dumps({"prompt": line}) for line in lines))
    result = cli_here(*words, "--prompts", "some.jsonl")
    assert result.returncode == 0, result.stderr
    found = ["xy" + json.loads(line)["completion"] + "\n" for line in result.stdout.splitlines()]
    assert (found[0], found[3], found[4]) == (texts["a"], texts["b"], texts["a"])
    assert len(set(found)) == 4
    refused = cli_here(*words, "--image", "a.png", "--prompt", "x" * 120)
    assert refused.returncode == 2
    assert "--tokens adds 12, and texts with images may have 128" in refused.stderr
