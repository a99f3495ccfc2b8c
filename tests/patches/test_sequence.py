"""The texts of a batch: where they start, kept from call to call, refused where it cannot be; and a pass over them."""

from typing import Any

import pytest
import torch

from patches.cache import SequenceState
from patches.errors import RetrofitError
from patches.rotary import rotate
from patches.sequence import UNPADDED, Pass, Starts, find_starts
from tests.patches.steps import rotary

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
    ("mask", "positions", "origins"),
    [
        (["1111", "1111"], [[7, 8, 9, 10]], (7,)),
        (["1111", "1111"], [[7, 8, 9, 10], [0, 1, 2, 3]], (7, 0)),
        (["0011", "1111"], [[1, 1, 0, 1], [0, 1, 2, 3]], (0,)),
        (["1100", "1111"], [[5, 6, 1, 1], [5, 6, 7, 8]], (5,)),  # right padding, where positions are anything
        (["0110", "1111"], [[1, 3, 4, 1], [5, 6, 7, 8]], (3, 5)),
        (["0011", "1111"], None, (2, 0)),  # positions are slots
        (["0000", "1111"], [[1, 1, 1, 1], [3, 4, 5, 6]], (0, 3)),  # not yet known
    ],
)
def test_an_origin_is_the_first_real_token_s_position(
    mask: list[str], positions: Any, origins: tuple[int, ...]
) -> None:
    assert find(mask, 0, positions=positions).origins == origins


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
    before = Starts((2, 0), (0, 5))
    assert find(["0011", "1111"], 3, before, [[1], [8]]) == before
    with pytest.raises(RetrofitError, match="packed"):
        find(["0011", "1111"], 3, before, [[2], [8]])
    with pytest.raises(RetrofitError, match="position_ids"):
        find_starts(Starts((0,), (5,)), 3, 1, None, None)
    # a row of nothing but padding so far takes its origin when it begins
    assert find(["0001", "1111"], 3, Starts((3, 0), (0, 5)), [[7], [8]]) == Starts((3, 0), (7, 5))


def test_other_padding_than_before() -> None:
    for mask in (["0111", "1111"], ["0011", "0111"]):
        with pytest.raises(RetrofitError, match="other padding"):
            find(mask, 3, Starts((2, 0)))
    with pytest.raises(RetrofitError, match="other padding"):
        find(["0111"], 3, Starts())


def test_rows_are_selected() -> None:
    starts = Starts((2, 0, 1), (0, 5, 5), True)
    assert starts.select([2, 2, 0]) == Starts((1, 1, 2), (5, 5, 0), True)
    assert starts.select([1]) == Starts((0,), (5,), True)
    assert Starts((0, 3), (4,)).select([1, 1]) == Starts((3, 3), (4,))
    assert Starts((0,), (4,)).select([0, 0]) == Starts((0,), (4,))


def test_the_index_goes_with_the_rows() -> None:
    state = SequenceState(Starts((2, 0, 1), (0,)))
    state.seen = 9
    state.set_index(CPU)
    assert state.index is not None
    assert state.index.tolist() == [6, 8, 7]
    where = state.index.data_ptr()
    state.index += 1  # as a compiled step does
    state.counted = True
    assert (state.seen, state.counted) == (10, False)
    state.set_index(CPU)
    assert (state.index.tolist(), state.index.data_ptr()) == ([7, 9, 8], where), "CUDA graphs look for it where it was"
    state.select(lambda rows: [rows[2], rows[0]])
    assert (state.starts, state.seen, state.index.tolist()) == (Starts((1, 2), (0,)), 10, [8, 7])
    alike = SequenceState(UNPADDED)
    alike.seen = 4
    alike.set_index(CPU)
    alike.select(lambda rows: rows * 5)  # of rows that are not told apart
    assert alike.index is not None
    assert (alike.starts, alike.index.tolist()) == (Starts(), [3])


def make_pass(seen: int, new: int, starts: Starts, **more: Any) -> Pass:
    return Pass(seen, new, starts, True, rotary, CPU, CPU, **more)


@pytest.mark.parametrize(
    ("seen", "new", "texts"),
    [
        (0, 6, [(0, 2, 0, 0, 6), (2, 3, 4, 0, 2), (3, 4, 6, 0, 0)]),
        (3, 2, [(0, 2, 0, 3, 2), (2, 3, 1, 0, 1), (3, 4, 2, 0, 0)]),
        (8, 1, [(0, 2, 0, 8, 1), (2, 3, 0, 4, 1), (3, 4, 0, 1, 1)]),
    ],
)
def test_texts_that_start_alike_are_attended_to_together(seen: int, new: int, texts: list[tuple[int, ...]]) -> None:
    now = make_pass(seen, new, Starts((0, 0, 4, 7), (3, 3, 3, 9)), index=torch.zeros(4))
    found = now.texts
    assert [(x.rows.start, x.rows.stop, x.skip, x.now.seen, x.now.new) for x in found] == texts
    assert [x.now.starts for x in found] == [Starts(origins=(3,)), Starts(origins=(3,)), Starts(origins=(9,))]
    assert all(x.now.index is None and x.now.results is not now.results for x in found)
    (whole,) = make_pass(seen, new, Starts(origins=(3,))).texts
    assert (whole.rows, whole.skip) == (slice(None), 0)
    apart = make_pass(seen, new, Starts(origins=(3, 9))).texts  # at other positions, though none is padded
    assert [x.now.starts.origins for x in apart] == [(3,), (9,)]


def test_tokens_have_an_index_and_a_position_in_their_text() -> None:
    now = make_pass(20, 3, Starts(origins=(5, 0)))
    assert now.indices(-1, 3).tolist() == [[19, 20, 21]]
    for ours, theirs in zip(now.tables(1, 2, torch.float64), rotary(torch.tensor([[26, 27], [21, 22]])), strict=True):
        assert torch.equal(ours, theirs)
    ragged = make_pass(20, 1, Starts((2, 0), (5, 0)), decoding=True, index=torch.tensor([18, 20]))
    assert ragged.indices(-2, 1).tolist() == [[16], [18]]
    assert ragged.indices(-2, 3).tolist() == [[16, 17, 18], [18, 19, 20]]
    assert [x.tolist() for x in ragged.places(4, 1)] == [[17 % 4, 19 % 4], [1 + 17 % 4, 1 + 19 % 4]]
    assert torch.equal(ragged.tables(0, 1, torch.float64)[0], rotary(torch.tensor([[23], [20]]))[0])
    # as if a text's first token stood at position 0
    x = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    at_own, at_zero = (rotary(torch.tensor(p)) for p in ([[5], [0]], [[0], [0]]))
    torch.testing.assert_close(ragged.from_first_token(rotate(x, *at_own)), rotate(x, *at_zero))
    torch.testing.assert_close(ragged.rotate_back(rotate(x, *rotary(torch.tensor([[23], [20]]))), 0), x)
