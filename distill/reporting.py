"""Where a run reports to besides its own JSONL file: wandb, trackio, tensorboard, whatever transformers knows."""

from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from patches.errors import RetrofitError, nearest


def reporters(report_to: str) -> list[str]:
    """``"wandb,tensorboard"`` as a list for ``TrainingArguments``; ``"none"`` is empty, ``"all"`` what is installed.

    Raises:
        RetrofitError: an unknown name, or one whose package is not installed.
    """
    names = [name.strip() for name in report_to.split(",") if name.strip() not in ("", "none")]
    installed = get_available_reporting_integrations()
    if names == ["all"]:
        return installed
    check_names(report_to)
    for name in names:
        if name not in installed:
            raise RetrofitError(f"report_to: {name!r} is not installed: pip install {name}, or leave report_to away")
    return names


def check_names(report_to: str) -> None:
    """Whether transformers knows all of ``report_to``, installed here or not.

    Raises:
        RetrofitError: it does not.
    """
    known = ["none", "all", *INTEGRATION_TO_CALLBACK]
    for name in filter(None, map(str.strip, report_to.split(","))):
        if name not in known:
            raise RetrofitError(f"report_to: unknown {name!r}{nearest(name, known)}")
