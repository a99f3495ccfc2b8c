"""Where rows start: found from masks and positions, kept from call to call, refused where it cannot be."""

from typing import Any

import pytest
import torch

from patches.errors import RetrofitError
from patches.padding import Starts, find_starts

CPU = torch.device("cpu")


def find(mask: list[str], seen: int, before: Starts | None = None, positions: Any = None, dtype: Any = bool) -> Starts:
    """Starts of rows of 4 tokens, ``seen`` of them cached."""
    tensor = torch.tensor([[int(c) for c in row] for row in mask]).to(dtype)
    if before is None:
        before = find_starts(Starts(), 0, seen, tensor[:, :seen], None) if seen else Starts()
    where = None if positions is None else torch.tensor(positions)
    return find_starts(before, seen, 4 - seen, tensor, where)


@pytest.mark.parametrize(
    ("mask", "seen", "expected"),
    [
        (["1111", "1111"], 0, (0,)),
        (["0011", "1111"], 0, (2, 0)),
        (["0000", "1111"], 0, (4, 0)),
        (["1100", "1111"], 0, (0,)),  # on the right of the new tokens: nothing later reads it
        (["0110", "1111"], 0, (1, 0)),
        (["0011", "1111"], 3, (2, 0)),
        (["0000", "0001"], 3, (4, 3)),
        (["1101", "1111"], 0, "hole"),
        (["1011", "1111"], 3, "hole"),
        (["1100", "1111"], 3, "hole"),  # the cache holds the third token: right padding that is continued
        (["0100", "1111"], 3, "hole"),
        (["111", "111"], 0, "cover all tokens"),
    ],
)
def test_padding(mask: list[str], seen: int, expected: Any) -> None:
    for dtype in (torch.long, torch.bool, torch.float32):
        if isinstance(expected, str):
            with pytest.raises(RetrofitError, match=expected):
                find(mask, seen, dtype=dtype)
        else:
            assert find(mask, seen, dtype=dtype).pads == expected


@pytest.mark.parametrize(
    ("mask", "positions", "offsets"),
    [
        (["1111", "1111"], [[7, 8, 9, 10]], (7,)),
        (["1111", "1111"], [[7, 8, 9, 10], [0, 1, 2, 3]], (7, 0)),
        (["0011", "1111"], [[1, 1, 0, 1], [0, 1, 2, 3]], (-2, 0)),
        (["1100", "1111"], [[5, 6, 1, 1], [5, 6, 7, 8]], (5,)),  # right padding, where positions are anything
        (["0110", "1111"], [[1, 3, 4, 1], [5, 6, 7, 8]], (2, 5)),
        (["0000", "1111"], [[1, 1, 1, 1], [3, 4, 5, 6]], (0, 3)),  # not yet known
    ],
)
def test_offsets_are_those_of_the_first_real_token(mask: list[str], positions: Any, offsets: tuple[int, ...]) -> None:
    assert find(mask, 0, positions=positions).offsets == offsets


@pytest.mark.parametrize(
    ("mask", "positions"),
    [
        (["1111", "1111"], [[0, 1, 2, 4]]),
        (["1111", "1111"], [[0, 1, 1, 2]]),
        (["0111", "1111"], [[0, 0, 1, 3], [0, 1, 2, 3]]),
        (["0111", "1111"], [[0, 0, 1, 0], [0, 1, 2, 3]]),
        (["1110", "1111"], [[0, 2, 4, 1], [0, 1, 2, 3]]),
    ],
)
def test_positions_that_do_not_go_up_by_one(mask: list[str], positions: Any) -> None:
    with pytest.raises(RetrofitError, match="packed"):
        find(mask, 0, positions=positions)
    if len(positions) == 1:
        with pytest.raises(RetrofitError, match="packed"):
            find_starts(Starts(), 0, 4, None, torch.tensor(positions))


def test_positions_go_on_from_call_to_call() -> None:
    before = Starts((2, 0), (-2, 5))
    assert find(["0011", "1111"], 3, before, [[1], [8]]) == before
    with pytest.raises(RetrofitError, match="packed"):
        find(["0011", "1111"], 3, before, [[2], [8]])
    with pytest.raises(RetrofitError, match="position_ids"):
        find_starts(Starts((0,), (5,)), 3, 1, None, None)
    # a row of nothing but padding so far takes its offset when it begins
    assert find(["0001", "1111"], 3, Starts((3, 0), (0, 5)), [[0], [8]]) == Starts((3, 0), (-3, 5))


def test_other_padding_than_before() -> None:
    for mask in (["0111", "1111"], ["0011", "0111"]):
        with pytest.raises(RetrofitError, match="other padding"):
            find(mask, 3, Starts((2, 0)))
    with pytest.raises(RetrofitError, match="other padding"):
        find(["0111"], 3, Starts())


def test_rows_are_selected() -> None:
    starts = Starts((2, 0, 1), (0, 5, 5))
    assert starts.select([2, 2, 0]) == Starts((1, 1, 2), (5, 5, 0))
    assert starts.select([1]) == Starts((0,), (5,))
    assert Starts((3,), (4,)).select([0, 0]) == Starts((3, 3), (4,))
    pad, offset = starts.on(CPU)
    assert pad is not None
    assert (pad.tolist(), offset.tolist()) == ([2, 0, 1], [0, 5, 5])
    assert starts.on(CPU)[0] is pad
