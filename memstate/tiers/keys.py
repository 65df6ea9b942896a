"""Computes digests of prefixes: equal for equal tokens and model, in every process and on every machine.

    fingerprint, salt ─▶ root ─▶ digest 0 ─▶ digest 1 ─▶ ..      digest i also depends on the tokens of page i

Digest i stands for all tokens up to the end of page i. The nodes of a prefix tree remember the digests of their pages.
Knows no record, no pool and no storage.
"""

import sys
from collections.abc import Hashable, Sequence
from hashlib import blake2b

from memstate.checks import whole
from memstate.errors import InvalidArgument
from memstate.prefix.tree import Found, Node, Tree
from memstate.salts import encode, encode_plain
from memstate.state.layout import Plane, StateLayout
from memstate.tiers.records import DIGEST_BYTES, VERSION, require_digest
from memstate.tokens import BYTES, NUMBER, SaltedTokens, ids, joined


class Keys:
    """Computes the digests of prefixes, page by page.

    Args:
        fingerprint: 32 bytes that stand for model, layout and ranks, see `fingerprint`.
        page_tokens: Tokens of a page.

    Attributes:
        unit: Bytes of a page's tokens in the key of a prompt.

    Raises:
        InvalidArgument: An argument has the wrong type or size.

    Example:
        >>> from memstate.tokens import encode as tokens
        >>> keys = Keys(bytes(32), page_tokens=2)
        >>> short, long = (keys.of(SaltedTokens(tokens(given), None)) for given in ([1, 2], [1, 2, 3, 4, 5]))
        >>> len(long), long[0] == short[0]
        (2, True)
    """

    def __init__(self, fingerprint: bytes, page_tokens: int) -> None:
        self.fingerprint = require_digest("fingerprint", fingerprint)
        self.page_tokens = whole("page_tokens", page_tokens)
        self.unit = self.page_tokens * BYTES

    def __repr__(self) -> str:
        return f"Keys({self.fingerprint.hex()[:8]}.., {self.page_tokens} tokens a page)"

    def of(self, prompt: SaltedTokens, known: Sequence[bytes] = ()) -> list[bytes]:
        """Returns the digest of every whole page of a prefix, 32 bytes each.

        Args:
            prompt: The prefix. Tokens after the last whole page do not count. Prefixes of different salts have
                different digests.
            known: Digests of the first pages, from an earlier call for the same tokens and salt. They are not computed
                again.

        Raises:
            InvalidArgument: `require_salt` refuses the salt.
        """
        salt, size = prompt.salt, self.page_tokens * NUMBER
        digests = list(known[: len(prompt.key) // self.unit])
        digest = digests[-1] if digests else blake2b(self.fingerprint + encode(salt), digest_size=DIGEST_BYTES).digest()
        tokens = ids(prompt.key[len(digests) * self.unit :]).tobytes()
        for end in range(size, len(tokens) + 1, size):
            digest = blake2b(digest + tokens[end - size : end], digest_size=DIGEST_BYTES).digest()
            digests.append(digest)
        return digests

    def of_node(self, tree: Tree, node: Node) -> list[bytes]:
        """Returns the digests of all pages up to a node's end. Nodes keep their digests: each is computed only once."""
        steps = list(node.path())[::-1]
        known: list[bytes] = []
        for step in steps:
            known += step.digests
            if len(step.digests) * self.unit < len(step.key):
                break
        else:
            return known
        whole = self.of(SaltedTokens(joined(step.key for step in steps), tree.salt(node)), known)
        for step in steps:
            step.digests = whole[step.end - len(step.key) // self.unit : step.end]
        return whole

    def of_prompt(self, tree: Tree, prompt: SaltedTokens, lookup: Found | None) -> list[bytes]:
        """Returns the digests of all whole pages of a prompt.

        Args:
            tree: The tree in which the prompt was looked up.
            prompt: The prompt.
            lookup: How far the tree matches the prompt, None if it was not looked up.
        """
        return self.of(prompt, self.of_node(tree, lookup.known) if lookup is not None else ())


def fingerprint(
    model: str, state: StateLayout | None, kv: StateLayout | None, page_tokens: int, rank: int, ranks: int
) -> bytes:
    """Returns 32 bytes that are equal in two processes if each can use the records of the other.

    They depend on the model's name, the planes of a state and of a KV page (names, shapes, dtypes, the order of their
    axes, layers, grids), the tokens of a page, the rank, the byte order and the version of the record format. They do
    not depend on the order and the alignment of planes on a device, because records have their own.

    Args:
        model: Name that stands for the weights and their quantisation.
        state: Layout of a state in a record.
        kv: Layout of a KV page, None if the caller manages KV.
        page_tokens: Tokens of a page.
        rank: The rank, from 0 on.
        ranks: Number of ranks.

    Raises:
        InvalidArgument: An argument has the wrong type, or `rank` is not below `ranks`.
    """
    if not isinstance(model, str):
        raise InvalidArgument(f"model {model!r}: expected its name, a text")
    page_tokens, ranks = whole("page_tokens", page_tokens), whole("ranks", ranks)
    if whole("rank", rank, least=0) >= ranks:
        raise InvalidArgument(f"rank {rank}: expected 0 to {ranks - 1}")
    parts = ("memstate", VERSION, sys.byteorder, model, _planes(state), _planes(kv), page_tokens, int(rank), ranks)
    return blake2b(encode_plain(parts), digest_size=DIGEST_BYTES).digest()


def _planes(layout: StateLayout | None) -> Hashable:
    if layout is None:
        return None
    return (layout.layers, tuple(map(_plane, layout.planes)))


def _plane(plane: Plane) -> Hashable:
    """Returns the properties of a plane that are in the fingerprint. Leaves out defaults, as older versions did."""
    order = (plane.order,) if plane.order or plane.layers else ()
    layers = (plane.layers,) if plane.layers else ()
    grid = (("grid", plane.grid),) if plane.grid != 1 else ()  # with another grid, states stand at other lengths
    return (plane.name, plane.shape, str(plane.dtype), *order, *layers, *grid)
