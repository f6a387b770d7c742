# SPDX-License-Identifier: Apache-2.0
"""What a client is promised of an answer: text, ids, the model of each token, counts, endings."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from tests.triton.servers import assert_clean_and_serving
from tools.client import Chunk, TokenRouterClient
from tools.supervisor import RunningServer

pytestmark = pytest.mark.triton

PROMPT = "Tell me about rivers."


def _chunks(server: RunningServer, **request: Any) -> list[Chunk]:
    with TokenRouterClient(server.grpc_url) as client:
        return list(client.generate(timeout_s=60, **{"text": PROMPT, "max_tokens": 60, **request}))


def _text(chunks: list[Chunk]) -> str:
    return "".join(c.text for c in chunks)


def _ids(chunks: list[Chunk]) -> list[int]:
    return [i for c in chunks for i in c.ids]


def test_streamed_and_whole_are_the_same_answer(tiny_server: RunningServer) -> None:
    streamed, whole = _chunks(tiny_server), _chunks(tiny_server, stream=False)
    assert len(streamed) > 5 and len(whole) == 1
    assert _ids(streamed) == _ids(whole)
    assert _text(streamed) == _text(whole) != ""
    assert [m for c in streamed for m in c.models] == list(whole[0].models)
    assert streamed[-1].usage == whole[0].usage
    assert streamed[-1].finish_reason == whole[0].finish_reason != ""
    assert [c.finish_reason for c in streamed[:-1]] == [""] * (len(streamed) - 1)


def test_a_streamed_chunk_has_one_source_and_the_counts_add_up(tiny_server: RunningServer) -> None:
    chunks = _chunks(tiny_server, ignore_eos=True)
    assert all(len(set(c.models)) <= 1 for c in chunks)
    usage = chunks[-1].usage
    made = [m for c in chunks for m in c.models]
    assert usage["completion_tokens"] == len(made) == 60
    assert usage["completion_tokens_by_model"] == {"slm": made.count("slm"), "llm": made.count("llm")}
    assert min(usage["completion_tokens_by_model"].values()) > 0 and usage["handoffs"] > 0
    assert usage["prompt_tokens"] > 0
    assert chunks[-1].finish_reason == "length"


def test_text_is_whole_characters(tiny_server: RunningServer, tiny_deployment: Any) -> None:
    """Random weights write random bytes: every chunk is valid text, and their sum is the bytes' text."""
    from python_backends.token_router.tokenizer import Tokenizer

    chunks = _chunks(tiny_server, ignore_eos=True, max_tokens=200, temperature=1.0, seed=11)
    tokenizer = Tokenizer(tiny_deployment.tokenizer)
    assert _text(chunks) == tokenizer.decode(_ids(chunks))


def test_stop_words_end_the_answer_before_them(tiny_server: RunningServer) -> None:
    free = _text(_chunks(tiny_server, ignore_eos=True))
    stop = free[len(free) // 2 : len(free) // 2 + 3]
    chunks = _chunks(tiny_server, ignore_eos=True, stop_words=[stop, "never written"])
    assert _text(chunks) == free[: free.index(stop)]
    assert chunks[-1].finish_reason == "stop"
    assert_clean_and_serving(tiny_server)


def test_a_seed_gives_the_same_answer_whoever_else_is_served(tiny_server: RunningServer) -> None:
    from concurrent.futures import ThreadPoolExecutor

    request = {"temperature": 0.9, "top_p": 0.95, "seed": 1234, "presence_penalty": 0.5}
    alone = _ids(_chunks(tiny_server, **request))
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(_chunks, tiny_server, temperature=1.0, text=f"other {i}") for i in range(5)]
        together = _ids(pool.submit(_chunks, tiny_server, **request).result())
        for other in others:
            other.result()
    assert together == alone
    assert _ids(_chunks(tiny_server, **{**request, "seed": 99})) != alone


def test_messages_go_through_the_chat_template(tiny_server: RunningServer) -> None:
    from python_backends.token_router.tokenizer import Tokenizer

    messages = [{"role": "user", "content": "hi"}]
    tokenizer = Tokenizer(tiny_server.deployment.tokenizer)  # type: ignore[arg-type]
    by_ids = _chunks(tiny_server, text=None, input_ids=tokenizer.encode_chat(messages), max_tokens=8)
    assert _ids(_chunks(tiny_server, text=None, messages=messages, max_tokens=8)) == _ids(by_ids)


def test_log_probs_and_echo(tiny_server: RunningServer) -> None:
    with_log_probs = _chunks(tiny_server, return_log_probs=True)
    values = [p for c in with_log_probs for p in c.log_probs]
    assert len(values) == len(_ids(with_log_probs)) and all(p <= 0 for p in values) and min(values) < 0
    assert _chunks(tiny_server)[0].log_probs == ()
    echoed = _text(_chunks(tiny_server, exclude_input_in_output=False))
    assert echoed == PROMPT + _text(_chunks(tiny_server))


def _post(server: RunningServer, endpoint: str, model: str = "token_router", **body: Any) -> bytes:
    url = f"http://{server.http_url}/v2/models/{model}/{endpoint}"
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        data: bytes = response.read()
        return data


def test_over_http(tiny_server: RunningServer) -> None:
    expected = _text(_chunks(tiny_server, max_tokens=20))
    whole = json.loads(_post(tiny_server, "generate", text_input=PROMPT, max_tokens=20))
    assert whole["text_output"] == expected
    lines = _post(tiny_server, "generate_stream", text_input=PROMPT, max_tokens=20, stream=True).split(b"\n\n")
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line]
    assert "".join(e["text_output"] for e in events) == expected
    assert json.loads(events[-1]["usage"])["completion_tokens"] > 0


def test_the_ensemble_gives_the_same_answer(tiny_server: RunningServer) -> None:
    expected = _chunks(tiny_server, max_tokens=20)
    with TokenRouterClient(tiny_server.grpc_url, model="ensemble") as client:
        chunks = list(client.generate(text=PROMPT, max_tokens=20, timeout_s=60))
    assert _ids(chunks) == _ids(expected) and _text(chunks) == _text(expected)
    assert_clean_and_serving(tiny_server)
