"""MuLaN really learns what words mean: it finds the sounds of captions that it has never read, whose words it knows from others."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helicon import registry
from helicon.config import load_recipe
from helicon.data.synthetic_sounds import SyntheticSounds
from helicon.metrics.retrieval import recall_at
from helicon.models.musiclm.conditioning import MuLaNEmbedQuantizer
from helicon.models.musiclm.mulan import MuLaN

TURNS = 8  # galleries, each with another sound of every caption


def galleries(sounds: SyntheticSounds) -> tuple[list[str], list[Tensor]]:
    """All captions there are; and for each turn one sound of each, in their order."""
    places = defaultdict(list)
    for index in range(len(sounds)):
        places[sounds.attributes(index).caption].append(index)
    captions = sorted(places)
    turns = [[sounds[places[caption][turn]]["audio"] for caption in captions] for turn in range(TURNS)]
    return captions, [torch.stack(turn) for turn in turns]


@pytest.mark.slow
def test_captions_never_read_find_their_sounds_and_are_found_by_them() -> None:
    """The demo's recipe learns 80 of the 90 captions there are, and is asked for the other 10, among all 90: chance finds 1.1 %.

    (Among those 10 alone it would do to know the words by which they differ from each other; here each must be told from the same
    sound of another duration, and those were read.) Measured with two seeds: 100 and 99 % of sounds, 96 and 100 % of captions.
    """
    rarely = ["save_model_every=1000", "save_results_every=1000", "val_every=1000"]
    sections = lambda name: registry.entries[name].recipe_sections()
    recipe = load_recipe("musiclm/mulan-demo", rarely, sections=sections)
    words = {**recipe.data["sounds"]}
    held_out = [tuple(pair) for pair in words.pop("held_out")]
    never_heard = SyntheticSounds(4000, 8000, recipe.data["data_max_length_seconds"], seed=1, **words)
    captions, turns = galleries(never_heard)
    others = SyntheticSounds(1000, 8000, seed=1, only=held_out, **words)
    never_read = {others.attributes(index).caption for index in range(len(others))}
    asked = torch.tensor([caption in never_read for caption in captions])
    assert (len(captions), int(asked.sum())) == (90, 10)

    def found(network: MuLaN) -> list[float]:
        """The part of sounds that find their caption first, and of captions that find their sound."""
        text = network.get_text_latents(raw_texts=captions)
        similarities = [network.get_audio_latents(turn) @ text.T for turn in turns]
        is_right = torch.eye(len(captions), dtype=torch.bool)[asked]
        ways = ([each[asked] for each in similarities], [each.T[asked] for each in similarities])
        return [recall_at(torch.cat(way), 1, is_right.repeat(TURNS, 1)) for way in ways]

    trainer = registry.build_trainer(recipe, results_folder=Path("run"))
    with trainer.inference():
        before = found(trainer.unwrapped_model)
    assert max(before) < 0.3, before
    trainer.train()
    with trainer.inference():
        network = trainer.unwrapped_model
        after = found(network)
        # Four times as long as what it learned from: sounds are found as clips, but not as a whole (measured: 100 and 76 to 86 %).
        long, text = torch.cat(turns[:4], dim=1), network.get_text_latents(raw_texts=captions)
        clips, whole = MuLaNEmbedQuantizer(network, 8).latents(long), network.get_audio_latents(long)
        of_clips, of_whole = (min(recall_at(text @ one.T, 1), recall_at(one @ text.T, 1)) for one in (clips, whole))
    assert min(after) >= 0.9, after
    assert of_clips >= 0.95 and of_clips > of_whole + 0.05, (of_clips, of_whole)
