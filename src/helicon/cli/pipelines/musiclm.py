"""Music from texts with MusicLM: MuLaN, a codec and a semantic tokenizer, the codes that stand for what MuLaN hears, tokens, the transformers
of AudioLM (conditioned on these codes), all of them as one model, and what that makes.

Only MuLaN learns from texts: the transformers learn from the codes of sounds, and are told those of texts.
"""

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from helicon.cli.generate import loaded
from helicon.cli.pipelines.audiolm import (
    CODEC,
    KMEANS,
    SOUNDS,
    TOKENS,
    Bundle,
    Samples,
    SoundTokens,
    by_argument,
    codec,
    next_command,
    seconds_of,
    semantic_tokenizer,
    transformers,
)
from helicon.cli.pipelines.outline import Pipeline, Request
from helicon.cli.steps import Clusters, Given, Stage, Step, Work
from helicon.config import ConfigError

if TYPE_CHECKING:
    from helicon.nn.network import Network

TRIAL_CLUSTERS = 32
MULAN, CONDITIONER, MUSICLM = "mulan", "conditioner", "musiclm"


def musiclm(request: Request) -> list[Step]:
    if not request.has_texts:
        raise ConfigError(
            f"MusicLM learns from sounds with texts: say where those of {request.data} are, with --captions column, beside or folder"
        )
    settings = ["model.transformer.has_condition=true", "model.transformer.t5_name=null"]
    own = [f"data.source={json.dumps(request.data)}", *request.about_data()]
    few = {"clusters": TRIAL_CLUSTERS} if request.is_a_trial else {}
    members = ("get_audio_latents", "get_text_latents")
    mulan = None if request.mulan is None else Given(MULAN, request.mulan, "MuLaN", members)
    return [
        mulan or Stage(MULAN, request.sized("musiclm/mulan"), {}, own),
        codec(request, full="musiclm/codec"),
        semantic_tokenizer(request),
        Codes(CONDITIONER, request.data, few, stands_on={"model": MULAN}),
        SoundTokens(TOKENS, request.data, {"codec": CODEC, "semantic": KMEANS, "conditioner": CONDITIONER}),
        *transformers(request, settings, {"model.audio_conditioner": CONDITIONER}, full="musiclm"),
        MusicBundle(MUSICLM, by_argument(request)),
        Samples(SOUNDS, {"model": MUSICLM, "texts": TOKENS}),
    ]


@dataclass(frozen=True)
class Codes(Clusters):
    """What makes codes of what MuLaN hears, fitted to clips as long as those that the transformers learn from."""

    def title(self, work: Work) -> str:
        return f"codes for what {self.stands_on['model']} hears"

    def run(self, work: Work) -> None:
        from helicon.models.musiclm.conditioning import TooFewSounds

        try:
            super().run(work)
        except TooFewSounds as error:
            options = " and ".join(f"{self.name}.{key}=..." for key in ("clusters", "quantizers"))
            raise ConfigError(f"{error} (here {options})") from error

    def usual(self, work: Work) -> dict[str, Any]:
        return {"model": str(work.home(self.stands_on["model"])), "seconds": seconds_of(work)}


class MusicBundle(Bundle):
    """The stages as one `MusicLM`, which needs no other folder."""

    def model(self, work: Work) -> "Network":
        from helicon.models.musiclm.generate import MusicLM

        audio_lm: Any = super().model(work)
        quantizer: Any = loaded(work.home(CONDITIONER))
        return MusicLM(audio_lm, quantizer)


PIPELINE = Pipeline(musiclm, partial(next_command, model=MUSICLM))
