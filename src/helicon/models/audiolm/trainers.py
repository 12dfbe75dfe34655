"""The trainers of AudioLM's stages: how their data is found, and the defaults they train with. The loop is the engine's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from helicon.config import check
from helicon.data.fields import TEXT, Field, are_flags, is_tensor, route
from helicon.data.paired import CaptionSource
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.data.tokens import TokenCache
from helicon.engine.checkpoint import load_stage
from helicon.engine.task import Batch
from helicon.engine.trainer import Trainer
from helicon.models.audiolm.data import END_PROB, TOKENS, WAVES, AudioTokenizer, cached_audio, sounds_for
from helicon.models.audiolm.stage import FOR_CONDITIONER, PAD, Stage
from helicon.models.audiolm.task import StageTask
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
from helicon.models.semantic.tokenizer import MelKmeans
from helicon.models.soundstream.model import SoundStream
from helicon.nn.network import Network

NUM_MADE_UP = 64  # sounds that a tokenizer is fitted to where a recipe names none


def batch_fields(stage: Stage) -> dict[str, Field]:
    """What a batch of a user's own DataLoader may hold for this stage."""
    fields = {
        "semantic_token_ids": Field(is_tensor(False, 2), "an integer tensor [b, t]"),
        "token_ids": Field(is_tensor(False, 3), "an integer tensor [b, t, q]"),
        "texts": TEXT,
        "is_end": Field(are_flags, "a bool tensor [b]"),
    }
    if stage.wav2vec is not None:
        fields["raw_wave"] = Field(is_tensor(True, 2), "a float tensor [b, n]")
    if stage.codec is not None:
        is_mono = stage.codec.channels == 1
        shape = "a float tensor [b, n]" if is_mono else "a float tensor [b, c, n]"
        fields["raw_wave_for_codec"] = Field(is_tensor(True, 2 if is_mono else 3), shape)
    if stage.transformer.has_condition:
        fields["text_embeds"] = Field(is_tensor(True, 3), "a float tensor [b, t, e]")
    if stage.transformer.code_table is not None:
        fields["condition_ids"] = Field(is_tensor(False, 2), "an integer tensor [b, q]")
        fields[FOR_CONDITIONER] = Field(is_tensor(True, 2), "a float tensor [b, n]")
    lengths = Field(is_tensor(False, 1), "an integer tensor [b]")
    fields |= {f"{name}_lengths": lengths for name in fields if name not in ("texts", "is_end")}
    return {name: replace(field, is_required=False) for name, field in fields.items()}


class StageTrainer(Trainer):
    """Trains a stage of AudioLM on sounds, or on the tokens that were made of them (`helicon tokenize`)."""

    kind: ClassVar[type[Stage]]  # of trainers of one kind of stage
    defaults: ClassVar = {"use_ema": False}

    def __init__(
        self,
        stage: Stage,
        *,
        folder: str | Path | None = None,
        dataset: Any = None,
        val_dataset: Any = None,
        valid_dataset: Any = None,
        train_dataloader: Any = None,
        val_dataloader: Any = None,
        data_max_length: float | None = None,
        data_max_length_seconds: float | None = None,
        captions: CaptionSource | None = None,
        text_column: str = "text",
        end_prob: float = END_PROB,
        ds_fields: Sequence[str] | None = None,
        average_valid_loss_over_grad_accum_every: bool = True,
        **options: Any,
    ):
        """
        Args:
            folder: sounds to learn from, in it and below (or a manifest of them, or a token cache made by `helicon tokenize`).
            dataset: anything else that holds sounds or tokens, in place of the folder.
            data_max_length, data_max_length_seconds: how much of a sound is heard at a time, in samples (of the highest rate) or
                in seconds.
            captions: where the text of a sound is: in the "column" `text_column`, in a file "beside" it, or the name of its "folder".
                A stage with an audio_conditioner needs none.
            end_prob: how often a crop is the last of its recording.
            ds_fields: names for the entries of a dataset's tuples, where their types do not tell. (Of two waves the first is the
                raw_wave, the other the raw_wave_for_codec.)
            valid_dataset: another name of val_dataset.
            average_valid_loss_over_grad_accum_every: without effect: a validation is over `val_num_batches` batches.
        """
        for one, other, names in (
            (folder, dataset, "folder or dataset"),
            (val_dataset, valid_dataset, "val_dataset or valid_dataset"),
        ):
            if one is not None and other is not None:
                raise ValueError(f"give {names}, not both")
        if type(self) is StageTrainer:
            self.name = next(kind.name for kind in StageTrainer.__subclasses__() if kind.kind is type(stage))
        self.fields, self.ds_fields = batch_fields(stage), ds_fields
        tokenizer = tokenizer_of(stage)
        self.sizes = tokenizer.sizes

        def find(source: Any) -> Any:
            found = sounds_for(
                source,
                tokenizer.rates,
                channels=tokenizer.channels,
                least=tokenizer.least,
                data_max_length=data_max_length,
                data_max_length_seconds=data_max_length_seconds,
                captions=captions,
                text_column=text_column,
                end_prob=end_prob,
                ds_fields=ds_fields,
            )
            return _captioned(stage, cached_audio(found, tokenizer)) if isinstance(found, TokenCache) else found

        super().__init__(
            StageTask(stage),
            dataset=find(folder if folder is not None else dataset),
            val_dataset=find(valid_dataset if val_dataset is None else val_dataset),
            train_dataloader=train_dataloader,
            val_dataloader=val_dataloader,
            **options,
        )

    def prepare(self, batch: Any) -> Batch:
        # What a conditioner hears or makes looks like other entries: it is known by its name alone.
        has_names = isinstance(batch, Mapping) or self.ds_fields is not None
        by_name = () if has_names else ("condition_ids", FOR_CONDITIONER)
        fields = {name: field for name, field in self.fields.items() if name not in by_name}
        named = route(batch, fields, self.ds_fields, in_order=WAVES)
        stage = self.unwrapped_stage
        self._check_tokens(named)  # here, where they are on the host yet
        table = stage.transformer.code_table
        if table is not None and "condition_ids" in named:
            table.check(named["condition_ids"])
        elif table is not None and stage.code_conditioner is None:
            raise ValueError(
                "this stage is conditioned on codes, and the samples have none: give it the audio_conditioner that makes them, "
                "or tokens with condition_ids (`helicon tokenize --conditioner`)"
            )
        if stage.transformer.text_encoder is not None and not named.keys() & {"texts", "text_embeds"}:
            raise ValueError(
                "this stage reads texts, and the samples have none: say where they are with captions=..., "
                "or train one without has_condition"
            )
        return named

    def _check_tokens(self, batch: Batch) -> None:
        """(A code too great would be read as one of the next quantizer, and learned as the end.)"""
        pad_id = getattr(self.unwrapped_stage.transformer, "pad_id", PAD)
        for name, size in self.sizes.items():
            if name not in TOKENS or name not in batch or not batch[name].numel():
                continue
            ids = batch[name].masked_fill(batch[name] == pad_id, 0)
            least, most = int(ids.min()), int(ids.max())
            if least < PAD or most >= size:
                raise ValueError(
                    f"{name} hold {least if least < PAD else most}, and the transformer knows 0 to {size - 1}, and -1 past the end "
                    "of a row: count them from 0, or build it for more"
                )

    def data_tuple_to_kwargs(self, data: Any) -> Batch:
        """A batch of a user's own DataLoader by the names its entries have here."""
        return self.prepare(data)

    @property
    def unwrapped_stage(self) -> Stage:
        return self.task.model  # type: ignore[return-value]

    def generate(self, *arguments: Any, **keywords: Any) -> Any:
        """What the stage makes with the weights it has now, the averaged ones where there are some; see its own `generate`."""
        with self.inference():
            return self.unwrapped_stage.generate(*arguments, **keywords)  # type: ignore[operator]


class SemanticTransformerTrainer(StageTrainer):
    name, kind = "semantic", SemanticTransformerWrapper

    def __init__(
        self,
        wav2vec: Any,
        transformer: SemanticTransformer | None = None,
        *,
        audio_conditioner: Any = None,
        **options: Any,
    ):
        """`wav2vec` may be a `SemanticTransformerWrapper`, which has all of these. The options: see `StageTrainer`."""
        own = {"wav2vec": wav2vec, "transformer": transformer, "audio_conditioner": audio_conditioner}
        super().__init__(_stage(self.kind, wav2vec, own), **options)


class CoarseTransformerTrainer(StageTrainer):
    name, kind = "coarse", CoarseTransformerWrapper

    def __init__(
        self,
        transformer: CoarseTransformer | CoarseTransformerWrapper,
        codec: Any = None,
        wav2vec: Any = None,
        *,
        audio_conditioner: Any = None,
        ds_fields: Sequence[str] | None = None,
        **options: Any,
    ):
        """`transformer` may be a `CoarseTransformerWrapper`, which has all of these. The options: see `StageTrainer`."""
        own = {"transformer": transformer, "codec": codec, "wav2vec": wav2vec, "audio_conditioner": audio_conditioner}
        super().__init__(_stage(self.kind, transformer, own), ds_fields=ds_fields, **options)


class FineTransformerTrainer(StageTrainer):
    name, kind = "fine", FineTransformerWrapper

    def __init__(
        self,
        transformer: FineTransformer | FineTransformerWrapper,
        codec: Any = None,
        *,
        audio_conditioner: Any = None,
        dataset_normalize: bool = False,
        **options: Any,
    ):
        """`transformer` may be a `FineTransformerWrapper`, which has all of these. The options: see `StageTrainer`."""
        if dataset_normalize:
            raise ValueError("dataset_normalize=True is not supported: scale the recordings themselves")
        own = {"transformer": transformer, "codec": codec, "audio_conditioner": audio_conditioner}
        super().__init__(_stage(self.kind, transformer, own), **options)


class DelayedTransformerTrainer(StageTrainer):
    name, kind = "delayed", DelayedTransformerWrapper

    def __init__(
        self,
        transformer: DelayedTransformer | DelayedTransformerWrapper,
        codec: Any = None,
        wav2vec: Any = None,
        *,
        audio_conditioner: Any = None,
        **options: Any,
    ):
        """`transformer` may be a `DelayedTransformerWrapper`, which has all of these. The options: see `StageTrainer`."""
        own = {"transformer": transformer, "codec": codec, "wav2vec": wav2vec, "audio_conditioner": audio_conditioner}
        super().__init__(_stage(self.kind, transformer, own), **options)


def _stage(kind: type[Stage], first: Any, own: Mapping[str, Any]) -> Stage:
    if not isinstance(first, Stage):
        return kind(**own)
    others = [name for name, value in own.items() if value is not None and value is not first]
    if not isinstance(first, kind) or others:
        raise ValueError(
            f"a {type(first).__name__} is given"
            + (f" beside {' and '.join(others)}, which it has itself" if others else "")
            + f": give a {kind.__name__} alone, or its parts"
        )
    return first


def tokenizer_of(stage: Stage) -> AudioTokenizer:
    """What makes the tokens this stage learns from; or, without the networks for it, tells what a cache must hold."""
    transformer: Any = stage.transformer
    sizes = {}
    if not isinstance(stage, FineTransformerWrapper):
        sizes["semantic_token_ids"] = transformer.num_semantic_tokens
    if not isinstance(stage, SemanticTransformerWrapper):
        sizes["token_ids"] = transformer.codebook_size
    if stage.transformer.code_table is not None:
        sizes["condition_ids"] = stage.transformer.code_table.codebook_size
    conditioner: Any = stage.code_conditioner
    return AudioTokenizer(stage.codec, stage.wav2vec, conditioner=conditioner, sizes=sizes)


def _captioned(stage: Stage, cache: TokenCache) -> TokenCache:
    if stage.transformer.text_encoder is not None and "texts" not in cache.fields:
        raise ValueError(
            f"{cache.folder} holds no texts, and this stage reads some: run `helicon tokenize` with captions=..."
        )
    return cache


# ---------------------------------------------------------------------- the `model` section of recipes


def build_semantic(
    transformer: Mapping[str, Any],
    *,
    wav2vec: str | Path | Mapping[str, Any] | None = None,
    audio_conditioner: str | Path | None = None,
    unique_consecutive: bool = True,
    mask_prob: float = 0.15,
) -> SemanticTransformerWrapper:
    """
    Args:
        transformer: keywords of `SemanticTransformer`; num_semantic_tokens follows from the tokenizer.
        wav2vec: the semantic tokenizer: a folder of `helicon fit-kmeans`; or the keywords of a `MelKmeans`, which is then fitted
            to made-up sounds, to see that everything runs.
        audio_conditioner: a folder that `helicon fit-kmeans --model RUN` made of a MuLaN: the stage learns from sounds what it is
            told in texts later, and needs none to learn.
    """
    tokenizer, conditioner = _semantic(wav2vec), _conditioner(audio_conditioner)
    sizes: dict[str, Any] = _conditioned(conditioner)
    sizes |= {} if tokenizer is None else {"num_semantic_tokens": tokenizer.codebook_size}
    return SemanticTransformerWrapper(
        transformer=SemanticTransformer(**check(SemanticTransformer, {**sizes, **transformer}, "model.transformer")),
        wav2vec=tokenizer,
        audio_conditioner=conditioner,
        unique_consecutive=unique_consecutive,
        mask_prob=mask_prob,
    )


def build_coarse(
    transformer: Mapping[str, Any],
    *,
    codec: str | Path | Mapping[str, Any] | None = None,
    wav2vec: str | Path | Mapping[str, Any] | None = None,
    audio_conditioner: str | Path | None = None,
    unique_consecutive: bool = True,
    semantic_cross_entropy_loss_weight: float = 1.0,
    mask_prob: float = 0.15,
) -> CoarseTransformerWrapper:
    """
    Args:
        transformer: keywords of `CoarseTransformer`; codebook_size and num_semantic_tokens follow from the other two.
        codec: a run, checkpoint or saved folder; or the keywords of an untrained `SoundStream`, to see that everything runs.
        wav2vec, audio_conditioner: see `build_semantic`.
    """
    found, tokenizer, conditioner = _codec(codec), _semantic(wav2vec), _conditioner(audio_conditioner)
    sizes: dict[str, Any] = _conditioned(conditioner)
    sizes |= {} if found is None else {"codebook_size": found.codebook_size}
    sizes |= {} if tokenizer is None else {"num_semantic_tokens": tokenizer.codebook_size}
    return CoarseTransformerWrapper(
        transformer=CoarseTransformer(**check(CoarseTransformer, {**sizes, **transformer}, "model.transformer")),
        codec=found,
        wav2vec=tokenizer,
        audio_conditioner=conditioner,
        unique_consecutive=unique_consecutive,
        semantic_cross_entropy_loss_weight=semantic_cross_entropy_loss_weight,
        mask_prob=mask_prob,
    )


def build_fine(
    transformer: Mapping[str, Any],
    *,
    codec: str | Path | Mapping[str, Any] | None = None,
    audio_conditioner: str | Path | None = None,
    coarse_cross_entropy_loss_weight: float = 1.0,
    mask_prob: float = 0.15,
) -> FineTransformerWrapper:
    """
    Args:
        transformer: keywords of `FineTransformer`; codebook_size follows from the codec, and num_fine_quantizers is by default
            all that the coarse ones leave.
        codec, audio_conditioner: see `build_coarse`.
    """
    found, conditioner = _codec(codec), _conditioner(audio_conditioner)
    sizes: dict[str, Any] = _conditioned(conditioner)
    if found is not None:
        sizes["codebook_size"] = found.codebook_size
        if isinstance(coarse := transformer.get("num_coarse_quantizers"), int):
            if coarse >= found.num_quantizers:
                raise ValueError(
                    f"num_coarse_quantizers={coarse} leaves none of the codec's {found.num_quantizers} quantizers to a fine stage: "
                    "give fewer"
                )
            sizes["num_fine_quantizers"] = found.num_quantizers - coarse
    return FineTransformerWrapper(
        transformer=FineTransformer(**check(FineTransformer, {**sizes, **transformer}, "model.transformer")),
        codec=found,
        audio_conditioner=conditioner,
        coarse_cross_entropy_loss_weight=coarse_cross_entropy_loss_weight,
        mask_prob=mask_prob,
    )


def build_delayed(
    transformer: Mapping[str, Any],
    *,
    codec: str | Path | Mapping[str, Any] | None = None,
    wav2vec: str | Path | Mapping[str, Any] | None = None,
    audio_conditioner: str | Path | None = None,
    unique_consecutive: bool = True,
    mask_prob: float = 0.15,
) -> DelayedTransformerWrapper:
    """The arguments: see `build_coarse`; num_quantizers is by default all that the codec has."""
    found, tokenizer, conditioner = _codec(codec), _semantic(wav2vec), _conditioner(audio_conditioner)
    sizes: dict[str, Any] = _conditioned(conditioner)
    if found is not None:
        sizes |= {"codebook_size": found.codebook_size, "num_quantizers": found.num_quantizers}
    sizes |= {} if tokenizer is None else {"num_semantic_tokens": tokenizer.codebook_size}
    return DelayedTransformerWrapper(
        transformer=DelayedTransformer(**check(DelayedTransformer, {**sizes, **transformer}, "model.transformer")),
        codec=found,
        wav2vec=tokenizer,
        audio_conditioner=conditioner,
        unique_consecutive=unique_consecutive,
        mask_prob=mask_prob,
    )


def _codec(source: str | Path | Mapping[str, Any] | None) -> Any:
    if isinstance(source, Mapping):
        return SoundStream(**check(SoundStream, source, "model.codec"))
    return _loaded(source, "codec", ("encode", "decode"), "a codec", "helicon train soundstream/soundstream")


def _semantic(source: str | Path | Mapping[str, Any] | None) -> Any:
    if isinstance(source, Mapping):
        tokenizer = MelKmeans(**check(MelKmeans, source, "model.wav2vec"))
        made_up = SyntheticSounds(NUM_MADE_UP, tokenizer.sample_hz, 1.0)
        waves = torch.stack([made_up[index]["audio"] for index in range(NUM_MADE_UP)])
        frames = NUM_MADE_UP * tokenizer.sample_hz // tokenizer.downsample_factor
        tokenizer.fit([(waves, None)], num_frames=frames)
        return tokenizer
    return _loaded(source, "wav2vec", ("code_lengths", "groups"), "a semantic tokenizer", "helicon fit-kmeans")


def _conditioner(source: str | Path | None) -> Any:
    how = "helicon fit-kmeans --model RUN, of a MuLaN"
    return _loaded(
        source, "audio_conditioner", ("codes", "initial_embeddings"), "what makes codes of sounds and texts", how
    )


def _conditioned(conditioner: Any) -> dict[str, Any]:
    """What a transformer has to be for it."""
    return {} if conditioner is None else {"audio_text_condition": True}


def _loaded(source: str | Path | None, name: str, members: Sequence[str], wanted: str, how: str) -> Network | None:
    if source is None:
        return None
    network = load_stage(source, f"model.{name}", how)
    if not all(hasattr(network, member) for member in members):
        raise ValueError(
            f"model.{name}={str(source)!r} holds a {type(network).__name__}, not {wanted}: make one ({how})"
        )
    return network
