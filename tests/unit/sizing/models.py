# SPDX-License-Identifier: Apache-2.0
"""The Qwen3 family as the golden file has it, and as folders with a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

GOLDEN: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("qwen3.yaml").read_text())["models"]


def write_checkpoint(folder: Path, name: str, **changes: Any) -> Path:
    """A folder with the config.json of a model of the family, and nothing else."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**GOLDEN[name]["config"], **changes}))
    return path
