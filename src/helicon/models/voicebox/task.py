"""How speech is learned: one loss, of features that the frozen networks make of waves, or that come from a cache.

Letters: b batch, n frames, w samples, d features, m tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from helicon.data.seeds import mix
from helicon.engine.task import Batch, Loss, Task, Update
from helicon.models.soundstream.task import sound_files
from helicon.models.voicebox.durations import frames_of
from helicon.models.voicebox.flow import ConditionalFlowMatcherWrapper, Randomness
from helicon.models.voicebox.infilling import copied, frame_error, middle_span
from helicon.models.voicebox.model import repeated
from helicon.models.voicebox.solving import Drawn, Evaluator
from helicon.models.voicebox.text import PADDING, PhonemeInventory
from helicon.nn.capture import evaluating
from helicon.nn.lengths import before

MAX_SHOWN = 4
READ = "read"  # where a batch keeps what was made of it


class Framed(NamedTuple):
    """What of a batch is not random."""

    features: Float[Tensor, "b n d"]
    mask: Bool[Tensor, "b n"] | None  # None: all frames are real
    ids: Int[Tensor, "b m"] | None  # as the network reads them
    said: Mapping[str, Any]  # the same as keywords of `ConditionalFlowMatcherWrapper.draw`

    @property
    def is_frame(self) -> Bool[Tensor, "b n"]:
        return self.features.new_ones(self.features.shape[:2], dtype=torch.bool) if self.mask is None else self.mask

    @property
    def lengths(self) -> Int[Tensor, " b"]:
        return self.is_frame.sum(dim=1)


class VoiceBoxTask(Task):
    """Batches hold "audio" `[b, w]` (with "audio_lengths") at the rate of the feature space, or "features" `[b, n, d]` (with
    "feature_lengths") in their place, and what is said: "texts", "phonemes" `[b, m]` (with "durations" in seconds, where tokens stand at
    their frames), or "semantic_token_ids" `[b, m]`.

    The loss is a mean over hidden frames, of which batches have different numbers: each weighs as many as it has.
    """

    model: ConditionalFlowMatcherWrapper
    unit = "frames"

    def __init__(
        self,
        cfm_wrapper: ConditionalFlowMatcherWrapper,
        *,
        seed: int = 0,
        sample_steps: int = 16,
        sample_cond_scale: float = 1.0,
    ):
        """
        Args:
            seed: of what is random in validation.
            sample_steps, sample_cond_scale: how samples are made (`ConditionalFlowMatcherWrapper.sample`).
        """
        heard = getattr(cfm_wrapper.text_to_semantic, "wav2vec", None)
        frozen = {"audio_enc_dec": cfm_wrapper.audio_enc_dec, "wav2vec": heard}
        super().__init__(cfm_wrapper, frozen={name: module for name, module in frozen.items() if module is not None})
        try:
            replace(cfm_wrapper.solving, steps=sample_steps, cond_scale=sample_cond_scale)
        except ValueError as error:
            raise ValueError(f"sample_{error}") from error
        self.seed, self.sample_steps, self.sample_cond_scale = seed, sample_steps, sample_cond_scale
        self.has_few_shapes = False  # whether frames and tokens are padded so that batches have few different shapes

    # ------------------------------------------------------------------ what of a batch is learned from

    def framed(self, batch: Batch) -> Framed:
        """Features and tokens of a batch: here frozen networks run, and texts are read."""
        features, lengths = self.features(batch)
        n = features.shape[1]
        mask = None if lengths is None else before(lengths, n)
        found = Framed(features, mask, None, {})
        if not self.model.voicebox.condition_on_text:
            return found
        said = self._said(batch, found)
        ids = self._ids(said, n)
        if self.model.voicebox.alignment == "free":
            # A frame has room for one token: those beyond the last frame are not seen, and nothing can be made of them.
            places = torch.arange(ids.shape[1], device=ids.device)
            ids = ids.masked_fill(places >= found.lengths[:, None], PADDING)
            said = {"text_token_ids": ids}
        return found._replace(ids=ids, said=said)

    def features(self, batch: Batch) -> tuple[Float[Tensor, "b n d"], Int[Tensor, " b"] | None]:
        """As the feature space makes them, and how many frames of each are real; None: all."""
        if "features" in batch:
            return self.model.checked(batch["features"]), batch.get("feature_lengths")
        lengths = batch.get("audio_lengths")
        features, frames = self.model.features(batch["audio"], lengths)
        return features, None if lengths is None else frames

    def spoken(self, batch: Batch) -> tuple[Int[Tensor, "b m"], Sequence[str] | None] | None:
        """The tokens of a batch, before they come to frames, and the texts that they were read from, if they were; None where nothing
        is said, or by semantic tokens."""
        name = self._name_of_said(batch) if self.model.voicebox.condition_on_text else None
        if name == "texts":
            return self.model.tokenize(batch["texts"]), batch["texts"]
        return (batch["phonemes"], None) if name == "phonemes" else None

    def _name_of_said(self, batch: Batch) -> str | None:
        """What of a batch tells what is said; None: its sounds do, by their semantic tokens."""
        model = self.model
        is_textual = model.tokenizer is not None and not isinstance(model.tokenizer, PhonemeInventory)
        known = ("texts",) if is_textual else ("semantic_token_ids", "phonemes", "texts")
        name = next((name for name in known if name in batch), None)
        if model.text_to_semantic is not None and name in (None, "texts") and "audio" in batch:
            return None
        if name is None:
            raise ValueError(
                "this VoiceBox learns what is said, and the samples do not tell: say where their texts are with "
                'captions="column", "beside" or "folder" (data.captions), or build it with condition_on_text=False'
            )
        return name

    def _said(self, batch: Batch, framed: Framed) -> Mapping[str, Any]:
        model, name = self.model, self._name_of_said(batch)
        if name is None:
            return {"semantic_token_ids": model.heard(batch["audio"], batch.get("audio_lengths"))}
        if name != "phonemes":
            return {name: batch[name]}
        said = {"phoneme_ids": batch["phonemes"]}
        if "durations" in batch and model.voicebox.alignment == "frames":
            seconds = batch["durations"].masked_fill(batch["phonemes"] < 0, 0.0)
            said["phoneme_durations"] = frames_of(seconds, model.frame_hz, framed.lengths)
        return said

    def _ids(self, said: Mapping[str, Any], n: int) -> Int[Tensor, "b m"]:
        """One for each of n frames, where durations tell."""
        if "phoneme_durations" in said:
            return repeated(said["phoneme_ids"], said["phoneme_durations"], n)
        return self.model.tokenize(said["texts"]) if "texts" in said else next(iter(said.values()))

    def _drawn(self, framed: Framed, generator: torch.Generator | None = None, **fixed: Any) -> Batch:
        """All that a pass of the network needs."""
        random = self.model.randomness(framed.features, framed.mask, generator=generator, **fixed)
        tensors = {"features": framed.features, "mask": framed.mask, "ids": framed.ids, **random._asdict()}
        found = {name: value for name, value in tensors.items() if value is not None}
        return self._of_few_shapes(found, framed.is_frame) if self.has_few_shapes else found

    def _of_few_shapes(self, drawn: Batch, is_frame: Bool[Tensor, "b n"]) -> Batch:
        """The same with padding. (It comes last, so that what is random does not depend on it.) Of tokens without an alignment those
        beyond the frames are not seen anyway."""
        n = rounded_up(is_frame.shape[1])
        widths = dict.fromkeys(("features", "noise", "mask", "hidden"), n)
        if "ids" in drawn:
            widths["ids"] = n if self.model.voicebox.alignment == "free" else rounded_up(drawn["ids"].shape[1])
        if n > is_frame.shape[1]:
            drawn = {**drawn, "mask": is_frame}
        return {
            name: to_width(value, widths[name], -1 if name == "ids" else 0) if name in widths else value
            for name, value in drawn.items()
        }

    def read(self, batch: Batch) -> Batch:
        return self._drawn(self.framed(batch))

    def fixed(self, batch: Batch) -> tuple[Framed, Batch]:
        """The same, with randomness that is always that of this batch; made once, and kept in it."""
        if READ not in batch:
            framed = self.framed(batch)
            seed = mix(self.seed, "validation", *framed.lengths.tolist())
            generator = torch.Generator(framed.features.device).manual_seed(seed)
            batch[READ] = framed, self._drawn(framed, generator, cond_drop_prob=0.0)
        return batch[READ]

    # ------------------------------------------------------------------ the loss

    def weight(self, batch: Batch) -> Tensor:
        return _random(batch if "hidden" in batch else self.fixed(batch)[1]).num_hidden

    def units(self, batch: Batch) -> int:
        """Frames, padding among them: how many are real only the device knows."""
        rows, n = batch["features"].shape[:2] if "features" in batch else self.fixed(batch)[0].features.shape[:2]
        return rows * n

    def forward(self, batch: Batch) -> Float[Tensor, ""]:
        return self.networks["model"](
            batch["features"],
            mask=batch.get("mask"),
            text_token_ids=batch.get("ids"),
            randomness=_random(batch),
        )

    def updates(self, step: int) -> Sequence[Update]:
        return [Update("model", Loss)]

    def validate(self, batch: Batch) -> Loss:
        """The same loss, with text and context always there, and noise, times and hidden frames that are always the same.

        Beside it, how well the middle of each sound is guessed from what is around it ("infilling"), and how well by someone who copies
        the nearest frame ("copying"). Both are mean squared errors of standardised features: at t = 0, where the input tells nothing, the
        velocity of least error leads to the mean of what the frames can be, and the loss is the error of that.
        """
        framed, drawn = self.fixed(batch)
        loss = self.forward(drawn)
        span = middle_span(framed.lengths, framed.features.shape[1])
        hidden = to_width(span, drawn["hidden"].shape[1])
        infilling = self.forward({**drawn, "hidden": hidden, "times": torch.zeros_like(drawn["times"])})
        clean = self.model.normalise(framed.features)
        copying = frame_error(copied(clean, span, framed.is_frame), clean, span, squared=True)
        return Loss(loss, {"infilling": infilling, "copying": copying})

    # ------------------------------------------------------------------ samples

    @torch.no_grad()
    def sample(self, batch: Batch, seed: int) -> dict[str, Tensor] | None:
        """Waves of what is said in the first sounds of the batch: "spoken" with nothing but the text given, and "infilled", their middle
        made anew. None where there is nothing to make features audible with."""
        if self.model.audio_enc_dec is None:
            return None
        shown = self.framed(_first(batch))
        how = {**shown.said, "seed": seed, "steps": self.sample_steps, "cond_scale": self.sample_cond_scale}
        span = middle_span(shown.lengths, shown.features.shape[1])
        # Nothing is captured: for a few sounds now and then that takes longer than it saves, and keeps memory.
        own, self.model.evaluator = self.model.evaluator, Evaluator(capture=False)
        try:
            spoken = self.model.draw(lengths=shown.lengths, **how)
            infilled = self.model.draw(cond=shown.features, cond_lengths=shown.lengths, cond_mask=span, **how)
        finally:
            self.model.evaluator = own
        return {"spoken": self._waves(spoken), "infilled": self._waves(infilled)}

    def _waves(self, drawn: Drawn) -> Float[Tensor, "b w"]:
        space = self.model.audio_enc_dec
        with torch.autocast(self.model.device.type, enabled=False), evaluating(space):
            return space.decode(drawn.features, drawn.lengths)

    def present(self, batch: Batch, samples: Mapping[str, Any]) -> Mapping[str, Callable[[Path], object]]:
        """Each sound, what was made of its text and of its middle, the spectrograms of them all as one picture, and the texts."""
        made = {name: waves for name, waves in samples.items() if waves is not None}
        if not made:
            return {}
        few = _first(batch)
        framed = self.framed(few)
        lengths = framed.lengths * self.model.audio_enc_dec.downsample_factor
        true = few.get("audio")
        if true is None:
            true = self._waves(Drawn(framed.features, framed.is_frame, framed.is_frame))
        sounds = {"original": true} | {f"{name}-{kind}": w for name, waves in made.items() for kind, w in waves.items()}
        rows = [
            {name: waves[number, None, :length].float().cpu() for name, waves in sounds.items()}
            for number, length in enumerate(lengths.tolist())
        ]
        files = sound_files(rows, self.model.audio_enc_dec.sample_hz)
        if "texts" not in few:
            return files
        texts = "".join(f"{number:02d} {text}\n" for number, text in enumerate(few["texts"]))
        return {**files, "texts.txt": lambda path: path.write_text(texts, encoding="utf-8")}


def _random(drawn: Batch) -> Randomness:
    return Randomness(*(drawn[name] for name in Randomness._fields))


def _first(batch: Batch) -> Batch:
    return {name: value[:MAX_SHOWN] for name, value in batch.items() if name != READ}


def to_width(values: Shaped[Tensor, "b n *d"], width: int, fill: float = 0) -> Shaped[Tensor, "b w *d"]:
    """The first `width` of each row, of which there may be fewer."""
    cut = values[:, :width]
    return F.pad(cut, (*[0, 0] * (values.ndim - 2), 0, width - cut.shape[1]), value=fill)


def rounded_up(count: int) -> int:
    """The next of few sizes, four in each octave and none closer than 64: at most a quarter (or 63) is added."""
    step = max(64, 2 ** (count - 1).bit_length() // 8) if count > 1 else 64
    return -(-count // step) * step
