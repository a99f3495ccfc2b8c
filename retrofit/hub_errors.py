"""What the Hub's refusals mean: which are worth another try, and each in one phrase that says what to do."""

import re

from huggingface_hub import get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)

from patches.errors import first_line

LOGIN = "run `hf auth login` or set HF_TOKEN"
TOKEN = re.compile(r"hf_[A-Za-z0-9]{30,}")


def transient(error: Exception) -> str:
    """What happened, if the same request may succeed a moment later; else empty."""
    error = _origin(error)
    if isinstance(error, OfflineModeIsEnabled):
        return ""
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return f"the Hub answered {status}" if status >= 500 or status in (408, 429) else ""
    if isinstance(error, HTTPError | ConnectionError | TimeoutError):  # no answer at all
        return f"the Hub cannot be reached ({type(error).__name__})"
    return ""


def reason(error: Exception, token: str | None = None) -> str:
    """Why the Hub did not do what was asked, and what to do, without any token in it.

    Args:
        error: what huggingface_hub raised.
        token: the token that was passed, if one was; else the one that huggingface_hub finds by itself was used.
    """
    error = _origin(error)
    known = bool(token or get_token())
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, RevisionNotFoundError):
        return "it has no such branch, tag or commit"
    if status == 401 and "Invalid credentials" in str(error):
        return f"the token is wrong or expired: {LOGIN} to a valid one"
    if status in (401, 404) and not known:
        return f"it is private or does not exist, and there is no token: {LOGIN}"
    if status in (401, 404):
        return f"it does not exist, or the token may not see it: check the name, or {LOGIN} to a token that may"
    if status == 403:
        return f"the token may not do that: {LOGIN} to a token with write access there"
    if isinstance(error, HfHubHTTPError) and not transient(error):
        return redact(f"it answered {status}: {error.server_message or first_line(error)}", token)
    # the client wraps what it could not connect to when nothing is in its cache either
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if isinstance(error, OfflineModeIsEnabled) or isinstance(cause, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set: unset it"
    unreachable = transient(error) or transient(cause)
    if unreachable:
        return f"{unreachable}: try again later, or check HF_ENDPOINT and the network"
    return redact(" ".join(str(error).split())[:300] or type(error).__name__, token)


def redact(text: str, token: str | None = None) -> str:
    """``text`` without the token given and without anything that looks like one."""
    if token:
        text = text.replace(token, "hf_***")
    return TOKEN.sub("hf_***", text)


def _origin(error: Exception) -> Exception:
    """The HTTP error behind the RuntimeError that huggingface_hub makes of a failed file."""
    return error.__cause__ if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception) else error
