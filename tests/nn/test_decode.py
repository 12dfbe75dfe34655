import pytest
import torch
from torch import nn

from helicon.nn.decode import Decoder, Prompt, TokenModel
from helicon.nn.sampling import Sampling, guide
from helicon.nn.transformer import Transformer

DIM, VOCABULARY, EOS = 12, 9, 8
STREAMS, BLANK = 3, 0
GREEDY = Sampling(temperature=0.0)

FAMILIES = {
    "plain": {},
    "grouped keys, registers": {"kv_heads": 1, "registers": 2, "qk_norm": True},
    "learned positions": {"positions": "learned", "max_seq_len": 40},
    "cross": {"cross_attend": True, "dim_context": 7},
    "adaptive": {"norm": "adaptive", "dim_cond": 5},
}
each_family = pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES.keys())


class Family(TokenModel):
    """Two quantizers in turn, each with its own embeddings and its own head; an end only in place of the first."""

    def __init__(self, **options):
        super().__init__()
        self.vocabulary = VOCABULARY
        self.transformer = Transformer(DIM, 2, heads=2, dim_head=6, causal=True, **options)
        self.embedding = nn.Embedding(2 * VOCABULARY, DIM)
        self.heads = nn.Parameter(torch.randn(2, DIM, VOCABULARY))

    def embed_tokens(self, tokens, index):
        return self.embedding(tokens + index % 2 * VOCABULARY)

    def token_logits(self, hidden, index):
        return hidden @ self.heads.index_select(0, (index % 2)[None])[0]

    def allowed_tokens(self, index, drawn):
        tokens = torch.arange(VOCABULARY, device=index.device)
        return (tokens != EOS) | (index % 2 == 0)


class StreamedFamily(TokenModel):
    """Three streams, each a step behind the one above: until a stream starts it holds `BLANK`, and never after.

    With `shared_rules` all streams may draw the same: everything but `BLANK`.
    """

    def __init__(self, shared_rules: bool = False, **options):
        super().__init__()
        self.vocabulary, self.streams, self.shared_rules = VOCABULARY, STREAMS, shared_rules
        self.transformer = Transformer(DIM, 2, heads=2, dim_head=6, causal=True, **options)
        self.embedding = nn.Embedding(STREAMS * VOCABULARY, DIM)
        self.heads = nn.Parameter(torch.randn(STREAMS, DIM, VOCABULARY))

    def embed_tokens(self, tokens, index):
        return self.embedding(tokens + torch.arange(STREAMS, device=index.device) * VOCABULARY).sum(dim=1)

    def token_logits(self, hidden, index):
        return torch.einsum("rd,kdv->rkv", hidden, self.heads)

    def allowed_tokens(self, index, drawn):
        is_blank = torch.arange(VOCABULARY, device=index.device) == BLANK
        if self.shared_rules:
            return ~is_blank
        has_started = torch.arange(STREAMS, device=index.device)[:, None] <= index
        return is_blank != has_started


class InnerFamily(TokenModel):
    """Three streams, drawn one after the other by a narrower transformer; the first may end a row, after the first token."""

    def __init__(self, inner_reads_context: bool = False, **options):
        super().__init__()
        self.vocabulary, self.streams = VOCABULARY, STREAMS
        context = {"cross_attend": True, "dim_context": 7} if inner_reads_context else {}
        self.transformer = Transformer(DIM, 2, heads=2, dim_head=6, causal=True, **options)
        self.inner = Transformer(8, 2, heads=2, dim_head=4, causal=True, **context)
        self.embedding = nn.Embedding(STREAMS * VOCABULARY, DIM)
        self.to_inner = nn.Linear(DIM, 8)
        self.heads = nn.Parameter(torch.randn(STREAMS, 8, VOCABULARY))

    def embed_tokens(self, tokens, index):
        return self.embedding(tokens + torch.arange(STREAMS, device=index.device) * VOCABULARY).sum(dim=1)

    def embed_stream(self, hidden, before, stream):
        return self.to_inner(hidden if before is None else self.embedding(before + (stream - 1) * VOCABULARY))

    def stream_logits(self, hidden, stream):
        return hidden @ self.heads[stream]

    def allowed_tokens(self, index, drawn):
        token = torch.arange(VOCABULARY, device=index.device)
        is_first = (torch.arange(STREAMS, device=index.device) == 0)[:, None]
        return (token != EOS) | (is_first & (index > 0))

    def logits_of(self, hidden, tokens, context):
        """All streams of one token, from a pass over those before each."""
        given = [self.embed_stream(hidden, None if k == 0 else tokens[:, k - 1], k) for k in range(tokens.shape[1] + 1)]
        said = self.inner(torch.stack(given, dim=1), **(context if self.inner.cross_attend else {}))
        return self.stream_logits(said[:, -1], tokens.shape[1])


class PickyFamily(InnerFamily):
    """What may be drawn differs by row: in the first, a stream may only draw its own number."""

    def allowed_tokens(self, index, drawn):
        token = torch.arange(VOCABULARY, device=index.device)
        own = token == torch.arange(STREAMS, device=index.device)[:, None]
        return torch.stack([own, *[torch.ones_like(own)] * 2])


class SteppingFamily(Family):
    """A token is one or two above the one before it; the first may be any."""

    def allowed_tokens(self, index, drawn):
        before = drawn.index_select(1, (index - 1).clamp(min=0)[None])
        step = (torch.arange(VOCABULARY, device=index.device) - before) % VOCABULARY
        return ((step == 1) | (step == 2) | (index == 0))[:, None]


def build(kind: type = Family, **options) -> TokenModel:
    torch.manual_seed(0)
    family = kind(**options)
    with torch.no_grad():
        inner = [] if family.inner is None else family.inner.parameters()
        for parameter in (*family.transformer.parameters(), *inner):
            parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.ndim > 1 else 1))
    return family


def prompt_for(options: dict, rows: int, length: int = 4) -> Prompt:
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    context = draw(rows, 3, 7) if "dim_context" in options else None
    return Prompt(
        draw(rows, length, DIM),
        context=context,
        context_mask=None if context is None else draw(rows, 3) > 0,
        cond=draw(rows, 5) if "dim_cond" in options else None,
    )


def naive(
    family: TokenModel, prompt: Prompt, count: int, sampling: Sampling, seed: int, eos_id: int | None = None
) -> list[list]:
    """Recomputes everything for each token, without a cache; the two halves of a guided batch in two passes."""
    family.eval()
    generator = torch.Generator().manual_seed(seed)
    groups = range(2 if sampling.is_guided else 1)
    parts = [[None if x is None else x.chunk(len(groups))[g] for x in vars(prompt).values()] for g in groups]
    each = () if family.streams == 1 else (family.streams,)
    tokens = torch.zeros(len(prompt.embeddings) // len(groups), 0, *each, dtype=torch.long)
    for index in range(count):
        logits = []
        for embeddings, _, context, context_mask, cond in parts:
            new = [family.embed_tokens(tokens[:, i], torch.tensor(i))[:, None] for i in range(index)]
            given = {"context": context, "context_mask": context_mask, "cond": cond}
            hidden = family.transformer(torch.cat([embeddings, *new], dim=1), **given)
            logits.append(family.token_logits(hidden[:, -1], torch.tensor(index)))
        guided = guide(*logits, sampling.cond_scale) if sampling.is_guided else logits[0]
        uniform = torch.rand(guided.shape, generator=generator) if sampling.temperature else torch.zeros_like(guided)
        unguided = Sampling(**{**vars(sampling), "cond_scale": 1.0})
        allowed = family.allowed_tokens(torch.tensor(index), tokens)
        if family.streams == 1:
            token = unguided.token(guided, uniform, allowed)
        else:
            masks = allowed.expand(family.streams, -1)
            token = [unguided.token(guided[:, k], uniform[:, k], masks[k]) for k in range(family.streams)]
            token = torch.stack(token, dim=1)
        tokens = torch.cat((tokens, token[:, None]), dim=1)
    rows = tokens.tolist()
    lasts = [row if family.streams == 1 else [token[-1] for token in row] for row in rows]
    return [row[: first.index(eos_id)] if eos_id in first else row for row, first in zip(rows, lasts, strict=True)]


def rows_of(decoded) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(decoded.tokens, decoded.lengths, strict=True)]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(temperature=0.8, top_k=5, top_p=0.9)], ids=str)
@each_family
@torch.no_grad()
def test_decoding_is_recomputing(options, sampling):
    family, prompt = build(**options), prompt_for(options, 3)
    decoded = Decoder(family)(prompt, max_new_tokens=11, seed=3, sampling=sampling)
    assert decoded.tokens.tolist() == naive(family, prompt, 11, sampling, seed=3)


@each_family
@torch.no_grad()
def test_guidance_in_one_batch_is_two_passes(options):
    family, prompt, sampling = build(**options), prompt_for(options, 6), Sampling(cond_scale=2.5, filter_thres=0.5)
    decoded = Decoder(family)(prompt, max_new_tokens=9, seed=1, sampling=sampling)
    assert decoded.tokens.shape == (3, 9)
    assert decoded.tokens.tolist() == naive(family, prompt, 9, sampling, seed=1)
    unguided = Sampling(filter_thres=0.5)
    first_half = Prompt(*(None if x is None else x[:3] for x in vars(prompt).values()))
    assert decoded.tokens.tolist() != naive(family, first_half, 9, unguided, seed=1)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_unequal_prompts(side):
    family, prompt = build(), prompt_for({}, 3, length=5)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    for i, length in enumerate((5, 1, 3)):
        mask[i, 5 - length :] = side == "left"
        mask[i, :length] |= side == "right"
    decoded = Decoder(family)(Prompt(prompt.embeddings, mask), max_new_tokens=6, seed=0, sampling=GREEDY)
    for i in range(3):
        alone = Prompt(prompt.embeddings[i : i + 1, mask[i]])
        assert decoded.tokens[i].tolist() == naive(family, alone, 6, GREEDY, seed=0)[0]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(temperature=0.8, top_k=5, cond_scale=2.5)], ids=str)
@pytest.mark.parametrize("shared_rules", [False, True])
@torch.no_grad()
def test_streams_are_recomputing(shared_rules, sampling):
    family, prompt = build(StreamedFamily, shared_rules=shared_rules), prompt_for({}, 6)
    decoder = Decoder(family)
    decoded = decoder(prompt, max_new_tokens=11, seed=3, sampling=sampling)
    assert decoded.tokens.shape == (3 if sampling.is_guided else 6, 11, STREAMS)
    assert decoded.tokens.tolist() == naive(family, prompt, 11, sampling, seed=3)
    is_blank = torch.ones(11, STREAMS, dtype=torch.bool).triu(1) & (not shared_rules)
    assert ((decoded.tokens == BLANK) == is_blank).all()
    again = decoder(prompt, max_new_tokens=11, seed=3, sampling=sampling, poll_every=2, on_tokens=(seen := []).append)
    assert torch.equal(again.tokens, decoded.tokens) and torch.equal(torch.cat(seen, dim=1), decoded.tokens)
    other = decoder(prompt, max_new_tokens=11, seed=4, sampling=sampling)
    assert torch.equal(other.tokens, decoded.tokens) == (sampling is GREEDY)


@torch.no_grad()
def test_streams_have_noise_of_their_own():
    family, prompt = build(StreamedFamily, shared_rules=True), prompt_for({}, 40)
    family.heads.zero_()  # equal logits: the noise alone decides
    tokens = Decoder(family)(prompt, max_new_tokens=20, seed=0).tokens
    assert (tokens[..., 0] == tokens[..., 1]).float().mean() < 0.2  # one in eight by chance


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_streams_after_unequal_prompts(side):
    sampling = Sampling(temperature=0.0, cond_scale=2.0)
    family, prompt = build(StreamedFamily), prompt_for({}, 6, length=5)
    mask = torch.zeros(6, 5, dtype=torch.bool)
    for i, length in enumerate((5, 1, 3, 5, 1, 3)):
        mask[i, 5 - length :] = side == "left"
        mask[i, :length] |= side == "right"
    decoded = Decoder(family)(Prompt(prompt.embeddings, mask), max_new_tokens=6, seed=0, sampling=sampling)
    for i in range(3):
        alone = Prompt(prompt.embeddings[[i, i + 3]][:, mask[i]])
        assert decoded.tokens[i].tolist() == naive(family, alone, 6, sampling, seed=0)[0]


@torch.no_grad()
def test_the_last_stream_ends_a_row():
    family, prompt = build(StreamedFamily), prompt_for({}, 5)
    expected = naive(family, prompt, 40, Sampling(), seed=1, eos_id=EOS)
    lengths = [len(row) for row in expected]
    assert min(lengths) < max(lengths) < 40
    assert any(EOS in token[:-1] for row in expected for token in row)  # in other streams it is a token like others
    decoded = Decoder(family, eos_id=EOS, pad_id=-7)(prompt, max_new_tokens=40, seed=1)
    assert rows_of(decoded) == expected and decoded.lengths.tolist() == lengths
    assert decoded.tokens.shape == (5, max(lengths), STREAMS)
    for row, length in zip(decoded.tokens, lengths, strict=True):
        assert (row[length:] == -7).all()


def naive_in_turn(family: InnerFamily, prompt: Prompt, count: int, sampling: Sampling, seed: int) -> list[list]:
    """As `naive`: every stream of every token from passes over all that was before it."""
    family.eval()
    generator = torch.Generator().manual_seed(seed)
    groups = range(2 if sampling.is_guided else 1)
    parts = [[None if x is None else x.chunk(len(groups))[g] for x in vars(prompt).values()] for g in groups]
    unguided = Sampling(**{**vars(sampling), "cond_scale": 1.0})
    tokens = torch.zeros(len(prompt.embeddings) // len(groups), 0, STREAMS, dtype=torch.long)
    for index in range(count):
        shape = (len(tokens), STREAMS, VOCABULARY)
        uniform = torch.rand(shape, generator=generator) if sampling.temperature else torch.zeros(shape)
        drawn = tokens[:, :0, 0]
        for stream in range(STREAMS):
            logits = []
            for embeddings, _, context, context_mask, _ in parts:
                new = [family.embed_tokens(tokens[:, i], torch.tensor(i))[:, None] for i in range(index)]
                given = {"context": context, "context_mask": context_mask}
                hidden = family.transformer(torch.cat([embeddings, *new], dim=1), **given)
                logits.append(family.logits_of(hidden[:, -1], drawn, given))
            guided = guide(*logits, sampling.cond_scale) if sampling.is_guided else logits[0]
            allowed = family.allowed_tokens(torch.tensor(index), tokens)[..., stream, :]
            drawn = torch.cat((drawn, unguided.token(guided, uniform[:, stream], allowed)[:, None]), dim=1)
        tokens = torch.cat((tokens, drawn[:, None]), dim=1)
    rows = tokens.tolist()
    ends = [[token[0] for token in row] for row in rows]
    return [row[: first.index(EOS)] if EOS in first else row for row, first in zip(rows, ends, strict=True)]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(temperature=0.8, top_k=5, cond_scale=2.5)], ids=str)
@pytest.mark.parametrize("reads_context", [False, True])
@torch.no_grad()
def test_streams_in_turn_are_recomputing(reads_context, sampling):
    options = FAMILIES["cross"] if reads_context else {}
    family = build(InnerFamily, inner_reads_context=reads_context, **options)
    decoder = Decoder(family, eos_id=EOS)
    for length in (4, 2):  # the second with what the first left behind
        prompt = prompt_for(options, 6, length)
        decoded = decoder(prompt, max_new_tokens=9, seed=3, sampling=sampling, poll_every=2)
        assert rows_of(decoded) == naive_in_turn(family, prompt, 9, sampling, seed=3)
        assert len(decoded.tokens) == (3 if sampling.is_guided else 6)
        assert all(len(row) for row in rows_of(decoded))


@torch.no_grad()
def test_the_first_of_streams_in_turn_ends_a_row():
    family, prompt = build(InnerFamily), prompt_for({}, 5)
    expected = naive_in_turn(family, prompt, 40, Sampling(), seed=1)
    lengths = [len(row) for row in expected]
    assert 0 < min(lengths) < max(lengths)
    decoded = Decoder(family, eos_id=EOS, pad_id=-7)(prompt, max_new_tokens=40, seed=1)
    assert rows_of(decoded) == expected and decoded.lengths.tolist() == lengths
    for row, length in zip(decoded.tokens, lengths, strict=True):
        assert (row[length:] == -7).all()


@torch.no_grad()
def test_what_is_allowed_may_differ_by_row():
    family, prompt = build(PickyFamily), prompt_for({}, 3)
    tokens = Decoder(family)(prompt, max_new_tokens=7, seed=0).tokens
    assert tokens[0].tolist() == [[0, 1, 2]] * 7
    assert tokens[1:].unique().numel() > STREAMS


@torch.no_grad()
def test_what_is_allowed_may_depend_on_what_was_drawn():
    tokens = Decoder(build(SteppingFamily))(prompt_for({}, 3), max_new_tokens=12, seed=0).tokens
    assert set((tokens.diff(dim=1) % VOCABULARY).flatten().tolist()) == {1, 2} and len(tokens[:, 0].unique()) > 1


@torch.no_grad()
def test_ends_stop_rows_and_pad():
    family, prompt = build(), prompt_for({}, 5)
    expected = naive(family, prompt, 40, Sampling(), seed=1, eos_id=EOS)
    lengths = [len(row) for row in expected]
    assert min(lengths) < max(lengths) < 40  # rows end, at different times
    decoded = Decoder(family, eos_id=EOS, pad_id=-7)(prompt, max_new_tokens=40, seed=1)
    assert rows_of(decoded) == expected
    assert decoded.tokens.shape == (5, max(lengths))
    for row, length in zip(decoded.tokens, lengths, strict=True):
        assert (row[length:] == -7).all()
    assert all(length % 2 == 0 for length in lengths)  # an end stands only where it is allowed


@torch.no_grad()
def test_the_loop_ends_soon_after_all_rows_have():
    family, prompt = build(), prompt_for({}, 5)
    steps = []
    embed = family.embed_tokens
    family.embed_tokens = lambda tokens, index: steps.append(index.item()) or embed(tokens, index)
    decoded = Decoder(family, eos_id=EOS)(prompt, max_new_tokens=200, seed=1, poll_every=3)
    assert decoded.lengths.max() <= len(steps) <= decoded.lengths.max() + 3


@torch.no_grad()
def test_the_seed_decides_and_polling_does_not():
    family, prompt = build(), prompt_for({}, 3)
    decoder = Decoder(family, eos_id=EOS)
    run = lambda seed, poll_every: decoder(prompt, max_new_tokens=30, seed=seed, poll_every=poll_every)
    first = run(0, 16)
    for poll_every in (1, 7, 100):
        again = run(0, poll_every)
        assert torch.equal(again.tokens, first.tokens) and torch.equal(again.lengths, first.lengths)
    assert rows_of(run(1, 16)) != rows_of(first)
    torch.manual_seed(123)  # the global generator has no say
    assert torch.equal(run(0, 16).tokens, first.tokens)


@torch.no_grad()
def test_on_tokens_sees_everything_once():
    seen = []
    decoded = Decoder(build())(prompt_for({}, 2), max_new_tokens=10, seed=0, poll_every=4, on_tokens=seen.append)
    assert [part.shape for part in seen] == [(2, 4), (2, 4), (2, 2)]
    assert torch.equal(torch.cat(seen, dim=1), decoded.tokens)


@torch.no_grad()
@pytest.mark.parametrize("eos_id", [EOS, None])
@pytest.mark.parametrize("kind", [Family, StreamedFamily, InnerFamily])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_refused(number, kind, eos_id):
    """Also where they begin late, and the loop has not ended when it is seen; the decoder goes on to serve."""
    family, prompt = build(kind), prompt_for({}, 2)
    decoder, seen, logits_of = (
        Decoder(family, eos_id=eos_id),
        [],
        "token_logits" if kind is not InnerFamily else "stream_logits",
    )
    options = {"max_new_tokens": 40, "seed": 1, "sampling": Sampling(top_k=3), "on_tokens": seen.append}
    expected, good = decoder(prompt, **options), getattr(family, logits_of)
    calls = []

    def broken(*arguments):
        calls.append(0)
        logits = good(*arguments).clone()
        logits[0, ..., 0] = number if len(calls) > 2 else -torch.inf
        return logits

    setattr(family, logits_of, broken)
    seen.clear()
    with pytest.raises(ValueError, match=r"logits are infinite or not numbers.*take another checkpoint"):
        decoder(prompt, **options)
    assert not seen and len(calls) <= 16 * STREAMS, "the first look is enough"
    setattr(family, logits_of, good)
    assert torch.equal(decoder(prompt, **options).tokens, expected.tokens)


@torch.no_grad()
def test_a_decoder_is_used_again():
    """For smaller and larger shapes, and after the weights have changed."""
    for options in (FAMILIES["cross"], FAMILIES["adaptive"]):
        family = build(**options)
        decoder = Decoder(family)
        for rows, length, count in ((2, 4, 9), (2, 3, 5), (3, 4, 5), (3, 130, 5), (3, 2, 7)):
            prompt = prompt_for(options, rows, length)
            decoded = decoder(prompt, max_new_tokens=count, seed=2)
            assert decoded.tokens.tolist() == naive(family, prompt, count, Sampling(), seed=2)
        family.heads.mul_(-1)
        prompt = prompt_for(options, 3)
        assert decoder(prompt, max_new_tokens=5, seed=2).tokens.tolist() == naive(family, prompt, 5, Sampling(), seed=2)
        kept = decoder._session
        for sampling in (Sampling(), GREEDY, Sampling(top_k=2)):
            decoded = decoder(prompt, max_new_tokens=3, seed=2, sampling=sampling)
            assert decoded.tokens.tolist() == naive(family, prompt, 3, sampling, seed=2)
        assert decoder._session is kept
        family.double()
        prompt = Prompt(*(x.double() if x is not None and x.is_floating_point() else x for x in vars(prompt).values()))
        assert decoder(prompt, max_new_tokens=5, seed=2).tokens.tolist() == naive(family, prompt, 5, Sampling(), seed=2)


@torch.no_grad()
def test_modes_and_weights_are_left_as_they_were():
    family = build(dropout=0.5)
    family.train()
    family.embedding.eval()
    before = {name: value.clone() for name, value in family.state_dict().items()}
    decoder = Decoder(family, dtype=torch.bfloat16)
    decoded = decoder(prompt_for({}, 2), max_new_tokens=5, seed=0)
    assert decoded.tokens.shape == (2, 5)
    assert decoder._session.cache.keys[0].dtype == torch.bfloat16
    assert family.training and family.transformer.training and not family.embedding.training
    for name, value in family.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, before[name])
    family.embed_tokens = lambda tokens, index: 1 / 0
    with pytest.raises(ZeroDivisionError):
        decoder(prompt_for({}, 2), max_new_tokens=5, seed=0)
    assert family.training and family.heads.dtype == torch.float32


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES)
def test_a_decoder_is_used_in_and_out_of_inference_mode(options, dtype):
    family, prompt = build(**options), prompt_for(options, 2)
    decoder = Decoder(family, dtype=dtype)
    with torch.inference_mode():
        inside = decoder(prompt, max_new_tokens=6, seed=0).tokens
    assert torch.equal(decoder(prompt, max_new_tokens=6, seed=0).tokens, inside)


@torch.no_grad()
@pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES)
def test_a_decoder_is_used_in_and_out_of_autocast(options):
    family, prompt = build(**options), prompt_for(options, 2)
    decoder = Decoder(family)
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            decoded, expected = (one(prompt, max_new_tokens=6, seed=0) for one in (decoder, Decoder(family)))
        assert torch.equal(decoded.tokens, expected.tokens)


def test_the_result_can_be_trained_on():
    """Neither the tokens nor the weights become inference tensors."""
    family, prompt = build(), prompt_for({}, 2)
    tokens = Decoder(family)(prompt, max_new_tokens=5, seed=0).tokens
    assert not tokens.is_inference() and not prompt.embeddings.is_inference()
    family.embed_tokens(tokens[:, 0], torch.tensor(0)).sum().backward()
    assert family.embedding.weight.grad is not None


def test_senseless_requests_are_refused():
    family, prompt = build(**FAMILIES["learned positions"]), prompt_for({}, 3)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        Decoder(family)(prompt, max_new_tokens=0, seed=0)
    with pytest.raises(ValueError, match="3 is odd"):
        Decoder(family)(prompt, max_new_tokens=2, seed=0, sampling=Sampling(cond_scale=2.0))
    with pytest.raises(ValueError, match="max_seq_len=40"):
        Decoder(family)(prompt, max_new_tokens=37, seed=0)
    assert Decoder(family)(prompt, max_new_tokens=36, seed=0).tokens.shape == (3, 36)


INNER = {"inner_reads_context": True, **FAMILIES["cross"]}
CAPTURED = [*((Family, x) for x in FAMILIES.values()), (StreamedFamily, {}), (InnerFamily, {}), (InnerFamily, INNER)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(filter_thres=0.5), Sampling(cond_scale=3.0, top_p=0.9)], ids=str)
@pytest.mark.parametrize(("kind", "options"), CAPTURED)
def test_captured_steps_are_eager_steps(kind, options, sampling):
    family = build(kind, **options).cuda()
    limit = 36 if "max_seq_len" in options else 300
    prompt = Prompt(*(None if x is None else x.cuda() for x in vars(prompt_for(options, 6)).values()))
    captured = Decoder(family, eos_id=EOS, compile=False)
    eager = Decoder(family, eos_id=EOS, capture=False)
    for seed in range(3):
        expected = eager(prompt, max_new_tokens=limit, seed=seed, sampling=sampling)
        decoded = captured(prompt, max_new_tokens=limit, seed=seed, sampling=sampling)
        assert torch.equal(decoded.tokens, expected.tokens) and torch.equal(decoded.lengths, expected.lengths)
        with torch.no_grad():
            family.heads.mul_(1.5)  # a captured graph reads the weights of the day


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own, when it is imported
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("kind", "options"), CAPTURED)
def test_compiled_steps_are_eager_steps(kind, options):
    """In fp32: in bf16, fused kernels round in other places."""
    family = build(kind, **options).cuda()
    limit = 36 if "max_seq_len" in options else 300
    prompt = Prompt(*(None if x is None else x.cuda() for x in vars(prompt_for(options, 6)).values()))
    decoders = (Decoder(family, dtype=torch.float32), Decoder(family, dtype=torch.float32, capture=False))
    first, second = (decoder(prompt, max_new_tokens=limit, seed=0, sampling=GREEDY) for decoder in decoders)
    assert torch.equal(first.tokens, second.tokens)
