"""Masks are those of a plain reference, with the rates that the config states, under any layout and after a resume."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mplug_masked.loader import MaskedLoader
from mplug_masked.masks import Masks
from numbered_samples import assert_resumes_on_other_ranks, loader_of
from splitmix import WORD, hashed

from mplug import IGNORED, UsageError
from mplug.run.prepare import check_data
from mplug_testing.harness import tiny_run
from mplug_testing.parity import require_parity

S, V, MASK = 16, 300, 300
KEPT = (0, 7)
NUMBER = 10_000
"""Samples of the statistics."""


inner = partial(loader_of, 0, V, S)


def masks(**changes: Any) -> Masks:
    given = {"rate": 0.15, "mask_share": 0.8, "random_share": 0.1, "mask": MASK, "vocab_size": V, "kept": KEPT}
    return Masks((5, "train"), **{**given, **changes})


def joined(batches: Any) -> dict[str, torch.Tensor]:
    """All samples of micro batches, in the order of their numbers."""
    batches = list(batches)
    found = {name: torch.cat([batch[name] for batch in batches]) for name in ("tokens", "labels", "sample_ids")}
    order = found["sample_ids"].argsort()
    return {name: values[order] for name, values in found.items()}


def reference(tokens: list[int], number: int, own: Masks, continuing: list[bool] | None = None) -> tuple[Any, Any]:
    """(tokens, labels) of a masked sample."""

    def drawn(draw: int, place: int) -> int:
        return hashed((hashed((number ^ own.keys[draw]) & WORD) + place) & WORD)

    def share(draw: int, place: int) -> float:
        return (drawn(draw, place) >> 40) / 2**24

    out, labels, begin = list(tokens), [IGNORED] * len(tokens), 0
    for place, token in enumerate(tokens):
        joins = continuing is not None and place > 0 and continuing[token] and tokens[place - 1] not in KEPT
        begin = begin if joins and token not in KEPT else place
        if token in KEPT or share(0, begin) >= own.rate:
            continue
        labels[place] = token
        if share(1, place) < own.mask_share:
            out[place] = MASK
        elif share(1, place) < own.mask_share + own.random_share:
            out[place] = (drawn(2, place) & (2**62 - 1)) % V
    return out, labels


@pytest.mark.parametrize("whole", [False, True])
def test_2000_samples_have_the_masks_of_a_plain_reference(whole: bool) -> None:
    number = 2000
    continuing = [n % 3 > 0 for n in range(V)] if whole else None
    own = masks(continuing=continuing)
    plain, found = (joined(loader.take(number)) for loader in (inner(), MaskedLoader(inner(), own)))
    given, out, labels = (one.tolist() for one in (plain["tokens"], found["tokens"], found["labels"]))
    for sample in range(number):
        assert (out[sample], labels[sample]) == reference(given[sample], sample, own, continuing), sample
    assert int((found["labels"] != IGNORED).sum()) > 1.5 * number


def within_bound(count: int, of: int, share: float) -> bool:
    """Whether a count is within five standard deviations of the binomial distribution."""
    return abs(count - of * share) <= 5 * (of * share * (1 - share)) ** 0.5


def test_rates_are_within_the_binomial_bound_over_10000_samples() -> None:
    plain, found = (joined(one.take(NUMBER)) for one in (inner(), MaskedLoader(inner(micro_batch_size=500), masks())))
    tokens, out, labels = plain["tokens"], found["tokens"], found["labels"]
    kept = torch.isin(tokens, torch.tensor(KEPT))
    chosen = labels != IGNORED
    assert not bool((chosen & kept).any())
    assert torch.equal(labels[chosen], tokens[chosen])
    assert torch.equal(out[~chosen], tokens[~chosen])
    number = int(chosen.sum())
    assert within_bound(number, int((~kept).sum()), 0.15)
    is_mask, is_same = (out == MASK) & chosen, (out == tokens) & chosen
    assert within_bound(int(is_mask.sum()), number, 0.8)
    assert within_bound(int(is_same.sum()), number, 0.1 + 0.1 / V)  # a random token may be the same one
    random = out[chosen & ~is_mask & ~is_same]
    assert int(random.min()) < V // 10
    assert int(random.max()) >= V - V // 10
    at_places = chosen.sum(dim=0)
    assert all(within_bound(int(count), int((~kept[:, s]).sum()), 0.15) for s, count in enumerate(at_places))


def test_a_resume_on_another_number_of_ranks_and_in_other_micro_batches_has_the_same_samples() -> None:
    assert_resumes_on_other_ranks(lambda *shard: MaskedLoader(inner(*shard), masks()), joined)


@pytest.mark.wide("data")
@pytest.mark.parametrize("layout", ["dp2", "cp2"])
def test_a_run_has_the_masks_of_one_process_under_a_layout(layout: str) -> None:
    """The loss of the first step is a function of masked tokens and labels; so is that of a resume."""
    settings = {**MOCK, "model.vocab_size": 256, "trainer.steps": 2}
    require_parity({**settings, "kernels.default": None}, layout)


def test_every_epoch_split_and_seed_has_other_masks() -> None:
    tokens = torch.arange(10, 10 + S)[None]
    given = {"tokens": tokens, "labels": tokens, "positions": torch.arange(S)[None]}
    of_epochs = [masks(rate=0.5).apply({**given, "sample_ids": torch.tensor([n])})["labels"] for n in (3, 3 + 100)]
    others = [
        Masks(key, 0.5, 0.8, 0.1, mask=MASK, vocab_size=V).apply({**given, "sample_ids": torch.tensor([3])})["labels"]
        for key in ((5, "validation"), (6, "train"))
    ]
    found = {tuple(labels[0].tolist()) for labels in (*of_epochs, *others)}
    assert len(found) == 4


def test_a_word_does_not_go_on_in_another_document() -> None:
    own = masks(rate=0.5, kept=(), continuing=[False, *[True] * (V - 1)])
    tokens = torch.arange(1, S + 1).expand(400, S)
    given = {"tokens": tokens, "labels": tokens, "sample_ids": torch.arange(400)}
    lengths = torch.tensor([[6, S - 6, 0]]).expand(400, 3)
    chosen = own.apply({**given, "document_lengths": lengths})["labels"] != IGNORED
    for part in (chosen[:, :6], chosen[:, 6:]):
        assert torch.equal(part.any(dim=1), part.all(dim=1))
    assert int((chosen[:, 0] != chosen[:, 6]).sum()) > 100


def test_tokens_that_the_source_does_not_count_are_no_targets() -> None:
    """Two documents: a prompt of 3 and an answer of 5, and a whole text of 5; then padding of 3, whose token is 0."""
    tokens = torch.arange(1, S + 1).masked_fill(torch.arange(S) >= 13, 0)
    labels = tokens.roll(-1)
    labels[[0, 1, 7, 12, 13, 14, 15]] = IGNORED
    counted = [*range(3, 8), *range(8, 13)]
    given = {"tokens": tokens[None], "labels": labels[None], "sample_ids": torch.tensor([0])}
    own = masks(rate=1.0, kept=())
    packed = own.apply({**given, "document_lengths": torch.tensor([[8, 5, 3, 0]])})
    assert (packed["labels"][0] != IGNORED).nonzero().flatten().tolist() == counted
    assert torch.equal(packed["tokens"][0, 13:], tokens[13:])
    ended = masks(rate=1.0, kept=(8,)).apply(given)  # 8 ends the first document, whose lengths are not given
    assert (ended["labels"][0] != IGNORED).nonzero().flatten().tolist() == [one for one in counted if one != 7]


def test_other_settings_give_another_fingerprint() -> None:
    found = [MaskedLoader(inner(), one).fingerprint for one in (masks(), masks(), masks(rate=0.2), masks(kept=()))]
    assert found[0] == found[1]
    assert len(set(found)) == 3


# Through the host.

MOCK = {"data.name": "masked", "data.of": {"name": "mock", "documents": 2, "vocab_size": 250}, "data.mask_token": 255}


def test_the_source_is_a_plugin_by_its_name() -> None:
    run = tiny_run(MOCK)
    assert run.config.data.of.config.documents == 2
    assert "document_lengths" in run.entries
    loader = run.hooks.call.build_loader(run=run, split="train")
    batch = next(loader.take(8))
    assert loader.vocab_size == 256
    assert batch["document_lengths"].shape[1] == 2
    chosen = batch["labels"] != IGNORED
    assert 0 < int(chosen.sum()) < batch["labels"].numel() // 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data.of": {"name": "mok"}}, "no plugin 'mok'"),
        ({"data.of": {"documents": 2}}, "the name of a data plugin"),
        ({"data.of": {"name": "mock", "documents": 200}}, "documents=200"),
        ({"data.of": {"name": "mock", "loss_weights": True}}, "loss_weights"),
        ({"data.of": {"name": "mock", "sort": 1}}, "sort"),
        ({"data.mask_share": 0.95}, "add up to more than 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        tiny_run({**MOCK, **changes})


def test_a_refusal_of_the_source_names_the_whole_path_of_its_field() -> None:
    text = {"name": "text", "path": "nowhere.txt"}
    for of, field in ((text, "data.of.path"), ({"name": "masked", "mask_token": 9, "of": text}, "data.of.of.path")):
        run = tiny_run({**MOCK, "data.of": of})
        with pytest.raises(UsageError, match=f"^{field} 'nowhere.txt' does not exist.* set {field} to"):
            check_data(run)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"data.mask_token": None}, "set data.mask_token"), ({"data.whole_words": True}, "data.whole_words needs")],
)
def test_a_tokenizer_without_what_masks_need_is_refused(changes: dict[str, Any], said: str) -> None:
    run = tiny_run({**MOCK, **changes})
    with pytest.raises(UsageError, match=said):
        run.hooks.call.build_loader(run=run, split="train")


def test_the_usual_mask_token_is_found_and_special_tokens_are_kept() -> None:
    from mplug_masked import Masked

    run = tiny_run(MOCK)
    plugin = Masked(run.config.data.model_copy(update={"mask_token": None}))
    plugin.__dict__["tokenizer"] = SimpleNamespace(special_tokens={"<mask>": 9, "[CLS]": 3}, eod=2)
    found = plugin._masks(250, 1, "train")
    assert found.mask == 9
    assert found.kept.tolist() == [2, 3, 9]
