"""How a MeshTransformer draws meshes: a step of the loop (nn/decode.py) is a face, its tokens drawn one after the other.

Letters: b batch, r rows of the transformer (2 b under guidance), f faces, k tokens of a face, d features of a face, e of a token, v logits,
n tokens before a new one.
"""

import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from helicon.models.meshgpt.compact import RECENT, CompactMeshTokenizer, may_follow
from helicon.models.meshgpt.layers import PAD, Condition, filmed
from helicon.models.meshgpt.transformer import MeshTransformer
from helicon.nn.capture import evaluating, lasting
from helicon.nn.decode import Decoder, Prompt, TokenModel
from helicon.nn.packing import left_packed
from helicon.nn.sampling import FILTER_THRES, Sampling


@dataclass(frozen=True)
class Asked:
    """What meshes are asked for, and how."""

    texts: Mapping[str, Any]  # the keywords of `TextConditioned.text_context`
    num_faces: Int[Tensor, "#b"] | None
    batch_size: int | None
    max_seq_len: int
    sampling: Sampling
    seed: int | None

    @property
    def has_texts(self) -> bool:
        return any(value is not None for value in self.texts.values())

    @property
    def definite_seed(self) -> int:
        return int(torch.randint(2**62, ())) if self.seed is None else self.seed


class _Faces(TokenModel):
    """The end can only stand in the place of a face's first token, and not where there is no face yet: nothing is no mesh.

    Compact tokens follow each other as `compact.may_follow` says."""

    film: Tensor | None  # [r, 2, d]
    is_empty: Tensor  # [b], rows without a prompt
    recent: Tensor  # [b, RECENT], the last tokens of the prompt

    def __init__(self, network: MeshTransformer):
        super().__init__()
        self.transformer, self.inner, self.tokens = network.coarse, network.fine, network.tokens
        self.streams, self.vocabulary = network.tokens_per_face, network.codebook_size + 1
        tokenizer = network.autoencoder
        self.num_blocks = tokenizer.num_blocks if isinstance(tokenizer, CompactMeshTokenizer) else None

    def begin(
        self, film: Float[Tensor, "r 2 d"] | None, is_empty: Bool[Tensor, "b"], recent: Int[Tensor, "b n"]
    ) -> None:
        """What a call has of its own; kept where it was before, if it fits: captured graphs read it there."""
        for name, value in {"film": film, "is_empty": is_empty, "recent": recent}.items():
            before = self.__dict__.get(name)
            if (
                before is not None
                and value is not None
                and (before.shape, before.device) == (value.shape, value.device)
            ):
                before.copy_(value)
            else:
                with lasting():
                    self.__dict__[name] = None if value is None else value.clone()

    def embed_tokens(self, tokens: Int[Tensor, "r *k"], index: Int[Tensor, ""]) -> Float[Tensor, "r d"]:
        faces = self.tokens.embed(tokens.reshape(len(tokens), self.streams))
        return filmed(faces[:, None], self.film)[:, 0]

    def token_logits(self, hidden: Float[Tensor, "r d"], index: Int[Tensor, ""]) -> Float[Tensor, "r v"]:
        return self.tokens.to_logits(hidden)

    def embed_stream(
        self, hidden: Float[Tensor, "r d"], before: Int[Tensor, "r"] | None, stream: int
    ) -> Float[Tensor, "r e"]:
        return self.tokens.to_fine(hidden) if before is None else self.tokens.embed_token(before, stream - 1)

    def stream_logits(self, hidden: Float[Tensor, "r e"], stream: int) -> Float[Tensor, "r v"]:
        return self.tokens.to_logits(hidden)

    def allowed_tokens(self, index: Int[Tensor, ""], drawn: Int[Tensor, "b t *k"]) -> Bool[Tensor, "b k v"]:
        if self.num_blocks is not None:
            places = index + torch.arange(RECENT, device=index.device)
            recent = torch.cat((self.recent, drawn), dim=1).index_select(1, places)
            return may_follow(recent, self.num_blocks, self.vocabulary)[:, None]
        is_end = torch.arange(self.vocabulary, device=index.device) == self.vocabulary - 1
        is_first = torch.arange(self.streams, device=index.device) == 0
        may_end = is_first & ((index > 0) | ~self.is_empty[:, None])
        return may_end[..., None] | ~is_end


# What each network decodes with: caches and captured graphs, which are no part of it.
_decoders: weakref.WeakKeyDictionary[MeshTransformer, Decoder] = weakref.WeakKeyDictionary()


def decoder_of(network: MeshTransformer) -> Decoder:
    if network not in _decoders:
        _decoders[network] = Decoder(_Faces(network), eos_id=network.eos_id, pad_id=PAD)
    return _decoders[network]


def draw(
    network: MeshTransformer,
    prompt: Int[Tensor, "#b ..."] | None,
    asked: Asked,
    on_face: Callable[[Tensor], None] | None = None,
) -> Int[Tensor, "b _ k"]:
    """Faces behind those of the prompt, -1 past the end of a row; see MeshTransformer.generate."""
    known, max_faces = _rows(network, prompt, asked), _max_faces(network, asked.max_seq_len)
    lengths = (known >= 0).all(dim=-1).sum(dim=1)
    shortest, longest = int(lengths.min()), int(lengths.max())
    if longest > max_faces:
        raise ValueError(
            f"a prompt of {longest} faces is longer than max_seq_len={asked.max_seq_len}, "
            f"which has room for {max_faces}: give a shorter one"
        )
    if shortest == max_faces:
        return known[:, :max_faces]
    decoder, conditioned = decoder_of(network), _prompt(network, known, asked)
    decoder.model.begin(conditioned.film, lengths == 0, _recent(known))  # type: ignore[operator]
    made = decoder(
        conditioned.prompt,
        max_new_tokens=max_faces - shortest,
        seed=asked.definite_seed,
        sampling=asked.sampling,
        poll_every=16 if on_face is None else 1,
        on_tokens=None if on_face is None else _each_face(on_face, max_faces - lengths, network.tokens_per_face),
    )
    return _joined(known, _by_face(made.tokens, network.tokens_per_face))[:, :max_faces]


def filters(
    filter_logits_fn: str | Callable[..., Tensor] | None, filter_kwargs: Mapping[str, Any] | None, **given: Any
) -> dict[str, Any]:
    """The filters of `Sampling`: those given by their names, or what a function of another package means by its keywords."""
    if filter_logits_fn is None and not filter_kwargs:
        return given if any(value is not None for value in given.values()) else {**given, "filter_thres": FILTER_THRES}
    filter_logits_fn = filter_logits_fn or "top_k"
    name = getattr(filter_logits_fn, "__name__", filter_logits_fn)
    meanings: dict[str, dict[str, Callable[[Any], dict[str, Any]]]] = {
        "top_k": {
            "k": lambda k: {"top_k": k, "filter_thres": None},
            "thres": lambda thres: {"filter_thres": thres},
            "frac_num_tokens": lambda fraction: {"filter_thres": 1 - fraction},
        },
        "top_p": {"thres": lambda thres: {"top_p": thres}},
    }
    usual: dict[str, dict[str, Any]] = {
        "top_k": {"filter_thres": FILTER_THRES},
        "top_p": {"filter_thres": None, "top_p": 0.9},
    }
    if name not in meanings:
        raise ValueError(
            f"filter_logits_fn={name!r}: a step that is captured has no room for another function than top_k and top_p; "
            "give filter_thres, top_k or top_p"
        )
    found = {**given, **usual[name]}
    for keyword, value in (filter_kwargs or {}).items():
        if keyword not in meanings[name]:
            raise ValueError(f"filter_kwargs: {name} does not know {keyword}, but {', '.join(meanings[name])}")
        found |= meanings[name][keyword](value)
    return found


def _recent(known: Int[Tensor, "b f k"]) -> Int[Tensor, "b n"]:
    """The last tokens of each row, -1 where there are not as many."""
    flat = F.pad(known.flatten(1), (RECENT, 0), value=PAD)
    return left_packed(flat.flip(1), flat.flip(1) >= 0, PAD)[:, :RECENT].flip(1)


@dataclass(frozen=True)
class _Conditioned:
    prompt: Prompt
    film: Float[Tensor, "r 2 d"] | None


def _prompt(network: MeshTransformer, known: Int[Tensor, "b f k"], asked: Asked) -> _Conditioned:
    """What the faces follow; under guidance with the text, then without."""
    if asked.sampling.is_guided and not asked.has_texts:
        raise ValueError(f"cond_scale={asked.sampling.cond_scale} guides by a text: give texts, or leave it out")
    with evaluating(network):  # the encoder of texts, too
        text = network.text_of(len(known), 0.0 if asked.has_texts else 1.0, **asked.texts)
        condition = Condition(text, network.count_of(len(known), 0.0, asked.num_faces))
        if asked.sampling.is_guided:
            known, condition = torch.cat((known, known)), network.guided(condition)
        packed, beside = network.sequence(known, condition, is_prompt=True)
        film = network.film_of(condition)
    return _Conditioned(Prompt(packed.embeddings, packed.mask, **beside), film)


def _max_faces(network: MeshTransformer, max_seq_len: int) -> int:
    if max_seq_len < network.tokens_per_face:
        raise ValueError(f"max_seq_len={max_seq_len} is less than a face, which has {network.tokens_per_face} tokens")
    if max_seq_len > network.max_seq_len:
        raise ValueError(
            f"max_seq_len={max_seq_len} is more than the {network.max_seq_len} this MeshTransformer was built with"
        )
    return max_seq_len // network.tokens_per_face


def _rows(network: MeshTransformer, prompt: Tensor | None, asked: Asked) -> Int[Tensor, "b f k"]:
    """The prompt, of as many rows as texts, numbers of faces, prompts and batch size ask for; one may stand for many."""
    if isinstance(asked.texts.get("texts"), str):
        raise ValueError(f"texts takes a list of texts, not one: write [{asked.texts['texts']!r}]")
    if asked.batch_size is not None and asked.batch_size < 1:
        raise ValueError(f"batch_size={asked.batch_size} must be at least 1")
    if any(value is not None and len(value) == 0 for value in (*asked.texts.values(), asked.num_faces, prompt)):
        raise ValueError("prompts, texts and num_faces must not be empty: give at least one, or leave them out")
    if asked.num_faces is not None and int(asked.num_faces.min()) < 1:
        raise ValueError(f"num_faces={asked.num_faces.tolist()} must be at least 1")
    if prompt is None:
        prompt = torch.empty(1, 0, dtype=torch.long)
    known = network.by_face(prompt.to(network.device))
    if known.numel() and int(known.max()) >= network.codebook_size:
        raise ValueError(f"the prompt holds {int(known.max())}, and the codes are 0 to {network.codebook_size - 1}")
    given = [*asked.texts.values(), asked.num_faces, known]
    several = {asked.batch_size or 1, *(len(value) for value in given if value is not None)} - {1}
    if len(several) > 1:
        raise ValueError(
            f"prompts, texts, num_faces and batch_size are of different numbers, {sorted(several)}: give as many of each"
        )
    known = known.masked_fill((known < 0).any(dim=-1, keepdim=True), PAD)
    return known.expand(several.pop() if several else 1, -1, -1)


def _by_face(tokens: Int[Tensor, "b f *k"], tokens_per_face: int) -> Int[Tensor, "b f k"]:
    """(Of a single stream the loop gives no dimension.)"""
    return tokens.reshape(*tokens.shape[:2], tokens_per_face)


def _each_face(
    on_face: Callable[[Tensor], None], room: Int[Tensor, "b"], tokens_per_face: int
) -> Callable[[Tensor], None]:
    """Shows the faces that come one by one, of each row as many as there is room for."""
    numbers = itertools.count()

    def on_tokens(tokens: Tensor) -> None:
        face = _by_face(tokens, tokens_per_face).masked_fill((room <= next(numbers))[:, None, None], PAD)
        if bool((face >= 0).any()):  # there is none where the last row has ended
            on_face(face)

    return on_tokens


def _joined(known: Int[Tensor, "b f k"], made: Int[Tensor, "b g k"]) -> Int[Tensor, "b _ k"]:
    """The faces of both, and -1 behind them."""
    both = torch.cat((known, made), dim=1)
    keep = (both >= 0).all(dim=-1)
    flat = left_packed(both.flatten(1), keep.repeat_interleave(both.shape[2], dim=1), PAD)
    return flat.unflatten(1, both.shape[1:])[:, : int(keep.sum(dim=1).max())]
