"""Sounds with AudioLM: codec, semantic tokenizer, tokens, transformers, all of them as one model, and what that makes."""

import inspect
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from helicon.cli.generate import MANIFEST, device, loaded
from helicon.cli.pipelines.outline import SYNTHETIC, Pipeline, Request
from helicon.cli.steps import Clusters, Given, Stage, Step, Tokens, Work, make, newest_of, replaced
from helicon.cli.train import sections
from helicon.config import ConfigError, signature_without

if TYPE_CHECKING:
    from helicon.nn.network import Network

EMPTY: Mapping[str, str] = MappingProxyType({})
SAMPLES = 4  # sounds made at the end
TRIAL_HOURS = 0.1  # of sounds that the semantic tokenizer is fitted to
LEAST_FRAMES = 10  # of the codec, in a sound that is learned from: a fifth of a second, at 50 a second
MOST_LOOKED_AT = 1000  # items, in search of texts to make them from

CODEC, KMEANS, TOKENS, AUDIOLM, SOUNDS = "codec", "kmeans", "tokens", "audiolm", "samples"
SEMANTIC, COARSE, FINE, DELAYED = "semantic", "coarse", "fine", "delayed"


NOT_READ = {SEMANTIC: "model.codec", FINE: "model.wav2vec"}  # the networks that a stage has no use for


def audiolm(request: Request) -> list[Step]:
    if request.mulan is not None:
        raise ConfigError("--mulan is for a MusicLM, and an AudioLM stands on none: leave it out")
    settings = [
        f"model.transformer.has_condition={json.dumps(request.has_texts)}",
        *([] if request.has_texts else ["model.transformer.t5_name=null"]),
    ]
    return [
        codec(request),
        semantic_tokenizer(request),
        SoundTokens(TOKENS, request.data, {"codec": CODEC, "semantic": KMEANS}),
        *transformers(request, settings),
        Bundle(AUDIOLM, by_argument(request)),
        Samples(SOUNDS, {"model": AUDIOLM, "texts": TOKENS}),
    ]


def codec(request: Request, full: str = "soundstream/soundstream") -> Stage | Given:
    """The one that was named; or one to train, of which `full` is the recipe where no size is asked for."""
    if request.codec is not None:
        return Given(CODEC, request.codec, "codec", ("code_lengths", "encode", "decode"))
    settings = [f"data.source={json.dumps(request.data)}", *request.not_made_up()]
    return Stage(CODEC, full if request.size is None else f"soundstream/{request.size}", {}, settings)


def semantic_tokenizer(request: Request) -> Clusters:
    return Clusters(KMEANS, request.data, {"hours": TRIAL_HOURS} if request.is_a_trial else {})


def transformers(
    request: Request, settings: Sequence[str], further: Mapping[str, str] = EMPTY, full: str = "audiolm"
) -> list[Stage]:
    """The stages that learn from tokens; `further` are keys of all their recipes that name earlier steps, and `full` is the family of
    the recipes where no size is asked for."""
    keys = {"data.source": TOKENS, "model.codec": CODEC, "model.wav2vec": KMEANS, **further}
    names = [SEMANTIC, DELAYED] if request.delayed else [SEMANTIC, COARSE, FINE]
    return [
        Stage(
            name,
            f"{full}/{name}" if request.size is None else request.sized(f"audiolm/{name}"),
            {key: step for key, step in keys.items() if key != NOT_READ.get(name)},
            [*settings, *request.about_data()],
        )
        for name in names
    ]


def by_argument(request: Request) -> dict[str, str]:
    """The stages, by the names they have as arguments of an `AudioLM`."""
    others = (
        {"coarse_transformer": DELAYED} if request.delayed else {"coarse_transformer": COARSE, "fine_transformer": FINE}
    )
    return {"semantic_transformer": SEMANTIC, **others}


class SoundTokens(Tokens):
    """Those of sounds, which must be there, as must their captions where some are asked for."""

    def check(self, work: Work) -> None:
        super().check(work)
        if self.data == SYNTHETIC or self.is_done(work):
            return
        data = work.recipes[SEMANTIC].data
        check_sounds(self.data, data.get("captions"), data.get("text_column", "text"))


def check_sounds(data: str, captions: Any, text_column: str) -> None:
    """Raises where a folder or a manifest has no sounds, or none of those that are looked at has a caption."""
    from helicon.data.audio import sound_files
    from helicon.data.dataset import BadFile
    from helicon.data.paired import captions_of

    files = sound_files(data, text_column=text_column if captions == "column" else None)
    if captions is None:
        return
    texts = captions_of(files, captions, text_column)
    problem = None
    for index in range(0, len(files), max(1, len(files) // MOST_LOOKED_AT)):
        try:
            texts[index]
        except BadFile as error:
            problem = problem or error
        else:
            return
    raise ConfigError(
        f"no sound of {data} has a caption, going by --captions {captions} (for example {problem}): put captions there, or say where "
        "they are with another --captions"
    )


@dataclass(frozen=True)
class Bundle:
    """The stages as one `AudioLM`, which needs no other folder."""

    name: str
    stands_on: Mapping[str, str]

    def title(self, work: Work) -> str:
        return "all stages as one model"

    def check(self, work: Work) -> None:
        work.options(self.name, inspect.Signature())
        check_stages(work, [name for name in self.stands_on.values() if name != SEMANTIC])

    def is_done(self, work: Work) -> bool:
        return work.home(self.name).is_dir() and work.recorded.get(self.name) == self._made_of(work)

    def run(self, work: Work) -> None:
        model = self.model(work)
        with replaced(work.home(self.name)) as partial:
            model.save_pretrained(partial)
        work.record(self.name, self._made_of(work))

    def model(self, work: Work) -> "Network":
        from helicon.engine.checkpoint import resolve
        from helicon.models.audiolm.pipeline import AudioLM

        stages: dict[str, Any] = {key: loaded(resolve(work.home(name))) for key, name in self.stands_on.items()}
        if "fine_transformer" in stages:
            codec = stages["fine_transformer"].codec
            stages["fine_max_frames"] = round(seconds_of(work) * codec.sample_hz / codec.downsample_factor)
        return AudioLM(**stages, learned_seconds=seconds_of(work))

    def _made_of(self, work: Work) -> dict[str, str]:
        """The checkpoint of each stage."""
        return newest_of(work, self.stands_on.values())


@dataclass(frozen=True)
class Samples:
    """Sounds of the finished model: from texts of the data, or from nothing."""

    name: str
    stands_on: Mapping[str, str]

    def title(self, work: Work) -> str:
        return "what it makes"

    def check(self, work: Work) -> None:
        work.options(self.name, inspect.Signature())

    def is_done(self, work: Work) -> bool:
        is_of_the_model = work.recorded.get(self.name) == work.recorded.get(self.stands_on["model"])
        return work.home(self.name).is_dir() and is_of_the_model

    def run(self, work: Work) -> None:
        from helicon.registry import maker_of

        model = self.stands_on["model"]
        build: Callable[..., Any] = maker_of(work.home(model))
        maker = build(loaded(work.home(model)), texts=texts_of(work), seconds=seconds_of(work))
        make(maker, max(1, SAMPLES // len(maker.prompts)), work.home(self.name))
        work.record(self.name, work.recorded[model])


def check_stages(work: Work, acoustic: Sequence[str]) -> None:
    """Whether the stages will go together once they are trained; `acoustic` are those that make the codec's codes."""
    _check_equal(work, [SEMANTIC, acoustic[0]], "unique_consecutive")
    frames_a_second, known = codec_sizes(work)
    frames = seconds_of(work) * frames_a_second
    if round(frames) < LEAST_FRAMES:
        raise ConfigError(
            f"sounds of {seconds_of(work):g} s are {frames:.2g} frames of the codec, too few to learn from: give --seconds "
            f"{_rounded_up(LEAST_FRAMES / frames_a_second):g} or more"
        )
    if FINE not in acoustic:
        return
    _check_equal(work, acoustic, "num_coarse_quantizers")
    fine = _model_of(work, FINE)
    coarse, num_fine = fine["num_coarse_quantizers"], fine.get("num_fine_quantizers") or 1
    if coarse + num_fine > known:
        raise ConfigError(
            f"the codec has {known} quantizers, and num_coarse_quantizers={coarse} leaves too few of them to the fine stage: give fewer to "
            "coarse and fine, or the codec more"
        )


def _rounded_up(seconds: float) -> float:
    return math.ceil(seconds * 100) / 100


def codec_sizes(work: Work) -> tuple[float, int]:
    """Frames a second, and quantizers."""
    import torch

    (step,) = [step for step in work.steps if step.name == CODEC]
    if isinstance(step, Given):
        network: Any = loaded(step.source(work))
        silence = torch.zeros(1, network.channels, network.downsample_factor, device=device())
        network.encode(
            silence
        )  # which not all can: better told now than when tokens are made, after a MuLaN is trained
        return network.sample_hz / network.downsample_factor, network.num_quantizers
    codec = _model_of(work, CODEC)
    frames = codec["target_sample_hz"] / math.prod(codec["strides"])
    return frames, codec["rq_num_quantizers"] * codec["rq_groups"]


def _check_equal(work: Work, names: Sequence[str], key: str) -> None:
    first, second = names
    one, other = (_model_of(work, name)[key] for name in names)
    if one != other:
        raise ConfigError(f"{first} has {key}={one} and {second} {other}, and they cannot go together: make them equal")


def _model_of(work: Work, name: str) -> dict[str, Any]:
    """The arguments of a stage's network (and of the transformer in it), those that are left out by their defaults."""
    recipe = work.recipes[name]
    known = signature_without(sections(recipe.trains)["model"]).parameters.values()
    defaults = {entry.name: entry.default for entry in known if entry.default is not entry.empty}
    return {**defaults, **recipe.model, **recipe.model.get("transformer", {})}


def seconds_of(work: Work) -> float:
    """How much of a sound the stages have learned from at a time."""
    data = work.recipes[SEMANTIC].data
    if data.get("data_max_length_seconds") is None:
        raise ConfigError("how long sounds are must be told in seconds: give data_max_length_seconds to all stages")
    return data["data_max_length_seconds"]


def texts_of(work: Work) -> list[str]:
    """Different texts of the data, from all over it; none, where the model reads none."""
    from helicon.data.dataset import BadFile
    from helicon.data.tokens import TokenCache

    if not work.recipes[SEMANTIC].model["transformer"].get("has_condition"):
        return []
    cache = TokenCache(work.home(TOKENS))
    found: dict[str, None] = {}
    for index in range(0, len(cache), max(1, len(cache) // MOST_LOOKED_AT)):
        with suppress(BadFile):
            found[cache[index]["texts"]] = None
    texts = list(found)
    return texts[:: max(1, len(texts) // SAMPLES)][:SAMPLES]


def next_command(work: Work, model: str = AUDIOLM) -> str:
    """What makes more sounds."""
    first, *_ = (work.home(SOUNDS) / MANIFEST).read_text(encoding="utf-8").splitlines()
    text = json.loads(first)["text"]
    words = ["helicon", "generate", str(work.home(model)), *(["--text", text] if text else [])]
    return shlex.join([*words, "--samples", "8", f"seconds={seconds_of(work):g}"])


PIPELINE = Pipeline(audiolm, next_command)
