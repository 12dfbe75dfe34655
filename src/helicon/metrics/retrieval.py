"""How well sounds and texts find each other by the similarity of their latents: recall at k, beside what chance would find.

A query has found what it looks for where a right candidate is among the k most similar. A text may belong to several sounds, as
captions do that are equal: each of them is right, and the text asks (and is a candidate) once. Ties count against the query, so that
latents that are all alike find nothing; so do numbers that are not finite.

Letters: q queries, c candidates, n sounds, m different texts, d features.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

AT = (1, 5, 10)
ROWS = 1024  # queries ranked at a time: of a hundred thousand candidates each, 400 MB


def recall_at(similarities: Float[Tensor, "q c"], k: int, is_right: Bool[Tensor, "q c"] | None = None) -> float:
    """The part of the queries that find a right candidate among their k most similar; without `is_right` candidate i is that of
    query i."""
    return _recall(ranks(similarities, is_right), k)


def ranks(similarities: Float[Tensor, "q c"], is_right: Bool[Tensor, "q c"] | None = None) -> Int[Tensor, " q"]:
    """The place of each query's most similar right candidate, from 1; after wrong ones that are as similar."""
    if is_right is None:
        is_right = torch.eye(*similarities.shape, dtype=torch.bool, device=similarities.device)
    if not is_right.any(dim=1).all():
        raise ValueError("a query has no right candidate, so it cannot be told whether it finds it: leave it out")
    best = similarities.masked_fill(~is_right, -torch.inf).amax(dim=1, keepdim=True)
    return 1 + (~(similarities < best) & ~is_right).sum(dim=1)


def chance_at(num_right: Sequence[int], num_candidates: int, k: int) -> float:
    """The recall of queries that have so many right candidates each, and draw k at random: k / c where there is one."""
    k = min(k, num_candidates)
    every = math.comb(num_candidates, k)
    found = sum(times * (1 - math.comb(num_candidates - n, k) / every) for n, times in Counter(num_right).items())
    return found / len(num_right)


@dataclass(frozen=True)
class Recall:
    """One way: the recall at each k, and that of chance."""

    num_candidates: int
    at: Mapping[int, float]
    chance_at: Mapping[int, float]


@dataclass(frozen=True)
class Retrieval:
    """Both ways: which sounds a text finds among all sounds, and which text a sound finds among all texts."""

    text_to_audio: Recall
    audio_to_text: Recall

    @classmethod
    def of(
        cls, audio: Float[Tensor, "n d"], text: Float[Tensor, "n d"], captions: Sequence[Hashable] | None = None
    ) -> "Retrieval":
        """Of the latents of sounds and of their texts, row by row; rows whose captions are equal have the same text."""
        captions = range(len(audio)) if captions is None else captions
        if not len(audio) == len(text) == len(captions):
            raise ValueError(f"{len(audio)} sounds, {len(text)} texts and {len(captions)} captions: give one for each")
        first = {caption: row for row, caption in reversed(list(enumerate(captions)))}
        places = {caption: place for place, caption in enumerate(first)}
        of_audio = torch.tensor([places[caption] for caption in captions], device=audio.device)
        of_text = torch.arange(len(first), device=audio.device)
        text = text[torch.tensor(list(first.values()), device=audio.device)]
        return cls(_one_way(text, of_text, audio, of_audio), _one_way(audio, of_audio, text, of_text))

    def numbers(self) -> dict[str, float]:
        """By name: recall at each k, that of chance, and among how many candidates."""
        found: dict[str, float] = {}
        for way, recall in (("text_to_audio", self.text_to_audio), ("audio_to_text", self.audio_to_text)):
            found |= {f"{way}_recall_at_{k}": value for k, value in recall.at.items()}
            found |= {f"{way}_chance_at_{k}": value for k, value in recall.chance_at.items()}
            found |= {f"{way}_candidates": float(recall.num_candidates)}
        return found


def _one_way(
    queries: Float[Tensor, "q d"], of_query: Int[Tensor, " q"], candidates: Float[Tensor, "c d"], of: Int[Tensor, " c"]
) -> Recall:
    found, num_right = [], []
    for rows, labels in zip(queries.split(ROWS), of_query.split(ROWS), strict=True):
        is_right = labels[:, None] == of
        found.append(ranks(rows @ candidates.T, is_right))
        num_right += is_right.sum(dim=1).tolist()
    places = torch.cat(found)
    return Recall(
        len(candidates),
        {k: _recall(places, k) for k in AT},
        {k: chance_at(num_right, len(candidates), k) for k in AT},
    )


def _recall(places: Int[Tensor, " q"], k: int) -> float:
    return (places <= k).double().mean().item()
