# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter routers`: official checkpoints, and what a file says of itself.

The two modules below have the layout of R2R's (r2r/models/router.py) and CITER's (src/models/conf_model.py) own.
"""

from __future__ import annotations

import json
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from routers.networks import CiterNetwork, R2RNetwork, restore
from routers.weights import load_router
from tools.cli import app
from tools.errors import UserError
from tools.router_checkpoints import read_checkpoint

H, E, W, TOP = 8, 6, 16, 5


def _block() -> nn.Module:
    block = nn.Module()
    block.layer_norm = nn.LayerNorm(W)
    block.mlp = nn.Sequential(nn.Linear(W, 4 * W), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * W, W), nn.Dropout(0.1))
    block.dim_change = nn.Identity()
    return block


class OfficialR2R(nn.Module):
    """HiddenStatesTokenLMHeadLogitsClassifier."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embeddings = nn.Embedding(40, E)
        self.logits_projection = nn.Linear(TOP, H)
        self.combined_projection = nn.Linear(2 * H + E, W)
        self.backbone = nn.Module()
        self.backbone.blocks = nn.ModuleList([_block(), _block()])
        self.backbone.input_projection = nn.Linear(W, W)
        self.backbone.output_layer = nn.Sequential(nn.LayerNorm(W), nn.Linear(W, 1))

    def forward(self, hidden: torch.Tensor, token: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        x = torch.cat([hidden, self.token_embeddings(token), self.logits_projection(logits)], dim=-1)
        x = self.backbone.input_projection(self.combined_projection(x))
        for block in self.backbone.blocks:
            x = x + block.mlp(block.layer_norm(x))
        return self.backbone.output_layer(x).squeeze(-1)


class OfficialCiter(nn.Module):
    """ConfidenceModel; torchvision's MLP is these layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(H, 2 * H), nn.BatchNorm1d(2 * H), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * H, H), nn.Dropout(0.1)
        )
        self.linear = nn.Linear(H, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(self.mlp(hidden)).squeeze(-1)


def save_r2r(path: Path, model: nn.Module, whole: bool, **changes: Any) -> Path:
    """As R2R's `save_model` does; whole: the "..._all.pt" with the embedding."""
    state = model.state_dict()
    if not whole:
        del state["token_embeddings.weight"]
    init = {"hidden_states_size": H, "logits_size": TOP, "hidden_dims": [W, W], "pretrained_model_name": "a/b"}
    content = {
        "model_type": "HiddenStatesTokenLMHeadLogitsClassifier",
        "init_args": {**init, "dtype": torch.float32, **changes.pop("init_args", {})},
        "common_args": {"threshold": 0.406, "input_type": ["hidden_states", "token", "logits"]},
        "model_specific_args": {},
        "state_dict": state,
    }
    torch.save({**content, **changes}, path)
    return path


@pytest.mark.parametrize("whole", [False, True])
def test_an_official_r2r_router_computes_the_same(whole: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    official = OfficialR2R().eval()
    read = read_checkpoint(save_r2r(tmp_path / "router.pt", official, whole), "r2r")
    assert read.network == {
        "hidden_size": H,
        "embedding_size": E,
        "width": W,
        "blocks": 2,
        "top_logits": TOP,
        "expansion": 4,
    }
    assert (read.threshold, read.data["slm"], read.data["converted_from"]) == (0.406, "a/b", "router.pt")
    ours = restore(R2RNetwork, read.network, read.tensors)
    hidden, logits, token = torch.randn(3, H), torch.randn(3, TOP), torch.tensor([1, 2, 3])
    expected = official(hidden, token, logits)
    assert torch.allclose(ours(hidden, logits, official.token_embeddings(token)), expected, atol=1e-6)


def test_an_official_citer_router_computes_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    official = OfficialCiter()
    for _ in range(3):
        official(torch.randn(16, H))  # statistics of its own
    torch.save(official.eval().state_dict(), tmp_path / "mlp_iter_2876.pth")
    read = read_checkpoint(tmp_path / "mlp_iter_2876.pth", "citer")
    assert (read.network, read.threshold) == ({"hidden_size": H, "width": H}, None)
    hidden = torch.randn(3, H)
    assert torch.allclose(restore(CiterNetwork, read.network, read.tensors)(hidden), official(hidden), atol=1e-6)


class _Trap:
    """A pickle that would write a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "executed"))


def test_code_in_a_checkpoint_is_not_executed(tmp_path: Path) -> None:
    path = tmp_path / "trap.pt"
    torch.save({"state_dict": _Trap(tmp_path / "proof")}, path)
    with pytest.raises(UserError) as refusal:
        read_checkpoint(path, "r2r")
    told = str(refusal.value)
    assert told.startswith(f"{path}: holds something other than tensors and plain containers (")
    assert told.endswith("getattr), or is no checkpoint; it isn't loaded, because that could run code")
    assert not (tmp_path / "proof").exists()


def test_nobody_is_told_how_to_load_code(tmp_path: Path) -> None:
    """As torch tells of these, in errors that aren't an unpickler's."""
    script, tar = tmp_path / "script.pt", tmp_path / "old.pt"
    with zipfile.ZipFile(script, "w") as archive:  # of TorchScript
        for name, content in (("constants.pkl", b"\x80\x02)."), ("data.pkl", b"\x80\x02}."), ("version", b"3\n")):
            archive.writestr(f"script/{name}", content)
    with tarfile.open(tar, "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    for path in (script, tar):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of a TorchScript archive
            with pytest.raises(UserError) as refusal:
                read_checkpoint(path, "r2r")
        assert str(refusal.value).endswith("or is no checkpoint; it isn't loaded, because that could run code")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "LogitsClassifier"}, "model_type: got 'LogitsClassifier'; allowed: 'HiddenStatesToken"),
        ({"init_args": {"normalize_input": True}}, "init_args.normalize_input: got True; allowed: False"),
        ({"init_args": {"use_position_embedding": True}}, "init_args.use_position_embedding: got True"),
        ({"state_dict": {}}, "state_dict: has no tensors of logits_projection, combined_projection"),
        ({"state_dict": {"layer_norm_token.weight": torch.zeros(1)}}, "state_dict: got 'layer_norm_token.weight'"),
        ({"state_dict": 3}, "with a state_dict"),
        ({"state_dict": {"logits_projection.weight": [1.0]}}, "got 'logits_projection.weight', a list"),
        ({"state_dict": {7: torch.zeros(1)}}, "state_dict: got '7', a Tensor; allowed: tensors of logits_projection"),
        (
            {"state_dict": {"logits_projection.bias": torch.tensor([1, torch.nan])}},
            "'logits_projection.bias' holds NaN",
        ),
        (
            {"state_dict": {"logits_projection.weight": torch.full((H, TOP), 1e300, dtype=torch.float64)}},
            "state_dict: 'logits_projection.weight' holds NaN or infinite numbers in FP32; allowed: finite ones",
        ),
        ({"common_args": [0.4]}, "common_args: got a list; allowed: a dict"),
    ],
)
def test_another_layout_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save_r2r(tmp_path / "router.pt", OfficialR2R(), False, **changes)
    with pytest.raises(UserError) as refusal:
        read_checkpoint(path, "r2r")
    assert str(refusal.value).startswith(f"{path}: ") and message in str(refusal.value)


@pytest.mark.parametrize("weight", [None, torch.zeros(3)])
def test_a_layer_without_its_matrix_is_named(weight: torch.Tensor | None, tmp_path: Path) -> None:
    state = {key: value for key, value in OfficialCiter().state_dict().items() if key != "mlp.4.weight"}
    torch.save(state if weight is None else {**state, "mlp.4.weight": weight}, tmp_path / "mlp.pth")
    with pytest.raises(UserError, match="state_dict: the weight of 'down' is missing, or no matrix"):
        read_checkpoint(tmp_path / "mlp.pth", "citer")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello", "is no checkpoint"),
        (b"", "is no checkpoint"),
        (None, "can't be read: No such file or directory"),
    ],
)
def test_what_is_no_checkpoint_is_said(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "router.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as refusal:
        read_checkpoint(path, "citer")
    assert message in str(refusal.value) and len(refusal.value.lines) == 1


def test_a_checkpoint_becomes_a_file_that_can_be_shown(tmp_path: Path) -> None:
    checkpoint = save_r2r(tmp_path / "router.pt", OfficialR2R(), False)
    output = tmp_path / "r2r.safetensors"
    convert = ["routers", "convert", str(checkpoint), "--algorithm", "r2r", "--output", str(output)]
    models = ["--slm", "small-0.5b", "--llm", "/somewhere/large-1.5b.gguf", "--vocab-size", "40"]
    result = CliRunner().invoke(app, [*convert, *models])
    assert result.exit_code == 0, result.output
    assert "r2r for small-0.5b + /somewhere/large-1.5b.gguf, threshold 0.406" in result.output
    header = load_router(output, "r2r").header
    assert (header.models, header.vocab_size, header.threshold) == (["small-0.5b", "large-1.5b"], 40, 0.406)
    shown = CliRunner().invoke(app, ["routers", "show", str(output), "--json"])
    assert json.loads(shown.output) == header.model_dump()
    table = CliRunner().invoke(app, ["routers", "show", str(output)])
    assert "network.width" in table.output and "small-0.5b, large-1.5b" in table.output
    again = CliRunner().invoke(app, [*convert, *models, "--threshold", "0.2"])
    assert again.exit_code == 0 and load_router(output, "r2r").header.threshold == 0.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "r.bin"], "--output: got r.bin; allowed: a name that ends in .safetensors"),
        (["--vocab-size", "9"], "--threshold: not given"),
        (["--threshold", "0.9"], "--vocab-size: not given, and not known of the small model"),
    ],
)
def test_what_convert_needs_is_said(arguments: list[str], message: str, tmp_path: Path) -> None:
    torch.save(OfficialCiter().state_dict(), tmp_path / "mlp.pth")
    wanted = ["--algorithm", "citer", "--slm", "small", "--llm", "large"]
    output = [] if "--output" in arguments else ["--output", str(tmp_path / "r.safetensors")]
    result = CliRunner().invoke(app, ["routers", "convert", str(tmp_path / "mlp.pth"), *wanted, *output, *arguments])
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_a_checkpoints_threshold_out_of_range_is_said(tmp_path: Path) -> None:
    path = save_r2r(tmp_path / "router.pt", OfficialR2R(), False, common_args={"threshold": 1.5})
    output = ["--output", str(tmp_path / "r.safetensors"), "--vocab-size", "40"]
    wanted = ["--algorithm", "r2r", "--slm", "small", "--llm", "large", *output]
    result = CliRunner().invoke(app, ["routers", "convert", str(path), *wanted])
    assert str(result.exception) == f"{path}: threshold: Input should be less than or equal to 1, got 1.5"


@pytest.mark.parametrize("algorithm", ["r2r", "citer"])
def test_a_router_that_no_server_would_take_is_not_written(algorithm: str, tmp_path: Path) -> None:
    """By its numbers, and by the small model's hidden size, whether or not the vocabulary's size is given."""
    official = OfficialR2R() if algorithm == "r2r" else OfficialCiter()
    path, output = tmp_path / "router.pt", tmp_path / "r.safetensors"

    def convert(width: int, *more: str) -> str | None:
        slm = tmp_path / f"small{width}.gguf"
        _write_gguf(slm, width)
        torch.save(official.state_dict(), path) if algorithm == "citer" else save_r2r(path, official, False)
        arguments = ["routers", "convert", str(path), "--algorithm", algorithm, "--output", str(output)]
        wanted = ["--slm", str(slm), "--llm", "large", "--threshold", "0.5"]
        result = CliRunner().invoke(app, [*arguments, *wanted, *more])
        return None if result.exit_code == 0 else str(result.exception)

    for more in ([], ["--vocab-size", "99"]):
        refused = convert(H + 1, *more)
        assert refused is not None
        assert refused.startswith(f"{path}: is of a model with hidden size {H}, but --slm ")
        assert f"has {H + 1}; allowed: " in refused
        assert not output.exists()
    if algorithm == "r2r":
        assert (
            convert(H, "--vocab-size", "4")
            == f"{path}: takes the {TOP} largest logits, but the vocabulary has 4 tokens"
        )
    assert convert(H) is None
    assert load_router(output, algorithm).header.vocab_size == 7
    output.unlink()
    name, tensor = next((n, t) for n, t in official.state_dict().items() if n.endswith("bias"))
    tensor[0] = torch.inf
    assert convert(H) == f"{path}: state_dict: '{name}' holds NaN or infinite numbers in FP32; allowed: finite ones"
    assert not output.exists()


@pytest.mark.parametrize("odd", [torch.Tensor.to_sparse, lambda t: t.to("meta"), lambda t: t.to(torch.complex64)])
def test_a_tensor_that_is_not_plain_numbers_is_named(
    odd: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    state = OfficialCiter().state_dict()
    torch.save({**state, "linear.weight": odd(state["linear.weight"])}, tmp_path / "mlp.pth")
    with pytest.raises(
        UserError, match=r"'linear.weight' is torch.\w+, torch.\w+, on \w+; allowed: dense, real numbers$"
    ):
        read_checkpoint(tmp_path / "mlp.pth", "citer")


def test_an_r2r_router_without_room_for_an_embedding_is_refused(tmp_path: Path) -> None:
    official = OfficialR2R()
    official.combined_projection = nn.Linear(2 * H, W)
    with pytest.raises(UserError, match=f"combined_projection has {2 * H} inputs; allowed: more than {2 * H}"):
        read_checkpoint(save_r2r(tmp_path / "router.pt", official, False), "r2r")


def _write_gguf(path: Path, hidden_size: int) -> None:
    """Metadata only, of a model with a vocabulary of 7."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(hidden_size)
    writer.add_token_list([f"t{i}" for i in range(7)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_show_says_what_is_wrong() -> None:
    result = CliRunner().invoke(app, ["routers", "show", "none.safetensors"])
    assert isinstance(result.exception, UserError)
    assert "no such file" in str(result.exception)
