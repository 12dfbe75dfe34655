"""AudioLM: sound from a text, from the beginning of a sound, or from nothing (Borsos et al. 2022).

Semantic tokens, then coarse codes, then fine codes, then the codec; or, with a delayed transformer, semantic tokens, all codes,
the codec. The stages may come as bare transformers, or as they are loaded from their runs, with the codec and the tokenizer they
were trained on: which must then be the same for all.

Letters: b batch, n samples, m text tokens, e text features.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from helicon.models.audiolm.generate import waves_of
from helicon.models.audiolm.stage import Stage
from helicon.models.audiolm.transformers import (
    CoarseTransformer,
    DelayedTransformer,
    FineTransformer,
    SemanticTransformer,
)
from helicon.models.audiolm.wrappers import (
    CoarseTransformerWrapper,
    DelayedTransformerWrapper,
    FineTransformerWrapper,
    SemanticTransformerWrapper,
)
from helicon.nn.network import Network, same_network

logger = logging.getLogger(__name__)

MAX_TIME_STEPS = 512  # frames, where no length is asked for
MAX_SEMANTIC_TOKENS = 2048  # where nobody knows how many a sound has


@dataclass(frozen=True)
class Prime:
    """The beginning of sounds, which are to go on."""

    wave: Tensor  # [b, n], or [b, c, n]
    lengths: Tensor | None  # [b] samples
    sample_hz: int

    @property
    def seconds(self) -> float:
        """Of the shortest."""
        return (self.wave.shape[-1] if self.lengths is None else int(self.lengths.min())) / self.sample_hz

    def keywords(self) -> dict[str, Any]:
        """As the stages take them."""
        return {
            "prime_wave": self.wave,
            "prime_lengths": self.lengths,
            "prime_wave_input_sample_hz": self.sample_hz,
        }


class AudioLM(Network):
    def __init__(
        self,
        *,
        semantic_transformer: SemanticTransformer | SemanticTransformerWrapper,
        coarse_transformer: CoarseTransformer
        | CoarseTransformerWrapper
        | DelayedTransformer
        | DelayedTransformerWrapper,
        fine_transformer: FineTransformer | FineTransformerWrapper | None = None,
        wav2vec: Any = None,
        codec: Any = None,
        audio_conditioner: Any = None,
        unique_consecutive: bool = True,
        fine_max_frames: int | None = None,
        learned_seconds: float | None = None,
    ):
        """
        Args:
            coarse_transformer: with a fine one; or a delayed one alone.
            wav2vec, codec, audio_conditioner: those of the stages, where they have them. An audio_conditioner makes of a text
                what the transformers are conditioned on.
            unique_consecutive: semantic tokens that repeat the one before are left out, as in training.
            fine_max_frames: the fine stage makes longer sounds piece by piece: as many frames as it learned from; by default those of
                learned_seconds.
            learned_seconds: how long the sounds are that the stages learned from: what they make is as long, where nothing else is
                asked for, and longer sounds are made piece by piece. (From semantic tokens that are deduplicated only fine codes are.)
        """
        super().__init__()
        given: dict[str, Any] = {
            "semantic_transformer": semantic_transformer,
            "coarse_transformer": coarse_transformer,
            "fine_transformer": fine_transformer,
        }
        stages = {name: stage for name, stage in given.items() if isinstance(stage, Stage)}
        wav2vec = _common("wav2vec", wav2vec, stages)
        codec = _common("codec", codec, stages)
        audio_conditioner = _common("audio_conditioner", audio_conditioner, stages)
        if codec is None:
            raise ValueError("there is nothing to turn codes into sound: give the codec")
        shared = {"audio_conditioner": audio_conditioner, "unique_consecutive": _agreed(stages, unique_consecutive)}
        bare: dict[str, Any] = {
            name: stage.transformer if isinstance(stage, Stage) else stage for name, stage in given.items()
        }
        self.semantic = SemanticTransformerWrapper(transformer=bare["semantic_transformer"], wav2vec=wav2vec, **shared)
        is_delayed = isinstance(bare["coarse_transformer"], DelayedTransformer)
        if is_delayed != (fine_transformer is None):
            raise ValueError(
                "a coarse_transformer needs a fine_transformer, and a delayed one stands in the place of both: "
                f"got {type(bare['coarse_transformer']).__name__} and {type(bare['fine_transformer']).__name__}"
            )
        build = DelayedTransformerWrapper if is_delayed else CoarseTransformerWrapper
        self.coarse: CoarseTransformerWrapper | DelayedTransformerWrapper = build(
            transformer=bare["coarse_transformer"], codec=codec, wav2vec=wav2vec, **shared
        )
        self.fine = (
            None
            if fine_transformer is None
            else FineTransformerWrapper(
                transformer=bare["fine_transformer"], codec=codec, audio_conditioner=audio_conditioner
            )
        )
        self.fine_max_frames, self.learned_seconds = fine_max_frames, learned_seconds
        self._check()
        self.arguments |= {**bare, "wav2vec": wav2vec, "codec": codec, **shared}

    def _check(self) -> None:
        assert self.usual_frames  # which refuses learned_seconds that cannot be
        semantic, coarse = self.semantic.transformer, self.coarse.transformer
        if semantic.num_semantic_tokens != coarse.num_semantic_tokens:
            raise ValueError(
                f"the semantic transformer has num_semantic_tokens={semantic.num_semantic_tokens} and the next one "
                f"{coarse.num_semantic_tokens}: they were trained on different tokenizers"
            )
        if self.fine_max_frames is not None and (self.fine is None or self.fine_max_frames < 2):
            raise ValueError(
                f"fine_max_frames={self.fine_max_frames} must be at least 2, and belongs to a fine_transformer"
            )
        if self.fine is None or isinstance(coarse, DelayedTransformer):
            return
        fine = self.fine.transformer
        for name in ("num_coarse_quantizers", "codebook_size"):
            if getattr(coarse, name) != getattr(fine, name):
                raise ValueError(
                    f"the coarse transformer has {name}={getattr(coarse, name)} and the fine one {getattr(fine, name)}: "
                    "they do not belong together"
                )

    @property
    def codec(self) -> Any:
        return self.coarse.codec

    @property
    def device(self) -> torch.device:
        return self.semantic.device

    @property
    def sample_hz(self) -> int:
        return self.codec.sample_hz

    @property
    def usual_frames(self) -> int:
        """How many frames the codec makes at most, where nothing is said of it."""
        return MAX_TIME_STEPS if self.learned_seconds is None else self._num_frames(self.learned_seconds)

    @property
    def reads_texts(self) -> bool:
        return any(stage.transformer.has_condition for stage in self._stages())

    def _stages(self) -> list[Stage]:
        return [stage for stage in (self.semantic, self.coarse, self.fine) if stage is not None]

    @torch.no_grad()
    def forward(
        self,
        *,
        batch_size: int = 1,
        text: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "#b m e"] | None = None,
        prime_wave: Float[Tensor, " n"]
        | Float[Tensor, "#b n"]
        | Float[Tensor, "#b c n"]
        | Real[np.ndarray, "..."]
        | None = None,
        prime_wave_input_sample_hz: int | None = None,
        prime_wave_path: str | Path | None = None,
        max_length: int | None = None,
        return_coarse_generated_wave: bool = False,
        mask_out_generated_fine_tokens: bool = False,
        seconds: float | None = None,
        prime_lengths: Int[Tensor, " #b"] | Sequence[int] | None = None,
        cond_scale: float | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        filter_thres: float | None = None,
        seed: int | None = None,
        condition_ids: Int[Tensor, "#b q"] | None = None,
    ) -> Float[Tensor, "b ..."] | list[Tensor]:
        """Sounds `[b, n]` at the codec's rate, with their prompts; a list of them where they end at different times.

        Args:
            batch_size: how many, where neither texts nor prompts tell.
            text, text_embeds: one for each sound, or one for all; None: whatever the model likes.
            prime_wave, prime_wave_path: beginnings to go on from, at `prime_wave_input_sample_hz` (the codec's rate by default),
                of which the first `prime_lengths` samples count; or a sound file.
            max_length: the most semantic tokens; by default as many as the sound is long, or 2048 where no wav2vec tells how many.
            return_coarse_generated_wave: the sound of the coarse codes alone.
            mask_out_generated_fine_tokens: without effect: there are never fine codes without coarse ones.
            seconds: the most that a sound lasts, its prompt with it; by default learned_seconds, or else 512 frames.
            cond_scale, temperature, top_k, top_p, filter_thres: how tokens are drawn, in all stages. By default filter_thres is
                0.9, or nothing where there is a top_k or a top_p, and cond_scale 3, or 1 (no guidance) for stages that are
                conditioned on codes.
            seed: the same again for the same seed; None draws one.
            condition_ids: in the place of texts: codes of sounds or texts, as an audio_conditioner makes them.
        """
        frames = self.usual_frames if seconds is None else self._num_frames(seconds)
        is_long = self.learned_seconds is not None and frames > self.usual_frames
        piece = max(2, self.usual_frames) if is_long else None
        prime = self._prime(prime_wave, prime_wave_input_sample_hz, prime_wave_path, prime_lengths, frames)
        said: dict[str, Any] = {"text": text, "text_embeds": text_embeds, "condition_ids": condition_ids}
        if any(value is not None for value in said.values()):
            self._check_texts(text)
        options: dict[str, Any] = {
            "cond_scale": cond_scale,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "filter_thres": filter_thres,
        }
        primed = {} if prime is None else prime.keywords()
        texts = [said if stage.transformer.has_condition else {} for stage in self._stages()]
        seeds = _seeds(seed, len(texts))
        max_tokens, max_frames = (None, None) if piece is None else self._pieces(piece)
        ids = self.semantic.generate(
            max_length=self._most_semantic(frames, max_length),
            batch_size=batch_size,
            **primed,
            **texts[0],
            **options,
            max_tokens=max_tokens,
            seed=seeds[0],
        )
        codes = self.coarse.generate(
            semantic_token_ids=ids,
            max_time_steps=frames,
            **primed,
            **texts[1],
            **options,
            max_frames=max_frames,
            seed=seeds[1],
        )
        if self.fine is None or return_coarse_generated_wave:
            return waves_of(self.codec, codes)
        return self.fine.generate(
            coarse_token_ids=codes,
            reconstruct_wave=True,
            max_frames=self.fine_max_frames or piece,
            **primed,
            **texts[2],
            **options,
            seed=seeds[2],
        )

    generate = forward

    def _most_semantic(self, frames: int, limit: int | None) -> int:
        """Semantic tokens of a sound of so many frames of the codec, and one: there is room behind each prompt it has room for."""
        if self.semantic.wav2vec is None:
            return MAX_SEMANTIC_TOKENS if limit is None else limit
        most = self.coarse.num_semantic(frames) + self.coarse.groups
        return most if limit is None else min(limit, most)

    def _pieces(self, frames: int) -> tuple[int | None, int | None]:
        """The semantic tokens and the frames in which the first two stages make a long sound, if they can."""
        if not self.coarse.keeps_time:
            logger.warning(
                "this AudioLM learned from %.4g s of sound at a time, and what comes after them may be poor: only stages with a wav2vec and "
                "unique_consecutive=False make longer sounds piece by piece",
                self.learned_seconds,
            )
            return None, None
        return max(self.coarse.num_semantic(frames), 2 * self.coarse.groups), frames

    def _num_frames(self, seconds: float) -> int:
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"seconds={seconds} must be a number of seconds, as in seconds=5")
        frames = round(seconds * self.codec.sample_hz / self.codec.downsample_factor)
        if frames < 1:
            raise ValueError(f"seconds={seconds} is less than a frame of the codec: give more")
        return frames

    def _prime(
        self,
        wave: Tensor | np.ndarray | None,
        hz: int | None,
        path: str | Path | None,
        lengths: Tensor | Sequence[int] | None,
        frames: int,
    ) -> Prime | None:
        if path is not None:
            if wave is not None:
                raise ValueError("give prime_wave or prime_wave_path, not both")
            wave, hz = _read(Path(path), self.codec.channels)
        if wave is None:
            return None
        wave = torch.as_tensor(wave, device=self.device)
        if not wave.is_floating_point():
            raise ValueError("prime_wave holds whole numbers, and sound is from -1 to 1: divide it, as in wave / 32768")
        wave = (wave[None] if wave.ndim == 1 else wave).float()
        lengths = None if lengths is None else torch.as_tensor(lengths, device=self.device)
        prime = Prime(wave, lengths, hz or self.sample_hz)
        limit = frames * self.codec.downsample_factor / self.sample_hz
        if prime.seconds >= limit:
            raise ValueError(
                f"the prompt lasts {prime.seconds:.2f} s, and the whole sound {limit:.2f} s: give more seconds, or a shorter prompt"
            )
        return prime

    def _check_texts(self, text: Sequence[str] | None) -> None:
        if not self.reads_texts:
            raise ValueError("none of the transformers reads texts: train them with has_condition=True")
        if isinstance(text, str):
            raise ValueError(f"text takes a list of texts, not one: write [{text!r}]")


def _read(path: Path, channels: int) -> tuple[Float[Tensor, "1 c n"], int]:
    """A sound file with so many channels: those it has, or the mean of them."""
    import soundfile

    if not path.is_file():
        raise FileNotFoundError(f"prime_wave_path={str(path)!r} is not there: name a sound file")
    try:
        frames, hz = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise ValueError(f"{path} cannot be read as sound ({error})") from error
    if not len(frames):
        raise ValueError(f"{path} is empty: there is nothing to go on from")
    wave = torch.from_numpy(frames).mT[None]
    return (wave if wave.shape[1] == channels else wave.mean(dim=1, keepdim=True).expand(-1, channels, -1)), hz


def _seeds(seed: int | None, count: int) -> list[int]:
    """One for each stage."""
    first = int(torch.randint(2**62, ())) if seed is None else seed
    return [(first + 7_919 * number) % 2**62 for number in range(count)]


def _common(name: str, given: Any, stages: Mapping[str, Stage]) -> Any:
    """The one codec (or tokenizer) of all stages."""
    owner = "given here"
    for stage_name, stage in stages.items():
        own = getattr(stage, name)
        if own is None:
            continue
        if given is None:
            given, owner = own, f"of the {stage_name}"
        elif not are_same(given, own):
            raise ValueError(
                f"the {stage_name} was trained on another {name} ({called(own)}) than the one {owner} ({called(given)}): "
                "give stages that were trained on the same"
            )
    return given


def are_same(first: Any, second: Any) -> bool:
    """Whether two networks are copies of each other; of others, whether they are one."""
    if isinstance(first, Network) and isinstance(second, Network):
        return same_network(first, second)
    return first is second


def called(network: Any) -> str:
    """Its class, and where it comes from."""
    source = getattr(network, "source", None)
    return type(network).__name__ if source is None else f"{type(network).__name__} of {source}"


def _agreed(stages: Mapping[str, Stage], given: bool) -> bool:
    """Whether semantic tokens were deduplicated in training."""
    own = {name: stage.unique_consecutive for name, stage in stages.items() if name != "fine_transformer"}
    if len(set(own.values())) > 1:
        raise ValueError(f"the stages were trained with different unique_consecutive, {own}: give stages that agree")
    return next(iter(own.values()), given)
