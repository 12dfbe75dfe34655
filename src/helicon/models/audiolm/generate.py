"""How the stages of AudioLM make tokens: prompts of unequal length, guidance in one batch, the decode loop of nn/decode.py.

Letters: b batch, r rows of the transformer (2 b under guidance), n tokens, t frames, q quantizers, d features, v logits, w samples or frames.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from helicon.models.audiolm.stage import PAD, Pieces, without_padding
from helicon.models.audiolm.transformers import (
    CoarseTransformer,
    Codes,
    DelayedTransformer,
    FineTransformer,
    SemanticTransformer,
    TokenTransformer,
    delayed,
    twice,
    undelayed,
)
from helicon.models.text.conditioning import stacked
from helicon.nn.capture import evaluating, lasting
from helicon.nn.decode import Decoded, Decoder, Prompt, TokenModel
from helicon.nn.packing import Part, left_packed
from helicon.nn.sampling import Sampling

OVERLAP = 4  # a piece of a long sound hears this part of its length of the piece before
NEVER = -1e9  # a logit; unlike infinity it stays what it is under guidance


@dataclass(frozen=True)
class Sampled:
    """What all stages are asked alike."""

    texts: Mapping[str, Any]  # the keywords of `TextConditioned.text_context`
    batch_size: int
    sampling: Sampling
    seed: int | None

    @property
    def definite_seed(self) -> int:
        return int(torch.randint(2**62, ())) if self.seed is None else self.seed

    @property
    def has_texts(self) -> bool:
        return any(value is not None for value in self.texts.values())

    def at(self, offset: int) -> "Sampled":
        """The same with another seed."""
        return replace(self, seed=(self.definite_seed + offset) % 2**62)


class _Semantic(TokenModel):
    def __init__(self, network: SemanticTransformer):
        super().__init__()
        self.transformer, self.vocabulary = network.layers, network.num_semantic_tokens + 1
        self.embedding, self.to_logits = network.semantic.embedding, network.to_logits

    def embed_tokens(self, tokens: Int[Tensor, "r"], index: Int[Tensor, ""]) -> Float[Tensor, "r d"]:
        # (A row that has ended goes on with the token of the end, which is none of these.)
        return self.embedding(tokens.clamp(max=self.vocabulary - 2))

    def token_logits(self, hidden: Float[Tensor, "r d"], index: Int[Tensor, ""]) -> Float[Tensor, "r v"]:
        return self.to_logits(hidden)

    def allowed_tokens(self, index: Int[Tensor, ""], drawn: Int[Tensor, "b t"]) -> Bool[Tensor, "v"]:
        """(Something is made before it ends: nothing has no sound.)"""
        is_token = torch.arange(self.vocabulary, device=index.device) < self.vocabulary - 1
        return is_token | (index > 0)


class _Flat(TokenModel):
    """Codes in a row; where they may end, only in the place of a frame's first code, and after one frame at least."""

    def __init__(self, network: TokenTransformer, codes: Codes):
        super().__init__()
        self.transformer, self.codes = network.layers, codes
        self.vocabulary = codes.logit_weights.shape[1]

    def embed_tokens(self, tokens: Int[Tensor, "r"], index: Int[Tensor, ""]) -> Float[Tensor, "r d"]:
        return self.codes.embed_one(tokens.clamp(max=self.codes.codebook_size - 1), index)

    def token_logits(self, hidden: Float[Tensor, "r d"], index: Int[Tensor, ""]) -> Float[Tensor, "r v"]:
        return self.codes.logits_of_one(hidden, index)

    def allowed_tokens(self, index: Int[Tensor, ""], drawn: Int[Tensor, "b t"]) -> Bool[Tensor, "v"] | None:
        if self.vocabulary == self.codes.codebook_size:
            return None
        is_code = torch.arange(self.vocabulary, device=index.device) < self.codes.codebook_size
        return is_code | ((index % self.codes.num_quantizers == 0) & (index > 0))


class _Delayed(TokenModel):
    """Codes by step. In the first steps the finer quantizers still have to do with the frames of the prompt, which are known.

    The end is drawn by the first quantizer; each of the others then ends a step after the one before it, as in training.
    """

    known: Tensor  # [r, q, q], by step and quantizer
    ended: Tensor  # [r], how many steps ago the first quantizer ended; 0 where it has not

    def __init__(self, network: DelayedTransformer):
        super().__init__()
        self.transformer, self.vocabulary = network.layers, network.codebook_size + 1
        self.streams, self.none_id = network.num_quantizers, network.none_id
        self.embedding, self.logit_weights = network.codes.embedding, network.logit_weights

    def begin(self, known: Int[Tensor, "r q q"]) -> None:
        """What the finer quantizers say of the prompt. Each shape has its place, where captured graphs read it, also after a call of
        another shape that came to nothing."""
        places, shape = self.__dict__.setdefault("places", {}), (known.shape, known.device)
        if shape not in places:
            with lasting():
                places[shape] = torch.empty_like(known), known.new_zeros(len(known))
        self.__dict__["known"], self.__dict__["ended"] = places[shape]
        self.known.copy_(known)

    def embed_tokens(self, tokens: Int[Tensor, "r *q"], index: Int[Tensor, ""]) -> Float[Tensor, "r d"]:
        tokens = tokens.reshape(len(tokens), self.streams)
        before = self.ended * (index > 0)  # of another call, at the first token
        self.ended.copy_((before + 1) * ((before > 0) | (tokens[:, 0] == self.none_id)))
        quantizer = torch.arange(self.streams, device=tokens.device)
        known = self.known.index_select(1, index.clamp(max=self.streams - 1)[None])[:, 0]
        codes = torch.where(quantizer > index, known, tokens)
        return self.embedding(codes + quantizer * self.vocabulary).sum(dim=-2)

    def token_logits(self, hidden: Float[Tensor, "r d"], index: Int[Tensor, ""]) -> Float[Tensor, "r *q v"]:
        logits = F.linear(hidden, self.logit_weights.flatten(0, 1)).unflatten(-1, self.logit_weights.shape[:2])
        quantizer = torch.arange(self.streams, device=hidden.device)
        ended = (self.ended * (index > 0))[:, None]
        must_end = ((ended > 0) & (quantizer <= ended))[..., None]
        is_end = torch.arange(self.vocabulary, device=hidden.device) == self.none_id
        refused = torch.where(must_end, ~is_end, is_end & ((quantizer > 0) | (index == 0))[:, None])
        logits = logits.float().masked_fill(refused, NEVER)
        return logits[:, 0] if self.streams == 1 else logits


# What each network decodes with: caches and captured graphs, which are no part of it.
_decoders: weakref.WeakKeyDictionary[TokenTransformer, Decoder] = weakref.WeakKeyDictionary()


def decoder_of(network: TokenTransformer, build: Callable[[], TokenModel], eos_id: int | None) -> Decoder:
    if network not in _decoders:
        _decoders[network] = Decoder(build(), eos_id=eos_id, pad_id=PAD)
    return _decoders[network]


def _decode(
    network: TokenTransformer,
    decoder: Decoder,
    parts: Sequence[Part],
    max_new_tokens: int,
    asked: Sampled,
) -> Decoded:
    """New tokens behind the parts of a sequence, of which the last may have padding too."""
    rows, sampling = asked.batch_size, asked.sampling
    if not _is_guided(network, asked):
        sampling = replace(sampling, cond_scale=1.0)
    ids = asked.texts.get("condition_ids")
    if ids is not None and network.code_table is not None:
        network.code_table.check(ids)
    with evaluating(network):  # the encoder of texts, too
        context = network.text_of(rows, 0.0 if asked.has_texts else 1.0, **asked.texts)
    if sampling.is_guided:
        nothing = network.no_context(rows)
        assert context is not None and nothing is not None
        context = stacked(context, nothing)
        parts = [Part(twice(part.embeddings), None if part.mask is None else twice(part.mask)) for part in parts]
    packed, beside = network.sequence(parts, context)
    prompt = Prompt(packed.embeddings, packed.mask, beside.get("context"), beside.get("context_mask"))
    return decoder(prompt, max_new_tokens=max_new_tokens, seed=asked.definite_seed, sampling=sampling)


def _is_guided(network: TokenTransformer, asked: Sampled) -> bool:
    return network.has_condition and asked.has_texts and asked.sampling.is_guided


def semantic_tokens(
    network: SemanticTransformer,
    max_length: int,
    prime_ids: Int[Tensor, "#b n"] | None,
    asked: Sampled,
    include_eos: bool = False,
    max_tokens: int | None = None,
    groups: int = 1,
) -> Int[Tensor, "b _"]:
    """Rows of at most `max_length` tokens, those of the prompt among them; see SemanticTransformerWrapper.generate.

    Pieces of `max_tokens` begin with a frame of the tokenizer, which is `groups` tokens.
    """
    if prime_ids is None:
        prime_ids = torch.empty(asked.batch_size, 0, dtype=torch.long, device=network.device)
    prime_ids = prime_ids.to(network.device)
    asked = replace(asked, batch_size=_rows(asked, len(prime_ids)))
    prime_ids = prime_ids.expand(asked.batch_size, -1)
    _check_ids(network.num_semantic_tokens, prime_ids=prime_ids)
    shortest = int((prime_ids >= 0).sum(dim=1).min())
    if max_length <= shortest:
        raise ValueError(f"max_length={max_length} leaves nothing to generate behind a prompt of {shortest} tokens")
    if max_tokens is None or max_length <= max_tokens:
        start = network.semantic.part(prime_ids)
        decoder = decoder_of(network, lambda: _Semantic(network), network.eos_id)
        made = _decode(network, decoder, [start], max_length - shortest, asked)
        ids = trimmed(torch.cat((prime_ids, made.tokens), dim=1))[:, :max_length]
    else:

        def make(inside: Tensor, begin: Tensor, end: Tensor, asked: Sampled) -> Tensor:
            made = semantic_tokens(network, int((end - begin).max()) * groups, without_padded(inside).flatten(1), asked)
            return by_group(made, groups)

        ends = torch.full((asked.batch_size,), max_length // groups, device=network.device)
        ids = trimmed(
            in_pieces(make, by_group(prime_ids[:, :max_length], groups), ends, max_tokens // groups, asked).flatten(1)
        )
    if include_eos:
        ends = (ids >= 0).sum(dim=1, keepdim=True)
        is_end = torch.arange(ids.shape[1] + 1, device=ids.device) == ends
        ids = F.pad(ids, (0, 1), value=PAD).masked_fill(is_end, network.eos_id)[:, :max_length]
    return ids


def flat_codes(
    network: CoarseTransformer,
    semantic_token_ids: Int[Tensor, "#b n"],
    max_time_steps: int,
    prime_codes: Int[Tensor, "#b t q"] | None,
    asked: Sampled,
    pieces: Pieces | None = None,
) -> Int[Tensor, "b _ _"]:
    """Coarse codes of at most `max_time_steps` frames, those of the prompt among them."""
    q = network.num_coarse_quantizers
    semantic_token_ids, prime, asked = _aligned(network, semantic_token_ids, prime_codes, q, asked)
    _check_ids(network.num_semantic_tokens, semantic_token_ids=semantic_token_ids)
    _check_ids(network.codebook_size, prime_coarse_token_ids=prime)
    shortest = _shortest(prime, max_time_steps)
    if pieces is not None and max_time_steps > pieces.max_frames:
        make = functools.partial(flat_codes, network)
        return codes_in_pieces(make, semantic_token_ids, prime, max_time_steps, pieces, asked)
    parts = [network.semantic.part(semantic_token_ids), network.coarse.part(prime.flatten(1))]
    decoder = decoder_of(network, lambda: _Flat(network, network.coarse), network.eos_id)
    made = _decode(network, decoder, parts, (max_time_steps - shortest) * q, asked)
    frames = made.tokens[:, : made.tokens.shape[1] // q * q].unflatten(1, (-1, q))
    return joined(prime, frames)[:, :max_time_steps]


def fine_codes(
    network: FineTransformer,
    coarse: Int[Tensor, "#b t q"],
    prime_codes: Int[Tensor, "#b k r"] | None,
    max_frames: int | None,
    asked: Sampled,
) -> Int[Tensor, "b t r"]:
    """The fine codes of every frame of coarse ones, piece by piece where a row has more than `max_frames`."""
    q, frames = network.num_fine_quantizers, coarse.shape[1]
    coarse, fine, asked = _aligned(network, coarse, prime_codes, q, asked)
    _check_ids(network.codebook_size, coarse_token_ids=coarse, prime_fine_token_ids=fine)
    if max_frames is not None and max_frames < 2:
        raise ValueError(f"max_frames={max_frames} must be at least 2")
    fine = F.pad(fine[:, :frames], (0, 0, 0, max(0, frames - fine.shape[1])), value=PAD)
    is_frame = F.pad((coarse >= 0).all(dim=-1), (1, 0))
    ends = (is_frame * torch.arange(frames + 1, device=coarse.device)).amax(dim=1)  # behind the last frame of each row

    def make(inside: Tensor, begin: Tensor, end: Tensor, asked: Sampled) -> Tensor:
        heard = _shifted(coarse, begin, inside.shape[1], end - begin)
        parts = [network.coarse.part(heard.flatten(1)), network.fine.part(inside.flatten(1))]
        decoder = decoder_of(network, lambda: _Flat(network, network.fine), None)
        made = _decode(network, decoder, parts, int((end - begin - num_frames(inside)).max()) * q, asked)
        return joined(inside, made.tokens.unflatten(1, (-1, q)))

    fine = in_pieces(make, fine, ends, max_frames or frames, asked)
    return fine.masked_fill((coarse < 0).any(dim=-1, keepdim=True), PAD)


def in_pieces(
    make: Callable[[Tensor, Tensor, Tensor, Sampled], Tensor],
    known: Int[Tensor, "b t q"],
    ends: Int[Tensor, " b"],
    piece: int,
    asked: Sampled,
) -> Int[Tensor, "b _ q"]:
    """Frames of every row up to its end, at most `piece` at a time, behind those that are known.

    A piece goes on from the last quarter of what is there, the first one from the whole of a prompt that leaves a quarter to it.
    The last one is as long as the others. Where its pieces begin and end depends on a row alone: it gives what it gives by itself.

    make    (frames of a piece that are known, with -1 behind them; where it begins and ends, [b]; what is asked) to all its frames.
            A row of fewer has ended.
    """
    overlap, number = max(1, piece // OVERLAP), 0
    known = F.pad(known, (0, 0, 0, max(0, int(ends.max()) - known.shape[1])), value=PAD)
    done, frame = num_frames(known).minimum(ends), torch.arange(known.shape[1], device=known.device)
    while bool((done < ends).any()):
        begin = (done - overlap).masked_fill(done <= piece - overlap, 0).minimum(ends - piece).clamp(min=0)
        end = (begin + piece).minimum(ends)
        inside = _shifted(known, begin, int((end - begin).max()), end - begin)
        made = make(inside, begin, end, asked.at(number) if number else asked)
        made = F.pad(made, (0, 0, 0, max(0, inside.shape[1] - made.shape[1])), value=PAD)
        is_inside = (frame >= begin[:, None]) & (frame < end[:, None])
        known = torch.where(is_inside[..., None], _shifted(made, -begin, len(frame), end), known)
        done = (begin + num_frames(made)).minimum(end)
        ends = torch.where(done < end, done, ends)
        number += 1
    return known


def codes_in_pieces(
    make: Callable[..., Tensor],
    semantic_token_ids: Int[Tensor, "#b n"],
    prime_codes: Int[Tensor, "b t q"],
    max_time_steps: int,
    pieces: Pieces,
    asked: Sampled,
) -> Int[Tensor, "b _ q"]:
    """Codes of at most `max_time_steps` frames, as far as there are tokens. A piece hears the tokens of its own time alone.

    make    (tokens, the most frames, the first codes, what is asked) to the codes of a piece
    """
    steps = by_group(semantic_token_ids, pieces.groups)
    count, (frames, per) = num_frames(steps), pieces.frames_a_step.as_integer_ratio()
    ends = (-(-count * frames // per)).maximum(num_frames(prime_codes)).clamp(max=max_time_steps)

    def make_piece(inside: Tensor, begin: Tensor, end: Tensor, asked: Sampled) -> Tensor:
        first = (2 * begin * per + frames) // (2 * frames)  # the nearest
        heard = _shifted(steps, first, pieces.max_steps, count - first)
        return make(without_padded(heard).flatten(1), int((end - begin).max()), without_padded(inside), asked)

    return in_pieces(make_piece, prime_codes[:, :max_time_steps], ends, pieces.max_frames, asked)


def num_frames(codes: Int[Tensor, "b t q"]) -> Int[Tensor, " b"]:
    """How many are whole."""
    return (codes >= 0).all(dim=-1).sum(dim=1)


def without_padded(codes: Int[Tensor, "b t q"]) -> Int[Tensor, "b _ q"]:
    """As wide as the longest row."""
    return codes[:, : int(num_frames(codes).max())]


def by_group(ids: Int[Tensor, "b n"], groups: int) -> Int[Tensor, "b t g"]:
    """Whole frames of semantic tokens."""
    return ids[:, : ids.shape[1] // groups * groups].unflatten(1, (-1, groups))


def _shifted(
    codes: Int[Tensor, "b t q"], begin: Int[Tensor, " b"], width: int, counts: Int[Tensor, " b"]
) -> Int[Tensor, "b w q"]:
    """The first `counts` frames of each row from its `begin` on, and -1 behind them."""
    places = begin[:, None] + torch.arange(width, device=codes.device)
    chosen = places.clamp(0, codes.shape[1] - 1)[..., None].expand(-1, -1, codes.shape[2])
    return without_padding(codes.gather(1, chosen), counts)


def delayed_codes(
    network: DelayedTransformer,
    semantic_token_ids: Int[Tensor, "#b n"],
    max_time_steps: int,
    prime_codes: Int[Tensor, "#b t q"] | None,
    asked: Sampled,
    pieces: Pieces | None = None,
) -> Int[Tensor, "b _ q"]:
    """Codes of all quantizers, of at most `max_time_steps` frames, those of the prompt among them."""
    q = network.num_quantizers
    semantic_token_ids, prime, asked = _aligned(network, semantic_token_ids, prime_codes, q, asked)
    _check_ids(network.num_semantic_tokens, semantic_token_ids=semantic_token_ids)
    _check_ids(network.codebook_size, prime_token_ids=prime)
    shortest = _shortest(prime, max_time_steps)
    if pieces is not None and max_time_steps > pieces.max_frames:
        make = functools.partial(delayed_codes, network)
        return codes_in_pieces(make, semantic_token_ids, prime, max_time_steps, pieces, asked)
    columns, lengths = delayed(prime, network.none_id), (prime >= 0).all(dim=-1).sum(dim=1)
    begun = torch.arange(prime.shape[1] + 1, device=prime.device) <= lengths[:, None]
    # A prompt by step as far as its first quantizer goes, and what its others say in the steps after that.
    steps = Part(network.codes.behind_start(network.embed_steps(columns[:, : prime.shape[1]])), begun)
    after = (lengths[:, None] + torch.arange(q, device=prime.device))[..., None].expand(-1, -1, q)
    known = columns.gather(1, after)
    decoder = decoder_of(network, lambda: _Delayed(network), network.eos_id)
    is_guided = _is_guided(network, asked)
    decoder.model.begin(twice(known) if is_guided else known)  # type: ignore[operator]
    parts = [network.semantic.part(semantic_token_ids), steps]
    made = _decode(network, decoder, parts, max_time_steps - shortest + q - 1, asked)
    frames = (made.lengths - (q - 1)).clamp(min=0)
    codes = undelayed(made.tokens.reshape(*made.tokens.shape[:2], q), int(frames.max()))
    return joined(prime, without_padding(codes, frames))[:, :max_time_steps]


def _aligned(
    network: TokenTransformer,
    known: Tensor,
    prime_codes: Tensor | None,
    num_quantizers: int,
    asked: Sampled,
) -> tuple[Tensor, Tensor, Sampled]:
    """What is given, on the network's device, as rows of one batch; the prompt's frames are there as a whole or not at all."""
    known = known.to(network.device)
    if prime_codes is None:
        prime_codes = known.new_empty(len(known), 0, num_quantizers)
    prime_codes = prime_codes.to(network.device)
    if prime_codes.shape[2:] != (num_quantizers,):
        raise ValueError(f"a prompt of codes {list(prime_codes.shape)} must be [b, t, {num_quantizers}]")
    prime_codes = prime_codes.masked_fill((prime_codes < 0).any(dim=-1, keepdim=True), PAD)
    rows = _rows(replace(asked, batch_size=len(known)), len(prime_codes))
    expanded = (x.expand(rows, *x.shape[1:]) for x in (known, prime_codes))
    return (*expanded, replace(asked, batch_size=rows))  # type: ignore[return-value]


def _check_ids(size: int, **given: Tensor) -> None:
    for name, ids in given.items():
        if ids.numel() and int(ids.max()) >= size:
            raise ValueError(
                f"{name} hold {int(ids.max())}, and the transformer knows 0 to {size - 1}: give those it was trained on"
            )


def _rows(asked: Sampled, prompts: int) -> int:
    """How many rows are asked for by texts, prompts and batch size, of which one may stand for many."""
    if asked.batch_size < 1:
        raise ValueError(f"batch_size={asked.batch_size} must be at least 1")
    if isinstance(asked.texts.get("texts"), str):
        raise ValueError(f"text takes a list of texts, not one: write [{asked.texts['texts']!r}]")
    if not prompts or any(value is not None and not len(value) for value in asked.texts.values()):
        raise ValueError("an empty list of prompts or texts asks for nothing: give one at least, or leave it out")
    counts = {asked.batch_size, prompts, *(len(value) for value in asked.texts.values() if value is not None)}
    several = counts - {1}
    if len(several) > 1:
        raise ValueError(
            f"prompts, texts and batch_size are of different numbers, {sorted(several)}: give as many of each"
        )
    return several.pop() if several else 1


def _shortest(prime: Int[Tensor, "b t q"], max_time_steps: int) -> int:
    shortest = int((prime >= 0).all(dim=-1).sum(dim=1).min())
    if max_time_steps <= shortest:
        raise ValueError(
            f"max_time_steps={max_time_steps} leaves nothing to generate behind a prompt of {shortest} frames"
        )
    return shortest


def joined(prime: Int[Tensor, "b t q"], made: Int[Tensor, "b k q"]) -> Int[Tensor, "b _ q"]:
    """The frames of both, those that are not whole left out, and -1 behind them."""
    both = torch.cat((prime, made), dim=1)
    keep = (both >= 0).all(dim=-1)
    frames = torch.stack([left_packed(level, keep, PAD) for level in both.unbind(-1)], dim=-1)
    return frames[:, : int(keep.sum(dim=1).max())]


def trimmed(ids: Int[Tensor, "b n"]) -> Int[Tensor, "b _"]:
    """Rows without holes, as wide as the longest."""
    keep = ids >= 0
    return left_packed(ids, keep, PAD)[:, : int(keep.sum(dim=1).max())]


def waves_of(codec: Any, codes: Int[Tensor, "b t q"]) -> Float[Tensor, "b ..."] | list[Tensor]:
    """The sounds of codes, `[b, w]` (`[b, c, w]` of several channels), or a list of them where they are of unequal length."""
    is_frame = (codes >= 0).all(dim=-1)
    lengths = (is_frame.sum(dim=1) * codec.downsample_factor).tolist()
    if max(lengths) == 0:
        audio = torch.zeros(len(codes), codec.channels, 0, device=codes.device)
    else:
        with evaluating(codec):
            audio = codec.decode(codes.masked_fill(~is_frame[..., None], PAD))
    audio = audio[:, 0] if audio.shape[1] == 1 else audio
    if len(set(lengths)) == 1:
        return audio[..., : lengths[0]]
    return [row[..., :length] for row, length in zip(audio, lengths, strict=True)]
