"""Where parameters are: every element once, padding last, shards and pieces of equal length."""

from itertools import pairwise
from math import lcm, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmpi.core.layout import PIECES, Layout
from zmpi.messages.transport import chunks

shapes = st.lists(
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
)
shapes = shapes.map(lambda found: {f"p{i}": shape for i, shape in enumerate(found)})
ranks = st.integers(1, 9)


def layout_of(shapes, shards):
    return Layout("unit", "unit.", shapes, shards)


@given(shapes, ranks)
def test_parameters_lie_one_after_another_in_order(shapes, shards):
    layout = layout_of(shapes, shards)
    vector = np.arange(layout.padded)
    views = layout.views(vector)
    assert list(views) == list(shapes)
    assert [view.shape for view in views.values()] == list(shapes.values())
    assert np.concatenate([view.ravel() for view in views.values()]).tolist() == list(
        range(layout.elements)
    )


@given(shapes, ranks)
def test_views_are_views(shapes, shards):
    layout = layout_of(shapes, shards)
    vector = np.zeros(layout.padded)
    for view in layout.views(vector).values():
        view += 1
    assert vector.tolist() == [1] * layout.elements + [0] * (layout.padded - layout.elements)


@given(shapes, ranks)
def test_padding_fills_up_to_a_multiple_of_ranks_and_pieces(shapes, shards):
    layout = layout_of(shapes, shards)
    multiple = lcm(shards, PIECES)
    assert layout.elements == sum(map(prod, shapes.values()))
    assert layout.padded % multiple == 0
    assert 0 <= layout.padded - layout.elements < multiple
    assert layout.shard_length * shards == layout.padded
    assert layout.shard_length % layout.pieces == 0
    assert layout.pieces * shards == multiple


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 192])
def test_every_number_of_ranks_that_divides_192_pads_alike(shards):
    for elements in range(1, 400, 7):
        layout = layout_of({"a": (elements,)}, shards)
        assert layout.padded == layout_of({"a": (elements,)}, 1).padded
        assert (
            layout.padded // (layout.pieces * shards) == layout.padded // 192
        )  # the norm's pieces are the same too


@given(shapes, ranks)
def test_shards_cover_the_vector_once(shapes, shards):
    layout = layout_of(shapes, shards)
    covered = [i for owner in range(shards) for i in range(layout.padded)[layout.shard(owner)]]
    assert covered == list(range(layout.padded))


@given(shapes, ranks)
def test_padding_of_all_shards_is_the_units(shapes, shards):
    layout = layout_of(shapes, shards)
    each = [layout.padding(layout.shard(owner)) for owner in range(shards)]
    assert sum(each) == layout.padded - layout.elements
    for owner, padding in enumerate(each):
        own = range(layout.padded)[layout.shard(owner)]
        assert padding == sum(i >= layout.elements for i in own)


@given(shapes, ranks, st.data())
def test_spans_name_the_parameter_of_every_element_of_a_slice(shapes, shards, data):
    layout = layout_of(shapes, shards)
    part = layout.shard(data.draw(st.integers(0, shards - 1)))
    owner = {}
    for name, view in layout.views(np.arange(layout.padded)).items():
        owner |= dict.fromkeys(view.ravel().tolist(), name)
    expected = [owner.get(i) for i in range(layout.padded)[part]]
    found = [None] * len(expected)
    for name, start, stop in layout.spans(part):
        assert start < stop
        found[start:stop] = [name] * (stop - start)
    assert found == expected


# ---- chunks --------------------------------------------------------------------------------------


@given(st.integers(0, 500), st.integers(1, 60))
def test_chunks_cover_a_range_once_and_in_order(length, limit):
    found = chunks(length, limit)
    assert [i for start, stop in found for i in range(start, stop)] == list(range(length))
    assert all(0 < stop - start <= limit for start, stop in found)


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_no_count_of_a_unit_of_more_than_2_to_the_31_elements_comes_near_2_to_the_31(
    shards, itemsize
):
    """B13 (a), integers only: chunks are elements of a large datatype; so is their sum."""
    layout = layout_of({"a": (2**31 + 7,)}, shards)
    limit = max(1, (16 << 20) // (itemsize * shards))
    found = chunks(layout.shard_length, limit)
    assert found[0][0] == 0 and found[-1][1] == layout.shard_length
    assert all(before[1] == after[0] for before, after in pairwise(found))
    assert all(start < stop and (stop - start) * shards < 2**31 for start, stop in found)
    assert sum(stop - start for start, stop in found) * shards == layout.padded >= 2**31 + 7
    assert all(isinstance(number, int) for pair in (found[0], found[-1]) for number in pair)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_chunk_limit_below_1_is_an_error(limit):
    with pytest.raises(ValueError, match=f"chunk limit: expected at least 1 element, got {limit}"):
        chunks(10, limit)
