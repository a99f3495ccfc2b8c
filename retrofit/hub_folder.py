"""A folder of ours or somebody else's: where it lies here, or where the Hub's copy of it does."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from patches.errors import RetrofitError

from .hub_errors import reason


def fetch_folder(path: str | Path, files: list[str], what: str, revision: str | None, token: str | None) -> Path:
    """The local folder behind ``path``, a folder or a Hub id; of the latter only ``files`` are fetched.

    Args:
        what: what is looked for, as in "the Hub gave no ... of that name".

    Raises:
        RetrofitError: there is neither a folder nor a repository of that name, or the Hub cannot be reached.
    """
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(str(path), revision=revision, token=token, allow_patterns=files))
    except HFValidationError:
        raise RetrofitError(f"there is no folder {str(path)!r}, and it is not a Hub id (user/name) either") from None
    except (HfHubHTTPError, OSError) as error:
        raise RetrofitError(
            f"there is no folder {str(path)!r}, and no {what} of that name could be fetched from the Hub: "
            + reason(error, token)
        ) from None
