"""The trainer of a VoiceBox: how its data is found, and the defaults it trains with; and the `model` sections of this family's recipes.
The loop is the engine's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from helicon.config import check
from helicon.data.fields import TEXT, Field, by_name_only, is_tensor, route
from helicon.data.paired import CaptionSource
from helicon.engine.checkpoint import load_stage
from helicon.engine.feed import steps_of_epochs
from helicon.engine.options import TrainerOptions
from helicon.engine.task import Batch
from helicon.engine.trainer import Trainer
from helicon.models.soundstream.codecs import Codec
from helicon.models.voicebox.data import LONGEST, SPOKEN, SpeechSource, collate_speech
from helicon.models.voicebox.durations import DurationPredictor
from helicon.models.voicebox.features import CodecLatents, EncodecVoco, FeatureSpace, MelVoco
from helicon.models.voicebox.flow import ConditionalFlowMatcherWrapper
from helicon.models.voicebox.model import VoiceBox
from helicon.models.voicebox.reading import Reading, first_batches
from helicon.models.voicebox.task import VoiceBoxTask
from helicon.models.voicebox.text import CharacterTokenizer, PhonemeInventory, PhonemeTokenizer, SymbolTokenizer
from helicon.models.voicebox.vocoder import Vocoder
from helicon.nn.lengths import before
from helicon.nn.network import Network

WARMUP = ("warmup_steps", "num_warmup_steps")
TRAIN_VOCODER = "helicon train voicebox/vocoder"
NUM_MADE_UP = 200  # utterances with every phoneme of made-up speech among them

_lengths = Field(is_tensor(False, 1), "an integer tensor [b]")
_BATCH_FIELDS = {
    "audio": Field(is_tensor(True, 2), "a float tensor [b, w]"),
    "audio_lengths": _lengths,
    "features": Field(is_tensor(True, 3), "a float tensor [b, n, d]"),
    "feature_lengths": _lengths,
    "texts": TEXT,
    "phonemes": Field(is_tensor(False, 2), "an integer tensor [b, m], -1 past the end"),
    "durations": Field(by_name_only, "a float tensor [b, m] of seconds; by name only"),
    "semantic_token_ids": Field(by_name_only, "an integer tensor [b, k], -1 past the end; by name only"),
}
BATCH_FIELDS = {name: replace(field, is_required=False) for name, field in _BATCH_FIELDS.items()}


class VoiceBoxTrainer(Trainer):
    """Trains a `VoiceBox`, in its `ConditionalFlowMatcherWrapper`, on utterances with their texts, phonemes or semantic tokens; or on the
    features that were made of them (`helicon tokenize`)."""

    name = "voicebox"
    defaults: ClassVar = {
        "lr": 3e-4,
        "initial_lr": 1e-5,
        "scheduler": "cosine",
        "ema_beta": 0.999,
        "save_results_every": 1000,
    }

    def __init__(
        self,
        cfm_wrapper: ConditionalFlowMatcherWrapper,
        *,
        folder: str | Path | None = None,
        dataset: Any = None,
        val_dataset: Any = None,
        train_dataloader: Any = None,
        val_dataloader: Any = None,
        num_train_steps: int | None = None,
        num_epochs: int | None = None,
        captions: CaptionSource | None = None,
        text_column: str = "text",
        max_length_seconds: float = LONGEST,
        sample_steps: int = 16,
        sample_cond_scale: float = 1.0,
        ds_fields: Sequence[str] | None = None,
        **options: Any,
    ):
        """
        Args:
            folder: utterances to learn from, in it and below (or a manifest of them, or a cache made by `helicon tokenize`).
            dataset: in its place, what `training_speech` returns, or anything else that holds utterances or features of them.
            num_train_steps, num_epochs: how long, one of them; an epoch is as many steps as the training part of the data fills, with
                all processes.
            captions: where the text of an utterance is: in the "column" `text_column`, in a file "beside" it, the "folder"'s name.
            max_length_seconds: longer utterances are left out.
            sample_steps, sample_cond_scale: how samples are made (`ConditionalFlowMatcherWrapper.sample`).
            ds_fields: names for the entries of a dataset's tuples, where their types do not tell.
        """
        if folder is not None and dataset is not None:
            raise ValueError("give a folder or a dataset of utterances, not both")
        self.ds_fields = ds_fields
        keywords: dict[str, Any] = {
            "captions": captions,
            "text_column": text_column,
            "max_length_seconds": max_length_seconds,
        }

        def find(source: Any) -> Any:
            if source is None:
                return None
            if not isinstance(source, SpeechSource):
                source = SpeechSource(source, **keywords, ds_fields=ds_fields)
            return _utterances(source, cfm_wrapper)

        options = {name: value for name, value in options.items() if name not in WARMUP or value is not None}
        found = find(folder if folder is not None else dataset)
        held_out = find(val_dataset)
        is_split = held_out is None and val_dataloader is None
        task = VoiceBoxTask(
            cfm_wrapper,
            seed=options.get("seed", options.get("random_seed", 0)),
            sample_steps=sample_steps,
            sample_cond_scale=sample_cond_scale,
        )
        super().__init__(
            task,
            dataset=found,
            val_dataset=held_out,
            train_dataloader=train_dataloader,
            val_dataloader=val_dataloader,
            collate=collate_speech,
            num_train_steps=_num_steps(num_train_steps, num_epochs, found, is_split, options, self.defaults),
            **options,
        )
        task.has_few_shapes = self.runtime.compiles
        if self.step == 0:
            self._look_at_data()

    def _look_at_data(self) -> None:
        """Once, before the first step: whether what is said in the first utterances can be read, and how fast; and the mean and the standard
        deviation of their features, where these are not known."""
        frames, task, model = [], self.task, self.unwrapped_cfm
        assert isinstance(task, VoiceBoxTask)
        reading = Reading(model.tokenizer, model.voicebox.num_cond_tokens)
        with torch.no_grad(), self._mode(False):
            for batch in first_batches(self):
                batch = self.runtime.to_device(self.prepare(batch))
                features, lengths = task.features(batch)
                mask = features.new_ones(features.shape[:2], dtype=torch.bool)
                mask = mask if lengths is None else before(lengths, features.shape[1])
                frames.append(features[mask])
                if (said := task.spoken(batch)) is not None:
                    reading.add(*said, mask.sum(dim=1))
        reading.check()
        if reading.symbols:
            model.feature_pace.fill_(reading.pace)
        self._fit_normalisation(torch.cat(frames))

    def _fit_normalisation(self, frames: Float[Tensor, "n d"]) -> None:
        """The same on every process."""
        model = self.unwrapped_cfm
        if not model.is_fitted:
            model.fit_normalisation(frames[None])
        if self.runtime.is_distributed:  # a loader of one's own may give each process other utterances
            for fitted in (model.feature_mean, model.feature_std, model.feature_pace):
                torch.distributed.broadcast(fitted, 0)
        if self.ema is not None:
            self.ema.update(self.step)  # the averaged network has the same

    def prepare(self, batch: Any) -> Batch:
        return route(batch, BATCH_FIELDS, self.ds_fields)

    def warmup(self, step: int) -> float:
        """The learning rate of a step (from 0) before the scheduler has a say: it rises evenly from initial_lr to lr."""
        options = self.options
        way = min(1.0, (step + 1) / options.warmup_steps) if options.warmup_steps else 1.0
        return options.initial_lr + (options.lr - options.initial_lr) * way

    @property
    def unwrapped_cfm(self) -> ConditionalFlowMatcherWrapper:
        return self.task.model  # type: ignore[return-value]

    def generate(self, **keywords: Any) -> Tensor:
        """`ConditionalFlowMatcherWrapper.sample` with the weights there are now, the averaged ones where there are some."""
        with self.inference(), self.runtime.whole(self.raw):
            return self.unwrapped_cfm.sample(**keywords)


def _utterances(source: SpeechSource, cfm: ConditionalFlowMatcherWrapper) -> Any:
    """Samples as this network reads them: phonemes by the ids of its inventory, with durations where tokens stand at their frames."""
    space = cfm.voicebox if cfm.audio_enc_dec is None else cfm.audio_enc_dec
    if not isinstance(cfm.tokenizer, PhonemeInventory):
        return source.at(space, names=None if cfm.tokenizer is None else ())
    return source.at(space, cfm.tokenizer, SPOKEN if cfm.voicebox.alignment == "frames" else SPOKEN[:1])


def _num_steps(
    steps: int | None,
    epochs: int | None,
    dataset: Any,
    is_split: bool,
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> int:
    """Optimizer steps of so many epochs of the part of a dataset that is learned from."""
    if (steps is None) == (epochs is None):
        raise ValueError("how long shall it learn? Give num_train_steps or num_epochs, one of them")
    if epochs is None:
        assert steps is not None
        return steps
    if dataset is None:
        raise ValueError("num_epochs needs a dataset: of a train_dataloader give num_train_steps")
    chosen = TrainerOptions.from_keywords({**options, "num_train_steps": 0}, defaults, "VoiceBoxTrainer")
    return steps_of_epochs(epochs, dataset, is_split, chosen)


# ---------------------------------------------------------------------- the `model` section of recipes


def build_voicebox(
    voicebox: Mapping[str, Any],
    *,
    audio_enc_dec: str | Path | Mapping[str, Any] | None = None,
    vocoder: str | Path | None = None,
    tokenizer: str | Path | Mapping[str, Any] | None = None,
    duration_predictor: str | Path | None = None,
    text_to_semantic: str | Path | None = None,
    semantic_hz: float | None = None,
    sigma: float = 0.0,
    cond_drop_prob: float = 0.2,
) -> ConditionalFlowMatcherWrapper:
    """
    Args:
        voicebox: keywords of `VoiceBox`; num_cond_tokens follows from what reads texts.
        audio_enc_dec: the feature space: keywords of a `MelVoco` (or, with `model` among them, an `EncodecVoco`); or a folder with one,
            with a codec, whose latents are then the features, or with a vocoder, which tells the mel settings. None learns from features
            alone.
        vocoder: a run of a `Vocoder`, which makes the frames of a `MelVoco` audible; without one Griffin-Lim does.
        tokenizer: what reads texts: "characters", or keywords of a `CharacterTokenizer` (characters), a `PhonemeTokenizer` (language) or a
            `PhonemeInventory` (symbols; or `phonemes_of`, a manifest, or "synthetic", whose phonemes these are); or a folder with one.
        duration_predictor: a run of a `DurationPredictor`, whose tokenizer is used where there is none here.
        text_to_semantic: a run of an AudioLM's semantic stage.
    """
    space = _feature_space(audio_enc_dec, vocoder)
    durations = _loaded(duration_predictor, "duration_predictor", DurationPredictor, "helicon train voicebox/durations")
    semantic = _loaded(text_to_semantic, "text_to_semantic", Network, "helicon train audiolm/semantic")
    reader = _tokenizer(tokenizer)
    _check_predictor(durations, reader, duration_predictor)
    sizes = {}
    if semantic is not None:
        if getattr(semantic, "wav2vec", None) is None:
            raise ValueError(
                f"model.text_to_semantic={str(text_to_semantic)!r} holds a {type(semantic).__name__}, not a semantic stage with its "
                "semantic tokenizer"
            )
        sizes["num_cond_tokens"] = semantic.wav2vec.codebook_size
    elif (known := reader or getattr(durations, "tokenizer", None)) is not None:
        sizes["num_cond_tokens"] = known.num_tokens
    keywords = check(VoiceBox, {**sizes, **voicebox}, "model.voicebox")
    return ConditionalFlowMatcherWrapper(
        VoiceBox(**keywords, audio_enc_dec=space),
        text_to_semantic=semantic,
        duration_predictor=durations,
        sigma=sigma,
        cond_drop_prob=cond_drop_prob,
        tokenizer=reader,
        semantic_hz=semantic_hz,
    )


def _check_predictor(predictor: DurationPredictor | None, reader: SymbolTokenizer | None, name: Any) -> None:
    """Raises if a predictor that knows names of phonemes stands beside a tokenizer that reads something else."""
    own = None if predictor is None else predictor.tokenizer
    if reader is None or not isinstance(own, PhonemeInventory):
        return
    if not isinstance(reader, PhonemeInventory) or not reader.ids.keys() & own.ids.keys():
        some = ", ".join(list(own.ids)[:8])
        raise ValueError(
            f"model.duration_predictor={str(name)!r} reads names of phonemes ({some} ...), which model.tokenizer does not: leave out one "
            "of them, or fit both to the same phonemes_of"
        )


def build_durations(
    predictor: Mapping[str, Any], *, tokenizer: str | Path | Mapping[str, Any] | None = None
) -> DurationPredictor:
    """
    Args:
        predictor: keywords of `DurationPredictor`.
        tokenizer: what knows the names of phonemes; see `build_voicebox`. Without one the data must have ids.
    """
    return DurationPredictor(**check(DurationPredictor, predictor, "model.predictor"), tokenizer=_tokenizer(tokenizer))


def _feature_space(source: str | Path | Mapping[str, Any] | None, vocoder: str | Path | None) -> Any:
    speaker = _loaded(vocoder, "vocoder", Vocoder, TRAIN_VOCODER)
    if isinstance(source, Mapping) and "model" in source:
        found: Any = EncodecVoco(**check(EncodecVoco, source, "model.audio_enc_dec"))
    elif isinstance(source, Mapping):
        return MelVoco(**check(MelVoco, source, "model.audio_enc_dec"), vocoder=speaker)
    else:
        found = speaker if source is None else load_stage(source, "model.audio_enc_dec", TRAIN_VOCODER)
    if isinstance(found, Vocoder):
        return MelVoco.of(found)
    if speaker is not None:
        raise ValueError(
            "model.vocoder makes the frames of a MelVoco audible: give its keywords as audio_enc_dec, or nothing"
        )
    if isinstance(found, Codec):
        return CodecLatents(found)  # type: ignore[arg-type]
    if found is not None and not isinstance(found, FeatureSpace):
        raise ValueError(
            f"model.audio_enc_dec={str(source)!r} holds a {type(found).__name__}, not a feature space, a codec or a vocoder"
        )
    return found


def _tokenizer(source: str | Path | Mapping[str, Any] | None) -> Any:
    if source == "characters":
        return CharacterTokenizer()
    if not isinstance(source, Mapping):
        if source is not None and not Path(source).expanduser().exists():
            raise ValueError(
                f"model.tokenizer={str(source)!r} is neither characters nor the folder of a saved tokenizer: give one of these, or keywords"
            )
        return _loaded(source, "tokenizer", SymbolTokenizer, "save_pretrained of a tokenizer")
    if "phonemes_of" in source:
        if len(source) > 1:
            raise ValueError("model.tokenizer: phonemes_of tells all there is to know, give it alone")
        path = source["phonemes_of"]
        if path != "synthetic" and not Path(path).expanduser().exists():
            raise ValueError(
                f"model.tokenizer.phonemes_of={str(path)!r} is not there: name a manifest with the column phonemes"
            )
        data = SpeechSource(path, num_samples=NUM_MADE_UP)
        return PhonemeInventory.fitted(data.phonemes())
    kinds = {"characters": CharacterTokenizer, "language": PhonemeTokenizer, "symbols": PhonemeInventory}
    kind = next((kind for name, kind in kinds.items() if name in source), None)
    if kind is None:
        raise ValueError(
            f"model.tokenizer has {', '.join(source) or 'nothing'}: give characters, language, symbols or phonemes_of"
        )
    return kind(**check(kind, source, "model.tokenizer"))


def _loaded(source: str | Path | None, name: str, kind: type[Network], how: str) -> Any:
    if source is None:
        return None
    network = load_stage(source, f"model.{name}", how)
    if not isinstance(network, kind):
        raise ValueError(f"model.{name}={str(source)!r} holds a {type(network).__name__}, not a {kind.__name__}")
    return network
