"""Load a running server with many clients: `python -m tests.serve.load http://127.0.0.1:8000 --clients 200`.

Every client sends the same greedy prompt as one other does. Both must get the same text, and nothing may be lost.
`--words 4000 8000` makes prompts of so many words, about as many tokens. Prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

WORDS = "the of and to in is was for on that by this with you it not or be are from at as your all have new more an"


def prompt_of(pair: int, words: list[int]) -> str:
    draw = random.Random(pair)
    text = " ".join(draw.choices(WORDS.split(), k=draw.randint(*words)))
    return f"This is the text of client {pair}. It begins {text}".rstrip()


def ask(server: str, number: int, tokens: int, words: list[int]) -> tuple[str, dict[str, int], float]:
    prompt = prompt_of(number // 2, words)
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "user": str(number)}).encode()
    headers = {"Authorization": f"Bearer {os.environ.get('TAMIS_API_KEY', '')}"}
    began = time.monotonic()
    with urllib.request.urlopen(urllib.request.Request(f"{server}/v1/completions", body, headers), timeout=600) as got:
        answer = json.load(got)
    return answer["choices"][0]["text"], answer["usage"], time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.serve.load", description=__doc__)
    parser.add_argument("server")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate")
    parser.add_argument("--words", type=int, nargs=2, default=[0, 0], help="fewest and most words of a prompt")
    options = parser.parse_args()
    began = time.monotonic()
    with ThreadPoolExecutor(options.clients) as pool:
        answers = list(
            pool.map(lambda n: ask(options.server, n, options.tokens, options.words), range(options.clients))
        )
    seconds, times = time.monotonic() - began, sorted(taken for _, _, taken in answers)
    mixed_up = sum(a[0] != b[0] for a, b in zip(answers[::2], answers[1::2], strict=False))
    read, written = (sum(usage[f"{part}_tokens"] for _, usage, _ in answers) for part in ("prompt", "completion"))
    result = {
        "clients": options.clients,
        "answered": len(answers),
        "mixed_up": mixed_up,
        "tokens_per_s": round(written / seconds, 1),
        "prompt_tokens_per_s": round(read / seconds, 1),
        "median_s": round(statistics.median(times), 2),
        "slowest_s": round(times[-1], 2),
    }
    print(json.dumps(result))
    return 1 if mixed_up else 0


if __name__ == "__main__":
    sys.exit(main())
