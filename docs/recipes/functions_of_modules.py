"""Write a JSONL file of functions of Python's standard library, each with the package that it comes from.

    python docs/recipes/functions_of_modules.py functions.jsonl

Functions of equal text are left out, and every package has at most `EACH` functions. docs/encoders.md trains on them.
"""

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("asyncio", "email", "idlelib", "multiprocessing", "tkinter", "unittest", "urllib", "xml")
EACH = 600


def functions(package: Path) -> Iterator[str]:
    """The source texts of a package's functions and methods, without indentation."""
    for file in sorted(package.rglob("*.py")):
        if {"test", "tests", "idle_test"} & {*file.relative_to(package).parts}:
            continue
        source = file.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_source_segment(source, node)
                if text and len(text) >= 80:
                    yield text


def main() -> None:
    """Write the file."""
    library, seen = Path(sysconfig.get_path("stdlib")), set[str]()
    with Path(sys.argv[1]).open("w", encoding="utf-8") as out:
        for name in PACKAGES:
            fresh = [text for text in dict.fromkeys(functions(library / name)) if text not in seen]
            seen.update(fresh)
            for text in fresh[:: max(1, len(fresh) // EACH)][:EACH]:
                out.write(json.dumps({"text": text, "label": name}) + "\n")


if __name__ == "__main__":
    main()
