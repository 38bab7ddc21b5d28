"""Documents that are rearranged to fill in the middle."""

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("tokenizers")


from indexed_files import EOD, FIM_TOKENS, FOLDER, ONE, REARRANGED, build, windows, write

# Fill in the middle.

PRE, MID, SUF = FIM_TOKENS.values()


def documents_of(row: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token in row:
        if token == EOD:
            found.append([])
        else:
            found[-1].append(token)
    return found


def put_together(document: list[int]) -> tuple[list[int], bool]:
    """(prefix, middle and suffix in the text's order, whether the suffix came first) of a rearranged document."""
    assert document[0] == PRE
    suffix, middle = document.index(SUF), document.index(MID)
    if suffix > 1 or middle < suffix:
        return document[1:suffix] + document[middle + 1 :] + document[suffix + 1 : middle], False
    return document[middle + 1 :] + document[2:middle], True


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_rearranged_documents_hold_the_text_but_for_three_tokens(spm_rate: float) -> None:
    config = {"path": ONE, "split": "1"}
    plain = windows(build(config, seq_length=40), 60)
    found = windows(build({**config, **REARRANGED, "fim_rate": 1.0, "fim_spm_rate": spm_rate}, seq_length=40), 60)
    rearranged = 0
    for before, after in zip(plain, found, strict=True):
        for old, new in zip(documents_of(before), documents_of(after), strict=True):
            if PRE not in new:
                assert new == old
                continue
            text, suffix_first = put_together(new)
            assert text == old[:-3]
            assert suffix_first or spm_rate == 0 or new.index(SUF) == 1
            rearranged += 1
    assert rearranged > 60


def test_a_rate_is_the_share_of_rearranged_documents() -> None:
    path = str(write(FOLDER / "long", [np.full(200, 7)] * 300))
    config = {"path": path, "split": "1", "samples": "epoch", **REARRANGED}
    rows = windows(build({**config, "fim_rate": 0.3, "fim_spm_rate": 0.25}, seq_length=100), 590)
    found = [row for row in rows if PRE in row]
    assert 0.24 < len(found) / len(rows) < 0.36
    assert 0.15 < sum(row[1] == SUF for row in found) / len(found) < 0.36
