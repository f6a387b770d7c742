# SPDX-License-Identifier: Apache-2.0
"""Profiles that several tests use."""

from __future__ import annotations

from python_backends.token_router.threshold.forms import Form, me, r2r, rstitch
from python_backends.token_router.threshold.profile import Profile, StepLatency

__all__ = ["ME", "PAPER", "STITCH", "profile"]


def profile(form: Form, *latency: float | StepLatency) -> Profile:
    """A profile with these step times, in ms when they are numbers."""
    steps = [x if isinstance(x, StepLatency) else StepLatency.constant(x) for x in latency]
    return Profile(models=[f"m{i}" for i in range(len(steps))], p=form.p, c=form.c, latency=steps)


PAPER = profile(r2r(0.35), 6.0, 27.9)
STITCH = profile(rstitch(0.3, 0.6), 6.0, 20.0)
ME = profile(me([0.5, 0.3, 0.2]), 6.0, 10.0, 28.0)
