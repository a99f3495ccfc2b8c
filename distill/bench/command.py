"""The benchmarks of training among those of ``retrofit bench``."""

from distill.bench import cases
from retrofit.bench.command import add, app

__all__ = ["app"]

add("distill.bench.loss", cases.Loss, "retrofit bench loss --dtype bfloat16", count=3)
add("distill.bench.step", cases.Step, "retrofit bench step --length 4096", count=5)
add(
    "distill.bench.segments",
    cases.Segments,
    "retrofit bench segments --length 4096 --longest 65536",
    "retrofit bench segments --memory joint --length 8192 --whole",
    count=1,
)
