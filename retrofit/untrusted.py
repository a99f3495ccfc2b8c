"""Reading what others wrote: JSON, texts and tensors, checked before anything is made of them."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from patches.errors import RetrofitError, first_line

from .quantised_bases import numbers


def read_json(file: Path) -> Any:
    """What a JSON file holds.

    Raises:
        RetrofitError: it cannot be read.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise RetrofitError(f"{file} cannot be read: {first_line(error)}") from None


def json_lines(lines: Iterable[bytes], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file's ``lines``, each with where it stands; blank lines are passed over.

    Raises:
        RetrofitError: a line is not UTF-8, or no object; ``where`` begins the sentence.
    """
    for number, raw in enumerate(lines, start=1):
        here = f"{where}, line {number}"
        try:
            line = raw.decode("utf-8-sig")  # some editors begin a file with a byte order mark
            if not line.strip():
                continue
            row = json.loads(line)
        except UnicodeDecodeError as error:
            raise RetrofitError(f"{here} is not UTF-8 text (byte {error.start}): convert it first") from error
        except (ValueError, RecursionError) as error:
            raise RetrofitError(f"{here} is not JSON ({error}): every line must be one object") from error
        if not isinstance(row, dict):
            raise RetrofitError(f"{here} is {_kind(row)}: every line must be one object")
        yield here, row


def checked_text(value: Any, where: str, what: str) -> str:
    """``value`` if it is a string that a tokenizer can take.

    Raises:
        RetrofitError: it is something else, or holds half a surrogate pair (JSON can say one, UTF-8 cannot).
    """
    if not isinstance(value, str):
        raise RetrofitError(f"{where}: {what} is {_kind(value)}, not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RetrofitError(
            f"{where}: {what} holds half a surrogate pair, which is not valid text: remove it"
        ) from None
    return value


def _kind(value: Any) -> str:
    kinds = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "a string", "bool": "true or false"}
    return kinds.get(type(value).__name__, "a number" if isinstance(value, int | float) else type(value).__name__)


def read_tensors(
    file: str | Path, expected: Mapping[str, Sequence[int]], rename: Callable[[str], str] = str
) -> dict[str, Tensor]:
    """The tensors of a safetensors file, which must be those expected and no others.

    Args:
        expected: shapes by name.
        rename: the name that a tensor of the file is known by.

    Raises:
        RetrofitError: the file is missing or damaged, its names or shapes are others, or a value is not finite.
    """
    try:
        with safe_open(str(file), framework="pt") as saved:
            names = {rename(name): name for name in saved.keys()}  # noqa: SIM118 (not a mapping)
            check_shapes(str(file), {name: saved.get_slice(key).get_shape() for name, key in names.items()}, expected)
            tensors = {name: saved.get_tensor(key) for name, key in names.items()}
    except (SafetensorError, OSError) as error:
        raise RetrofitError(f"{file} is missing, damaged or cut short: {first_line(error)}") from None
    refuse_nan(str(file), tensors.items())
    return tensors


def check_shapes(where: str, found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> None:
    """Refuse tensors whose names and shapes are not exactly those expected.

    Raises:
        RetrofitError: they are not; ``where`` says whose they are.
    """
    for problem, names in (
        ("lacks", sorted(expected.keys() - found.keys())),
        ("also has", sorted(found.keys() - expected.keys())),
        ("has in another shape", [name for name in found if tuple(found[name]) != tuple(expected.get(name, ()))]),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            shapes = f" ({tuple(found[names[0]])}, not {tuple(expected[names[0]])})" if "shape" in problem else ""
            raise RetrofitError(f"{where} {problem} {names[0]}{shapes}{more}: these weights are not for this memory")


def refuse_nan(where: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse weights of which one is NaN or infinite: whatever a model computes with it is, too.

    Args:
        where: begins the sentence.
        weights: names and tensors; those without storage of their own here (meta) or in 8 bits are passed over.

    Raises:
        RetrofitError: a value is not finite.
    """
    for name, tensor in weights:
        if tensor.is_meta or not tensor.numel() or not tensor.is_floating_point() or tensor.itemsize < 2:
            continue
        # both NaN if one value is; no copy is made, as isfinite would
        least, most = torch.aminmax(numbers(tensor.detach()))
        if not math.isfinite(least) or not math.isfinite(most):
            raise RetrofitError(
                f"{where}: {name} holds NaN or infinite values: the weights are damaged, fetch them again"
            )
