"""Sounds with AudioLM: codec, semantic tokenizer, tokens, transformers, all of them as one model, and what that makes."""

import inspect
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from helicon.cli.generate import MANIFEST, loaded
from helicon.cli.pipelines.outline import Pipeline, Request
from helicon.cli.steps import Clusters, Stage, Step, Tokens, Work, make, replaced
from helicon.config import ConfigError

if TYPE_CHECKING:
    from helicon.nn.network import Network

EMPTY: Mapping[str, str] = MappingProxyType({})
SAMPLES = 4  # sounds made at the end
MOST_LOOKED_AT = 1000  # items, in search of texts to make them from

CODEC, KMEANS, TOKENS, AUDIOLM, SOUNDS = "codec", "kmeans", "tokens", "audiolm", "samples"
SEMANTIC, COARSE, FINE, DELAYED = "semantic", "coarse", "fine", "delayed"


NOT_READ = {SEMANTIC: "model.codec", FINE: "model.wav2vec"}  # the networks that a stage has no use for


def audiolm(request: Request) -> list[Step]:
    settings = [
        f"model.transformer.has_condition={json.dumps(request.has_texts)}",
        *([] if request.has_texts else ["model.transformer.t5_name=null"]),
    ]
    return [
        codec(request),
        Clusters(KMEANS, request.data),
        Tokens(TOKENS, request.data, {"codec": CODEC, "semantic": KMEANS}),
        *transformers(request, settings),
        Bundle(AUDIOLM, by_argument(request)),
        Samples(SOUNDS, {"model": AUDIOLM, "texts": TOKENS}),
    ]


def codec(request: Request) -> Stage:
    return Stage(CODEC, f"soundstream/{request.size or 'soundstream'}", {}, [f"data.source={json.dumps(request.data)}"])


def transformers(request: Request, settings: Sequence[str], further: Mapping[str, str] = EMPTY) -> list[Stage]:
    """The stages that learn from tokens; `further` are keys of all their recipes that name earlier steps."""
    keys = {"data.source": TOKENS, "model.codec": CODEC, "model.wav2vec": KMEANS, **further}
    names = [SEMANTIC, DELAYED] if request.delayed else [SEMANTIC, COARSE, FINE]
    return [
        Stage(
            name,
            request.sized(f"audiolm/{name}"),
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


@dataclass(frozen=True)
class Bundle:
    """The stages as one `AudioLM`, which needs no other folder."""

    name: str
    stands_on: Mapping[str, str]

    def title(self, work: Work) -> str:
        return "all stages as one model"

    def check(self, work: Work) -> None:
        work.options(self.name, inspect.Signature())
        seconds_of(work)

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
        return AudioLM(**stages)

    def _made_of(self, work: Work) -> dict[str, str]:
        """The checkpoint of each stage."""
        from helicon.engine.checkpoint import checkpoints

        found = {name: checkpoints(work.home(name)) for name in self.stands_on.values()}
        return {name: folders[-1].name for name, folders in found.items() if folders}


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
