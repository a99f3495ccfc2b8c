"""The tiny checkpoint and text of the tests of distillation, and the shortened demo."""

from tests.distill.conftest import checkpoint, text, tokenizer  # noqa: F401
from tests.distill.demo.conftest import quick  # noqa: F401
