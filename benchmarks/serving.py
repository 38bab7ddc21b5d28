"""A server under load: `mplug serve` with many clients, malformed requests, and a restart.

    mplug train --name first && python benchmarks/serving.py --name first [--clients 50] [--seconds 120]

Three parts, each against a server that this script starts:

- clients: each sends a request after the other, half of them streamed, greedy. Every answer must be that of `mplug
  generate` for its prompt, which the script asks first. Printed: requests, errors, tokens/s, and the time to the first
  token and to the end, as the median and the 99th percentile.
- malformed: 200 requests that no server can answer. Each must have a status of 400 to 499 with a sentence, while
  clients go on without an error.
- restart: SIGTERM under load, and a new server on the same port. Every request either ends with its whole answer, or is
  refused or not connected before it has one; clients then send it again, so no request stays without its answer.
"""

import argparse
import http.client
import itertools
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

PROMPTS = ("def ", "class Parser", "import os\n", "    return self.", "# A comment", "for line in ", "x = [", "if not ")
TOKENS = 32


@dataclass
class Seen:
    """What clients have seen: seconds to the first token and to the end, statuses of errors, wrong answers."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    num_wrong: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="a run in runs/")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--port", type=int, default=8765)
    options = parser.parse_args()
    expected = generated(options.name)
    server = start(options)
    seen = load(options, expected, options.seconds)
    tokens = len(seen.whole) * TOKENS / options.seconds
    print(f"{options.clients} clients, {options.seconds:g} s: {len(seen.whole)} answers, {tokens:,.0f} tokens/s")
    print(f"  errors {sum(seen.errors.values())} {dict(seen.errors)}, answers unlike generate {seen.num_wrong}")
    for name, values in (("first token", seen.first), ("whole answer", seen.whole)):
        print(
            f"  {name}: median {statistics.median(values):.2f} s, 99% {sorted(values)[int(0.99 * len(values))]:.2f} s"
        )
    results: list[Seen] = []
    background = threading.Thread(target=lambda: results.append(load(options, expected, 20)))
    background.start()
    statuses = malformed(options.port, 200)
    background.join()
    num_errors = sum(results[0].errors.values())
    print(f"200 malformed requests: {dict(statuses)}; meanwhile {len(results[0].whole)} answers, {num_errors} errors")
    background = threading.Thread(target=lambda: results.append(load(options, expected, 30, again=True)))
    background.start()
    time.sleep(5)
    server.send_signal(signal.SIGTERM)
    print(f"stopped under load: exit status {server.wait(60)}")
    server = start(options)
    background.join()
    after, answers = results[1], len(results[1].whole)
    print(f"restarted under load: {answers} answers, {after.num_wrong} unlike generate; again {dict(after.errors)}")
    server.send_signal(signal.SIGTERM)
    sys.exit(server.wait(60))


def generated(name: str) -> dict[str, str]:
    """The greedy texts of `mplug generate`."""
    with tempfile.TemporaryDirectory() as folder:
        prompts, output = Path(folder) / "prompts.jsonl", Path(folder) / "texts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
        words = ["--prompts", prompts, "--output", output, "--tokens", TOKENS, "--temperature", 0, "--name", name]
        subprocess.run([sys.executable, "-m", "mplug", "generate", *map(str, words)], check=True, capture_output=True)
        found = map(json.loads, output.read_text().splitlines())
        return {one["prompt"]: one["completion"] for one in found}


def start(options: argparse.Namespace) -> subprocess.Popen[str]:
    """A server that listens."""
    words = ["--name", options.name, "--port", str(options.port), "--lanes", str(options.lanes), "--queue", "1000"]
    command = [sys.executable, "-m", "mplug", "serve", *words]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    if "serving" not in (line := server.stdout.readline()):
        sys.exit(f"the server has not started: {line}")
    return server


def load(options: argparse.Namespace, expected: dict[str, str], seconds: float, *, again: bool = False) -> Seen:
    """Let clients send requests for some seconds. `again`: what has no answer is sent again until it has one."""
    seen, end = Seen(), time.monotonic() + seconds

    def client(number: int) -> None:
        prompts = itertools.cycle(random.Random(number).sample(PROMPTS, len(PROMPTS)))
        while time.monotonic() < end:
            prompt = next(prompts)
            while (reason := asked(options.port, prompt, expected[prompt], seen, streamed=number % 2 == 0)) and again:
                seen.errors[reason] += 1
                time.sleep(0.2)
            if reason:
                seen.errors[reason] += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(options.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def asked(port: int, prompt: str, expected: str, seen: Seen, *, streamed: bool) -> str:
    """Send a request; returns why it has no answer, or nothing."""
    begin, first, text = time.monotonic(), None, ""
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": streamed}
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        if response.status != 200:
            return str(response.status)
        if streamed:
            is_done = False
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    is_done = True
                elif line.startswith(b"data: "):
                    part = json.loads(line[6:])
                    if "error" in part:
                        return "ended by an error"
                    first = first or time.monotonic()
                    text += part["choices"][0]["text"]
            if not is_done:
                return "cut"
        else:
            text = json.loads(response.read())["choices"][0]["text"]
        connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        return type(error).__name__
    seen.whole.append(time.monotonic() - begin)
    seen.first += [] if first is None else [first - begin]
    seen.num_wrong += text != expected
    return ""


def malformed(port: int, count: int) -> Counter[int]:
    """The statuses of broken requests; ends with an error at a status that is not 400 to 499, or without a sentence."""
    made, statuses = random.Random(1), Counter[int]()
    whole = {"prompt": "def ", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "n": 1, "stop": ["x"], "seed": 3}
    bad = [None, "", -1, 1e99, [], {}, "a" * 9, [None], {"a": 1}, True, 2**80]
    for number in range(count):
        body = json.dumps(whole).encode()
        match number % 5:
            case 0:
                body = body[: made.randrange(1, len(body))]
            case 1:
                body = bytes(made.randrange(128, 256) for _ in range(40))
            case 2:
                body = json.dumps({**whole, f"field{number}": 1}).encode()
            case 3:
                value = made.choice([one for one in bad if one is not None])
                body = json.dumps({**whole, "prompt": value if not isinstance(value, str) or not value else 7}).encode()
            case 4:
                body = json.dumps(
                    {**whole, made.choice(["max_tokens", "n", "top_p"]): made.choice([-1, "x", 2**80, [1]])}
                ).encode()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", made.choice(["/v1/completions", "/v1/chat/completions"]), body)
        response = connection.getresponse()
        answer = json.loads(response.read())
        if not 400 <= response.status < 500 or not answer["error"]["message"]:
            sys.exit(f"status {response.status} for {body[:200]!r}: {answer}")
        statuses[response.status] += 1
        connection.close()
    return statuses


if __name__ == "__main__":
    main()
