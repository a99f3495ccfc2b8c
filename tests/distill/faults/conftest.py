"""Long trials, which `make test-faults` runs: runs that are killed, hang, or lose their disk or their data."""

import os

KILLS = int(os.environ.get("RETROFIT_FAULTS", "0"))
collect_ignore_glob = [] if KILLS else ["test_*.py"]
