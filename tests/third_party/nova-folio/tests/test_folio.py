"""Folio: mplug's suite for formats, and what is folio's own: the page."""

import json
from pathlib import Path

import pytest
from nova_folio import Folio

from mplug import UsageError
from mplug_testing import FormatSuite


class TestFolio(FormatSuite):
    plugin = "folio"


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"family": "gpt", "settings": {}})])
def test_a_damaged_page_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "folio.json").write_text(text)
    for method in ("describe", "open"):
        with pytest.raises(UsageError, match=r"cannot read '.*folio\.json'"):
            getattr(Folio(Folio.Config()), method)(tmp_path)
