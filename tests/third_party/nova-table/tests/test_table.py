"""Table: mplug's suite for data plugins, and the cells of a column."""

from pathlib import Path

import pytest
from nova_table.cells import cells

from mplug import UsageError
from mplug_testing import DataSuite

NOTES = Path(__file__).with_name("notes.csv")


class TestTable(DataSuite):
    plugin = "table"
    settings = {"data.path": str(NOTES)}
    examples = {"column": ["title"], "delimiter": [";"]}


def test_cells_are_those_of_the_column_whatever_the_delimiter(tmp_path: Path) -> None:
    path = tmp_path / "some.tsv"
    path.write_text("a\tb\n1, one\t2\n3\t4\n")
    assert list(cells(path, "a", "\t")) == ["1, one", "3"]
    assert list(cells(path, "b", "\t")) == ["2", "4"]
    with pytest.raises(UsageError, match=r"has no column 'a', only a\tb; set data\.column or data\.delimiter"):
        list(cells(path, "a", ","))
