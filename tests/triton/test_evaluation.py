# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter eval run` on a server that runs already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from python_backends.token_router.tokenizer import Tokenizer
from tools.commands.eval import told
from tools.deployment import Deployment
from tools.errors import UserError
from tools.evaluation.single import evaluate
from tools.evaluation.spec import SweepSpec
from tools.evaluation.tasks import ReasoningTask
from tools.supervisor import RunningServer

pytestmark = pytest.mark.triton

SPEC = SweepSpec(task=ReasoningTask(kinds=["chain_sum"], per_kind=3), max_tokens=8, concurrency=2)
CONSOLE = Console(quiet=True)


def test_a_running_server_is_asked(tiny_deployment: Deployment, tiny_server: RunningServer, tmp_path: Path) -> None:
    result = evaluate(SPEC, tiny_deployment, {"tau": 0.0}, str(tiny_server.pid), None, tmp_path, CONSOLE)
    (point,) = result.points
    assert point.label == "rstitch tau=0.0"
    assert (point.questions, point.passed) == (3, 0)  # random weights answer nothing
    assert point.tokens <= 8
    assert point.llm_share > 0
    assert point.rates is not None
    assert point.rates.steps[0][1] == 1
    by_url = evaluate(SPEC, tiny_deployment, {"tau": 1.0}, None, tiny_server.grpc_url, tmp_path, CONSOLE)
    assert by_url.points[0].llm_share == 0
    assert by_url.points[0].rates is None  # a server elsewhere isn't counted
    assert (tmp_path / "results.md").read_text().startswith("# Accuracy against cost: slm + llm")


def test_what_the_markov_model_is_given_agrees_with_the_steps(tiny_deployment: Deployment, tmp_path: Path) -> None:
    """On a server of its own, which has seen no other traffic. The ways there and back differ: neither is the other."""
    task = ReasoningTask(kinds=["chain_sum"], per_kind=24)
    spec = SPEC.model_copy(update={"task": task, "max_tokens": 64, "concurrency": 4})
    (point,) = evaluate(spec, tiny_deployment, {}, None, None, tmp_path, CONSOLE).points
    rates = point.rates
    assert rates is not None
    assert rates.given is not None
    assert rates.answers is not None
    assert rates.steps[0][1] > rates.steps[1][0] + 0.2
    for model in (0, 1):
        assert rates.given[model] == pytest.approx(rates.steps[model], abs=0.05)
        assert rates.answers[model] == pytest.approx(rates.steps[model], abs=0.02)
    (path,) = tmp_path.glob("*.jsonl")
    counts = [json.loads(line)["traffic"]["outcomes"] for line in path.read_text().splitlines() if "traffic" in line]
    assert len(counts) == 24 + 1  # one with each answer, and one at the end
    so_far = [sum(map(sum, outcomes)) for outcomes in counts]
    assert so_far == sorted(so_far)
    assert so_far[0] < so_far[-1]


def test_only_what_is_missing_is_asked(tiny_deployment: Deployment, tiny_server: RunningServer, tmp_path: Path) -> None:
    one = SPEC.model_copy(update={"problems": "1"})
    evaluate(one, tiny_deployment, {}, None, tiny_server.grpc_url, tmp_path, CONSOLE)
    evaluate(SPEC, tiny_deployment, {}, None, tiny_server.grpc_url, tmp_path, CONSOLE)
    (path,) = tmp_path.glob("*.jsonl")
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + 3
    assert ['"sitting": 0' in line for line in lines] == [False, True, False, False]


def test_the_question_of_a_refused_request_is_named(
    tiny_deployment: Deployment, tiny_server: RunningServer, tmp_path: Path
) -> None:
    long = SPEC.model_copy(update={"max_tokens": 100_000})
    with pytest.raises(UserError, match=r"^the server refused a question: chain_sum/\d: max_tokens: 100000"), told():
        evaluate(long, tiny_deployment, {}, None, tiny_server.grpc_url, tmp_path, CONSOLE)


def test_a_question_that_fails_stops_no_other(
    tiny_deployment: Deployment, tiny_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_chat = Tokenizer.encode_chat
    lengths = []

    def too_long_at_first(self: Tokenizer, messages: list[dict[str, str]], begun: str = "") -> list[int]:
        lengths.append(len(messages))
        return [1] * 100_000 if len(lengths) == 1 else encode_chat(self, messages, begun)

    monkeypatch.setattr(Tokenizer, "encode_chat", too_long_at_first)
    with pytest.raises(UserError, match=r"^the server refused a question: chain_sum/\d: input_ids: .*"), told():
        evaluate(SPEC, tiny_deployment, {}, None, tiny_server.grpc_url, tmp_path, CONSOLE)
    (path,) = tmp_path.glob("*.jsonl")
    assert len(path.read_text().splitlines()) == 1 + 2
    evaluate(SPEC, tiny_deployment, {}, None, tiny_server.grpc_url, tmp_path, CONSOLE)  # asks what is missing
    assert len(path.read_text().splitlines()) == 1 + 3


def test_a_server_of_another_deployment_is_refused(
    tiny_deployment: Deployment, tiny_server: RunningServer, tmp_path: Path
) -> None:
    other = tiny_deployment.model_copy(
        update={"router": tiny_deployment.router.model_copy(update={"params": {"tau": 0.5}})}
    )
    with pytest.raises(
        UserError, match=r"the server has router .*0.4.*, but the deployment .*0.5.*; give the deployment"
    ):
        evaluate(SPEC, other, {}, None, tiny_server.grpc_url, tmp_path, CONSOLE)
