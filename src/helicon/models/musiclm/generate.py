"""MusicLM (Agostinelli et al. 2023, arXiv:2301.11325): music from words.

An AudioLM that is conditioned on codes of MuLaN's latents is given those of the text. Of several candidates that one is taken which
MuLaN hears as closest to it.

Letters: b candidates, n samples, c channels, d features of a latent.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from helicon.models.audiolm.pipeline import AudioLM, are_same, called
from helicon.models.musiclm.conditioning import MuLaNEmbedQuantizer
from helicon.nn.network import Network

COND_SCALE = 1.0  # no guidance
NEXT_SEED = 104_729  # from one piece of the candidates to the next


class Candidates(NamedTuple):
    """All that was made of a text, the best first."""

    waves: list[Tensor]  # [n], or [c, n]
    similarities: Tensor  # of each with the text: cosines


class MusicLM(Network):
    """Usage: `MusicLM(audio_lm, quantizer)("a slow waltz", num_samples=4)` is the best of four sounds `[n]` at `sample_hz`."""

    def __init__(self, audio_lm: AudioLM, mulan_embed_quantizer: MuLaNEmbedQuantizer | None = None):
        """
        Args:
            mulan_embed_quantizer: the one that the stages were trained with; that of the AudioLM, where it has one.
        """
        super().__init__()
        own = audio_lm.semantic.audio_conditioner
        given = own if mulan_embed_quantizer is None else mulan_embed_quantizer
        if given is None:
            raise ValueError(
                "the stages have no audio_conditioner: give the mulan_embed_quantizer they were trained with"
            )
        if own is not None and not are_same(own, given):
            raise ValueError(
                f"the stages were trained with another audio_conditioner ({called(own)}) than the mulan_embed_quantizer "
                f"({called(given)}): give that one"
            )
        _check_stages(audio_lm, given)
        self.audio_lm = audio_lm
        self.quantizer: MuLaNEmbedQuantizer = given if own is None else own
        # An AudioLM is saved with its audio_conditioner, which need not be saved twice.
        self.arguments["mulan_embed_quantizer"] = given if own is None else None

    @property
    def device(self) -> torch.device:
        return self.audio_lm.device

    @property
    def sample_hz(self) -> int:
        return self.audio_lm.sample_hz

    @torch.no_grad()
    def forward(
        self,
        text: str | Sequence[str],
        num_samples: int = 1,
        return_all: bool = False,
        *,
        batch_size: int | None = None,
        seed: int | None = None,
        cond_scale: float = COND_SCALE,
        **options: Any,
    ) -> Any:
        """The best sound `[n]` (`[c, n]` of a codec with channels) for a text, a list of them for a list.

        Args:
            num_samples: how many candidates are made for each text.
            return_all: all of them, `Candidates`, in the place of the best.
            batch_size: how many are made at once; all, where nothing is said.
            seed: the same again for the same seed (and batch size); None draws one.
            cond_scale: guidance by the text: 1 is none, which was best in what is measured (docs/log.md).
            options: of `AudioLM.forward`, as `seconds`; a prime_wave is for all texts, or has a row for each.
        """
        texts = [text] if isinstance(text, str) else [*text]
        if not texts:
            raise ValueError("there is no text to make music of: give one or more")
        for words in texts:
            if not words.strip():
                raise ValueError(f"the text {words!r} says nothing of what is to be heard: give one with words in it")
        for name, number in {"num_samples": num_samples, "batch_size": batch_size}.items():
            if number is not None and number < 1:
                raise ValueError(f"{name}={number} must be at least 1")
        rows = [row for row in range(len(texts)) for _ in range(num_samples)]
        options["cond_scale"] = cond_scale
        waves = [*self._made(texts, rows, batch_size or len(rows), seed, options)]
        if num_samples == 1 and not return_all:  # there is nothing to rank
            return waves[0] if isinstance(text, str) else waves
        closeness = self.similarities(waves, [texts[row] for row in rows], batch_size or len(rows))
        found = [
            _ranked(waves[first : first + num_samples], closeness[first : first + num_samples])
            for first in range(0, len(rows), num_samples)
        ]
        answers = found if return_all else [candidates.waves[0] for candidates in found]
        return answers[0] if isinstance(text, str) else answers

    generate = forward

    def similarities(
        self, waves: Sequence[Tensor], texts: Sequence[str], batch_size: int | None = None
    ) -> Float[Tensor, " b"]:
        """How close each sound, at `sample_hz` and of any length, is to its text, as MuLaN hears them: cosines.

        One that is longer than what MuLaN has learned from is heard in clips, see `MuLaNEmbedQuantizer.latents`.
        """
        size, found = batch_size or len(waves), []
        for first in range(0, len(waves), size):
            heard = self._heard(waves[first : first + size])
            said = self.quantizer.latents(texts=texts[first : first + size])
            found.append((heard * said).sum(dim=-1))
        return torch.cat(found)

    def _heard(self, waves: Sequence[Tensor]) -> Float[Tensor, "b d"]:
        mono = [wave.mean(dim=0) if wave.ndim == 2 else wave for wave in waves]
        lengths = torch.tensor([len(wave) for wave in mono], device=self.device)
        padded = pad_sequence(mono, batch_first=True).to(self.device)
        return self.quantizer.latents(padded, lengths=lengths, input_sample_hz=self.sample_hz)

    def _made(
        self, texts: Sequence[str], rows: Sequence[int], size: int, seed: int | None, options: dict[str, Any]
    ) -> Iterator[Tensor]:
        """A sound for each row, the number of its text."""
        told = {"condition_ids": self.quantizer.codes(texts=texts).to(self.device), **_own_prompts(options, len(texts))}
        seed = int(torch.randint(2**62, ())) if seed is None else seed
        for number, first in enumerate(range(0, len(rows), size)):
            piece = {name: values[rows[first : first + size]] for name, values in told.items()}
            yield from self.audio_lm(seed=(seed + NEXT_SEED * number) % 2**62, **{**options, **piece})


def _own_prompts(options: Mapping[str, Any], texts: int) -> dict[str, Tensor]:
    """The prompts (and their lengths) of which each text has its own, which all of its candidates go on from."""
    found = {}
    for name, usual in (("prime_wave", 1), ("prime_lengths", 0)):
        if options.get(name) is None:
            continue
        values = torch.as_tensor(options[name])
        if values.ndim == usual or len(values) == 1:  # for all texts
            continue
        if len(values) != texts:
            raise ValueError(f"{name} has {len(values)} rows for {texts} texts: give one for each, or one for all")
        found[name] = values
    return found


def _ranked(waves: Sequence[Tensor], similarities: Float[Tensor, " b"]) -> Candidates:
    # (What is not finite would come first: a sort takes NaN for the largest number.)
    order = similarities.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
    return Candidates([waves[index] for index in order.tolist()], similarities[order])


def _check_stages(audio_lm: AudioLM, quantizer: MuLaNEmbedQuantizer) -> None:
    stages = {"semantic": audio_lm.semantic, "coarse": audio_lm.coarse, "fine": audio_lm.fine}
    wanted = (quantizer.num_quantizers, quantizer.codebook_size)
    has_table = False
    for name, stage in stages.items():
        if stage is None or not stage.transformer.has_condition:
            continue
        table = stage.transformer.code_table
        if table is None or (table.num_quantizers, table.codebook_size) != wanted:
            raise ValueError(
                f"the {name} transformer was not trained with the codes of this mulan_embed_quantizer: "
                "give it as audio_conditioner to the trainer of each stage"
            )
        has_table = True
    if not has_table:
        raise ValueError(
            "none of the transformers is conditioned on anything: train them with audio_text_condition=True and "
            "the mulan_embed_quantizer as audio_conditioner"
        )
