# SPDX-License-Identifier: Apache-2.0
"""The image's entry point, command and health check, run here as the Dockerfile says them; the image itself is not."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.triton.servers import paced_deployment

pytestmark = pytest.mark.triton

DOCKERFILE = Path(__file__).parents[2] / "docker" / "Dockerfile"
BIN = Path(sys.executable).parent
END_S = 40.0


def _words(instruction: str) -> list[str]:
    found = re.search(rf"^{instruction} (?:--\S+ )*(?:CMD )?(\[.*\])$", DOCKERFILE.read_text(), re.MULTILINE)
    assert found is not None, instruction
    words: list[str] = json.loads(found[1])
    return words


def test_it_serves_is_healthy_and_ends(tmp_path: Path) -> None:
    config = tmp_path / "deployment.yaml"
    given = paced_deployment().model_dump(mode="json")
    config.write_text(yaml.safe_dump({**given, "server": {**given["server"], "host": "0.0.0.0"}}))
    entry, command, health = _words("ENTRYPOINT"), _words("CMD"), _words("HEALTHCHECK")
    assert command.pop() == "/etc/tokenrouter/deployment.yaml"
    serve = [str(BIN / entry[0]), *entry[1:], *command, str(config)]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while "Ctrl-C" not in (line := process.stdout.readline()):
                assert line, "it has ended"
                lines.append(line)
            check = [str(BIN / health[0]), *health[1:], "--server", str(process.pid)]
            done = subprocess.run(check, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout) == (0, "a token was made\n")
            (url,) = re.findall(r"metrics +(http\S+)", "".join(lines))
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert b"nv_inference_request_success" in answer.read()
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
    gone = subprocess.run(check, capture_output=True, text=True, check=False)
    assert gone.returncode == 1 and "no such server runs" in gone.stderr
