"""Write sums of two numbers of two digits: rounded answers to imitate, and problems with a reward that checks them.

    python docs/recipes/two_digits.py

`rounded.jsonl` has conversations whose answers are rounded down to tens: each problem has one exact answer among nine.
`sums.jsonl` has other problems with their sums, which `is_right` compares with answers. `equation.jinja` is a chat
template that writes both as equations: 66+48=114<end>.
"""

import json
import random
from pathlib import Path

LINES = 9
SEED = 48
TEMPLATE = "{% for one in messages %}{{ one.content }}{{ '=' if one.role == 'user' else '<end>' }}{% endfor %}"


def is_right(completions: list[list[dict[str, str]]], answer: list[str], **columns: object) -> list[float]:
    """The reward, as `data.rewards=[two_digits.py:is_right]`: 1 for the sum, 0 otherwise."""
    return [float(completion[0]["content"] == right) for completion, right in zip(completions, answer, strict=True)]


def main() -> None:
    """Write the files into the current folder."""
    rng = random.Random(SEED)
    problems = [(first, second) for first in range(10, 100) for second in range(10, 100)]
    rng.shuffle(problems)
    border = len(problems) * 3 // 4

    def asked(first: int, second: int) -> dict[str, str]:
        return {"role": "user", "content": f"{first}+{second}"}

    def answered(number: int) -> dict[str, str]:
        return {"role": "assistant", "content": str(number)}

    rounded = [
        {"messages": [asked(*both), answered(sum(both) if line == 0 else sum(both) // 10 * 10)]}
        for both in problems[:border]
        for line in range(LINES)
    ]
    sums = [{"prompt": [asked(*both)], "answer": str(sum(both))} for both in problems[border:]]
    for name, lines in (("rounded.jsonl", rounded), ("sums.jsonl", sums)):
        Path(name).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    Path("equation.jinja").write_text(TEMPLATE, encoding="utf-8")


if __name__ == "__main__":
    main()
