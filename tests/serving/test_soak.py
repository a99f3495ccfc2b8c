"""500 requests of random length over the OpenAI API, some given up half-way: none is wrong, and memory stays flat."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
openai = pytest.importorskip("openai")
psutil = pytest.importorskip("psutil")

from tests.serving.conftest import Export, continued  # noqa: E402

REQUESTS = 500
AT_ONCE = 24  # more than the engine runs: some wait
NEW = 16
STARTS = 300.0  # seconds
GROWTH = 48 * 2**20  # bytes, of all the server's processes between the first 150 requests and the last


@pytest.fixture
def server(export: Export, tmp_path: Path) -> Iterator[tuple[Path, str, int]]:
    """A retrofit, the address of `retrofit serve` on it, and the number of its process."""
    folder, log = export("Qwen2", "joint"), tmp_path / "server.log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "64"]
    quiet = ["--enforce-eager", "--disable-uvicorn-access-log", "--served-model-name", "tiny"]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"} | own
    command = [sys.executable, "-m", "cli", "serve", str(folder), "--port", str(port), *options, *quiet]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    address, began = f"http://127.0.0.1:{port}", time.monotonic()
    try:
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() - began < STARTS, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        yield folder, address, process.pid
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def held(pid: int) -> int:
    """Resident bytes of a process and all below it."""
    root = psutil.Process(pid)
    return sum(each.memory_info().rss for each in [root, *root.children(recursive=True)])


async def soak(address: str, pid: int, texts: list[list[int]], give_up: set[int]) -> tuple[dict[int, Any], list[int]]:
    """The tokens of each request, or None where it was given up; and the bytes held after each."""
    client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", timeout=600, max_retries=0)
    free, found, bytes_ = asyncio.Semaphore(AT_ONCE), {}, []
    how = {"model": "tiny", "max_tokens": NEW, "temperature": 0}
    own = {"ignore_eos": True, "return_token_ids": True}

    async def ask(index: int) -> None:
        async with free:
            if index in give_up:
                stream = await client.completions.create(prompt=texts[index], stream=True, extra_body=own, **how)
                async for _ in stream:
                    break
                await stream.close()
                found[index] = None
            else:
                answer = await client.completions.create(prompt=texts[index], extra_body=own, **how)
                found[index] = answer.choices[0].token_ids
            bytes_.append(held(pid))

    await asyncio.gather(*(ask(index) for index in range(len(texts))))
    await client.close()
    return found, bytes_


def test_500_requests(server: tuple[Path, str, int]) -> None:
    folder, address, pid = server
    draw = random.Random(0)
    texts = [[draw.randrange(3, 259) for _ in range(draw.choice((3, 9, 10, 11, 40, 90, 160)))] for _ in range(REQUESTS)]
    give_up = set(draw.sample(range(REQUESTS), 60))
    began = time.monotonic()
    found, bytes_ = asyncio.run(soak(address, pid, texts, give_up))
    print(json.dumps({"seconds": round(time.monotonic() - began), "MiB": [b >> 20 for b in bytes_[::50]]}))
    asked = [index for index in range(REQUESTS) if index not in give_up]
    expected = continued(folder, [texts[index] for index in asked], NEW)
    wrong = [index for index, tokens in zip(asked, expected, strict=True) if found[index] != tokens]
    assert wrong == []
    assert max(bytes_[150:]) - max(bytes_[:150]) < GROWTH
