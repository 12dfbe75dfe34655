"""Generation: what the cache, batches, guidance and prompts give is what a plain loop over whole sequences gives, row by row."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from helicon.models.audiolm.generate import _Delayed, joined, waves_of
from helicon.nn.sampling import Sampling
from models.audiolm.tiny import (
    ALL_CODES,
    COARSE,
    CODES,
    CONDITIONS,
    FINE,
    IDS,
    KINDS,
    SEMANTIC,
    TEXTS,
    given,
    lengths_of,
    padded,
)
from models.soundstream.tiny import tiny as tiny_codec

QUANTIZERS = COARSE + FINE
SAMPLINGS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.9, "filter_thres": 0.3}}
each_sampling = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
each_condition = pytest.mark.parametrize("options", CONDITIONS.values(), ids=CONDITIONS.keys())


class Plain:
    """One row, without cache, batch or padding: every token from a pass over the whole sequence before it."""

    def __init__(self, row: int, sampling: Sampling, noise: list[Tensor], forward: Callable[..., Tensor]):
        self.row, self.sampling, self.noise, self.forward = row, sampling, noise, forward

    def token(self, logits: Tensor, step: int, stream: int = 0, allowed: Tensor | None = None) -> int:
        return int(self.sampling.token(logits[None], self.noise[step][self.row : self.row + 1, stream], allowed))

    def semantic(self, prompt: list[int], most: int) -> list[int]:
        ids = list(prompt)
        for step in range(most - len(prompt)):
            allowed = torch.arange(SEMANTIC + 1) < SEMANTIC + (step > 0)  # there is never nothing
            token = self.token(self.forward(ids=torch.tensor([ids]).long())[0, -1], step, allowed=allowed)
            if token == SEMANTIC:
                break
            ids.append(token)
        return ids

    def coarse(self, prompt: list[int], most: int, semantic: Tensor) -> list[int]:
        codes = list(prompt)
        for step in range(most * COARSE - len(prompt)):
            given = {"semantic_token_ids": semantic, "coarse_token_ids": torch.tensor([codes]).long()}
            may_end = step > 0 and len(codes) % COARSE == 0  # between frames, and after one
            allowed = torch.arange(CODES + 1) < CODES + may_end
            token = self.token(self.forward(**given, return_only_coarse_logits=True)[0, -1], step, allowed=allowed)
            if token == CODES:
                break
            codes.append(token)
        return codes

    def fine(self, prompt: list[int], coarse: Tensor) -> list[int]:
        codes = list(prompt)
        for step in range(coarse.shape[1] * FINE - len(prompt)):
            logits = self.forward(
                coarse_token_ids=coarse, fine_token_ids=torch.tensor([codes]).long(), return_only_fine_logits=True
            )
            codes.append(self.token(logits[0, -1], step))
        return codes

    def delayed(self, prompt: list[list[int]], most: int, count: int, semantic: Tensor) -> list[list[int]]:
        """Code by code, each from a network that is shown the codes of the steps before it."""
        known, end = {(t, q): code for t, frame in enumerate(prompt) for q, code in enumerate(frame)}, None
        for index in range(count):
            step = len(prompt) + index
            shown = torch.full((1, step if end is None else end, QUANTIZERS), -1)
            for (frame, quantizer), code in known.items():
                if frame + quantizer < step:
                    shown[0, frame, quantizer] = code
            logits = self.forward(semantic_token_ids=semantic, token_ids=shown)[0, step]
            for quantizer in range(min(step + 1, QUANTIZERS)):
                frame = step - quantizer
                if (frame, quantizer) in known or (end is not None and frame >= end):
                    continue
                allowed = torch.arange(CODES + 1) < CODES + (quantizer == 0 and index > 0)
                token = self.token(logits[quantizer], index, quantizer, allowed)
                if token == CODES:
                    end = frame
                else:
                    known[frame, quantizer] = token
            if end is not None and step == end + QUANTIZERS - 1:
                break
        whole = [frame for frame in range(most) if all((frame, q) in known for q in range(QUANTIZERS))]
        return [[known[frame, q] for q in range(QUANTIZERS)] for frame in whole]


def plain_rows(
    network: Any, options: dict[str, Any], sampling: dict[str, Any], seed: int, vocabulary: int
) -> list[Plain]:
    scale = 2.5 if options else 1.0
    generator = torch.Generator().manual_seed(seed)
    streams = QUANTIZERS if network.__class__.__name__ == "DelayedTransformer" else 1
    noise = [torch.zeros(2, streams, vocabulary) for _ in range(60)]
    if sampling["temperature"]:
        noise = [each.uniform_(generator=generator) for each in noise]
    rows = []
    for row in range(2):
        condition = given(options, slice(row, row + 1))

        def forward(condition: dict[str, Any] = condition, **tokens: Any) -> Tensor:
            with torch.no_grad():
                return network.forward_with_cond_scale(**tokens, **condition, cond_scale=scale)

        rows.append(Plain(row, Sampling(**sampling), noise, forward))
    return rows


def real(ids: Tensor) -> list[Any]:
    """Rows without their padding."""
    return [row[:length].tolist() for row, length in zip(ids, lengths_of(ids), strict=True)]


def flat(codes: Tensor) -> list[int]:
    """The codes of one row."""
    return codes[codes >= 0].tolist()


# ------------------------------------------------------------------ cached = uncached


@each_sampling
@each_condition
def test_semantic_tokens_are_those_of_a_plain_loop(options: dict[str, Any], sampling: dict[str, Any]) -> None:
    stage = KINDS["semantic"].stage(KINDS["semantic"].build(**options))
    prompts = padded(2, 4, high=SEMANTIC, lengths=(4, 2), seed=3)
    made = stage.generate(max_length=11, prime_ids=prompts, **given(options), **sampling, cond_scale=2.5, seed=4)
    rows = plain_rows(stage.transformer, options, sampling, 4, SEMANTIC + 1)
    expected = [row.semantic(prompt, 11) for row, prompt in zip(rows, real(prompts), strict=True)]
    assert real(made) == expected


@each_sampling
@each_condition
def test_coarse_codes_are_those_of_a_plain_loop(options: dict[str, Any], sampling: dict[str, Any]) -> None:
    stage = KINDS["coarse"].stage(KINDS["coarse"].build(**options))
    prompts = ALL_CODES[:, :3, :COARSE].clone()
    prompts[0, 1:] = -1
    made = stage.generate(
        semantic_token_ids=IDS,
        prime_coarse_token_ids=prompts,
        max_time_steps=5,
        **given(options),
        **sampling,
        cond_scale=2.5,
        seed=4,
    )
    rows = plain_rows(stage.transformer, options, sampling, 4, CODES + 1)
    for number, row in enumerate(rows):
        semantic = torch.tensor([real(IDS)[number]])
        expected = row.coarse(flat(prompts[number]), 5, semantic)
        assert flat(made[number]) == expected


@each_sampling
@each_condition
def test_fine_codes_are_those_of_a_plain_loop(options: dict[str, Any], sampling: dict[str, Any]) -> None:
    stage = KINDS["fine"].stage(KINDS["fine"].build(**options))
    coarse, prompts = ALL_CODES[..., :COARSE], ALL_CODES[:, :2, COARSE:].clone()
    prompts[1, 1:] = -1
    made = stage.generate(
        coarse_token_ids=coarse, prime_fine_token_ids=prompts, **given(options), **sampling, cond_scale=2.5, seed=4
    )
    assert made.shape == (2, 5, FINE) and lengths_of(made) == lengths_of(coarse)
    for number, row in enumerate(plain_rows(stage.transformer, options, sampling, 4, CODES)):
        expected = row.fine(flat(prompts[number]), torch.tensor([real(coarse)[number]]))
        assert flat(made[number]) == expected


@each_sampling
@each_condition
def test_delayed_codes_are_those_of_a_plain_loop(options: dict[str, Any], sampling: dict[str, Any]) -> None:
    stage = KINDS["delayed"].stage(KINDS["delayed"].build(**options))
    prompts = ALL_CODES[:, :3].clone()
    prompts[0, 1:] = -1
    made = stage.generate(
        semantic_token_ids=IDS,
        prime_token_ids=prompts,
        max_time_steps=7,
        **given(options),
        **sampling,
        cond_scale=2.5,
        seed=4,
    )
    rows = plain_rows(stage.transformer, options, sampling, 4, CODES + 1)
    count = 7 - 1 + QUANTIZERS - 1
    for number, row in enumerate(rows):
        expected = row.delayed(real(prompts)[number], 7, count, torch.tensor([real(IDS)[number]]))
        assert real(made)[number] == expected


@pytest.mark.parametrize("seed", range(6))
def test_delayed_rows_end_where_the_first_quantizer_says(seed: int) -> None:
    """With the end made likely, and from nothing: finer codes of the last frames are still drawn, then the row is done."""
    stage = KINDS["delayed"].stage()
    with torch.no_grad():
        stage.transformer.logit_weights[0, CODES] *= 2.5
    sampling = {"temperature": 1.0, "filter_thres": 0.0}
    made = stage.generate(semantic_token_ids=IDS, max_time_steps=8, **sampling, seed=seed)
    rows = plain_rows(stage.transformer, {}, sampling, seed, CODES + 1)
    count = 8 + QUANTIZERS - 1
    expected = [row.delayed([], 8, count, torch.tensor([ids])) for row, ids in zip(rows, real(IDS), strict=True)]
    assert real(made) == expected
    assert any(len(row) < 8 for row in expected)


@pytest.mark.parametrize("name", KINDS)
def test_it_generates_in_and_out_of_inference_mode(name: str) -> None:
    """What is kept between calls belongs to neither."""
    stage = KINDS[name].stage()
    options: dict[str, Any] = {"max_length": 8, "batch_size": 2}
    if name != "semantic":
        options = {"coarse_token_ids": ALL_CODES[..., :COARSE]} if name == "fine" else {"semantic_token_ids": IDS}
    with torch.inference_mode():
        inside = stage.generate(**options, seed=1)
    assert torch.equal(stage.generate(**options, seed=1), inside)
    with torch.inference_mode():
        assert torch.equal(stage.generate(**options, seed=1), inside)


def test_a_second_call_is_not_disturbed_by_the_first() -> None:
    """What a row that ended left behind is forgotten."""
    stage = KINDS["delayed"].stage()
    with torch.no_grad():
        stage.transformer.logit_weights[0, CODES] *= 2.5
    calls = [
        stage.generate(semantic_token_ids=IDS, max_time_steps=8, filter_thres=0.0, seed=seed) for seed in (0, 1, 0)
    ]
    assert torch.equal(calls[0], calls[2])


def test_what_captured_graphs_read_stays_where_it_is() -> None:
    """Also where a call of another shape came between, and was refused before it decoded."""
    model = _Delayed(KINDS["delayed"].build())
    quantizers = COARSE + FINE
    places = []
    for rows in (4, 2, 4):
        known = torch.full((rows, quantizers, quantizers), rows)
        model.begin(known)
        assert torch.equal(model.known, known) and len(model.ended) == rows
        places.append((model.known.data_ptr(), model.ended.data_ptr()))
    assert places[0] == places[2] != places[1]


def test_a_single_quantizer_needs_no_delay() -> None:
    stage = KINDS["delayed"].stage(KINDS["delayed"].build(num_quantizers=1))
    made = stage.generate(semantic_token_ids=IDS, prime_token_ids=ALL_CODES[:1, :2, :1], max_time_steps=6, seed=0)
    assert made.shape[2] == 1 and torch.equal(made[0, :2], ALL_CODES[0, :2, :1])


# ------------------------------------------------------------------ steps


def count_steps(network: Any, generate: Callable[[], object]) -> int:
    steps: list[int] = []
    handle = network.layers.register_forward_hook(lambda *_: steps.append(1))
    generate()
    handle.remove()
    return len(steps)


def without_ends(network: Any) -> Any:
    with torch.no_grad():
        weights = network.logit_weights if hasattr(network, "logit_weights") else network.coarse.logit_weights
        weights[:, CODES] = 0
    return network


def test_the_delayed_stage_takes_a_step_a_frame() -> None:
    frames = 9
    kinds = {name: KINDS[name].stage() for name in ("coarse", "fine", "delayed")}
    without_ends(kinds["coarse"].transformer)
    without_ends(kinds["delayed"].transformer)
    options = {"temperature": 0.0, "max_time_steps": frames}
    made: dict[str, Tensor] = {}

    def run(name: str, **given: Any) -> int:
        return count_steps(kinds[name].transformer, lambda: made.update({name: kinds[name].generate(**given)}))

    coarse = run("coarse", semantic_token_ids=IDS, **options)
    fine = run("fine", coarse_token_ids=made["coarse"], temperature=0.0)
    assert made["coarse"].shape == (2, frames, COARSE) and made["fine"].shape == (2, frames, FINE)
    assert coarse + fine == frames * QUANTIZERS
    assert run("delayed", semantic_token_ids=IDS, **options) == frames + QUANTIZERS - 1
    assert made["delayed"].shape == (2, frames, QUANTIZERS)


@pytest.mark.parametrize("name", ["semantic", "coarse", "delayed"])
def test_it_stops_when_all_rows_have_ended(name: str) -> None:
    stage = KINDS[name].stage()
    always_end(stage.transformer)
    most = {"max_length": 600} if name == "semantic" else {"max_time_steps": 200, "semantic_token_ids": IDS}
    steps = count_steps(stage.transformer, lambda: stage.generate(**most, seed=0))
    assert steps <= 16


def always_end(network: Any) -> None:
    """The logit of the end is the greatest, whatever was before."""
    with torch.no_grad():
        weights = network.to_logits.weight if hasattr(network, "to_logits") else None
        if weights is None:
            weights = (network.logit_weights if hasattr(network, "logit_weights") else network.coarse.logit_weights)[0]
        weights.zero_()
        network.layers.final_norm.register_forward_hook(lambda module, args, out: torch.ones_like(out))
        weights[-1] = 1


@pytest.mark.parametrize("name", ["semantic", "coarse", "delayed"])
def test_something_is_made_before_it_ends(name: str) -> None:
    stage = KINDS[name].stage()
    always_end(stage.transformer)
    if name == "semantic":
        made = stage.generate(max_length=4, batch_size=2, seed=0)
    else:
        made = stage.generate(semantic_token_ids=IDS, max_time_steps=4, seed=0)
    assert made.shape[:2] == (2, 1) and (made >= 0).all()


def test_no_codes_have_no_sound() -> None:
    assert waves_of(tiny_codec(), torch.full((2, 3, 3), -1)).shape == (2, 0)


# ------------------------------------------------------------------ ends


def test_rows_that_ended_are_padded_and_the_end_can_be_shown() -> None:
    stage = KINDS["semantic"].stage()
    options = {"max_length": 40, "batch_size": 6, "filter_thres": 0.0, "seed": 3}
    ids, shown = stage.generate(**options), stage.generate(**options, include_eos_in_output=True)
    lengths = lengths_of(ids)
    assert min(lengths) < max(lengths) <= 40
    assert ids.max() < SEMANTIC  # the end is no token
    for row, length in enumerate(lengths):
        assert (ids[row, length:] == -1).all()
        assert torch.equal(shown[row, :length], ids[row, :length])
        if length < 40:
            assert shown[row, length] == SEMANTIC and (shown[row, length + 1 :] == -1).all()


def test_a_coarse_row_ends_only_between_frames() -> None:
    """The end is likely for all quantizers, and still frames are whole."""
    stage = KINDS["coarse"].stage()
    with torch.no_grad():
        stage.transformer.coarse.logit_weights[:, CODES] *= 3
    made = stage.generate(
        semantic_token_ids=IDS[:1].expand(20, -1), max_time_steps=9, filter_thres=0.0, temperature=2.0, seed=0
    )
    lengths = lengths_of(made)
    assert min(lengths) < max(lengths)
    for row, length in zip(made, lengths, strict=True):
        assert (row[:length] >= 0).all() and (row[:length] < CODES).all() and (row[length:] == -1).all()


@pytest.mark.parametrize("name", ["coarse", "fine", "delayed"])
def test_every_code_can_be_drawn_by_every_quantizer(name: str) -> None:
    stage = KINDS[name].stage()
    options = {"temperature": 3.0, "filter_thres": 0.0, "seed": 0}
    if name == "fine":
        codes = torch.randint(CODES, (60, 6, COARSE), generator=torch.Generator().manual_seed(0))
        made = stage.generate(coarse_token_ids=codes, **options)
    else:
        without_ends(stage.transformer)
        made = stage.generate(semantic_token_ids=IDS[:1].expand(60, -1), max_time_steps=6, **options)
    for quantizer in range(made.shape[2]):
        assert set(made[..., quantizer].flatten().tolist()) >= set(range(CODES))


def test_the_prompt_counts() -> None:
    semantic, coarse, delayed = (KINDS[name].stage() for name in ("semantic", "coarse", "delayed"))
    ids = semantic.generate(max_length=9, prime_ids=IDS, temperature=0.0)
    assert ids.shape[1] <= 9 and [row[:3] for row in real(ids)] == [row[:3] for row in real(IDS)]
    without_ends(coarse.transformer)
    without_ends(delayed.transformer)
    codes = coarse.generate(
        semantic_token_ids=IDS, prime_coarse_token_ids=ALL_CODES[..., :COARSE], max_time_steps=6, temperature=0.0
    )
    assert codes.shape == (2, 6, COARSE)
    assert torch.equal(codes[0, :3], ALL_CODES[0, :3, :COARSE]) and torch.equal(codes[1, :5], ALL_CODES[1, :, :COARSE])
    codes = delayed.generate(semantic_token_ids=IDS, prime_token_ids=ALL_CODES, max_time_steps=6, temperature=0.0)
    assert codes.shape == (2, 6, QUANTIZERS)
    assert torch.equal(codes[0, :3], ALL_CODES[0, :3]) and torch.equal(codes[1, :5], ALL_CODES[1])
    # A row whose prompt is longer than what is asked for is cut.
    assert coarse.generate(
        semantic_token_ids=IDS, prime_coarse_token_ids=ALL_CODES[..., :COARSE], max_time_steps=4, temperature=0.0
    ).shape == (2, 4, COARSE)


# ------------------------------------------------------------------ randomness, modes


@pytest.mark.parametrize("name", KINDS)
def test_a_seed_decides(name: str) -> None:
    stage = KINDS[name].stage()
    options: dict[str, Any] = {"filter_thres": 0.0}
    if name == "semantic":
        options |= {"max_length": 12, "batch_size": 2}
    elif name == "fine":
        options |= {"coarse_token_ids": ALL_CODES[..., :COARSE]}
    else:
        options |= {"semantic_token_ids": IDS, "max_time_steps": 6}
    first, again, other = (stage.generate(**options, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    torch.manual_seed(0)
    drawn = [stage.generate(**options) for _ in range(2)]
    assert not torch.equal(*drawn)
    torch.manual_seed(0)
    assert torch.equal(stage.generate(**options), drawn[0])  # None draws one, from torch's own generator


def test_generation_is_in_evaluation_mode_and_puts_the_mode_back() -> None:
    network = KINDS["coarse"].build(
        has_condition=True, t5_name={**CONDITIONS["text"]["t5_name"], "dropout": 0.5}, ff_dropout=0.5
    )
    stage = KINDS["coarse"].stage(network)
    options = {"semantic_token_ids": IDS, "text": TEXTS, "max_time_steps": 4, "temperature": 0.0}
    expected = stage.generate(**options)
    stage.train()
    torch.manual_seed(1)
    assert torch.equal(stage.generate(**options), expected)
    assert all(module.training for module in stage.modules())


def test_generation_follows_training() -> None:
    stage = KINDS["semantic"].stage()
    before = stage.generate(max_length=8, temperature=0.0)
    with torch.no_grad():
        stage.transformer.semantic.start.add_(3)
        stage.transformer.to_logits.weight.copy_(stage.transformer.to_logits.weight.flip(0))
    assert not torch.equal(stage.generate(max_length=8, temperature=0.0), before)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.99}], ids=str)
def test_a_filter_that_is_asked_for_is_the_only_one(name: str, filters: dict[str, Any]) -> None:
    """By default a tenth of the tokens is drawn from, which is the likeliest alone here."""
    stage = KINDS[name].stage()
    most = {"semantic": {"max_length": 12, "batch_size": 4}, "fine": {"coarse_token_ids": ALL_CODES[..., :COARSE]}}
    options = most.get(name, {"semantic_token_ids": IDS, "max_time_steps": 6}) | {"temperature": 3.0, "seed": 0}
    asked, alone, usual = (
        stage.generate(**options, **more) for more in (filters, {**filters, "filter_thres": 0.0}, {})
    )
    assert torch.equal(asked, alone) and not torch.equal(asked, usual)
    assert torch.equal(usual, stage.generate(**options, filter_thres=0.9))


# ------------------------------------------------------------------ rows, and mistakes


def test_one_prompt_or_text_serves_many_rows() -> None:
    stage = KINDS["semantic"].stage(KINDS["semantic"].build(**CONDITIONS["text"]))
    assert stage.generate(max_length=5, text=TEXTS[:1], batch_size=3, seed=0).shape[0] == 3
    assert stage.generate(max_length=9, text=TEXTS, prime_ids=IDS[:1], seed=0).shape[0] == 2
    assert stage.generate(max_length=9, batch_size=2, seed=0).shape[0] == 2  # whatever the model likes
    embedded = stage.transformer.encode_text(TEXTS)
    by_text, by_embedding = (
        stage.generate(max_length=9, temperature=0.0, **condition)
        for condition in ({"text": TEXTS}, {"text_embeds": embedded})
    )
    assert torch.equal(by_text, by_embedding)


def test_guidance_is_heard() -> None:
    """For all stages, by strings and by embeddings, in each way of conditioning."""
    for name in KINDS:
        for options in (CONDITIONS["text"], CONDITIONS["prefix"]):
            stage = KINDS[name].stage(KINDS[name].build(**options))
            fixed: dict[str, Any] = {"text": TEXTS, "temperature": 0.0}
            if name == "semantic":
                fixed |= {"max_length": 8}
            elif name == "fine":
                fixed |= {"coarse_token_ids": ALL_CODES[..., :COARSE]}
            else:
                fixed |= {"semantic_token_ids": IDS, "max_time_steps": 4}
            weak, strong = (stage.generate(**fixed, cond_scale=scale) for scale in (1.0, 8.0))
            assert weak.shape != strong.shape or not torch.equal(weak, strong), (name, options)


SENTENCES: Sequence[tuple[str, dict[str, Any], str]] = [
    ("semantic", {"max_length": 3, "prime_ids": IDS}, "max_length=3 leaves nothing to generate behind a prompt of 3"),
    ("semantic", {"max_length": 9, "prime_ids": IDS + 9}, "prime_ids hold 1[0-9], and the transformer knows 0 to 10"),
    ("semantic", {"max_length": 9, "prime_ids": IDS, "batch_size": 3}, r"different numbers, \[2, 3\]"),
    ("semantic", {"max_length": 9, "batch_size": 0}, "batch_size=0 must be at least 1"),
    ("semantic", {"max_length": 9, "temperature": -1.0}, "temperature=-1.0 must not be negative"),
    ("semantic", {"max_length": 9, "text": TEXTS}, "does not take texts"),
    ("coarse", {"semantic_token_ids": IDS + 9}, "semantic_token_ids hold 1[0-9], and the transformer knows 0 to 10"),
    (
        "coarse",
        {"semantic_token_ids": IDS, "prime_coarse_token_ids": ALL_CODES[..., :COARSE], "max_time_steps": 3},
        "max_time_steps=3 leaves nothing to generate behind a prompt of 3 frames",
    ),
    ("coarse", {"semantic_token_ids": IDS, "prime_coarse_token_ids": ALL_CODES}, r"must be \[b, t, 3\]"),
    ("coarse", {"semantic_token_ids": IDS, "reconstruct_wave": True, "max_time_steps": 2}, "was built without a codec"),
    ("fine", {"coarse_token_ids": ALL_CODES}, r"\[2, 5, 5\] are not those of 3 quantizers"),
    ("fine", {"coarse_token_ids": ALL_CODES[..., :COARSE] + 7}, "coarse_token_ids hold 1[0-9]"),
    ("delayed", {"semantic_token_ids": IDS, "prime_token_ids": ALL_CODES + 7}, "prime_token_ids hold 1[0-9]"),
]


@pytest.mark.parametrize(("name", "given", "sentence"), SENTENCES)
def test_a_mistake_gets_one_sentence(name: str, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        KINDS[name].stage().generate(**given)
    assert "\n" not in str(error.value)


def test_one_text_that_is_no_list_is_refused() -> None:
    stage = KINDS["semantic"].stage(KINDS["semantic"].build(**CONDITIONS["text"]))
    with pytest.raises(ValueError, match=r"text takes a list of texts, not one: write \['bell'\]"):
        stage.generate(max_length=4, text="bell")


def test_frames_are_joined_where_the_prompt_ends() -> None:
    prime = torch.tensor([[[1, 2], [3, 4]], [[5, 6], [-1, -1]]])
    made = torch.tensor([[[7, 7], [-1, -1]], [[8, 8], [9, -1]]])
    assert joined(prime, made).tolist() == [[[1, 2], [3, 4], [7, 7]], [[5, 6], [8, 8], [-1, -1]]]


def test_sounds_of_unequal_length_come_as_a_list() -> None:
    codec = tiny_codec()
    codes = torch.randint(16, (2, 5, 3), generator=torch.Generator().manual_seed(0))
    waves = waves_of(codec, codes)
    assert isinstance(waves, Tensor) and waves.shape == (2, 5 * codec.downsample_factor)
    codes[1, 3:] = -1
    cut = waves_of(codec, codes)
    assert [wave.shape for wave in cut] == [(40,), (24,)]
    torch.testing.assert_close(cut[0], waves[0])
    codes[1, 2, 1] = -1  # half a frame is none
    assert [len(wave) for wave in waves_of(codec, codes)] == [40, 16]


# ------------------------------------------------------------------ learning


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_it_learns_rows_by_heart_and_says_them_again_to_their_end(name: str) -> None:
    kind = KINDS[name]
    stage = kind.stage(kind.build(**CONDITIONS["text"], cond_drop_prob=0.1, dim=32), mask_prob=0.0).train()
    optimizer = torch.optim.Adam(stage.parameters(), lr=5e-3)
    ends = {"is_end": torch.tensor([True, True])} if kind.has_end else {}
    torch.manual_seed(0)
    for _ in range(250):
        loss = stage(**kind.tokens, **ends, text=TEXTS, return_loss=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    options: dict[str, Any] = {"text": TEXTS, "temperature": 0.0, "cond_scale": 1.0}
    if name == "semantic":
        made = stage.generate(max_length=20, **options)
    elif name == "fine":
        made = stage.generate(coarse_token_ids=kind.tokens["coarse_token_ids"], **options)
    else:
        made = stage.generate(semantic_token_ids=IDS, max_time_steps=20, **options)
    assert real(made) == real([*kind.tokens.values()][-1])
