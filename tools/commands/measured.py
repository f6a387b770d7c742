# SPDX-License-Identifier: Apache-2.0
"""A profile from what a running server has measured of its traffic."""

from __future__ import annotations

from pydantic import ValidationError

from python_backends.token_router.threshold.profile import Profile
from tools.commands.profile_options import ProfileOptions
from tools.control import ControlError
from tools.errors import UserError
from tools.running import find_server

__all__ = ["server_profile"]


def server_profile(which: str, options: ProfileOptions) -> Profile:
    """Of the server that `find_server` finds. options: another profile, which may not be given too.

    Raises UserError, also when the server has seen too little traffic.
    """
    if options != ProfileOptions():
        raise UserError("--server: given beside another profile; allowed: one of them")
    server = find_server(which)
    try:
        measured = server.control.traffic()
        if measured["profile"] is None:
            raise UserError(
                f"--server: {server.pid} has seen too little traffic yet; outcomes of steps by model:"
                f" {measured['counts']['outcomes']}"
            )
        return Profile.model_validate(measured["profile"])
    except ControlError as error:
        raise UserError(f"--server: {server.pid}: {error}") from error
    except (KeyError, ValidationError) as error:
        raise UserError(f"--server: {server.pid} is of another version of tokenrouter: {error}") from error
