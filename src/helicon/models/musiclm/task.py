"""How MuLaN is learned: one loss over all pairs of a batch.

Letters: b batch, n samples, t tokens, d features of a latent, s shown.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxtyping import Float
from PIL import Image
from torch import Tensor

from helicon.engine.task import Batch, Loss, Task, Update
from helicon.models.musiclm.mulan import Latents, MuLaN, check_chunk_size
from helicon.models.musiclm.towers import TextTransformer
from helicon.quantize.rows import num_ranks

MULTIPLE = 16  # tokens to which texts are padded, so that batches have few different shapes
MAX_SHOWN = 16
CELL = 24  # pixels
NUM_BEST = 3  # captions named beside each sound


class Pairs(NamedTuple):
    """Sounds and their texts, in the space they share."""

    audio: Float[Tensor, "b d"]
    text: Float[Tensor, "b d"]
    captions: list[int]  # equal where the texts are


class MuLaNTask(Task):
    """Batches hold "audio" `[b, n]` at the network's rate (with "audio_lengths" `[b]` where sounds are shorter), and "texts", or their
    "text_token_ids" `[b, t]` with -1, or the `pad_id` of the network, past the end."""

    model: MuLaN
    unit = "pairs"

    def __init__(self, mulan: MuLaN, *, chunk_size: int | None = None):
        """
        Args:
            chunk_size: see `MuLaN.forward`.
        """
        super().__init__(mulan)
        check_chunk_size(chunk_size)
        # (The losses are small, and talk to other processes.)
        self.compiled = {"model": (mulan.audio, mulan.text)}
        self.chunk_size = chunk_size
        self._kept: list[Pairs] | None = None
        self._num_pairs: int | None = None  # of the batches it is trained on

    def weight(self, batch: Batch) -> float:
        """Pairs. One alone counts nothing, as there is no loss of it: the last of a validation set, say."""
        count = len(batch["audio"])
        if self.model.training and num_ranks() > 1:
            self._check_equal(count)
        compared = count * num_ranks() if self.model.training else count
        return float(count) if compared > 1 else 0.0

    def _check_equal(self, count: int) -> None:
        """(Processes that gather unequal batches would wait for each other for ever.)"""
        if self._num_pairs not in (None, count):
            raise ValueError(
                f"a batch of {count} pairs follows one of {self._num_pairs}, and all must be equally large to be compared over processes: "
                "give the DataLoader drop_last=True"
            )
        self._num_pairs = count

    def units(self, batch: Batch) -> int:
        return len(batch["audio"])

    def read(self, batch: Batch) -> Batch:
        sounds: Batch = {name: batch[name] for name in ("audio", "audio_lengths") if name in batch}
        if "texts" in batch:
            read = self.model.read_texts(batch["texts"], MULTIPLE)
            ids = self.model.caption_ids(read["texts"], batch["texts"], read["text_mask"])
            return {**sounds, **read, "caption_ids": ids}
        if "text_token_ids" not in batch:
            raise ValueError(
                "these sounds have no texts, and MuLaN learns what belongs together: say where the texts are with "
                'captions="column", "beside" or "folder"'
            )
        tokens, reader = batch["text_token_ids"], self.model.text
        if not isinstance(reader, TextTransformer):
            raise ValueError(f"a {type(reader).__name__} reads texts, and not ids of tokens: give it texts")
        mask = reader.are_tokens(tokens)
        ids = self.model.caption_ids(tokens, text_mask=mask)
        return {**sounds, "texts": tokens.clamp(min=0), "text_mask": mask, "caption_ids": ids}

    def forward(self, batch: Batch) -> Float[Tensor, ""]:
        return self._pass(batch, chunk_size=self.chunk_size, caption_ids=batch["caption_ids"])

    def _pass(self, read: Batch, **options: Any) -> Any:
        lengths, mask = read.get("audio_lengths"), read["text_mask"]
        return self.networks["model"](read["audio"], read["texts"], lengths=lengths, text_mask=mask, **options)

    def updates(self, step: int) -> Sequence[Update]:
        return [
            Update("model", lambda loss: Loss(loss, {"temperature": self.model.loss.temperature.detach()})),
        ]

    # ------------------------------------------------------------------ validation

    def validate(self, batch: Batch) -> Loss:
        """The loss of the pairs of this batch, among themselves."""
        read = self.read(batch)
        audio, text = self._embedded(read)
        if self._kept is not None:
            self._kept.append(Pairs(audio.last.cpu(), text.last.cpu(), read["caption_ids"].tolist()))
        is_alone = len(audio.last) < 2
        return Loss(
            audio.last.new_zeros(()) if is_alone else self.model.contrast(audio, text, caption_ids=read["caption_ids"])
        )

    @contextmanager
    def keeping(self) -> Iterator[list[Pairs]]:
        """Inside, what `validate` embeds is kept: who finds whom is a question to all batches together."""
        kept: list[Pairs] = []
        self._kept = kept
        try:
            yield kept
        finally:
            self._kept = None

    def _embedded(self, read: Batch) -> tuple[Latents, Latents]:
        return self._pass(read, return_all_latents=True)

    # ------------------------------------------------------------------ samples

    def sample(self, batch: Batch, seed: int) -> Float[Tensor, "s s"]:
        """The similarity of each of the first sounds (rows) with each of their texts."""
        audio, text = self._embedded(self.read({name: value[:MAX_SHOWN] for name, value in batch.items()}))
        return (audio.last @ text.last.T).cpu()

    def present(self, batch: Batch, samples: Mapping[str, Any]) -> Mapping[str, Callable[[Path], object]]:
        """The similarities as a picture, and which captions each sound is most similar to."""
        captions = _captions(batch)
        files: dict[str, Callable[[Path], object]] = {}
        for name, similarities in samples.items():
            files[f"similarities-{name}.png"] = similarity_picture(similarities).save
            files[f"captions-{name}.txt"] = partial(_write, _best_captions(similarities, captions))
        return files


def _write(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def _captions(batch: Batch) -> list[str]:
    if "texts" in batch:
        return list(batch["texts"])
    return [str(tuple(token for token in row if token >= 0)) for row in batch["text_token_ids"].tolist()]


def similarity_picture(similarities: Float[Tensor, "s s"]) -> Image.Image:
    """A square for each sound (a row) and text (a column), from black at the lowest similarity to white at the highest."""
    low, high = similarities.min(), similarities.max()
    levels = ((similarities - low) / (high - low).clamp(min=1e-6) * 255).nan_to_num().byte()
    rows, columns = levels.shape
    return Image.fromarray(levels.numpy()).resize((columns * CELL, rows * CELL), Image.Resampling.NEAREST)


def _best_captions(similarities: Float[Tensor, "s s"], captions: Sequence[str]) -> str:
    """For each sound its caption, and those that it is most similar to."""
    lines = []
    for caption, row in zip(captions, similarities, strict=False):
        highest: dict[str, float] = {}
        for place in row.argsort(descending=True).tolist():
            highest.setdefault(captions[place], row[place].item())
        best = list(highest.items())[:NUM_BEST]
        lines += [caption, *(f"    {similarity:.3f} {found}" for found, similarity in best)]
    return "".join(f"{line}\n" for line in lines)
