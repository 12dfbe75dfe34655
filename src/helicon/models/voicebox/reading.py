"""Whether what is said can be read, and has room: seen in the first utterances, before anything is learned from them.

Letters: b utterances, m tokens.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor

from helicon.data.loader import Loader
from helicon.engine.trainer import Trainer
from helicon.models.voicebox.data import collate_speech
from helicon.models.voicebox.text import SymbolTokenizer

logger = logging.getLogger(__name__)

NUM_FIRST = 256  # utterances that are looked at
MOST, FEW = 0.5, 0.01  # shares: of more than most nothing can be learned, and of fewer than few nobody need know
NUM_NAMED = 8


def first_batches(trainer: Trainer) -> Iterable[Any]:
    """The first utterances of what a trainer learns from, the same on every process."""
    feed = trainer.feed
    if feed.dataset is None:
        return [feed.first_batch()]
    loader = Loader(feed.dataset, batch_size=feed.batch_size, seed=trainer.options.seed, collate=collate_speech)
    return loader.validation(-(-NUM_FIRST // feed.batch_size))


class Reading:
    """Counts what of utterances is not known to their tokenizer, says nothing, or has more tokens than frames."""

    def __init__(self, tokenizer: Any, num_tokens: int | None):
        self.tokenizer = tokenizer if isinstance(tokenizer, SymbolTokenizer) else None
        self.num_tokens = num_tokens
        self.utterances = self.empty = self.crowded = self.symbols = self.unknown = self.frames = 0
        self.strange: dict[str, None] = {}  # unknown symbols, in the order in which they were met

    def add(
        self, ids: Int[Tensor, "b m"], texts: Sequence[str] | None = None, frames: Int[Tensor, " b"] | None = None
    ) -> None:
        """A batch: ids, -1 past the end of a row; the texts that they were read from, and how many frames there are for each."""
        counts = (ids >= 0).sum(dim=1)
        self.utterances += len(ids)
        self.symbols += int(counts.sum())
        self.empty += int((counts == 0).sum())
        if frames is not None:
            self.crowded += int((counts > frames).sum())
            self.frames += int(frames.sum())
        if self.num_tokens is not None and ids.numel() and int(ids.max()) >= self.num_tokens:
            raise ValueError(
                f"the data has the token {int(ids.max())}, and the network knows 0 to {self.num_tokens - 1}: build it for more tokens"
            )
        if self.tokenizer is None:
            return
        unknown = int((ids == self.tokenizer.unknown).sum())
        self.unknown += unknown
        if unknown and texts is not None:
            symbols = [symbol for row in self.tokenizer.symbols_of(texts) for symbol in row]
            self.strange |= dict.fromkeys(symbol for symbol in symbols if symbol not in self.tokenizer.ids)

    @property
    def pace(self) -> float:
        """Tokens a frame; 0 where nothing was read."""
        return self.symbols / max(1, self.frames)

    def check(self) -> None:
        """Refuses what is no use to learn from, and warns of what is less use than it seems."""
        utterances = f"of {self.utterances} utterances"
        self._tell(self.empty, self.utterances, f"{utterances} have an empty text: fill it in, or leave them out")
        self._tell(self.unknown, self.symbols, f"of {self.symbols} symbols {self._strange()}")
        self._tell(
            self.crowded,
            self.utterances,
            f"{utterances} have more tokens than frames, so that some are not learned: take a feature space of more frames a second, "
            "or leave them out",
        )

    def _strange(self) -> str:
        if self.tokenizer is None:
            return ""
        some = lambda symbols: f"{' '.join(list(symbols)[:NUM_NAMED])}{' ...' if len(symbols) > NUM_NAMED else ''}"
        named = f" ({some(self.strange)})" if self.strange else ""
        known = some(sorted(self.tokenizer.ids, key=str.isalpha, reverse=True))
        return (
            f"that are said{named} are not known to the tokenizer, which knows {known}: give model.tokenizer the symbols "
            "of this data"
        )

    def _tell(self, count: int, total: int, what: str) -> None:
        if count > MOST * total:
            raise ValueError(f"{count} {what}")
        if count > FEW * total:
            logger.warning("%d %s", count, what)
