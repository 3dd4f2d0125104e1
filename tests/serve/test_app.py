"""The server, in a process of its own, answers OpenAI's client, a browser and odd input."""

import concurrent.futures
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tamis.generate.load import load_model
from tamis.generate.sample import Sampling, generate_text
from tests.browser import browser_window, needs_chromium
from tests.faults.launched import as_operators_do
from tests.generate.test_load import save
from tests.model.tiny import tiny_model

KEY = "a secret key"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("served"), tiny_model("train.seq_len=256", "model.name=tiny"))


@pytest.fixture(scope="module")
def server(checkpoint):
    """A real server with a key and a chat template; yields its address, and must end well on SIGTERM."""
    template = checkpoint.parent / "chat.jinja"
    template.write_text(TEMPLATE)
    command = [sys.executable, "-m", "tamis", "serve", str(checkpoint), "--port", "0", "--rows", "4"]
    process = subprocess.Popen(
        [*command, "--chat-template", str(template)],
        stdout=subprocess.PIPE,
        text=True,
        env={**as_operators_do(), "TAMIS_API_KEY": KEY},
    )
    assert process.stdout is not None
    address = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+:\d+", line)))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            break
        except OSError:
            time.sleep(0.05)
    yield address
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) in (0, -signal.SIGTERM)


@pytest.fixture(scope="module")
def client(server):
    from openai import OpenAI

    return OpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def alone(checkpoint):
    loaded = load_model(checkpoint, device="cpu")

    def text(prompt: str, count: int, sampling: Sampling) -> str:
        s = sampling
        pieces = generate_text(loaded.model, loaded.tokenizer, prompt, count, s.temperature, s.seed, s.top_k, s.top_p)
        return "".join(pieces)

    return text


def post(server: str, body: object, path: str = "/v1/completions", key: str = KEY) -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server + path, data, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_openais_client_gets_what_generate_gives(client, alone):
    assert [model.id for model in client.models.list()] == ["tiny"]
    greedy = client.completions.create(model="tiny", prompt="Fellow", max_tokens=20, temperature=0)
    assert greedy.choices[0].text == alone("Fellow", 20, Sampling(0.0))
    assert (greedy.usage.prompt_tokens, greedy.choices[0].finish_reason) == (6, "length")
    several = client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, max_tokens=9, seed=5, temperature=0.9)
    expected = [alone(prompt, 9, Sampling(0.9, seed=seed)) for prompt in ("ab", "cd") for seed in (5, 6)]
    assert [choice.text for choice in several.choices] == expected
    whole = alone("Fellow", 30, Sampling(0.0))
    cut = client.completions.create(model="tiny", prompt="Fellow", max_tokens=30, temperature=0, stop=[whole[9:11]])
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (whole[: whole.find(whole[9:11])], "stop")
    logged = client.completions.create(
        model="tiny", prompt="Fellow", max_tokens=3, temperature=0, logprobs=2, echo=True
    )
    assert logged.choices[0].text.startswith("Fellow") and len(logged.choices[0].logprobs.top_logprobs[0]) == 2


def test_streams_and_chats_of_openais_client(client, alone):
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt="Hello",
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == alone("Hello", 12, Sampling(0.0))
    assert chunks[-1].usage.completion_tokens == 12
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=8, temperature=0
    )
    assert chat.choices[0].message.content == alone("<user>Hi<assistant>", 8, Sampling(0.0))


def test_many_clients_at_once_get_their_own_texts(server, alone):
    prompts = [f"client {number} asks" for number in range(24)]
    bodies = [{"prompt": prompt, "max_tokens": 10, "temperature": 0, "user": prompt} for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda body: post(server, body), bodies))
    for prompt, (status, answer) in zip(prompts, answers, strict=True):
        assert (status, answer["choices"][0]["text"]) == (200, alone(prompt, 10, Sampling(0.0)))


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "JSON"),
        ([1], 400, "the body"),
        ({}, 400, "prompt"),
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": []}, 400, "empty"),
        ({"prompt": [999999]}, 400, "999999"),
        ({"prompt": "a" * 300}, 400, "256"),
        ({"prompt": "a", "max_tokens": 10**12}, 400, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "top_p": 0}, 400, "top_p"),
        ({"prompt": "a", "n": 1000}, 400, "n:"),
        ({"prompt": ["a"] * 129}, 400, "128"),
        ({"prompt": "a", "colour": 1}, 400, "unknown parameter 'colour'"),
        ({"prompt": "a", "presence_penalty": 1}, 400, "presence_penalty"),
        ({"prompt": "a", "model": "gpt-9"}, 404, "'tiny' is"),
        (b"[" * 100_000, 400, "JSON"),
    ],
)
def test_bad_input_gets_one_clear_error_and_the_server_continues(server, body, status, words):
    found, answer = post(server, body)
    assert found == status and words in answer["error"]["message"]
    assert post(server, {"prompt": "a", "max_tokens": 1})[0] == 200


def test_the_key_and_the_host_name_are_checked(server):
    assert post(server, {"prompt": "a"}, key="wrong")[0] == 401
    connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=60)
    connection.request("GET", "/v1/models", headers={"Host": "evil.example", "Authorization": f"Bearer {KEY}"})
    assert connection.getresponse().status == 400


def test_a_client_that_leaves_frees_its_row_and_metrics_count_it(server):
    def metrics() -> dict[str, float]:
        request = urllib.request.Request(f"{server}/metrics", headers={"Authorization": f"Bearer {KEY}"})
        lines = urllib.request.urlopen(request, timeout=60).read().decode().splitlines()
        return {name: float(value) for name, value in (line.split() for line in lines if line[0] != "#")}

    connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=60)
    body = json.dumps({"prompt": "a", "max_tokens": 250, "temperature": 0, "stream": True, "n": 16})
    connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {KEY}"})
    connection.getresponse().read(10)
    connection.close()
    deadline = time.monotonic() + 120
    while (now := metrics())["tamis_running"] + now["tamis_waiting"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (now["tamis_running"], now["tamis_waiting"]) == (0, 0)
    assert now["tamis_generated_tokens_total"] > 0


def test_beyond_loopback_a_key_is_required(checkpoint):
    environment = {name: value for name, value in os.environ.items() if name != "TAMIS_API_KEY"}
    command = [sys.executable, "-m", "tamis", "serve", str(checkpoint), "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 2 and "TAMIS_API_KEY" in done.stderr


@needs_chromium
def test_the_page_continues_a_prompt_and_shows_the_blocks_in_a_real_browser(server):
    problems: list[str] = []
    requests: list[str] = []
    with browser_window(problems, requests) as window:
        window.set_viewport_size({"width": 390, "height": 800})
        window.goto(server)
        window.fill("#prompt", "Fellow citizens")
        window.fill("#max_tokens", "25")
        window.click("#go")
        window.locator("#error", has_text="API key").wait_for()
        window.fill("#key", KEY)
        window.click("#go")
        window.locator("#speed", has_text="tokens per second").wait_for()
        window.locator("#stop:disabled").wait_for()
        text = window.text_content("#text") or ""
        lit, width = window.locator(".strip i.on").count(), window.evaluate("document.documentElement.scrollWidth")
    assert [problem for problem in problems if "401" not in problem] == []  # the requests without a key
    assert width == 390
    assert [request for request in requests if not request.startswith((server, "data:"))] == []
    assert text.startswith("Fellow citizens") and len(text) > 15 and lit > 0
