"""Exchanges words (int64) between ranks: each rank sends its words, and gets the bitwise AND over all ranks."""

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from memstate.errors import AgreementLost, ConfigurationError

Words = NDArray[np.int64]


class Exchange:
    """One exchange under way.

    Args:
        words: The words of this rank, int64 `word`; as many on every rank.
        group: The torch.distributed group of the ranks, None for all.
        timeout: How long `result` waits for a rank that does not answer.

    Raises:
        AgreementLost: The group refuses the words.
    """

    def __init__(self, words: Words, group: "dist.ProcessGroup | None", timeout: timedelta) -> None:
        self._tensor, self._timeout = torch.from_numpy(words.copy()), timeout
        try:
            self._work: Any = dist.all_reduce(self._tensor, dist.ReduceOp.BAND, group=group, async_op=True)
        except (RuntimeError, ValueError) as error:
            raise AgreementLost(str(error)) from error

    @property
    def done(self) -> bool:
        """Whether `result` returns without waiting."""
        return bool(self._work.is_completed())

    def result(self) -> Words:
        """Returns the AND over all ranks, int64 `word`.

        Raises:
            AgreementLost: A rank does not answer.

        Syncs: waits for the slowest rank.
        """
        try:
            if not self._work.wait(self._timeout):
                raise AgreementLost("the group gave up waiting")
        except RuntimeError as error:
            raise AgreementLost(str(error)) from error
        words: Words = self._tensor.numpy()
        return words


class Ranks:
    """Agrees over a torch.distributed group with a backend for CPU tensors (gloo). Nothing else may use the group.

    Args:
        group: The group, None for all ranks.
        timeout: Seconds after which a rank that does not answer counts as lost.

    Raises:
        ConfigurationError: torch.distributed is not set up, or the group has no gloo backend.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None, timeout: float = 60.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigurationError("ranks that agree need torch.distributed.init_process_group first")
        backend = dist.get_backend_config(group)
        if "cpu:gloo" not in backend:
            raise ConfigurationError(f"group with {backend}: expected cpu:gloo, as of new_group(backend='gloo')")
        self._group, self._timeout = group, timedelta(seconds=timeout)

    def exchange(self, words: Words) -> Exchange:
        """Begins, in the background, to compute the bitwise AND of words over all ranks.

        Raises:
            AgreementLost: The group refuses the words.

        Syncs: no.
        """
        return Exchange(words, self._group, self._timeout)

    def gather(self, text: str) -> list[str]:
        """Returns the texts of all ranks, in the order of the group. It waits up to the timeout of the group.

        Raises:
            AgreementLost: A rank does not answer.

        Syncs: waits for the slowest rank.
        """
        own, ranks = np.frombuffer(text.encode(), np.uint8), dist.get_world_size(self._group)
        size = torch.tensor([own.size], dtype=torch.int64, device="cpu")
        sizes = [torch.zeros_like(size) for _ in range(ranks)]
        try:
            dist.all_gather(sizes, size, group=self._group)
            lengths = [int(each) for each in sizes]
            sent = torch.from_numpy(np.pad(own, (0, max(lengths) - own.size)))  # gloo crashes if sizes differ
            told = [torch.empty_like(sent) for _ in range(ranks)]
            dist.all_gather(told, sent, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise AgreementLost(str(error)) from error
        return [bytes(each[:n].numpy()).decode() for each, n in zip(told, lengths, strict=True)]
