# SPDX-License-Identifier: Apache-2.0
"""The client against a gRPC server that plays Triton: what it sends, and what it makes of the answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from tritonclient.grpc import service_pb2

from tests.unit.client.fake_triton import FakeTriton, response, two_chunks
from tools.client import Answer, Chunk, GenerationError, TokenRouterClient


def test_chunks_arrive_in_order_with_their_models(triton: tuple[FakeTriton, TokenRouterClient]) -> None:
    fake, client = triton
    fake.script = two_chunks
    first, last = client.generate(text="x")
    assert (first.text, first.ids, first.models, first.finish_reason) == ("Hé", (5, 6), ("slm", "slm"), "")
    assert (last.text, last.ids, last.models, last.finish_reason) == ("llo", (7,), ("llm",), "stop")
    assert last.usage == {"prompt_tokens": 3, "handoffs": 1}
    assert first.log_probs == ()


def test_request_carries_typed_tensors_of_shape_1_by_n(triton: tuple[FakeTriton, TokenRouterClient]) -> None:
    fake, client = triton
    fake.script = two_chunks
    Answer.of(
        client.generate(
            messages=[{"role": "user", "content": "ä"}],
            max_tokens=9,
            stop_words=["a", "b"],
            temperature=0.5,
            seed=2**63,
            router_params={"tau": 0.1},
        )
    )
    sent = {i.name: (i.datatype, list(i.shape), i.contents) for i in fake.requests[0].inputs}
    assert fake.requests[0].model_name == "token_router"
    assert fake.metadata[0]["triton_grpc_error"] == "true"
    assert sent["messages"][2].bytes_contents[0] == b'[{"role": "user", "content": "\\u00e4"}]'
    assert sent["stop_words"][:2] == ("BYTES", [1, 2])
    assert list(sent["stop_words"][2].bytes_contents) == [b"a", b"b"]
    assert (sent["max_tokens"][0], list(sent["max_tokens"][2].int_contents)) == ("INT32", [9])
    assert (sent["seed"][0], list(sent["seed"][2].uint64_contents)) == ("UINT64", [2**63])
    assert (sent["stream"][0], list(sent["stream"][2].bool_contents)) == ("BOOL", [True])
    assert sent["router_params"][2].bytes_contents[0] == b'{"tau": 0.1}'
    assert "text_input" not in sent


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temprature": 1.0}, "temprature: the public model has no such input"),
        ({"max_tokens": "many"}, "max_tokens: 'many' can't be sent as INT32"),
        ({"max_tokens": 2**31}, "max_tokens: 2147483648 can't be sent as INT32"),
        ({"input_ids": [1, "a"]}, "input_ids"),
    ],
)
def test_what_cannot_be_sent_is_named(
    triton: tuple[FakeTriton, TokenRouterClient], params: dict[str, Any], message: str
) -> None:
    fake, client = triton
    with pytest.raises(ValueError, match=message):
        client.generate(text="x", **params)
    assert not fake.requests


def test_refusal_has_the_servers_status_and_message(triton: tuple[FakeTriton, TokenRouterClient]) -> None:
    fake, client = triton

    def refuse(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield response("a", [1], "slm")
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "max_tokens: must be 1 or more, got 0")

    fake.script = refuse
    generation = client.generate(text="x", max_tokens=0)
    assert next(generation).text == "a"
    with pytest.raises(GenerationError, match="INVALID_ARGUMENT: max_tokens: must be 1 or more") as caught:
        next(generation)
    assert caught.value.status is grpc.StatusCode.INVALID_ARGUMENT


def test_a_stream_that_ends_early_is_an_error(triton: tuple[FakeTriton, TokenRouterClient]) -> None:
    fake, client = triton
    fake.script = lambda request, context: iter([response("a", [1], "slm")])
    with pytest.raises(GenerationError, match="ended without a final response"):
        Answer.of(client.generate(text="x"))


def test_flags_only_responses_are_skipped(triton: tuple[FakeTriton, TokenRouterClient]) -> None:
    fake, client = triton

    def with_empty(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield from two_chunks(request, context)
        empty = service_pb2.ModelStreamInferResponse()
        empty.infer_response.parameters["triton_final_response"].bool_param = True
        yield empty

    fake.script = with_empty
    assert len(list(client.generate(text="x"))) == 2


def test_cancel_reaches_the_server_and_ends_the_iteration(triton: tuple[FakeTriton, TokenRouterClient]) -> None:
    fake, client = triton
    seen = threading.Event()

    def endless(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        context.add_callback(seen.set)
        yield response("a", [1], "slm")
        seen.wait(10)

    fake.script = endless
    generation = client.generate(text="x")
    next(generation)
    client.cancel()
    with pytest.raises(GenerationError) as caught:
        next(generation)
    assert caught.value.status is grpc.StatusCode.CANCELLED
    assert seen.wait(10)


def test_a_finished_stream_is_never_cancelled(triton: tuple[FakeTriton, TokenRouterClient]) -> None:
    fake, client = triton
    ended: list[bool] = []

    def watched(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield from two_chunks(request, context)
        ended.append(context.is_active())

    fake.script = watched
    generation = client.generate(text="x")
    Answer.of(generation)
    generation.cancel()
    assert ended == [True]


def test_generations_of_one_client_run_at_once(triton: tuple[FakeTriton, TokenRouterClient]) -> None:
    fake, client = triton
    both = threading.Barrier(2, timeout=10)

    def meet(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        both.wait()
        yield response("a", [1], "slm", "stop", "{}")

    fake.script = meet
    for generation in [client.generate(text="x"), client.generate(text="y")]:
        assert Answer.of(generation).text == "a"


def test_no_server_is_unavailable() -> None:
    with (
        TokenRouterClient("127.0.0.1:1") as client,
        pytest.raises(GenerationError, match="UNAVAILABLE"),
    ):
        next(client.generate(text="x"))


@pytest.mark.parametrize("runtime", ["", '{"models": ["slm"], "speculation": 3}'])
def test_a_server_of_another_version_is_one_line(triton: tuple[FakeTriton, TokenRouterClient], runtime: str) -> None:
    fake, client = triton
    fake.runtime = runtime
    with pytest.raises(GenerationError, match="'token_router' is of another version of tokenrouter: ") as caught:
        client.runtime()
    assert "\n" not in str(caught.value)


def test_answer_adds_up_text_counts_and_times() -> None:
    answer = Answer(sent_at=10.0)
    for at, ids, model in [(10.5, (1, 2), "slm"), (11.0, (3,), "llm"), (12.5, (4, 5), "slm")]:
        answer.add(Chunk("ab", ids, (model,) * len(ids), (), "", {}, at))
    answer.add(Chunk("!", (), (), (), "length", {"handoffs": 2}, 20.0))
    assert answer.text == "ababab!"
    assert answer.tokens_by_model == {"slm": 4, "llm": 1}
    assert answer.ttft_s == pytest.approx(0.5)
    assert answer.tokens_per_s == pytest.approx(3 / 2.0)  # three tokens after the first chunk, in two seconds
    assert (answer.finish_reason, answer.usage) == ("length", {"handoffs": 2})


def test_an_answer_without_tokens_has_no_times() -> None:
    answer = Answer(sent_at=0.0)
    answer.add(Chunk("", (), (), (), "stop", {}, 1.0))
    assert answer.ttft_s is None
    assert answer.tokens_per_s is None
