# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter eval` from the questions to the picture, on the small real pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from python_backends.llm.catalog import locate_tokenizer
from python_backends.token_router.tokenizer import Tokenizer
from tools.deployment import load_deployment
from tools.errors import UserError
from tools.evaluation import sweep as sweeping
from tools.evaluation.query_level import entropies
from tools.evaluation.report import LLM_ONLY, SLM_ONLY
from tools.evaluation.spec import RouterSweep, SweepSpec
from tools.evaluation.sweep import sweep
from tools.evaluation.tasks import HumanEvalTask, questions

pytestmark = [pytest.mark.model, pytest.mark.triton]


def test_a_sweep_and_that_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment, console = load_deployment("smollm2"), Console(quiet=True)
    spec = SweepSpec(
        deployment="smollm2",
        problems="2",
        max_tokens=24,
        first_tokens=4,
        routers=[RouterSweep(name="rstitch", sweep={"tau": [0.1, 1.0]})],
    )
    result = sweep(spec, deployment, tmp_path, console)
    labels = [point.label for point in result.points]
    assert labels[:4] == [SLM_ONLY, LLM_ONLY, "rstitch tau=0.1", "rstitch tau=1.0"]
    by_label = {point.label: point for point in result.points}
    assert all(point.questions == 2 for point in result.points)
    assert by_label[SLM_ONLY].llm_share == 0
    assert by_label[LLM_ONLY].llm_share == 1
    assert by_label["rstitch tau=1.0"].llm_share == 0
    routed = by_label["rstitch tau=0.1"]
    assert 0 < routed.llm_share < 1
    assert routed.handoffs > 0
    control = by_label[str(result.controls["rstitch tau=0.1"])]
    assert control.router == "random"
    assert control.value == pytest.approx(routed.llm_share, abs=1e-4)
    assert result.controls["rstitch tau=1.0"] is None  # it never chooses
    rates = routed.rates
    assert rates is not None
    assert rates.answers is not None
    assert rates.steps[0] == pytest.approx(rates.answers[0], abs=0.05)
    assert rates.c[0] == [1.0, 0.0]  # the SLM's uncertain token is dropped
    assert [p.to_llm for p in result.query_entropy] == [0, 1, 2]
    assert result.query_entropy[-1].llm_share == 1
    assert {p.name for p in tmp_path.iterdir()} >= {"results.json", "results.csv", "results.md", "frontier.png"}

    # the SLM's answers equal those at a tau that never delegates, and the file's lines say so
    alone, never = (
        [json.loads(line)["answer"] for line in path.read_text().splitlines() if line.startswith('{"answer"')]
        for path in (tmp_path / "SLM-only.jsonl", tmp_path / "rstitch-tau=1.0.jsonl")
    )
    assert {a["id"]: a["ids"] for a in alone} == {a["id"]: a["ids"] for a in never}

    # all that is there isn't asked again: no server can start, and the report is the same
    monkeypatch.setattr(sweeping, "own_server_of", None)
    assert sweep(spec, deployment, tmp_path, console) == result
    with pytest.raises(UserError, match="holds answers with max_tokens = 24, now it is 25"):
        sweep(spec.model_copy(update={"max_tokens": 25}), deployment, tmp_path, console)


def test_an_entropy_does_not_depend_on_what_was_asked_before(tmp_path: Path) -> None:
    from tests.unit.evaluation.made import answered

    deployment = load_deployment("smollm2")
    tokenizer = Tokenizer(locate_tokenizer(str(deployment.tokenizer)))
    asked = questions(HumanEvalTask())[:2]
    answers = [answered(n, slm=5).model_copy(update={"id": q.id}) for n, q in enumerate(asked)]

    def of(which: list[int], path: Path) -> dict[str, float]:
        chosen = [answers[n] for n in which]
        return entropies(deployment.models[0], tokenizer, asked, chosen, 3, path, lambda: None)

    both = of([0, 1], tmp_path / "both")
    assert set(both) == {q.id for q in asked}
    assert all(0 < value < 1 for value in both.values())
    assert of([1], tmp_path / "one") == {asked[1].id: both[asked[1].id]}
    assert of([0, 1], tmp_path / "one") == both  # the one that is there is kept
    (tmp_path / "cut").write_text((tmp_path / "both").read_text()[:-10])
    assert of([0, 1], tmp_path / "cut") == both
