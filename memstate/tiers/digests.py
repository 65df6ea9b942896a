"""Digests of prompts and of nodes of the prefix cache, each computed once a page. Knows no record."""

from memstate.prefix.tree import Found, Node, Tree
from memstate.tiers.keys import Keys
from memstate.tokens import BYTES, Prompt


class Digests:
    """Computes chained digests page by page; nodes remember theirs.

    Args:
        keys: Makes the digests.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys, self._unit = keys, keys.page_tokens * BYTES

    def of_node(self, tree: Tree, node: Node) -> list[bytes]:
        """Returns the digests of all pages up to a node's end, 32 bytes each."""
        steps = list(node.path())[::-1]
        known: list[bytes] = []
        for step in steps:
            known += step.digests
            if len(step.digests) * self._unit < len(step.key):
                break
        else:
            return known
        whole = self._keys.of(Prompt(b"".join(step.key for step in steps), tree.salt(node)), known)
        for step in steps:
            step.digests = whole[step.end - len(step.key) // self._unit : step.end]
        return whole

    def of_prompt(self, tree: Tree, prompt: Prompt, found: Found | None) -> list[bytes]:
        """Returns the digests of all whole pages of a prompt.

        Args:
            tree: The tree in which the prompt was looked up.
            prompt: The prompt.
            found: What the tree had of it.
        """
        node = found.known if found is not None else None
        known = self.of_node(tree, node) if node is not None and not node.is_root else []
        return self._keys.of(prompt, known[: len(prompt.key) // self._unit])
