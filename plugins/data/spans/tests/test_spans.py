"""Corrupted spans are those of a plain reference, with the published lengths, under any layout and after a resume."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mplug_spans import Spans
from mplug_spans.corruption import Corruption
from mplug_spans.lengths import lengths_of, longest
from mplug_spans.loader import SpansLoader
from numbered_samples import assert_resumes_on_other_ranks, loader_of
from splitmix import WORD, hashed
from torch.nn.functional import pad

from mplug import IGNORED, UsageError
from mplug.model.build import build_model
from mplug_testing.harness import tiny_run

LENGTHS = lengths_of(27, 0.3, 2.0)
N, V, LENGTH = LENGTHS.tokens, 300, 15
"""The tokens of a sample, those of the corpus, and the decoder's length: two more than it needs."""
SENTINELS, END, START = (310, 309, 308, 307, 306), 1, 0


inner = partial(loader_of, 2, V, N)


def corruption(key: tuple[int, str] = (5, "train"), **changes: Any) -> Corruption:
    given = {"sentinels": SENTINELS, "end": END, "start": START}
    return Corruption(key, LENGTHS, LENGTH, **{**given, **changes})


def spans(shard: tuple[int, int] = (0, 1), micro_batch_size: int = 8) -> SpansLoader:
    return SpansLoader(inner(shard, micro_batch_size), corruption(), 311)


def joined(batches: Any) -> dict[str, torch.Tensor]:
    """All samples of micro batches, in the order of their numbers; the encoder's texts have a row each."""
    batches = list(batches)
    found = {name: torch.cat([batch[name] for batch in batches]) for name in ("tokens", "labels", "sample_ids")}
    texts = [batch["encoder_tokens"][0][batch["encoder_rows"]] for batch in batches]
    places = [batch["encoder_places"][0][batch["encoder_rows"]] for batch in batches]
    found |= {"texts": torch.cat(texts), "places": torch.cat(places)}
    order = found["sample_ids"].argsort()
    return {name: values[order] for name, values in found.items()}


def parts(key: int, number: int, total: int, count: int) -> list[int]:
    """A sample's `count` lengths that sum to `total`: the borders with the smallest hashes divide it."""
    of_sample = hashed((number ^ key) & WORD)
    signed = {border: (hashed((of_sample + border) & WORD) ^ 2**63) for border in range(1, total)}
    borders = [0, *sorted(sorted(signed, key=lambda border: signed[border])[: count - 1]), total]
    return [end - begin for begin, end in pairwise(borders)]


def reference(tokens: list[int], number: int, own: Corruption) -> tuple[list[int], list[int]]:
    """(the encoder's text, the decoder's targets) of a sample."""
    noise = parts(own.keys[0], number, LENGTHS.noise, LENGTHS.spans)
    kept = parts(own.keys[1], number, N - LENGTHS.noise, LENGTHS.spans)
    text, targets, at = [], [], 0
    for sentinel, keeps, hides in zip(SENTINELS, kept, noise, strict=False):
        text += [*tokens[at : at + keeps], sentinel]
        targets += [sentinel, *tokens[at + keeps : at + keeps + hides]]
        at += keeps + hides
    return [*text, END], [*targets, END]


def test_10000_samples_are_those_of_a_plain_reference() -> None:
    own, number = corruption(), 10_000
    plain = inner(micro_batch_size=500)
    tokens = torch.cat([batch["tokens"] for batch in plain.take(number)]).tolist()
    found = joined(spans(micro_batch_size=500).take(number))
    texts, labels, written = (found[name].tolist() for name in ("texts", "labels", "tokens"))
    for n in range(number):
        text, targets = reference(tokens[n], n, own)
        assert texts[n] == text, n
        assert labels[n] == [*targets, IGNORED, IGNORED], n
        assert written[n] == [START, *targets, START], n


def test_tokens_that_the_source_does_not_count_are_no_targets() -> None:
    """The second half of each sample is padding, which the decoder reads without a loss: spans are drawn first."""
    batch = next(inner().take(8))
    text = batch["tokens"].masked_fill(torch.arange(N) >= N // 2, V)
    labels = pad(text, (0, 1), value=V)[:, 1:].masked_fill(torch.arange(N) >= N // 2 - 1, IGNORED)
    whole, found = (corruption().apply({**batch, "tokens": text, "labels": one}) for one in (text, labels))
    assert torch.equal(found["tokens"], whole["tokens"])
    assert torch.equal(found["labels"], whole["labels"].masked_fill(whole["labels"] == V, IGNORED))
    assert int((whole["labels"] == V).sum()) > 8


def test_all_divisions_into_spans_are_equally_likely() -> None:
    own = lengths_of(10, 0.4, 2.0)  # 4 tokens of noise in 2 spans, 6 kept ones in 2 parts
    drawn = Corruption((1, "train"), own, 8, sentinels=SENTINELS, end=END, start=START)
    found = [tuple(row) for row in drawn.noise_of(torch.arange(6000)).tolist()]
    counts = {one: found.count(one) for one in set(found)}
    assert (own.noise, own.spans, len(counts)) == (4, 2, 3 * 5)
    assert all(abs(count - 400) < 5 * 400**0.5 for count in counts.values()), counts


def test_lengths_are_the_published_ones() -> None:
    found = longest(512, 0.15, 3.0)
    assert found is not None
    assert (found.tokens, found.encoder, found.decoder) == (568, 512, 114)  # arXiv 1910.10683: 114 targets
    assert longest(2, 0.15, 3.0) is None
    for length in (3, 4, 37, 150):
        for density, mean in ((0.15, 3.0), (0.5, 1.0), (0.83, 7.5)):
            one = longest(length, density, mean)
            assert one is not None
            assert one.encoder <= length < lengths_of(one.tokens + 1, density, mean).encoder
    almost_all = longest(1_000_000, 0.999999, 3.0)  # half a million million tokens: a search one by one would not end
    assert almost_all is not None
    assert almost_all.encoder <= 1_000_000
    for tokens in range(2, 200):
        for density, mean in ((0.15, 3.0), (0.5, 1.0), (0.9, 8.0), (0.01, 2.0)):
            own = lengths_of(tokens, density, mean)
            assert 1 <= own.spans <= min(own.noise, tokens - own.noise)


def test_a_resume_on_another_number_of_ranks_and_in_other_micro_batches_has_the_same_samples() -> None:
    expected = assert_resumes_on_other_ranks(spans, joined)
    assert len(expected["places"].unique()) == expected["places"].numel()


def test_every_epoch_split_and_seed_has_other_spans() -> None:
    found = {tuple(corruption().noise_of(torch.tensor([n]))[0].tolist()) for n in (3, 3 + 100)}
    found |= {tuple(corruption(key).noise_of(torch.tensor([3]))[0].tolist()) for key in ((5, "validation"), (6, ""))}
    assert len(found) == 4


def test_other_settings_give_another_fingerprint() -> None:
    own = [corruption(), corruption(), corruption(end=2), corruption((6, "train"))]
    found = [SpansLoader(inner(), one, 311).fingerprint for one in own]
    assert found[0] == found[1]
    assert len(set(found)) == 3


# Through the host.

RUN: dict[str, Any] = {
    "model.name": "t5",
    "model.vocab_size": 300,
    "data.name": "spans",
    "data.of": {"name": "mock", "vocab_size": 200},
    "data.end_token": 1,
    "data.encoder_length": 23,
    "data.noise_density": 0.3,
    "data.mean_span": 2.0,
}


def run_of(**changes: Any) -> Any:
    return tiny_run({**RUN, **changes})


def test_the_source_has_samples_of_the_length_that_the_encoder_needs() -> None:
    run = run_of()
    loader = run.hooks.call.build_loader(run=run, split="train")
    batch = next(loader.take(8))
    assert batch["encoder_tokens"].shape == (1, 2 * 23)
    assert batch["tokens"].shape == (2, 16)
    assert loader.vocab_size == 300
    assert batch["tokens"][:, 1].tolist() == [299, 299]
    assert batch["encoder_tokens"].view(2, 23)[:, -2:].tolist() == [[296, 1], [296, 1]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data.of": {"name": "mok"}}, "no plugin 'mok'"),
        ({"data.of": {"name": "mock", "documents": 2}}, "document_lengths"),
        ({"data.of": {"name": "mock", "loss_weights": True}}, "loss_weights"),
        ({"data.encoder_length": 2}, "no room for a sample"),
        ({"data.encoder_length": 40}, r"need \d+ tokens; set it to that or more"),
        ({"data.noise_density": 1.0}, "noise_density"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_of(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"data.end_token": None}, "set data.end_token"), ({"data.sentinels": 2}, "4 spans, and data.sentinels is 2")],
)
def test_tokens_that_are_missing_are_refused(changes: dict[str, Any], said: str) -> None:
    run = run_of(**changes)
    with pytest.raises(UsageError, match=said):
        run.hooks.call.build_loader(run=run, split="train")


def test_the_sentinels_of_a_tokenizer_are_used() -> None:
    plugin = Spans(run_of().config.data)
    special = {f"<extra_id_{n}>": 99 - n for n in range(4)}
    plugin.__dict__["tokenizer"] = SimpleNamespace(special_tokens=special, eod=7)
    assert plugin._sentinels(200) == [99, 98, 97, 96]
    plugin.__dict__["tokenizer"].special_tokens.pop("<extra_id_3>")
    with pytest.raises(UsageError, match="4 spans, and the tokenizer of data/mock has 3"):
        plugin._sentinels(200)


def test_a_model_without_an_encoder_is_refused() -> None:
    run = run_of(**{"model.name": "gpt"})
    with pytest.raises(UsageError, match="encoder_"):
        build_model(run)
