# SPDX-License-Identifier: Apache-2.0
"""Official weights from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from python_backends.llm.catalog import Official, WeightsError
from tools.models.extra import from_extra
from tools.models.progress import Report, watching

__all__ = ["download_from_hub"]

_ANSWER_S = 3.0


def download_from_hub(entry: Official, folder: Path, report: Report) -> Path:
    """Download the file of `entry` into `folder`, going on from what an earlier try left there.

    Its sha256 is not checked here. Raises WeightsError when the hub doesn't answer within a few seconds, or
    the download fails.
    """
    huggingface_hub = from_extra("huggingface_hub")
    from_extra("huggingface_hub.utils").disable_progress_bars()
    hub = entry.hub
    try:
        # hf_hub_download tries for a long time; a hub that can't be reached shall be known at once.
        huggingface_hub.get_hf_file_metadata(
            huggingface_hub.hf_hub_url(hub.repo, hub.file, revision=hub.revision), timeout=_ANSWER_S
        )
        with watching(folder, report):
            path = huggingface_hub.hf_hub_download(hub.repo, hub.file, revision=hub.revision, local_dir=folder)
    except Exception as error:  # the library lets through the errors of whichever HTTP client it uses
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeightsError(f"the Hugging Face hub did not give {hub.file}: {reason}") from error
    return Path(path)
