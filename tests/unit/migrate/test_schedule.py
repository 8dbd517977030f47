"""Schedule: pieces tile what travels, no rank has more than a bucket under way, and no rank waits for ever."""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dyn.migrate import Parcel, Piece, cut

MAX_RANKS = 5


@st.composite
def parcel_lists(draw):
    """Up to eight parcels between up to five ranks, with buffers that may be empty."""
    num_ranks = draw(st.integers(2, MAX_RANKS))
    pairs = st.tuples(st.integers(0, num_ranks - 1), st.integers(0, num_ranks - 1)).filter(lambda pair: pair[0] != pair[1])
    drawn = draw(st.lists(st.tuples(pairs, st.lists(st.integers(0, 25), max_size=4)), max_size=8))
    return [parcel(*pair, *sizes) for pair, sizes in drawn]


BUCKETS = st.integers(1, 30)


def parcel(source, destination, *sizes):
    return Parcel(unit="test", source=source, destination=destination, sizes=sizes)


def ends_of(parcels, piece):
    return parcels[piece.parcel].source, parcels[piece.parcel].destination


def under_way(parcels, pieces):
    """Bytes by (rank, bucket), sent and received together."""
    found = {}
    for piece in pieces:
        for rank in ends_of(parcels, piece):
            found[rank, piece.bucket] = found.get((rank, piece.bucket), 0) + piece.end - piece.start
    return found


def buckets_of(parcels, pieces):
    """By rank, the transfers of each of its buckets in the order in which it does them, as `execute` goes through them."""
    ranks = {rank for piece in pieces for rank in ends_of(parcels, piece)}
    mine = {rank: [piece for piece in pieces if rank in ends_of(parcels, piece)] for rank in ranks}
    return {rank: [list(bucket) for _, bucket in groupby(own, key=lambda piece: piece.bucket)] for rank, own in mine.items()}


def blocked(buckets):
    """The ranks that wait for ever when a bucket ends once all its transfers have been begun at both ends."""
    left = {rank: list(own) for rank, own in buckets.items()}
    begun = {rank: list(own[0]) for rank, own in buckets.items()}
    progress = True
    while progress:
        progress = False
        for rank, own in left.items():
            if own and all(sum(transfer in begun[other] for other in begun) == 2 for transfer in own[0]):
                own.pop(0)
                begun[rank] += own[0] if own else []
                progress = True
    return sorted(rank for rank, own in left.items() if own)


class TestCut:
    @given(parcel_lists(), BUCKETS)
    def test_pieces_tile_every_buffer_in_order(self, parcels, bucket_bytes):
        pieces = cut(parcels, bucket_bytes)
        for index, each in enumerate(parcels):
            for buffer, size in enumerate(each.sizes):
                reached = 0
                for piece in pieces:
                    if (piece.parcel, piece.buffer) == (index, buffer):
                        assert piece.start == reached < piece.end
                        reached = piece.end
                assert reached == size
        assert all(piece.parcel < len(parcels) and piece.buffer < len(parcels[piece.parcel].sizes) for piece in pieces)

    @given(parcel_lists(), BUCKETS)
    def test_no_rank_has_more_than_a_bucket_under_way(self, parcels, bucket_bytes):
        assert all(size <= bucket_bytes for size in under_way(parcels, cut(parcels, bucket_bytes)).values())

    @given(parcel_lists(), BUCKETS)
    def test_buckets_come_in_order_so_that_each_is_gone_through_once(self, parcels, bucket_bytes):
        buckets = [piece.bucket for piece in cut(parcels, bucket_bytes)]
        assert buckets == sorted(buckets)
        assert not buckets or buckets[0] == 0

    @given(parcel_lists(), BUCKETS)
    def test_no_rank_waits_for_ever(self, parcels, bucket_bytes):
        assert blocked(buckets_of(parcels, cut(parcels, bucket_bytes))) == []

    @given(parcel_lists())
    def test_what_fits_into_one_bucket_is_one_bucket_and_each_buffer_one_piece(self, parcels):
        pieces = cut(parcels, max(sum(sum(each.sizes) for each in parcels), 1))
        filled = [(index, buffer, size) for index, each in enumerate(parcels) for buffer, size in enumerate(each.sizes) if size]
        assert pieces == tuple(Piece(0, index, buffer, 0, size) for index, buffer, size in filled)

    @given(parcel_lists(), BUCKETS)
    def test_ranks_cut_alike(self, parcels, bucket_bytes):
        assert cut(tuple(parcels), bucket_bytes) == cut(
            [parcel(each.source, each.destination, *each.sizes) for each in parcels], bucket_bytes
        )

    def test_a_buffer_larger_than_a_bucket_goes_on_in_the_next(self):
        assert cut([parcel(0, 1, 7), parcel(0, 1, 3)], 4) == (
            Piece(0, 0, 0, 0, 4),
            Piece(1, 0, 0, 4, 7),
            Piece(1, 1, 0, 0, 1),
            Piece(2, 1, 0, 1, 3),
        )

    def test_ranks_that_have_nothing_to_do_with_each_other_use_the_same_bucket(self):
        assert [piece.bucket for piece in cut([parcel(0, 1, 4), parcel(2, 3, 4)], 4)] == [0, 0]

    def test_a_rank_that_sends_and_receives_counts_both(self):
        assert [piece.bucket for piece in cut([parcel(0, 1, 4), parcel(1, 2, 4)], 4)] == [0, 1]

    @pytest.mark.parametrize("bucket_bytes", [0, -1])
    def test_a_bucket_that_can_hold_nothing_is_refused(self, bucket_bytes):
        with pytest.raises(ValueError, match=f"bucket_bytes: expected at least 1, got {bucket_bytes}"):
            cut([parcel(0, 1, 7)], bucket_bytes)


def test_the_simulation_can_tell_a_job_that_blocks():
    # Three ranks in a circle; each begins with the transfer that its peer does last.
    circle = {0: [["0-1"], ["2-0"]], 1: [["1-2"], ["0-1"]], 2: [["2-0"], ["1-2"]]}
    assert blocked(circle) == [0, 1, 2]
    assert blocked({rank: [[transfer for bucket in own for transfer in bucket]] for rank, own in circle.items()}) == []
