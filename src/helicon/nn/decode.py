"""The token loop of all autoregressive families: prefill once, then one static step per token.

A step (embed the last token, run the transformer over its cache, sample, note the ends) touches the device only. On
CUDA it is captured once in a graph and replayed; elsewhere the same code runs eagerly. The host looks only every
`poll_every` tokens: whether all rows have ended, and whether all logits were numbers. Noise is drawn outside the step,
from the caller's seed: eager and replayed steps see the same.

Letters: b rows of the result, r rows of the transformer (2 b under guidance: with the condition, then without), n
prompt tokens, d features, v vocabulary, t new tokens, k streams of tokens, m context tokens, e context features, c size
of the condition, i features of the inner transformer. `*k` is there only where a model has several streams.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from helicon.nn.capture import REPRODUCIBLE, Weights, captured, compiled, evaluating, lasting
from helicon.nn.sampling import Sampling
from helicon.nn.transformer import Transformer, run_layer

SMALLEST_WINDOW = 128  # slots; windows double from here


class TokenModel(nn.Module):
    """What a family gives to the loop: how a token enters the transformer and how the next one comes out.

    It should hold what a step runs and nothing else: its weights are copied in the type that decoding runs in. `index`,
    a 0-d tensor on the device, is the token's number among the new ones: a family whose embeddings or heads differ by
    position (quantizers in turn, say) computes with it. What asks the host for its value cannot be captured, and
    `weights[index]` does: write `weights.index_select(0, index[None])[0]`.

    With several `streams` each step draws one token of each, all at once (the codebooks of a delayed pattern, say): where
    a token is spoken of, it is then one of each stream.

    With an `inner` transformer the streams of a step are drawn one after the other: it is a causal transformer over them,
    without registers, begins anew at each step, and gives the logits of each stream from those drawn before it and from
    what the outer one says (RQ-Transformer, Lee et al. 2022). It attends to the same context, where it attends to any.
    """

    transformer: Transformer
    inner: Transformer | None
    vocabulary: int
    streams: int = 1

    def __init__(self) -> None:
        super().__init__()
        self.inner = None

    def embed_tokens(self, tokens: Int[Tensor, "r *k"], index: Int[Tensor, ""]) -> Float[Tensor, "r d"]:
        """The transformer's input for new token number `index`."""
        raise NotImplementedError

    def token_logits(self, hidden: Float[Tensor, "r d"], index: Int[Tensor, ""]) -> Float[Tensor, "r *k v"]:
        """The logits of new token number `index`, from the transformer's output for the token before it."""
        raise NotImplementedError

    def embed_stream(
        self, hidden: Float[Tensor, "r d"], before: Int[Tensor, "r"] | None, stream: int
    ) -> Float[Tensor, "r i"]:
        """The inner transformer's input for stream number `stream`: from the token of the stream before, or for the first,
        which has none, from the outer transformer's output."""
        raise NotImplementedError

    def stream_logits(self, hidden: Float[Tensor, "r i"], stream: int) -> Float[Tensor, "r v"]:
        """The logits of stream number `stream`, from the inner transformer's output (in place of `token_logits`)."""
        raise NotImplementedError

    def allowed_tokens(
        self, index: Int[Tensor, ""], drawn: Int[Tensor, "b t *k"]
    ) -> Bool[Tensor, "v"] | Bool[Tensor, "k v"] | Bool[Tensor, "b k v"] | None:
        """Which tokens may stand at new token number `index`, where not all may (an end only at the end of a frame).

        `drawn[:, :index]` are the new tokens before it; what is behind them means nothing.
        """
        return None


@dataclass(frozen=True)
class Prompt:
    """What the new tokens follow: embeddings, their mask, and the conditions. Under guidance: 2 b rows."""

    embeddings: Float[Tensor, "r n d"]
    mask: Bool[Tensor, "r n"] | None = None  # padding may stand on either side
    context: Float[Tensor, "r m e"] | None = None
    context_mask: Bool[Tensor, "r m"] | None = None
    cond: Float[Tensor, "r c"] | None = None


@dataclass(frozen=True)
class Decoded:
    tokens: Int[Tensor, "b t *k"]  # as long as the longest row; from a row's end token on, pad_id
    lengths: Int[Tensor, "b"]  # how many tokens stand before the end token


class Decoder:
    """Decodes with one model, keeping the cache and the captured graphs for calls of the same or smaller shapes.

    The model's weights are read anew at each call, so the model may be trained in between.

    eos_id   the token that ends a row; of several streams, where the last draws it, or of streams drawn one after the
             other, where the first does
    pad_id   what stands in the result from a row's end on
    dtype    the type to run in: bf16 on CUDA by default, the model's own elsewhere
    capture  whether to capture steps in a CUDA graph; on CUDA by default
    compile  whether to compile the layers and the sampling first; where steps are captured, by default
    """

    def __init__(
        self,
        model: TokenModel,
        *,
        eos_id: int | None = None,
        pad_id: int = -1,
        dtype: torch.dtype | None = None,
        capture: bool | None = None,
        compile: bool | None = None,
    ):
        self.model, self.eos_id, self.pad_id = model, eos_id, pad_id
        self.dtype, self.capture, self.compile = dtype, capture, compile
        self._session: _Session | None = None
        self._weights: Weights | None = None

    @torch.no_grad()
    def __call__(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        seed: int,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        poll_every: int = 16,
        on_tokens: Callable[[Int[Tensor, "b t *k"]], None] | None = None,
    ) -> Decoded:
        """`on_tokens` gets what is new at each poll: `[b, up to poll_every]` (and streams), padded like the result."""
        if max_new_tokens < 1 or poll_every < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} and poll_every={poll_every} must be at least 1")
        if sampling.is_guided and len(prompt.embeddings) % 2:
            raise ValueError(
                f"guidance needs prompt rows with the condition, then as many without; {len(prompt.embeddings)} is odd"
            )
        weights = self._current_weights()
        with weights.in_place(), evaluating(self.model), sdpa_kernel(REPRODUCIBLE):
            session = self._prepare(prompt, max_new_tokens, sampling, weights.dtype)
            generator = torch.Generator(weights.device).manual_seed(seed)
            session.prefill(prompt, generator)
            shown = 0
            for count in range(1, max_new_tokens + 1):
                is_last = count == max_new_tokens
                if (is_last or count % poll_every == 0) and (on_tokens is not None or self.eos_id is not None):
                    is_finished = session.is_finished()
                    if on_tokens is not None:
                        on_tokens(session.new_tokens(shown, count))
                    shown = count
                    if is_finished:
                        break
                if not is_last:
                    session.step(generator)
            return session.result(max_new_tokens)

    def _current_weights(self) -> Weights:
        if self._weights is None or not self._weights.are_of(self.model):
            self._weights, self._session = Weights(self.model, self.dtype), None
        return self._weights

    def _prepare(self, prompt: Prompt, max_new_tokens: int, sampling: Sampling, dtype: torch.dtype) -> "_Session":
        """The kept session where it fits, else a new one; with every graph this call will replay."""
        needed = prompt.embeddings.shape[1] + max_new_tokens
        if self._session is None or not self._session.fits(prompt, needed, sampling.is_guided):
            self._session = None  # frees the old cache first
            with lasting():
                self._session = _Session(self, prompt, needed, sampling.is_guided, dtype)
        self._session.use(sampling)
        if self._captures(prompt.embeddings.device):
            self._session.capture(prompt.embeddings.shape[1], needed)
        return self._session

    def _captures(self, device: torch.device) -> bool:
        return device.type == "cuda" if self.capture is None else self.capture

    def _compiles(self, device: torch.device) -> bool:
        return self._captures(device) if self.compile is None else self.compile


class _Session:
    """The static buffers of one shape, the cache, and the graphs that refer to them."""

    def __init__(self, decoder: Decoder, prompt: Prompt, needed: int, is_guided: bool, dtype: torch.dtype):
        self.model, self.is_guided, self.sampling = decoder.model, is_guided, Sampling()
        self.eos_id, self.pad_id, self.dtype = decoder.eos_id, decoder.pad_id, dtype
        self.device = prompt.embeddings.device
        self.rows = len(prompt.embeddings)
        batch = self.rows // 2 if is_guided else self.rows
        limit = self.model.transformer.max_seq_len
        if limit is not None and needed > limit:
            raise ValueError(
                f"a prompt and new tokens of {needed} together are more than the model's max_seq_len={limit}"
            )
        self.capacity = min(_window(needed), limit or _window(needed))
        self.context_len = None if prompt.context is None else _window(prompt.context.shape[1])
        self.cache = self.model.transformer.new_cache(self.rows, self.capacity, self.context_len)
        inner = self.model.inner
        self.inner_cache = (
            None
            if inner is None
            else inner.new_cache(self.rows, self.model.streams, self.context_len if inner.cross_attend else None)
        )

        def buffer(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.cond = None if prompt.cond is None else buffer(*prompt.cond.shape, dtype=dtype)
        streams = self.model.streams
        self.noise = buffer(batch, streams, self.model.vocabulary, dtype=torch.float32)
        self.tokens = buffer(batch, self.capacity, streams)
        self.last = buffer(self.rows, streams)  # the newest token of each row of the transformer
        self.index = buffer()  # of the token to come
        self.lengths = buffer(batch)
        self.finished = buffer(batch, dtype=torch.bool)
        self.is_broken = buffer(dtype=torch.bool)  # some logit was no number
        self.compiles = decoder._compiles(self.device)
        self.run_layer, self.run_inner_layer = self._compiled(run_layer), self._compiled(run_layer)
        self.choose = self._compiled(_choose)
        self.filled = 0  # slots in use, as the host counts them
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by window
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return compiled(function) if self.compiles else function

    def use(self, sampling: Sampling) -> None:
        """Graphs hold the numbers of the sampling they were captured with."""
        if sampling != self.sampling:
            self.sampling, self.choose = sampling, self._compiled(_choose)
            self.graphs.clear()

    def fits(self, prompt: Prompt, needed: int, is_guided: bool) -> bool:
        context_len = None if prompt.context is None else prompt.context.shape[1]
        return (
            self.is_guided == is_guided
            and self.rows == len(prompt.embeddings)
            and self.capacity >= needed
            and self.cache.keys[0].dtype == self.model.transformer.cache_dtype
            and (self.context_len is None) == (context_len is None)
            and (self.context_len or 0) >= (context_len or 0)
            and (self.cond is None) == (prompt.cond is None)
        )

    def reset(self) -> None:
        self.cache.reset()
        self.cache.window = self.cache.max_len
        self.tokens.fill_(self.pad_id)
        for counter in (self.last, self.index, self.lengths, self.finished, self.is_broken):
            counter.zero_()

    def prefill(self, prompt: Prompt, generator: torch.Generator) -> None:
        self.reset()
        if self.cond is not None and prompt.cond is not None:
            self.cond.copy_(prompt.cond)
        context = None if prompt.context is None else prompt.context.to(self.dtype)
        beside = {"context": context, "context_mask": prompt.context_mask}
        hidden = self.model.transformer(
            prompt.embeddings.to(self.dtype), prompt.mask, **beside, cond=self.cond, cache=self.cache
        )
        self.filled = prompt.embeddings.shape[1] + self.model.transformer.num_registers
        self._draw(generator)
        inner = self.model.inner
        self._select(_last_real(hidden, prompt.mask), beside if inner is not None and inner.cross_attend else None)

    def step(self, generator: torch.Generator) -> None:
        self.filled += 1
        window = min(_window(self.filled), self.cache.max_len)
        self._draw(generator)
        if window in self.graphs:
            self.graphs[window].replay()
        else:
            self.cache.window = window
            self._step()

    def capture(self, prompt_len: int, needed: int) -> None:
        """Captures the step for each window that will be needed. The state this leaves behind is reset before use."""
        registers = self.model.transformer.num_registers
        filled = range(prompt_len + registers + 1, needed + registers)
        windows = sorted({min(_window(count), self.cache.max_len) for count in filled} - self.graphs.keys())
        for window in windows:
            self.reset()
            self.index.fill_(1)  # a step is never the first token
            self.cache.is_fresh, self.cache.window = False, window
            self.graphs[window] = captured(self._step, self.pool)

    def is_finished(self) -> bool:
        return bool(self._read(self.finished.all()))

    def result(self, max_new_tokens: int) -> Decoded:
        longest = min(max_new_tokens, self._read(self.lengths.max()))
        return Decoded(self.new_tokens(0, longest), self.lengths.clone())

    def _read(self, value: Int[Tensor, ""] | Bool[Tensor, ""]) -> int:
        """A number for the host, which learns at the same time whether the logits were numbers so far."""
        found, is_broken = torch.stack((value.long(), self.is_broken.long())).tolist()
        if is_broken:
            raise ValueError(
                "the model's logits are infinite or not numbers, so that nothing can be drawn from them: its weights are damaged, or its "
                "training failed; take another checkpoint"
            )
        return found

    def new_tokens(self, start: int, end: int) -> Int[Tensor, "b t *k"]:
        return self._as_model_sees(self.tokens[:, start:end]).clone()

    def _as_model_sees(self, tokens: Int[Tensor, "*b k"]) -> Int[Tensor, "..."]:
        """The session always has a dimension of streams, a model only where it has several."""
        return tokens.squeeze(-1) if self.model.streams == 1 else tokens

    def _draw(self, generator: torch.Generator) -> None:
        if self.sampling.temperature > 0:
            self.noise.uniform_(generator=generator)

    def _step(self) -> None:
        embedded = self.model.embed_tokens(self._as_model_sees(self.last), self.index - 1)
        hidden = self.model.transformer(embedded[:, None], cond=self.cond, cache=self.cache, run_layer=self.run_layer)
        self._select(hidden[:, 0])

    def _select(self, hidden: Float[Tensor, "r d"], beside: dict[str, Any] | None = None) -> None:
        """Draws the next token; `beside` is the context of an inner transformer, given at the first one and kept."""
        is_in_turn = self.model.inner is not None
        tokens = self._tokens_in_turn(hidden, beside) if is_in_turn else self._tokens_at_once(hidden)
        if self.eos_id is not None:
            self.finished |= tokens[:, 0 if is_in_turn else -1] == self.eos_id
        # A finished row goes on with tokens it ignores: its slots are its own, and shapes stay static.
        self.last.copy_(self._for_all_rows(tokens))
        shown = tokens.masked_fill(self.finished[:, None], self.pad_id)
        self.tokens.index_copy_(1, self.index[None], shown[:, None])
        self.lengths += ~self.finished
        self.index += 1

    def _allowed(self) -> Bool[Tensor, "..."] | None:
        return self.model.allowed_tokens(self.index, self._as_model_sees(self.tokens))

    def _tokens_at_once(self, hidden: Float[Tensor, "r d"]) -> Int[Tensor, "b k"]:
        logits = self.model.token_logits(hidden, self.index)
        if self.model.streams == 1:
            logits = logits[:, None]
        return self._chosen(logits, self.noise, self._allowed())

    def _tokens_in_turn(self, hidden: Float[Tensor, "r d"], beside: dict[str, Any] | None) -> Int[Tensor, "b k"]:
        model, cache, allowed = self.model, self.inner_cache, self._allowed()
        assert model.inner is not None and cache is not None
        cache.reset()
        cache.is_fresh = beside is not None  # a step after the first has the context in the cache
        drawn: list[Tensor] = []
        for stream in range(model.streams):
            embedded = model.embed_stream(hidden, self._for_all_rows(drawn[-1]) if drawn else None, stream)
            # A context is read once, by a pass that is not worth compiling.
            given = beside or {} if cache.is_fresh else {"run_layer": self.run_inner_layer}
            said = model.inner(embedded[:, None], cache=cache, **given)
            logits = model.stream_logits(said[:, 0], stream)
            ours = allowed if allowed is None or allowed.ndim == 1 else allowed[..., stream, :]
            drawn.append(self._chosen(logits, self.noise[:, stream], ours))
        return torch.stack(drawn, dim=1)

    def _chosen(self, logits: Tensor, noise: Tensor, allowed: Tensor | None) -> Tensor:
        tokens, is_broken = self.choose(self.sampling, logits, noise, allowed)
        self.is_broken |= is_broken
        return tokens

    def _for_all_rows(self, tokens: Int[Tensor, "b *k"]) -> Int[Tensor, "r *k"]:
        """Under guidance the rows without the condition go on with the same tokens."""
        return tokens.repeat(self.rows // len(tokens), *[1] * (tokens.ndim - 1))


def _choose(
    sampling: Sampling, logits: Tensor, noise: Tensor, allowed: Tensor | None
) -> tuple[Int[Tensor, "b *k"], Bool[Tensor, ""]]:
    """The next tokens, and whether some logit is NaN or infinite: the filters would let it pass, and a token be drawn all the same.
    (Minus infinity is a token that a model excludes.)"""
    return sampling.token(logits, noise, allowed), ~(logits < torch.inf).all()


def _window(length: int) -> int:
    """The smallest of the doubling windows that holds `length` slots."""
    window = SMALLEST_WINDOW
    while window < length:
        window *= 2
    return window


def _last_real(hidden: Float[Tensor, "r n d"], mask: Bool[Tensor, "r n"] | None) -> Float[Tensor, "r d"]:
    if mask is None:
        return hidden[:, -1]
    last = torch.where(mask, torch.arange(mask.shape[1], device=mask.device), 0).amax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last]
