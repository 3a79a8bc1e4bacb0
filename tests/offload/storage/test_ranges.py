import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.offload.storage.ranges import MIN_PIECE_BYTES, PAGE_ALIGN_BYTES, RangeAllocator, aligned, growth_bytes

GIB = 1 << 30


@settings(deadline=None, max_examples=60)
@given(
    slabs=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    actions=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 100)), max_size=60),
)
def test_pieces_never_overlap_and_everything_comes_back(slabs, actions):
    ranges = RangeAllocator()
    for number, length in enumerate(slabs):
        ranges.extend(number, length * PAGE_ALIGN_BYTES)
    total = sum(slabs) * PAGE_ALIGN_BYTES
    held = []
    for size, choice in actions:
        pieces = ranges.take(size * PAGE_ALIGN_BYTES)
        if pieces is not None:
            assert sum(piece.length for piece in pieces) == size * PAGE_ALIGN_BYTES
            held.append(pieces)
        elif held:
            ranges.give(held.pop(choice % len(held)))
        taken = sorted(piece for pieces in held for piece in pieces)
        for one, two in pairwise(taken):
            assert one.slab < two.slab or one.start + one.length <= two.start
        assert all(piece.start + piece.length <= slabs[piece.slab] * PAGE_ALIGN_BYTES for piece in taken)
        assert ranges.free_bytes == total - sum(piece.length for piece in taken)
    for pieces in held:
        ranges.give(pieces)
    assert ranges.free_bytes == total
    assert sorted(ranges.remove_free_slabs()) == list(range(len(slabs)))
    assert ranges.free_bytes == 0


def test_a_slab_grows_at_its_end_and_joins_what_is_free_there():
    ranges = RangeAllocator()
    ranges.extend(0, 4 * PAGE_ALIGN_BYTES)
    taken = ranges.take(PAGE_ALIGN_BYTES)
    ranges.extend(0, 5 * PAGE_ALIGN_BYTES)
    (piece,) = ranges.take(8 * PAGE_ALIGN_BYTES)
    assert piece == (0, PAGE_ALIGN_BYTES, 8 * PAGE_ALIGN_BYTES)
    assert ranges.remove_free_slabs() == []
    ranges.give([piece, *taken])
    assert ranges.remove_free_slabs() == [0]


def test_no_piece_is_too_short_to_be_worth_a_copy():
    ranges = RangeAllocator()
    ranges.extend(0, 10 * MIN_PIECE_BYTES)
    parts = [ranges.take(MIN_PIECE_BYTES // 2) for _ in range(20)]
    for part in parts[::2]:
        ranges.give(part)
    assert ranges.free_bytes == 5 * MIN_PIECE_BYTES
    assert ranges.take(MIN_PIECE_BYTES) is None
    assert ranges.usable_bytes(MIN_PIECE_BYTES) == 0


def test_200_steps_of_a_7b_model_reserve_at_most_a_twentieth_too_much():
    """Responses of 4k to 32k tokens through 28 layers: attention's tensors leave in forward and come back in reverse."""
    layers, bytes_per_token = 28, (7168, 7168, 1024, 1024, 7168, 112)
    for seed in range(4):
        draw, ranges = random.Random(seed), RangeAllocator()
        reserved = slabs = largest = longest = 0
        for _ in range(200):
            tokens, held = draw.randint(4096, 32768), []
            grown_before = slabs
            for nbytes in [width * tokens for _ in range(layers) for width in bytes_per_token]:
                pieces = ranges.take(aligned(nbytes))
                if pieces is None:
                    more = growth_bytes(aligned(nbytes) - ranges.usable_bytes(aligned(nbytes)), reserved)
                    ranges.extend(slabs, more)
                    reserved, slabs = reserved + more, slabs + 1
                    pieces = ranges.take(aligned(nbytes))
                held.append(pieces)
            assert slabs == grown_before or tokens > longest  # none after the longest seen
            longest, largest = max(longest, tokens), max(largest, layers * sum(bytes_per_token) * tokens)
            assert reserved <= 1.05 * largest or largest < GIB
            for pieces in reversed(held):
                ranges.give(pieces)
        assert slabs < 200
