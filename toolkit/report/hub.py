"""Uploading a finished model."""

from pathlib import Path

from toolkit.errors import UserError
from toolkit.report.console import say


def push(folder: Path, name: str) -> None:
    """Upload a run's folder to the Hub repository `name`.

    Raises:
        UserError: the Hub could not be reached or refused; the folder is complete all the same.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api = HfApi()
        url = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, ignore_patterns=["checkpoint-*"])
        say(f"uploaded to {url}")
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(
            f"the model is complete in {folder}, but could not be uploaded to the Hub as {name}: "
            f"{str(error).splitlines()[0]}. Try again with `hf upload {name} {folder}`."
        ) from error
