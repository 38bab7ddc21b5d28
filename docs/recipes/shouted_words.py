"""Write conversations with answers in two ways, and pairs that prefer one of them.

    python docs/recipes/shouted_words.py

`chats.jsonl` asks to repeat a word. Half of the answers are in capital letters, the other half are not. `pairs.jsonl`
has other words; the chosen answer is in capital letters, the rejected one is not.
"""

import json
import random
from pathlib import Path

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
CHATS, PAIRS = 1500, 400
SEED = 48


def words(count: int, rng: random.Random) -> list[str]:
    """Different words of two to four syllables."""
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = (rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(2, 4)))
        found["".join(syllables)] = None
    return list(found)


def main() -> None:
    """Write both files into the current folder."""
    rng = random.Random(SEED)
    drawn = words(CHATS + PAIRS, rng)

    def asked(word: str) -> dict[str, str]:
        return {"role": "user", "content": f"Say {word}"}

    def answered(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": text}

    chats = [
        {"messages": [asked(word), answered(word.upper() if number % 2 else word)]}
        for number, word in enumerate(drawn[:CHATS])
    ]
    pairs = [
        {"prompt": [asked(word)], "chosen": [answered(word.upper())], "rejected": [answered(word)]}
        for word in drawn[CHATS:]
    ]
    for name, lines in (("chats.jsonl", chats), ("pairs.jsonl", pairs)):
        Path(name).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
