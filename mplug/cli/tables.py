"""Plain text tables, with the same output on a terminal, in a file and in a pipe."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a header; text is left-aligned, numbers are right-aligned."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width)
            if cell[:1].isdigit() and cell.replace(",", "").replace(".", "").isdigit()
            else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def human_bytes(count: int) -> str:
    """A number of bytes in binary units: 1.50 GiB."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{size:.2f} {units[0]}"
