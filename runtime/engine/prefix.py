"""The identity of a cached prefix: a chain of digests, with the tokens kept for comparison.

Contract: two entries are the same prefix only if salt and every token from position 0 agree. The
digest only finds a candidate; a collision costs a miss, never a wrong hit.
"""

import hashlib
from collections.abc import Callable

import msgspec

Digest = Callable[[bytes], bytes]


class PrefixEntry(msgspec.Struct, eq=False):
    """One full block of a prefix. `tokens` are its little-endian int32 ids; `parent` may be
    replaced by an equal entry, which makes later comparisons short."""

    digest: bytes
    parent: "PrefixEntry | None"
    tokens: bytes
    salt: str


def blake2b(data: bytes) -> bytes:
    """The 16-byte digest that block identities use."""
    return hashlib.blake2b(data, digest_size=16).digest()


def extend(
    parent: PrefixEntry | None, tokens: bytes, salt: str, digest: Digest = blake2b
) -> PrefixEntry:
    """The entry of the block that follows `parent` (None: the first block) and holds `tokens`.

    The salt goes into the first block's digest, length first, so that no salt and tokens can be
    split another way; later blocks inherit it through the parent's digest.
    """
    if parent is None:
        encoded = salt.encode("utf-8", "surrogatepass")
        head = len(encoded).to_bytes(8, "little") + encoded
    else:
        head = parent.digest
    return PrefixEntry(digest(head + tokens), parent, tokens, salt)


def same_prefix(kept: PrefixEntry, other: PrefixEntry) -> bool:
    """Whether both stand for the same salt and tokens from position 0 on."""
    left: PrefixEntry | None = kept
    right: PrefixEntry | None = other
    while left is not right:
        if left is None or right is None:
            return False
        if left.tokens != right.tokens or left.salt != right.salt:
            return False
        if left.parent is right.parent:
            break
        left, right = left.parent, right.parent
    # Equal from here to the root: share the chain, so that the next comparison ends at once.
    other.parent = kept.parent
    return True
