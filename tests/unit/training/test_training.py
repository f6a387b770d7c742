# SPDX-License-Identifier: Apache-2.0
"""The stages on a scripted pair of models: what is made once, what an interruption costs, and what comes out."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from routers.weights import load_router
from tests.unit.training.fakes import VOCAB, CharacterTokenizer, ScriptedPool
from tools.errors import UserError
from tools.training.dataset import Split, tokens_of
from tools.training.fitting import FitOptions
from tools.training.jobs import Answer, Branch, Followed
from tools.training.judges import Case, ContinuationJudge, Judge, TestsJudge
from tools.training.options import DataOptions
from tools.training.prompts import Prompt
from tools.training.recipes import R2R, Citer, CoLLM, Recipe
from tools.training.stages import Pair, Stages
from tools.training.training import Target, train_router
from tools.training.work_folder import WorkFolder
from tools.training.workers import Item, Setup

H = 8
COUNT = 20
RIGHT = "    return 1\n```"
WRONG = "    return 2\n```"


def embed(token_ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(token_ids % 4, 4).float()


def prompt(number: int) -> Prompt:
    name = f"f{number}"
    tests = "def check(candidate):\n    assert candidate() == 1\n"
    return Prompt(f"m:{name}", "code", f"def {name}():\n", name, tests, "    return 1")


PROMPTS = [prompt(n) for n in range(COUNT)]


def scripted(setup: Setup, item: Item) -> Any:
    """The large model is right on the even prompts. Of every answer, the small one would write token 3 otherwise, and
    of references both would write token 2 otherwise; its hidden state gives that away."""
    given = item.arguments.get("given")
    number = int(item.key.removeprefix("m:f"))
    if item.kind == "answer":
        text = f"def f{number}():\n{RIGHT if number % 2 == 0 else WRONG}"
        token_ids = CharacterTokenizer().encode(text)
        return Answer(token_ids, [-0.1] * len(token_ids))
    if item.kind == "follow":
        argmax = np.array(given)
        off = 3 if setup.hidden_states else 2
        argmax[off] += 1
        if number % 2:
            argmax[2] += 1
        rng = np.random.default_rng(number)
        hidden = rng.normal(size=(len(argmax), H)).astype(np.float32)
        hidden[argmax != np.array(given), 0] += 6
        n = len(argmax)
        top = -np.sort(-rng.normal(size=(n, 100)).astype(np.float32))
        entropy = rng.random(n).astype(np.float32)
        logprobs = np.where(argmax == np.array(given), -0.05, -3).astype(np.float32)
        if not setup.hidden_states:
            return Followed(argmax, logprobs, entropy)
        return Followed(argmax, logprobs, entropy, hidden, top)
    rest = WRONG if number % 4 == 0 else RIGHT
    whole = item.arguments.get("whole", True)
    return [
        Branch(at, CharacterTokenizer().encode(rest), None if item.kind == "rollouts" else False, whole)
        for at, _ in item.arguments["marks"]
    ]


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of functions of packages; and answers judged without a sandbox."""
    monkeypatch.setattr("tools.training.stages.choose_prompts", lambda *_: (PROMPTS, {"too long": 1}))
    for module in ("stages", "judges"):
        monkeypatch.setattr(f"tools.training.{module}.passes", lambda _, answer: answer.endswith(RIGHT))


def stages(folder: Path, pool: Any) -> Stages:
    options = DataOptions(prompts=COUNT, reasoning=0, max_tokens=50, seed=0)
    pair = Pair(("small", "large"), ({}, {}), CharacterTokenizer())  # type: ignore[arg-type]
    console = Console(file=io.StringIO())
    return Stages(WorkFolder(folder, {"seed": 0}), pair, options, pool, console)


def recipes() -> list[Recipe]:
    """With rates for so few tokens."""
    found = [R2R(embed, ContinuationJudge(), width=16), Citer(width=8, rollouts=2), CoLLM(marginal=True)]
    return [replace(r, fit=FitOptions(rate=0.005, weight_decay=0, batch=64, epochs=25)) for r in found]


def test_what_the_algorithms_share_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.training.training.write_report", lambda *_: None)
    pool = ScriptedPool(scripted)
    for recipe in recipes():
        tmp_path.joinpath("out").mkdir(exist_ok=True)
        output = tmp_path / "out" / f"{recipe.algorithm}.safetensors"
        train_router(recipe, stages(tmp_path / "work", pool), Target(), output, VOCAB)
    made = [kind for kind, _ in pool.done]
    references = COUNT // 2
    # answers and the small model along them once; both models along the references; two rounds of roll-outs
    assert made.count("answer") == COUNT
    assert made.count("follow") == COUNT + 2 * references
    assert made.count("branches") == COUNT
    assert made.count("rollouts") == 2 * references


# in the answers, the texts along them, along the references, each round's roll-outs; and when all is done
@pytest.mark.parametrize("after", [3, COUNT + 3, 2 * COUNT + 5, 3 * COUNT + 3, 3 * COUNT + 15, 4 * COUNT])
def test_an_interrupted_training_goes_on_and_ends_as_if_it_had_not_been(
    tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.training.training.write_report", lambda *_: None)  # a picture takes a second
    recipe = replace(recipes()[1], fit=FitOptions(rate=0.02, weight_decay=0, batch=64, epochs=2))
    outputs = []
    for folder, interrupts in (("whole", [None]), ("parts", [after, None])):
        done: list[tuple[str, str]] = []
        output = tmp_path / f"{folder}.safetensors"
        for interrupt in interrupts:
            pool = ScriptedPool(scripted, None if interrupt is None else interrupt)
            try:
                train_router(recipe, stages(tmp_path / folder, pool), Target(), output, VOCAB)
            except KeyboardInterrupt:
                assert interrupt is not None
            done += pool.done
        assert len(done) == 2 * COUNT + 4 * (COUNT // 2)  # nothing twice: answers, the texts along, two rounds
        outputs.append(load_router(output, "citer"))
    assert outputs[0].header == outputs[1].header
    for name, tensor in outputs[0].tensors.items():
        assert torch.equal(tensor, outputs[1].tensors[name]), name


@pytest.mark.parametrize("recipe", recipes(), ids=lambda r: r.algorithm)
def test_a_router_learns_and_its_file_and_report_say_what_it_is(tmp_path: Path, recipe: Recipe) -> None:
    output = tmp_path / f"{recipe.algorithm}.safetensors"
    work = stages(tmp_path / "work", ScriptedPool(scripted))
    facts = train_router(recipe, work, Target(), output, VOCAB)
    assert facts["metrics"]["auroc"] > 0.95 > 0.7 > facts["metrics"]["auroc_entropy"]
    file = load_router(output, recipe.algorithm)
    assert file.header.models == ["small", "large"]
    assert (file.header.hidden_size, file.header.vocab_size) == (H, VOCAB)
    assert file.header.data["prompts"] == work.fingerprint
    assert file.header.metrics == facts["metrics"]
    # every tensor's numbers are FP16's: what is served is what was measured
    assert all(torch.equal(t, t.half().float()) for t in file.tensors.values() if t.is_floating_point())
    report = json.loads(output.with_suffix(".json").read_text())
    assert report["threshold"] == file.header.threshold
    # of the last round; the first loss is from before the first epoch
    assert report["data"]["epochs_run"] == [len(losses) - 1 for losses in report["held_out_loss"]]
    assert f"{facts['metrics']['auroc']:.3f}" in output.with_suffix(".md").read_text()
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_share_can_be_wanted_instead_of_a_recall(tmp_path: Path) -> None:
    recipe, work = recipes()[2], stages(tmp_path / "work", ScriptedPool(scripted))
    facts = train_router(recipe, work, Target(None, 0.02), tmp_path / "a.safetensors", VOCAB)
    assert facts["metrics"]["llm_share"] == pytest.approx(0.02, abs=0.02)
    assert facts["data"]["target"] == {"llm_share": 0.02}
    full = train_router(recipe, work, Target(1.0), tmp_path / "b.safetensors", VOCAB)
    assert full["metrics"]["recall"] > facts["metrics"]["recall"]


@pytest.mark.parametrize(
    ("judge", "even", "odd"),
    [
        (ContinuationJudge(), {1}, {1}),
        (TestsJudge(), {0, 1}, {1}),  # of the right answers, every second one's branch is right too
    ],
)
def test_verdicts(tmp_path: Path, judge: Judge, even: set[int], odd: set[int]) -> None:
    found = stages(tmp_path, ScriptedPool(scripted)).verdicts(judge)
    assert {v for n in range(0, COUNT, 2) for v in found[f"m:f{n}"].values()} == even
    assert {v for n in range(1, COUNT, 2) for v in found[f"m:f{n}"].values()} == odd
    assert set(found["m:f1"]) == {2, 3}


def test_a_branch_that_was_cut_off_has_no_verdict_and_its_token_is_left_out(tmp_path: Path) -> None:
    """Of the answers 0, 4, 8, ..., that are right; their branches were wrong where they were cut off."""

    def cut_off(setup: Setup, item: Item) -> Any:
        found = scripted(setup, item)
        if item.kind != "branches":
            return found
        return [replace(branch, equal=None if branch.position == 2 else False, whole=False) for branch in found]

    work = stages(tmp_path, ScriptedPool(cut_off))
    found = work.verdicts(TestsJudge())
    assert found["m:f0"] == {3: -1}
    assert found["m:f1"] == {2: -1, 3: 1}  # a wrong answer's whole branches aren't asked for
    assert found["m:f2"] == {3: 0}  # it was right already
    texts = {text.prompt: text for text in R2R(embed, TestsJudge()).texts(work, 1, None)}
    left = tokens_of([texts["m:f0"]], {"m:f0": Split.TRAIN})
    assert len(left.labels) == len(texts["m:f0"].tokens) - 1 and not left.mismatch.any()


def test_the_minutes_are_those_of_all_sittings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.training.training.write_report", lambda *_: None)
    now = [1000.0]
    monkeypatch.setattr("tools.training.work_folder.monotonic", lambda: now[0])

    def slow(setup: Setup, item: Item) -> Any:
        now[0] += 60
        return scripted(setup, item)

    output = tmp_path / "a.safetensors"
    for interrupt in (3, COUNT + 5):
        with pytest.raises(KeyboardInterrupt):
            train_router(
                recipes()[2], stages(tmp_path / "work", ScriptedPool(slow, interrupt)), Target(), output, VOCAB
            )
        now[0] += 10_000  # nobody works at it
    pool = ScriptedPool(slow)
    facts = train_router(recipes()[2], stages(tmp_path / "work", pool), Target(), output, VOCAB)
    assert facts["minutes"] == 3 + (COUNT + 5) + len(pool.done) == 2 * COUNT + 2 * (COUNT // 2)
    again = train_router(recipes()[1], stages(tmp_path / "work", ScriptedPool(slow)), Target(), output, VOCAB)
    assert again["minutes"] == 2 * (COUNT // 2)  # another algorithm's own: the roll-outs


def test_a_judge_of_statements_sees_each_choice_to_the_end_of_its_own(tmp_path: Path) -> None:
    seen: list[Case] = []

    class Recorder(ContinuationJudge):
        def __call__(self, case: Case) -> int:
            seen.append(case)
            return 1

    stages(tmp_path, ScriptedPool(scripted)).verdicts(Recorder())
    (case,) = [c for c in seen if c.prompt.id == "m:f0"]
    assert (case.before, case.original, case.branch) == ("def", " f0():\n", WRONG)


def test_prompts_that_teach_nothing_are_an_error(tmp_path: Path) -> None:
    def agreeing(setup: Setup, item: Item) -> Any:
        found = scripted(setup, item)
        if item.kind == "follow":
            return Followed(
                np.array(item.arguments["given"]),
                *[getattr(found, n) for n in ("logprobs", "entropy", "hidden", "top_logits")],
            )
        return found

    work = stages(tmp_path / "work", ScriptedPool(agreeing))
    with pytest.raises(UserError, match=r"0 of the .* tokens of the train prompts need the large model"):
        train_router(CoLLM(), work, Target(), tmp_path / "a.safetensors", VOCAB)


def test_a_later_rounds_rollouts_are_made_anew_for_another_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.training.training.write_report", lambda *_: None)
    short = FitOptions(rate=0.02, weight_decay=0, batch=64, epochs=1)
    pool = ScriptedPool(scripted)
    made = []
    for width in (8, 8, 12):
        before = len(pool.done)
        recipe = Citer(width=width, rollouts=2, fit=short)
        train_router(recipe, stages(tmp_path / "work", pool), Target(), tmp_path / "a.safetensors", VOCAB)
        made.append([kind for kind, _ in pool.done[before:]].count("rollouts"))
    assert made == [2 * COUNT // 2, 0, COUNT // 2]  # the first round's don't depend on it
