"""Energon's states as plain data, and back."""

import json
from typing import Any

import pytest

pytest.importorskip("megatron.energon")

from megatron.energon.state import FlexState
from mplug_energon.states import from_plain, to_plain

from mplug_testing.samples import kept


@pytest.mark.parametrize(
    "value",
    [
        None,
        (1, "a", (2.5, None)),
        [True, [1, 2], b"", b"\0\xff"],
        {"a": (1,), 3: "b", ("k", 0): [2]},
        FlexState(rng=b"abc", inner=FlexState(n=1)),
        tuple(range(100)),
        [1 << 40, *range(40)],
        [True] * 40,
    ],
)
def test_a_checkpoint_restores_every_kind_of_value(value: Any) -> None:
    back = from_plain(kept(to_plain(value)))
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_unknown_types_are_refused_and_no_object_is_made_from_a_name() -> None:
    with pytest.raises(TypeError, match="contains a object"):
        to_plain([object()])
    with pytest.raises(TypeError, match="contains the unknown kind 'Popen'"):
        from_plain({"$": "Popen", "of": {"args": "true"}})
    json.dumps(to_plain(FlexState(a=(1, 2))))
