"""Many processes: launching them, what they agree on, DeepSpeed. Here: how one of them says why it ended (no torch)."""

import json
import os
import time
from pathlib import Path

EXIT_STATUS = 130  # what a shell reports for a program ended by Ctrl-C


def tell_launcher(message: str) -> bool:
    """Leave ``message`` where torchrun's agent looks for it; False if this process has no such agent above it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return False
    Path(file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}), encoding="utf-8")
    return True
