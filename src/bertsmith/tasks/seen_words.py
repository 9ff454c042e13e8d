"""The rows of the word table that a training file's tokens look up, as the table that a fine-tuning updates.

A task's texts hold a part of the vocabulary: 11,600 words of 30,522 in MRPC, 5,600 in CoLA. The other rows never get a
gradient, their moments stay 0, and all that AdamW does to them is weight decay, which is one factor for all of them.
So the loop trains the rows that occur, and the others are multiplied once, when someone looks: the same weights up to
rounding, without a gradient, two moments and a pass over all of these for most of the table.
"""

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Parameter

from bertsmith.model.bert import BertEmbeddings

WORDS = "bert.embeddings.word"
"""What the table is called in a model."""


class SeenWords:
    """Narrows the table of `embeddings` to the rows of the ids that occur, on the device where it lies.

    `token_ids`: all that will be looked up in training, in any number of arrays. `begun`: the table (V, H) that the run
    began with, of which the rows are that do not occur; None: the present one.
    """

    def __init__(
        self, embeddings: BertEmbeddings, token_ids: Iterable[npt.NDArray[np.integer]], begun: Tensor | None = None
    ) -> None:
        table = embeddings.word.detach()
        occurs = np.zeros(len(table), dtype=bool)
        occurs[0] = True  # what a batch is filled up with
        for ids in token_ids:
            occurs[ids] = True
        seen = np.flatnonzero(occurs)
        numbers = np.full(len(table), -1)
        numbers[seen] = np.arange(len(seen))
        self._embeddings = embeddings
        self._begun = table if begun is None else begun.to(table.device)
        self._seen = torch.from_numpy(seen).to(table.device)
        self._numbers = torch.from_numpy(numbers).to(table.device)
        embeddings.word = Parameter(table.index_select(0, self._seen))

    def numbers(self, token_ids: Tensor) -> Tensor:
        """Token ids → their rows in the narrow table, of the same shape."""
        return self._numbers[token_ids]

    @contextlib.contextmanager
    def whole(self, shrunk: float) -> Iterator[None]:
        """In here the table is whole again, a copy of its own; what has not occurred is `shrunk` times what it was."""
        narrow = self._embeddings.word
        table = (self._begun * shrunk).index_copy_(0, self._seen, narrow.detach())
        self._embeddings.word = Parameter(table)
        try:
            yield
        finally:
            self._embeddings.word = narrow
