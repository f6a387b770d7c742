# SPDX-License-Identifier: Apache-2.0
"""What the routers' scores tell apart, on a made work folder: which tokens count where, and whose scores they are."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer

from perf import router_auroc
from routers.networks import CiterNetwork, CoLLMHead, R2RNetwork
from routers.weights import RouterHeader, save_router
from tools.errors import UserError
from tools.training.calibration import auroc
from tools.training.dataset import Split, split_of
from tools.training.fitting import predict
from tools.training.prompts import Prompt, fingerprint
from tools.training.work_folder import WorkFolder

H, COUNT = 4, 40
OPTIONS = {"models": ["small", "large"], "seed": 3, "max_tokens": 9}
PROMPTS = [Prompt(f"t:{n}", "reasoning", f"{n}?", "t") for n in range(COUNT)]
# the small model would write another token at 1, 3 and 5; every second answer is right
RIGHT, WRONG = {1: 1, 3: 0, 5: -1}, {1: 1, 3: 1, 5: 0}
SIGNAL = [0.0, 2.0, 1.0, 3.0, 0.0, 5.0]  # of each token: what co_llm's head reads
ENTROPY = [0.1, 0.9, 0.2, 0.8, 0.3, 0.0]


def embed(token_ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(token_ids % H, H).float()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = WorkFolder(tmp_path / "work", OPTIONS)
    records = [folder.records(name) for name in ("prompts", "answers", "outcomes", "verdicts-tests")]
    for number, prompt in enumerate(PROMPTS):
        right = number % 2 == 0
        rng = np.random.default_rng(number)
        written = np.arange(6)
        argmax = written + np.array([0, 1, 0, 1, 0, 1])
        hidden = rng.normal(size=(6, H)).astype(np.float32)
        hidden[:, 0] = SIGNAL
        arrays = {
            "argmax": argmax,
            "logprobs": np.zeros(6, np.float32),
            "entropy": np.array(ENTROPY, np.float32),
            "hidden": hidden,
            "top_logits": -np.sort(-rng.normal(size=(6, 100)).astype(np.float32)),
        }
        folder.save_arrays("slm-answers", prompt.id, arrays)
        verdicts = {str(at): verdict for at, verdict in (RIGHT if right else WRONG).items()}
        answer = {"token_ids": written.tolist(), "logprobs": [-0.1] * 6}
        for kept, record in zip(
            records, [asdict(prompt), answer, {"passed": right}, {"verdicts": verdicts}], strict=True
        ):
            kept.add(prompt.id, record)
    return folder.path


def networks() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    head = CoLLMHead(H)
    with torch.no_grad():
        head.output.weight.copy_(torch.eye(H)[:1])
    return {"r2r": R2RNetwork(H, H, width=8, blocks=1), "citer": CiterNetwork(H), "co_llm": head}


@pytest.fixture
def routers(tmp_path: Path) -> Path:
    path = tmp_path / "routers"
    path.mkdir()
    for algorithm, network in networks().items():
        save_router(path / f"{algorithm}-x.safetensors", header(algorithm), network.state_dict())
    return path


def header(algorithm: str, **changed: Any) -> RouterHeader:
    arguments: dict[str, Any] = {"hidden_size": H}
    if algorithm == "r2r":
        arguments |= {"embedding_size": H, "width": 8, "blocks": 1}
    data = {"prompts": fingerprint(PROMPTS), "seed": 3, "max_tokens": 9} | changed
    return RouterHeader(
        algorithm=algorithm,
        models=["small", "large"],
        hidden_size=H,
        vocab_size=128,
        threshold=0.5,
        network=arguments,
        data=data,
    )


def test_each_kind_of_label_stands_alone(
    work: Path, routers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_auroc, "locate_weights", lambda name: Path(name))
    monkeypatch.setattr(router_auroc, "EmbeddingRows", lambda _: embed)
    before = {p: p.read_bytes() for p in work.rglob("*") if p.is_file()}
    router_auroc.main(work, routers, tmp_path / "out")
    assert {p: p.read_bytes() for p in work.rglob("*") if p.is_file()} == before

    split = split_of(PROMPTS, 3)
    test = [n for n, p in enumerate(PROMPTS) if split[p.id] is Split.TEST]
    right = sum(n % 2 == 0 for n in test)
    wrong = len(test) - right
    assert right and wrong
    result = json.loads((tmp_path / "out" / "router_auroc.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    found = {name: (row["positives"], row["against"]) for name, row in rows.items()}
    assert found == {
        "mismatches": (3 * len(test), 3 * len(test)),
        "divergent by R2R's labels": (right + 2 * wrong, 4 * right + 4 * wrong),
        "divergent, right answers only": (right, 4 * right),
        "divergent against harmless mismatches, right answers only": (right, right),
    }
    co_llm = [row["co_llm"]["auroc"] for row in rows.values()]
    entropy = [row["bare entropy"]["auroc"] for row in rows.values()]
    # of the right answers, signal 2 against 0, 1, 3, 0; and against 3
    assert (co_llm[0], co_llm[2], co_llm[3]) == (1.0, 0.75, 0.0)
    assert (entropy[0], entropy[2], entropy[3]) == (pytest.approx(2 / 3, abs=1e-4), 1.0, 1.0)
    assert rows["mismatches"]["co_llm"]["auroc_95"] == [1.0, 1.0]
    assert result["labels"]["test"] == {
        "tokens": 6 * len(test),
        "prompts": len(test),
        "mismatches": 3 * len(test),
        "divergent": right + 2 * wrong,
        "divergent_by_tests": right,
        "divergent_by_rule": 2 * wrong,
        "no_verdict": right,
    }
    assert result["labels"]["all"]["divergent_by_rule"] == 2 * COUNT // 2
    page = (tmp_path / "out" / "router_auroc.md").read_text()
    assert "| 0.750 (0.750 to 0.750) |" in page and f"| test: {len(test)} |" in page


def test_a_high_score_says_that_the_large_model_is_needed(work: Path, routers: Path) -> None:
    folder = router_auroc.read_folder(work)
    scores, made = router_auroc.shipped_scores(folder, routers, embed), networks()
    tokens, mismatch = folder.tokens, folder.tokens.mismatch.astype(np.int8)
    diverges = predict(made["r2r"], [tokens.hidden, tokens.top_logits, embed(tokens.choice)])
    confident = predict(made["citer"], [tokens.hidden])
    assert auroc(mismatch, scores["r2r"]) == pytest.approx(auroc(mismatch, diverges.numpy()))
    assert auroc(mismatch, scores["citer"]) == pytest.approx(1 - auroc(mismatch, confident.numpy()))


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"prompts": "0" * 16}, "has prompts = "), ({"seed": 4}, "has seed = 3; co_llm was trained with 4")],
)
def test_a_router_of_another_training_is_refused(
    work: Path, routers: Path, changed: dict[str, Any], message: str
) -> None:
    """Its own training prompts could be among the test prompts."""
    path = routers / "co_llm-x.safetensors"
    save_router(path, header("co_llm", **changed), networks()["co_llm"].state_dict())
    with pytest.raises(UserError, match=message):
        router_auroc.shipped_scores(router_auroc.read_folder(work), routers, embed)


def test_a_folder_that_is_not_finished_is_told(work: Path, tmp_path: Path) -> None:
    (work / "verdicts-tests.jsonl").unlink()
    for folder in (work, tmp_path / "nothing"):
        with pytest.raises(typer.BadParameter, match=r"--work: .*must be a folder in which `tokenrouter train r2r`"):
            router_auroc.main(folder, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "nothing").exists()
