"""Uploads an exported folder to the Hugging Face hub: `tamis export RUN FOLDER --upload OWNER/NAME`."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = re.compile(r"(\w|\w[\w.-]{0,94}\w)/(\w|\w[\w.-]{0,94}\w)")


def require_upload(repository: str) -> None:
    """Raise a ValueError that names what to change, before anything is written or sent."""
    if not REPOSITORY.fullmatch(repository):
        raise ValueError(f"--upload must be OWNER/NAME on the hub, got {repository!r}")
    try:
        from huggingface_hub import get_token
    except ImportError:
        raise ValueError("--upload needs huggingface_hub: pip install huggingface_hub") from None
    if get_token() is None:
        raise ValueError("--upload needs a token with write access: set HF_TOKEN, or run `hf auth login`")


def upload_folder(folder: str | Path, repository: str, *, public: bool = False, endpoint: str | None = None) -> str:
    """Upload every file of the folder in one commit, and return the page's address; a new repository is made.

    Args:
        public: whether a new repository is; one that exists stays as it is.
        endpoint: address of the hub, by default HF_ENDPOINT or huggingface.co.
    """
    require_upload(repository)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    hub = HfApi(endpoint=endpoint)
    try:
        page = hub.create_repo(repository, private=not public, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload a model exported by Tamis")
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{repository} cannot be uploaded ({reason}): {folder} is complete, so check network and token, then run "
            f"`hf upload {repository} {folder}`"
        ) from None
    return str(page)
