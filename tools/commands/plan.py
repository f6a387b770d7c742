# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter plan`: what fits beside what."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from tools.deployment import load_deployment
from tools.sizing.joint import Plan, joint_plan
from tools.sizing.units import gib

__all__ = ["plan"]


def plan(config: str | None, as_json: bool) -> None:
    """Print the joint sizing of a deployment. Raises UserError when something doesn't fit or can't be read."""
    found = joint_plan(load_deployment(config))
    if as_json:
        print(json.dumps(_values(found), indent=2))
        return
    console = Console(highlight=False)
    devices = Table(
        "device", "memory", "for weights and KV", "weights", "KV of a token", "tokens that fit", title_justify="left"
    )
    for name, use in found.devices.items():
        fits = "" if use.fits is None else f"{use.fits:,}" + (" *" if use.fits == found.tokens else "")
        devices.add_row(name, gib(use.memory), gib(use.budget), gib(use.weights), f"{use.kv_token:,} B", fits)
    models = Table("model", "engine", "devices", "weights, each", "KV of a token, each", "block", "given")
    for footprint, model in zip(found.footprints, found.deployment.models, strict=True):
        models.add_row(
            model.name,
            model.engine.type,
            ", ".join(footprint.devices),
            gib(footprint.weights),
            f"{footprint.kv_token:,} B",
            f"{footprint.block:,}",
            ", ".join(f"{name} {value:,}" for name, value in _given(found, model.name).items()),
        )
    console.print(devices, models)
    console.print(f"every model can hold {found.held:,} tokens, prompts and answers of all requests together")


def _values(found: Plan) -> dict[str, object]:
    return {
        "tokens": found.tokens,
        "held": found.held,
        "devices": {name: vars(use) for name, use in found.devices.items()},
        "models": {
            f.model: {
                "devices": f.devices,
                "weights": f.weights,
                "kv_token": f.kv_token,
                "block": f.block,
                "given": _given(found, f.model),
            }
            for f in found.footprints
        },
    }


def _given(found: Plan, name: str) -> dict[str, int]:
    """The settings that bound an engine's KV, as `prepare` writes them."""
    engine = next(m.engine for m in found.deployment.models if m.name == name)
    names = ("kv_tokens", "max_tokens")
    given = {n: v for n in names if (v := getattr(engine, n, None)) is not None}
    return given or {"max_sessions": engine.max_sessions}
