"""Load a running server with many clients: `python -m tests.serve.load http://127.0.0.1:8000 --clients 200`.

Every client sends the same greedy prompt as one other does. Both must get the same text, and nothing may be lost.
Prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def ask(server: str, number: int, tokens: int) -> tuple[str, int, float]:
    prompt = f"This is the text of client {number // 2}. It begins"
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "user": str(number)}).encode()
    headers = {"Authorization": f"Bearer {os.environ.get('TAMIS_API_KEY', '')}"}
    began = time.monotonic()
    with urllib.request.urlopen(urllib.request.Request(f"{server}/v1/completions", body, headers), timeout=600) as got:
        answer = json.load(got)
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"], time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.serve.load", description=__doc__)
    parser.add_argument("server")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    began = time.monotonic()
    with ThreadPoolExecutor(options.clients) as pool:
        answers = list(pool.map(lambda n: ask(options.server, n, options.tokens), range(options.clients)))
    seconds, times = time.monotonic() - began, sorted(taken for _, _, taken in answers)
    mixed_up = sum(a[0] != b[0] for a, b in zip(answers[::2], answers[1::2], strict=False))
    total = sum(count for _, count, _ in answers)
    result = {
        "clients": options.clients,
        "answered": len(answers),
        "mixed_up": mixed_up,
        "tokens_per_s": round(total / seconds, 1),
        "median_s": round(statistics.median(times), 2),
        "slowest_s": round(times[-1], 2),
    }
    print(json.dumps(result))
    return 1 if mixed_up else 0


if __name__ == "__main__":
    sys.exit(main())
