# SPDX-License-Identifier: Apache-2.0
"""R2R, CITER and Co-LLM: what their networks see, how the threshold is compared, and what they refuse."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from routers import LogitsOutput, RouterConfig
from routers.networks import CiterNetwork, CoLLMHead, R2RNetwork
from routers.weights import load_router
from tests.unit.routers.steps import routed
from tests.unit.routers.trained import (
    MODELS,
    NETWORKS,
    TABLE,
    THRESHOLDS,
    TOP,
    VOCAB,
    bound,
    network,
    served,
    step,
    write,
)

every_algorithm = pytest.mark.parametrize("algorithm", list(NETWORKS))


def _parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_the_networks_have_the_papers_sizes() -> None:
    with torch.device("meta"):
        assert _parameters(R2RNetwork(1536, 1536)) == 56_302_081  # the paper: 56 M
        assert _parameters(R2RNetwork(1024, 1024)) == 54_677_505  # Qwen3-0.6B
        assert _parameters(CiterNetwork(1024)) == 4_202_497
        assert _parameters(CiterNetwork(1536)) == 9_449_473
        assert _parameters(CoLLMHead(1024, bias=False)) == 1024


def _by_hand(algorithm: str, module: Any, result: Any) -> torch.Tensor:
    """The probabilities, written out as the reference says, row by row."""
    found = []
    for r in range(len(result.rids)):
        hidden = result.hidden_states[r]
        if algorithm == "co_llm":
            signal = module.output.weight[0] @ hidden + module.output.bias[0]
        elif algorithm == "citer":
            norm = module.norm
            x = module.up.weight @ hidden + module.up.bias
            x = (x - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
            x = module.down.weight @ x.clamp_min(0) + module.down.bias
            signal = module.output.weight[0] @ x + module.output.bias[0]
        else:
            top = result.logits[r].sort(descending=True).values[:TOP]
            embedding = TABLE[result.next_token_ids[r]]
            projected = module.logits_projection.weight @ top + module.logits_projection.bias
            x = module.combined_projection(torch.cat([hidden, embedding, projected]))
            x = module.input_projection(x)
            for block in module.blocks:
                inner = torch.nn.functional.gelu(block.up(block.norm(x)))
                x = x + block.down(inner)
            signal = module.output(module.output_norm(x))[0]
        found.append(signal.double().sigmoid())
    return torch.stack(found)


@every_algorithm
def test_the_signal_is_the_networks_on_the_steps_own_numbers(algorithm: str, tmp_path: Path) -> None:
    module = network(algorithm)
    router: Any = bound(write(tmp_path / "r.safetensors", algorithm, module), algorithm)
    result = step(router, 5)
    assert torch.allclose(router.probabilities(result), _by_hand(algorithm, module, result), atol=1e-6)


@every_algorithm
def test_no_row_depends_on_the_others(algorithm: str, tmp_path: Path) -> None:
    """Of batch norm it is the running statistics, and of matrix products no bit is another batch's."""
    router: Any = bound(write(tmp_path / "r.safetensors", algorithm, network(algorithm)), algorithm)
    result = step(router, 9)
    assert result.hidden_states is not None
    together = router.probabilities(result)
    for rows in (slice(0, 4), *(slice(r, r + 1) for r in range(9))):
        fewer = replace(
            step(router, len(result.rids[rows])),
            logits_output=LogitsOutput(result.logits[rows].clone(), result.hidden_states[rows].clone()),
            token_ids=result.token_ids[rows],
        )
        assert torch.equal(router.probabilities(fewer), together[rows])


@pytest.mark.parametrize(("algorithm", "delegates"), [("r2r", 1), ("citer", 0), ("co_llm", 0)])
def test_comparisons_at_equality(algorithm: str, delegates: int, tmp_path: Path) -> None:
    """R2R: probability >= threshold. CITER: confidence < tau. Co-LLM: probability > eta."""
    module = network(algorithm)
    for parameter in module.parameters():  # so that every signal is 0, every probability 0.5
        torch.nn.init.zeros_(parameter)
    router = bound(write(tmp_path / "r.safetensors", algorithm, module), algorithm)
    assert routed(router, step(router, 2)) == [delegates] * 2
    config = RouterConfig(name=algorithm, params=router.params.model_dump())
    below, above = math.nextafter(0.5, 0), math.nextafter(0.5, 1)
    requests = [config.override({THRESHOLDS[algorithm]: t}, ["slm", "llm"]) for t in (below, 0.5, above)]
    expected = {"r2r": [1, 1, 0], "citer": [0, 0, 1], "co_llm": [1, 0, 0]}[algorithm]
    assert routed(router, step(router, 3, params=requests)) == expected


@every_algorithm
def test_the_threshold_is_the_requests_else_the_deployments_else_the_files(algorithm: str, tmp_path: Path) -> None:
    path = write(tmp_path / "r.safetensors", algorithm, network(algorithm), threshold=0.25)
    name = THRESHOLDS[algorithm]
    router: Any = bound(path, algorithm)
    config = RouterConfig(name=algorithm, params={"weights": str(path)})
    requests = [router.params, config.override({name: 0.75}, ["slm", "llm"])]
    assert router.thresholds(step(router, 2, params=requests)).tolist() == [0.25, 0.75]
    deployed: Any = bound(path, algorithm, **{name: 0.5})
    assert deployed.thresholds(step(deployed, 1)).tolist() == [0.5]
    with pytest.raises(ValueError, match=f"router '{algorithm}': {name}: Input should be less than or equal to 1"):
        config.override({name: 1.5}, ["slm", "llm"])
    with pytest.raises(ValueError, match="'weights' can't be set by a request"):
        config.override({"weights": "x"}, ["slm", "llm"])


@every_algorithm
def test_the_small_models_token_is_dropped_and_the_large_one_makes_one(algorithm: str, tmp_path: Path) -> None:
    from tests.unit.routers.test_routers import Sent

    path = write(tmp_path / "r.safetensors", algorithm, network(algorithm))
    config = RouterConfig(name=algorithm, params={"weights": str(path)})
    small, large = (config.router(i, ["slm", "llm"]) for i in (0, 1))
    assert (list(small.send(Sent(peer_locs=[0, 4])).token_ids), small.send(Sent()).loc) == ([5], 5)
    large.check(served(1))
    assert routed(large, step(small, 3)) == [1, 1, 1]
    assert list(large.send(Sent(peer_locs=[0, 4])).token_ids) == [5, 6]


@every_algorithm
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_hidden_state_that_is_not_finite_is_an_error(algorithm: str, number: float, tmp_path: Path) -> None:
    router = bound(write(tmp_path / "r.safetensors", algorithm, network(algorithm)), algorithm)
    result = step(router, 1)
    assert result.hidden_states is not None
    result.hidden_states[0, 3] = number
    with pytest.raises(ValueError, match="hidden state: holds NaN or infinite numbers"):
        router.route(result)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_r2r_refuses_logits_that_are_not_finite(number: float, tmp_path: Path) -> None:
    router = bound(write(tmp_path / "r.safetensors", "r2r", network("r2r")), "r2r")
    result = step(router, 1)
    result.logits[0, 3] = number
    with pytest.raises(ValueError, match="the 10 largest logits: holds NaN or infinite numbers"):
        router.route(result)


def test_r2r_takes_masked_tokens_as_long_as_enough_are_left(tmp_path: Path) -> None:
    router: Any = bound(write(tmp_path / "r.safetensors", "r2r", network("r2r")), "r2r")
    result = step(router, 1)
    lowest = result.logits[0].topk(VOCAB - TOP, largest=False).indices
    unmasked = router.probabilities(result)
    result.logits[0, lowest] = -math.inf
    assert torch.equal(router.probabilities(result), unmasked)
    result.logits[0] = -math.inf
    with pytest.raises(ValueError, match="the 10 largest logits"):
        router.route(result)


@every_algorithm
@pytest.mark.parametrize(
    ("index", "changes", "message"),
    [
        (0, {"vocab_size": 41}, "vocab_size: trained for 40, model 'slm' has 41"),
        (1, {"vocab_size": 41}, "vocab_size: trained for 40, model 'llm' has 41"),
        (0, {"hidden_size": 9}, "hidden_size: trained for 8, model 'slm' has 9"),
        (0, {"weights": "other"}, "models[0]: trained for small-q4_0, model 'slm' has other; other_models: true"),
        (1, {"weights": None}, "models[1]: trained for large-q4_0, model 'llm' has None; other_models: true"),
    ],
)
def test_other_models_are_refused(
    algorithm: str, index: int, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "r.safetensors", algorithm, network(algorithm))
    params = {"weights": str(path)}
    with pytest.raises(ValueError) as refusal:
        RouterConfig(name=algorithm, params=params).router(index, ["slm", "llm"]).check(served(index, **changes))
    assert message in str(refusal.value)
    bold = RouterConfig(name=algorithm, params={**params, "other_models": True}).router(index, ["slm", "llm"])
    if "weights" in changes:
        bold.check(served(index, **changes))
    else:  # sizes must be right all the same
        with pytest.raises(ValueError):
            bold.check(served(index, **changes))


def test_the_large_models_hidden_size_does_not_matter(tmp_path: Path) -> None:
    path = write(tmp_path / "r.safetensors", "citer", network("citer"))
    RouterConfig(name="citer", params={"weights": str(path)}).router(1, ["a", "b"]).check(served(1, hidden_size=99))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed": None}, "needs the rows of the input embedding"),
        ({"embed": torch.zeros(VOCAB, 7).__getitem__}, "network.embedding_size: trained for 6, model 'slm' has 7"),
    ],
)
def test_r2r_is_bound_to_the_right_embedding(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "r.safetensors", "r2r", network("r2r"))
    with pytest.raises(ValueError, match=message):
        RouterConfig(name="r2r", params={"weights": str(path)}).router(0, ["a", "b"]).bind(served(**changes))


def test_r2r_needs_as_many_logits_as_it_sees(tmp_path: Path) -> None:
    path = write(tmp_path / "r.safetensors", "r2r", network("r2r"), vocab_size=9)
    with pytest.raises(ValueError, match=r"network\.top_logits: trained for 10, model 'slm' has 9 logits"):
        RouterConfig(name="r2r", params={"weights": str(path)}).router(0, ["a", "b"]).bind(served(vocab_size=9))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 5}, "doesn't fit its tensors: Error(s) in loading state_dict for CiterNetwork: size mismatch"),
        ({"depth": 5}, "unexpected keyword argument 'depth'"),
    ],
)
def test_a_network_that_does_not_fit_its_tensors_is_refused(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    fits = NETWORKS["citer"][1]
    path = write(tmp_path / "r.safetensors", "citer", network("citer"), network={**fits, **arguments})
    with pytest.raises(ValueError) as refusal:
        bound(path, "citer")
    assert str(refusal.value).startswith(f"weights: {path}: network: ")
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


@every_algorithm
def test_what_was_written_is_read(algorithm: str, tmp_path: Path) -> None:
    module = network(algorithm)
    path = write(tmp_path / "r.safetensors", algorithm, module, data={"prompts": 3}, metrics={"auroc": 0.9})
    file = load_router(path, algorithm)
    assert (file.header.models, file.header.data, file.header.metrics) == (MODELS, {"prompts": 3}, {"auroc": 0.9})
    assert file.tensors.keys() == module.state_dict().keys()
    assert all(torch.equal(file.tensors[name], tensor) for name, tensor in module.state_dict().items())


def test_halved_numbers_are_served_in_full_width(tmp_path: Path) -> None:
    module = network("co_llm").half()
    router: Any = bound(write(tmp_path / "r.safetensors", "co_llm", module), "co_llm")
    assert router.network.output.weight.dtype == torch.float32
    assert len(routed(router, step(router, 1))) == 1


def test_a_router_that_only_sends_imports_no_torch(tmp_path: Path) -> None:
    """`token_router` makes one beside every model."""
    path = write(tmp_path / "r.safetensors", "r2r", network("r2r"))
    code = (
        "import sys; from routers import RouterConfig; c = RouterConfig(name='r2r', params={'weights': sys.argv[1]});"
        "[c.router(i, ['a', 'b']) for i in (0, 1)]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 0


def test_without_hidden_states_a_step_cannot_be_routed(tmp_path: Path) -> None:
    router = bound(write(tmp_path / "r.safetensors", "citer", network("citer")), "citer")
    result = step(router, 1)
    object.__setattr__(result, "logits_output", LogitsOutput(result.logits, None))
    with pytest.raises(ValueError, match="returns no hidden states"):
        router.route(result)
