"""Write sums of two numbers of two digits: estimates to imitate, and problems with a reward that checks the answer.

    python docs/recipes/two_digits.py

`estimates.jsonl` has conversations whose answers are near the sum: each difference from -3 to 3 is equally frequent, so
one answer in seven is right. `sums.jsonl` has other problems with their sums, which `is_right` compares with answers.
"""

import json
import random
from pathlib import Path

LARGEST_ERROR = 3
SEED = 48


def is_right(completions: list[list[dict[str, str]]], answer: list[str], **columns: object) -> list[float]:
    """The reward, as `data.rewards=[two_digits.py:is_right]`: 1 for the sum, 0 otherwise."""
    return [float(completion[0]["content"] == right) for completion, right in zip(completions, answer, strict=True)]


def main() -> None:
    """Write both files into the current folder."""
    rng = random.Random(SEED)
    problems = [(first, second) for first in range(10, 100) for second in range(10, 100)]
    rng.shuffle(problems)
    half = len(problems) // 2

    def asked(first: int, second: int) -> dict[str, str]:
        return {"role": "user", "content": f"{first}+{second}"}

    def answered(number: int) -> dict[str, str]:
        return {"role": "assistant", "content": str(number)}

    estimates = [
        {"messages": [asked(*both), answered(sum(both) + error)]}
        for both in problems[:half]
        for error in range(-LARGEST_ERROR, LARGEST_ERROR + 1)
    ]
    sums = [{"prompt": [asked(*both)], "answer": str(sum(both))} for both in problems[half:]]
    for name, lines in (("estimates.jsonl", estimates), ("sums.jsonl", sums)):
        Path(name).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
