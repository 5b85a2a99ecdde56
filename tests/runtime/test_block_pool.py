"""The block pool: holds, eviction order, publishing, collisions."""

import numpy as np
import pytest

from ropeway.compiler.errors import RunError
from ropeway.runtime.engine.block_pool import BlockPool
from ropeway.runtime.engine.prefix import PrefixEntry, blake2b, extend


def entry(*blocks: list[int], salt: str = "", digest=blake2b) -> PrefixEntry:
    """The entry of the last of `blocks`."""
    found = None
    for tokens in blocks:
        found = extend(found, np.array(tokens, np.int32).tobytes(), salt, digest)
    assert found is not None
    return found


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate() for _ in range(3)) == [1, 2, 3]
    assert pool.available == 0
    with pytest.raises(RunError, match="all 3 blocks"):
        pool.allocate()


def test_release_once_too_often_is_an_error() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(RunError, match="once too often"):
        pool.release([block])


def test_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    head, tail = pool.allocate(), pool.allocate()
    first, second = entry([1]), entry([1], [2])
    pool.publish(head, first)
    pool.publish(tail, second)
    pool.release([head, tail])
    assert pool.allocate() == tail
    assert pool.find(entry([1])) == (head, first)
    assert pool.find(entry([1], [2])) is None


def test_least_recently_used_goes_first() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    for index, block in enumerate(blocks):
        pool.publish(block, entry([index]))
        pool.release([block])
    pool.acquire(blocks[0])  # used again, so it is now the youngest
    pool.release([blocks[0]])
    assert [pool.allocate() for _ in range(3)] == [blocks[1], blocks[2], blocks[0]]


def test_unpublished_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3)
    cached, plain = pool.allocate(), pool.allocate()
    pool.publish(cached, entry([5]))
    pool.release([cached])
    pool.release([plain])
    assert pool.allocate() == plain


def test_same_prefix_published_twice_keeps_the_first_block() -> None:
    pool = BlockPool(3)
    one, two = pool.allocate(), pool.allocate()
    kept = pool.publish(one, entry([1, 2]))
    assert pool.publish(two, entry([1, 2])) is kept
    pool.release([one, two])
    pool.check([])
    assert pool.find(entry([1, 2])) == (one, kept)


def test_salt_and_position_are_part_of_the_identity() -> None:
    pool = BlockPool(2)
    pool.publish(pool.allocate(), entry([7], [8], salt="a"))
    assert pool.find(entry([7], [8], salt="a")) is not None
    assert pool.find(entry([7], [8], salt="b")) is None
    assert pool.find(entry([8], salt="a")) is None
    assert pool.find(entry([0], [8], salt="a")) is None


def test_salt_and_tokens_cannot_be_split_another_way() -> None:
    # "x" + tokens, against a salt that swallows the first token's bytes.
    token = np.array([0x41], np.int32).tobytes()
    assert (
        extend(None, token + token, "x").digest != extend(None, token, "x" + token.decode()).digest
    )


def test_a_digest_collision_costs_a_miss_and_never_a_wrong_hit() -> None:
    pool = BlockPool(4)
    weak = lambda data: b"same"  # noqa: E731
    a, b = pool.allocate(), pool.allocate()
    pool.publish(a, entry([1], digest=weak))
    pool.publish(b, entry([2], digest=weak))
    assert pool.find(entry([1], digest=weak)) is not None
    assert pool.find(entry([2], digest=weak)) is None
    pool.check([[a], [b]])


def test_child_of_a_collided_parent_is_not_found_under_the_other_parent() -> None:
    # The parents' digests collide; the children's differ by their own tokens only.
    weak = lambda data: bytes(data[-4:])  # noqa: E731
    pool = BlockPool(4)
    pool.publish(pool.allocate(), entry([1, 9], digest=weak))
    pool.publish(pool.allocate(), entry([2, 9], [3], digest=weak))
    assert pool.find(entry([1, 9], [3], digest=weak)) is None
    assert pool.find(entry([2, 9], [3], digest=weak)) is not None


def test_without_caching_nothing_is_published() -> None:
    pool = BlockPool(2, caching=False)
    block = pool.allocate()
    pool.publish(block, entry([1]))
    assert pool.find(entry([1])) is None
    pool.release([block])
    assert pool.cached == 0 and pool.available == 1


def test_reset_forgets_prefixes_and_keeps_holds() -> None:
    pool = BlockPool(4)
    held, idle = pool.allocate(), pool.allocate()
    pool.publish(held, entry([1]))
    pool.publish(idle, entry([2]))
    pool.release([idle])
    pool.reset()
    pool.check([[held]])
    assert pool.cached == 0 and pool.available == 2


def test_check_finds_a_lost_and_a_doubled_block() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    with pytest.raises(RunError, match=f"block {block} has 0 holders, 1 ref"):
        pool.check([])
    with pytest.raises(RunError, match=f"block {block} has 2 holders, 1 ref"):
        pool.check([[block], [block]])
