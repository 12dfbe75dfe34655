"""The four networks: rows are independent of their padding, texts and guidance are heard, ids are never shared."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from helicon.models.audiolm.transformers import (
    DelayedTransformer,
    SemanticTransformer,
    TokenTransformer,
    delayed,
    remembered,
    undelayed,
)
from helicon.nn.network import load_network
from models.audiolm.tiny import (
    ALL_CODES,
    BYTES,
    COARSE,
    CODES,
    CONDITIONS,
    FINE,
    IDS,
    KINDS,
    SEMANTIC,
    SIZES,
    TEXTS,
    Kind,
    as_tuple,
    given,
)

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
each_condition = pytest.mark.parametrize("options", CONDITIONS.values(), ids=CONDITIONS.keys())
each_text = pytest.mark.parametrize("options", [CONDITIONS["text"], CONDITIONS["prefix"]], ids=["text", "prefix"])


def inputs(kind: Kind, tokens: Any = None) -> dict[str, Any]:
    """The tokens of a kind as its transformer takes them."""
    tokens = kind.tokens if tokens is None else tokens
    return {"ids" if kind.transformer is SemanticTransformer else name: ids for name, ids in tokens.items()}


def difference(first: Any, second: Any) -> float:
    """Between logits, where both are of real tokens."""
    pairs = zip(as_tuple(first), as_tuple(second), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


# ------------------------------------------------------------------ shapes, and rows


def test_logits_are_of_each_token_and_of_what_follows() -> None:
    frames = ALL_CODES.shape[1]
    shapes = {name: [list(x.shape) for x in as_tuple(kind.build()(**inputs(kind)))] for name, kind in KINDS.items()}
    assert shapes == {
        "semantic": [[2, 7, SEMANTIC + 1]],
        "coarse": [[2, 6, SEMANTIC], [2, frames * COARSE + 1, CODES + 1]],
        "fine": [[2, frames * COARSE, CODES], [2, frames * FINE + 1, CODES]],
        "delayed": [[2, frames + COARSE + FINE, COARSE + FINE, CODES + 1]],
    }


@each_condition
@each_kind
def test_a_row_of_a_padded_batch_gives_what_it_gives_alone(kind: Kind, options: dict[str, Any]) -> None:
    network = kind.build(**options).eval()
    together = as_tuple(network(**inputs(kind), **given(options)))
    for row in range(2):
        alone = as_tuple(network(**inputs(kind, kind.alone(row)), **given(options, slice(row, row + 1))))
        for both, one in zip(together, alone, strict=True):
            torch.testing.assert_close(both[row, : one.shape[1]], one[0], atol=2e-5, rtol=1e-4)


@each_kind
def test_nothing_is_known_of_the_future(kind: Kind) -> None:
    network, tokens = kind.build().eval(), kind.alone(0)
    before = as_tuple(network(**inputs(kind, tokens)))[-1]
    name = [*tokens][-1]
    changed = tokens[name].clone()
    changed[:, -1] = (changed[:, -1] + 1) % CODES
    after = as_tuple(network(**inputs(kind, {**tokens, name: changed})))[-1]
    steps = changed[0].numel() if kind.transformer is not DelayedTransformer else len(changed[0])
    unknown = steps - (changed[0, -1].numel() if kind.transformer is not DelayedTransformer else 1)
    assert torch.equal(before[:, : unknown + 1], after[:, : unknown + 1])
    assert not torch.allclose(before[:, unknown + 1 :], after[:, unknown + 1 :])


@each_kind
def test_places_matter(kind: Kind) -> None:
    """One layer without positions sees a set of tokens: their order would be lost."""
    network, tokens = kind.build(depth=1).eval(), kind.alone(0)
    first = next(iter(tokens))
    turned = tokens[first].clone()
    turned[:, :2] = turned[:, :2].flip(1)
    assert not torch.equal(turned, tokens[first])
    before, after = (as_tuple(network(**inputs(kind, {**tokens, first: ids})))[-1] for ids in (tokens[first], turned))
    assert (before[:, -1] - after[:, -1]).abs().max() > 1e-3


@each_kind
def test_flash_attn_changes_nothing(kind: Kind) -> None:
    """The kernel is chosen by torch; a name that once took the positions away does not."""
    assert difference(kind.build(flash_attn=True)(**inputs(kind)), kind.build(flash_attn=False)(**inputs(kind))) == 0


def test_codes_may_come_flat() -> None:
    coarse, fine = KINDS["coarse"].build(), KINDS["fine"].build()
    flat = ALL_CODES[..., :COARSE].flatten(1)
    by_frame = coarse(semantic_token_ids=IDS, coarse_token_ids=ALL_CODES[..., :COARSE])
    assert difference(coarse(semantic_token_ids=IDS, coarse_token_ids=flat), by_frame) == 0
    # A beginning need not end with a frame.
    begun = coarse(semantic_token_ids=IDS, coarse_token_ids=flat[:, :4], return_only_coarse_logits=True)
    torch.testing.assert_close(begun, by_frame[1][:, :5])
    together = fine(ALL_CODES[..., :COARSE], ALL_CODES[..., COARSE:])
    assert difference(fine(flat, ALL_CODES[..., COARSE:].flatten(1)), together) == 0
    assert difference(fine(flat, ALL_CODES[..., COARSE:], return_only_fine_logits=True), together[1]) == 0


def test_codes_of_another_number_of_quantizers_are_refused() -> None:
    codes = ALL_CODES[..., :4]
    with pytest.raises(ValueError, match=r"\[2, 5, 4\] are not those of 3 quantizers"):
        KINDS["coarse"].build()(semantic_token_ids=IDS, coarse_token_ids=codes)
    with pytest.raises(ValueError, match=r"\[2, 5, 4\] are not those of 2 quantizers"):
        KINDS["fine"].build()(ALL_CODES[..., :3], codes)
    with pytest.raises(ValueError, match=r"\[2, 5, 4\] must be \[b, t, 5\]"):
        KINDS["delayed"].build()(semantic_token_ids=IDS, token_ids=codes)


def test_a_fine_network_may_have_another_padding() -> None:
    network, usual = KINDS["fine"].build(pad_id=99), KINDS["fine"].build()
    coarse, fine = (ids.masked_fill(ids < 0, 99) for ids in (ALL_CODES[..., :COARSE], ALL_CODES[..., COARSE:]))
    assert difference(network(coarse, fine), usual(**KINDS["fine"].tokens)) == 0
    with pytest.raises(ValueError, match="pad_id=3 is a code of codebook_size=7"):
        KINDS["fine"].build(pad_id=3)


def test_the_other_tokens_need_not_be_predicted() -> None:
    coarse = KINDS["coarse"].build(project_semantic_logits=False)
    fine = KINDS["fine"].build(project_coarse_logits=False)
    assert coarse(**KINDS["coarse"].tokens)[0] is None and coarse.to_semantic_logits is None
    assert fine(**KINDS["fine"].tokens)[0] is None and "coarse.logit_weights" not in fine.state_dict()


# ------------------------------------------------------------------ no id is shared


@pytest.mark.parametrize("name", ["coarse", "delayed"])
def test_each_quantizer_has_embeddings_of_its_own(name: str) -> None:
    """Another embedding of a code changes what follows that code of that quantizer, and of no other."""
    kind = KINDS[name]
    network = kind.build().eval()
    quantizers = COARSE if name == "coarse" else COARSE + FINE
    table = network.coarse.embedding if name == "coarse" else network.codes.embedding
    rows = len(table.weight) // quantizers
    codes = torch.arange(CODES).repeat_interleave(1)[None, :, None].expand(1, CODES, quantizers)  # frame t is code t
    tokens = {**kind.alone(0), [*kind.tokens][-1]: codes}
    for quantizer, code in ((0, CODES - 1), (1, 0), (quantizers - 1, 0), (1, CODES - 1)):
        with torch.no_grad():
            before = as_tuple(network(**tokens))[-1]
            table.weight[quantizer * rows + code] += 1
            after = as_tuple(network(**tokens))[-1]
        changed = (before - after).abs().flatten(2).amax(dim=(0, 2)) > 1e-6
        # The first place that has seen the code: of a row of codes, or of steps.
        seen = code * quantizers + quantizer + 1 if name == "coarse" else code + quantizer + 1
        assert not changed[:seen].any() and changed[seen]


def test_the_coarse_and_the_fine_codes_of_the_fine_stage_are_apart() -> None:
    network, kind = KINDS["fine"].build().eval(), KINDS["fine"]
    tokens = kind.alone(0)
    with torch.no_grad():
        before = network(**tokens)
        network.fine.embedding.weight[:] += 1
        after = network(**tokens)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1][:, 0], after[1][:, 0])
    assert not torch.allclose(before[1][:, 1:], after[1][:, 1:])


def test_each_quantizer_has_logits_of_its_own() -> None:
    network = KINDS["coarse"].build().eval()
    with torch.no_grad():
        before = network(**KINDS["coarse"].tokens)[1]
        network.coarse.logit_weights[1] += 1
        after = network(**KINDS["coarse"].tokens)[1]
    changed = (before != after).flatten(2).any(dim=2).any(dim=0)
    assert changed.tolist() == [place % COARSE == 1 for place in range(len(changed))]


# ------------------------------------------------------------------ texts


@each_text
@each_kind
def test_texts_and_guidance_change_the_logits(kind: Kind, options: dict[str, Any]) -> None:
    network = kind.build(**options).eval()
    first = network(**inputs(kind), text=TEXTS)
    other = network(**inputs(kind), text=["a drum", "silence"])
    null = network(**inputs(kind), cond_drop_prob=1.0)
    for one, two, nothing in zip(as_tuple(first), as_tuple(other), as_tuple(null), strict=True):
        assert (one - two).abs().max() > 1e-3 and (one - nothing).abs().max() > 1e-3
    guided = network.forward_with_cond_scale(**inputs(kind), text=TEXTS, cond_scale=2.5)
    for one, nothing, led in zip(as_tuple(first), as_tuple(null), as_tuple(guided), strict=True):
        real = one != 0  # (what is not a real token is said nothing of)
        torch.testing.assert_close(led[real], (nothing + 2.5 * (one - nothing))[real], atol=1e-4, rtol=1e-4)
    assert difference(network.forward_with_cond_scale(**inputs(kind), text=TEXTS, cond_scale=1.0), first) == 0


@each_text
@each_kind
def test_embedded_texts_do_the_same(kind: Kind, options: dict[str, Any]) -> None:
    """With strings, with what `encode_text` makes of them, with guidance by either."""
    network = kind.build(**options).eval()
    embedded = network.encode_text(TEXTS)
    assert embedded.shape == (2, len(TEXTS[1]) + 2, BYTES["dim"])
    assert (embedded[0, len(TEXTS[0]) + 2 :] == 0).all()
    by_string = network(**inputs(kind), text=TEXTS)
    assert difference(network(**inputs(kind), text_embeds=embedded), by_string) < 1e-5
    dropped = network(**inputs(kind), text_embeds=embedded, cond_drop_prob=1.0)
    assert difference(dropped, network(**inputs(kind), cond_drop_prob=1.0)) < 1e-5
    guided = network.forward_with_cond_scale(**inputs(kind), text=TEXTS)
    assert difference(network.forward_with_cond_scale(**inputs(kind), text_embeds=embedded), guided) < 1e-4
    assert difference(guided, by_string) > 1e-2


@each_text
@each_kind
def test_rows_that_lose_their_text_are_as_without(kind: Kind, options: dict[str, Any]) -> None:
    network = kind.build(**options, cond_drop_prob=0.5).train()
    with_text, without = (
        as_tuple(network(**inputs(kind), text=TEXTS, cond_drop_prob=probability)) for probability in (0.0, 1.0)
    )
    seen = set()
    for seed in range(10):
        torch.manual_seed(seed)
        dropped = as_tuple(network(**inputs(kind), text=TEXTS))
        for row in range(2):
            is_kept = torch.allclose(dropped[-1][row], with_text[-1][row], atol=1e-5)
            expected = with_text if is_kept else without
            for got, wanted in zip(dropped, expected, strict=True):
                torch.testing.assert_close(got[row], wanted[row], atol=2e-5, rtol=1e-4)
            seen.add((row, is_kept))
    assert len(seen) == 4
    assert difference(network.eval()(**inputs(kind), text=TEXTS), with_text) < 1e-5  # none, where nothing is learned


def test_one_text_serves_all_rows() -> None:
    kind = KINDS["coarse"]
    network = kind.build(**CONDITIONS["text"]).eval()
    assert difference(network(**kind.tokens, text=TEXTS[:1]), network(**kind.tokens, text=TEXTS[:1] * 2)) < 1e-5
    with pytest.raises(ValueError, match="3 texts cannot belong to 2 rows"):
        network(**kind.tokens, text=["a", "b", "c"])


@each_text
@each_kind
def test_every_weight_learns_the_encoder_of_texts_too(kind: Kind, options: dict[str, Any]) -> None:
    """In single precision, from strings; no tensor stays behind, which distributed training would wait for."""
    for probability in (0.999, 0.0):
        network = kind.build(**options).train()
        logits = network(**inputs(kind), text=TEXTS, cond_drop_prob=probability)
        sum(part.square().mean() for part in as_tuple(logits)).backward()
        assert [name for name, weight in network.named_parameters() if weight.grad is None] == []
    assert network.text_encoder.embed.weight.grad.abs().sum() > 0


@each_kind
def test_embeddings_made_in_inference_mode_can_be_learned_from(kind: Kind) -> None:
    with torch.inference_mode():
        embedded = torch.randn(2, 4, 5)
    network = kind.build(has_condition=True, cond_dim=5).train()
    kept: list[Tensor] = []
    network.text_proj.register_forward_pre_hook(lambda module, given: kept.append(given[0]))
    logits = network(**inputs(kind), text_embeds=embedded)
    assert not kept[0].is_inference()
    as_tuple(logits)[-1].sum().backward()
    assert all(weight.grad is not None for weight in network.text_proj.parameters())


def test_a_joint_space_of_sound_and_text_has_the_networks_own_size() -> None:
    network = KINDS["semantic"].build(audio_text_condition=True)
    assert network.text_encoder is None and network.has_condition
    assert network(ids=IDS, text_embeds=torch.randn(2, 3, SIZES["dim"])).shape == (2, 7, SEMANTIC + 1)


@pytest.mark.parametrize(
    ("options", "condition", "sentence"),
    [
        ({}, {"text": TEXTS}, "does not take texts"),
        ({}, {"text_embeds": torch.zeros(2, 3, 4)}, "does not take texts: build it with has_condition=True"),
        (CONDITIONS["text"], {}, "this network reads texts: give texts or text_embeds"),
        (
            CONDITIONS["text"],
            {"text": TEXTS, "text_embeds": torch.zeros(2, 3, 12)},
            "give one of texts and text_embeds",
        ),
        ({"has_condition": True, "cond_dim": 4}, {"text": TEXTS}, "has no text encoder: give text_embeds"),
        (
            {"has_condition": True, "cond_dim": 4},
            {"text_embeds": torch.zeros(2, 3, 5)},
            "have 5 features, and .* takes 4",
        ),
        (CONDITIONS["text"], {"text": "bell"}, "takes a list of texts, not one"),
    ],
)
def test_a_missing_or_wrong_text_is_named(options: dict[str, Any], condition: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        KINDS["semantic"].build(**options)(ids=IDS, **condition)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"t5_name": BYTES}, "t5_name and cond_dim belong to has_condition=True"),
        ({"cond_dim": 4}, "t5_name and cond_dim belong to has_condition=True"),
        ({"has_condition": True, "t5_name": BYTES, "cond_dim": 4}, "give one"),
        ({"cond_as_self_attn_prefix": True}, "belongs to has_condition=True"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        KINDS["semantic"].build(**options)


@each_kind
def test_layers_of_the_reference_that_are_not_there_say_nothing(kind: Kind) -> None:
    plain = kind.build()(**inputs(kind))
    for silent in ({"add_value_residual": True, "num_residual_streams": 4}, {"add_value_residual": False}):
        assert difference(kind.build(**silent)(**inputs(kind)), plain) == 0
    with pytest.raises(ValueError, match=r"^num_residual_streams=2: there is one residual stream, leave it out$"):
        kind.build(num_residual_streams=2)


@pytest.mark.parametrize(
    ("name", "options"),
    [("semantic", {name: 0}) for name in ("dim", "depth", "heads", "dim_head", "num_semantic_tokens")]
    + [("coarse", {name: 0}) for name in ("codebook_size", "num_coarse_quantizers", "num_semantic_tokens")]
    + [("fine", {name: 0}) for name in ("codebook_size", "num_coarse_quantizers", "num_fine_quantizers")]
    + [("delayed", {name: 0}) for name in ("codebook_size", "num_quantizers", "num_semantic_tokens")]
    + [("semantic", {"cond_drop_prob": 2.0}), ("semantic", {"cond_drop_prob": -0.1})],
)
def test_sizes_that_cannot_be_are_refused(name: str, options: dict[str, Any]) -> None:
    ((option, value),) = options.items()
    with pytest.raises(
        ValueError, match=f"^{option}={value} (must be at least 1|is a probability: it must be between 0 and 1)$"
    ):
        KINDS[name].build(**options)


def test_guidance_passes_over_what_is_not_predicted() -> None:
    network = KINDS["coarse"].build(**CONDITIONS["text"], project_semantic_logits=False).eval()
    semantic, coarse = network.forward_with_cond_scale(**KINDS["coarse"].tokens, text=TEXTS)
    assert semantic is None and coarse.shape == (2, 16, CODES + 1)


def test_guidance_takes_positional_tokens() -> None:
    network, tokens = KINDS["fine"].build(**CONDITIONS["text"]).eval(), KINDS["fine"].tokens
    named = network.forward_with_cond_scale(**tokens, text=TEXTS, cond_scale=2.0)
    assert difference(network.forward_with_cond_scale(*tokens.values(), text=TEXTS, cond_scale=2.0), named) == 0


@each_kind
def test_nothing_is_read_from_elsewhere_where_no_text_is_read(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("an encoder was built")

    monkeypatch.setattr("helicon.models.text.build_text_encoder", refuse)
    kind.build()
    kind.build(has_condition=True, cond_dim=4)


# ------------------------------------------------------------------ forgetful masking


def test_some_of_the_keys_are_forgotten_never_the_first() -> None:
    torch.manual_seed(0)
    keep = torch.stack([remembered(torch.zeros(50, 40, 1), 0.25) for _ in range(20)]).flatten(0, 1)
    hidden = (~keep).sum(dim=1)
    assert keep[:, 0].all()
    assert hidden.max() == 9 and hidden.min() == 0  # drawn between 0 and a quarter of 40, row by row
    assert abs(hidden.float().mean() - 4.5) < 0.5
    assert ((~keep[:, 1:]).float().mean(dim=0) - 4.5 / 39).abs().max() < 0.05  # each alike


@each_condition
@each_kind
def test_forgotten_keys_are_not_attended_to(kind: Kind, options: dict[str, Any]) -> None:
    """And positions stay what they were: nothing moves up."""
    network = kind.build(**options).eval()
    torch.manual_seed(0)
    usual = network(**inputs(kind), **given(options))
    forgetful = network(**inputs(kind), **given(options), forget_prob=0.9)
    assert difference(usual, forgetful) > 1e-3
    assert difference(network(**inputs(kind), **given(options), forget_prob=1e-9), usual) < 1e-5


def test_what_is_hidden_has_no_influence() -> None:
    """With all but the first key hidden a change of a token reaches its own place alone."""
    network = KINDS["semantic"].build().eval()
    ids = torch.randint(SEMANTIC, (1, 6))
    changed = ids.clone()
    changed[0, 2] = (ids[0, 2] + 1) % SEMANTIC
    for seed in range(50):
        torch.manual_seed(seed)
        if not remembered(torch.zeros(1, 7, 1), 0.999)[0, 3]:
            break
    outputs = []
    for tokens in (ids, changed):
        torch.manual_seed(seed)
        outputs.append(network(ids=tokens, forget_prob=0.999))
    different = (outputs[0] - outputs[1]).abs().amax(dim=(0, 2)) > 1e-6
    assert different.tolist() == [False, False, False, True, False, False, False]


# ------------------------------------------------------------------ the delay


@pytest.mark.parametrize(("frames", "quantizers"), [(1, 1), (1, 4), (5, 3), (4, 1)])
def test_delayed_codes_come_back(frames: int, quantizers: int) -> None:
    codes = torch.randint(CODES, (2, frames, quantizers))
    steps = delayed(codes, CODES)
    assert steps.shape == (2, frames + quantizers, quantizers)
    for step in range(frames + quantizers):
        for quantizer in range(quantizers):
            frame = step - quantizer
            expected = codes[:, frame, quantizer] if 0 <= frame < frames else torch.tensor([CODES, CODES])
            assert torch.equal(steps[:, step, quantizer], expected)
    assert torch.equal(undelayed(steps, frames), codes)


def test_a_code_is_known_before_the_finer_ones_of_its_frame_are_asked_for() -> None:
    network = KINDS["delayed"].build().eval()
    codes = torch.randint(CODES, (1, 4, COARSE + FINE))
    changed = codes.clone()
    changed[0, 1, 0] = (codes[0, 1, 0] + 1) % CODES
    before, after = (network(semantic_token_ids=IDS[:1], token_ids=tokens) for tokens in (codes, changed))
    different = (before - after).abs().amax(dim=(0, 2, 3)) > 1e-6
    assert different.tolist() == [False, False] + [True] * 7  # from the step that asks for quantizer 1 of frame 1


# ------------------------------------------------------------------ constructors, saving


@each_kind
def test_the_constructor_names_all_its_keywords(kind: Kind) -> None:
    shared = set(inspect.signature(TokenTransformer.__init__).parameters) - {"self"}
    named = inspect.signature(kind.transformer).parameters
    assert shared | set(kind.sizes) <= set(named)
    assert all(entry.kind is entry.KEYWORD_ONLY for entry in named.values())
    network = kind.build(ff_dropout=0.25)
    assert set(network.arguments) == set(named)
    assert network.arguments["ff_dropout"] == 0.25 and network.arguments["cond_drop_prob"] == 0.5
    with pytest.raises(TypeError):
        kind.build(dropout=0.1)


def test_the_own_defaults_are_recorded() -> None:
    assert KINDS["coarse"].build().arguments["project_semantic_logits"] is True
    assert KINDS["fine"].build().arguments["project_coarse_logits"] is True
    assert KINDS["fine"].build().arguments["pad_id"] == -1


@each_condition
@each_kind
def test_saved_and_loaded_it_says_the_same(kind: Kind, options: dict[str, Any], tmp_path: Path) -> None:
    network = kind.build(**options).eval()
    network.save_pretrained(tmp_path)
    loaded = load_network(tmp_path)
    assert type(loaded) is kind.transformer and loaded.arguments == network.arguments
    assert difference(network(**inputs(kind), **given(options)), loaded(**inputs(kind), **given(options))) == 0
    other = kind.build(seed=5, **options)
    other.load(tmp_path)
    assert difference(network(**inputs(kind), **given(options)), other.eval()(**inputs(kind), **given(options))) == 0


@pytest.mark.parametrize("option", ["attn_dropout", "ff_dropout"])
@each_kind
def test_dropout_acts_in_training_alone(kind: Kind, option: str) -> None:
    network = kind.build(**{option: 0.5})
    torch.manual_seed(0)
    assert difference(*(network.train()(**inputs(kind)) for _ in range(2))) > 1e-3
    assert difference(*(network.eval()(**inputs(kind)) for _ in range(2))) == 0


def test_it_knows_its_device() -> None:
    assert all(kind.build().device == torch.device("cpu") for kind in KINDS.values())


@each_kind
def test_recomputed_activations_give_the_same_gradients(kind: Kind) -> None:
    gradients = []
    for checkpoint_activations in (False, True):
        network = kind.build(checkpoint_activations=checkpoint_activations).train()
        torch.manual_seed(1)
        as_tuple(network(**inputs(kind), forget_prob=0.3))[-1].square().mean().backward()
        gradients.append([weight.grad for weight in network.layers.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_logits_are_of_the_hidden_state_and_the_quantizers_matrix() -> None:
    codes = KINDS["coarse"].build().coarse
    hidden = torch.randn(2, 7, SIZES["dim"])
    expected = torch.stack(
        [F.linear(hidden[:, place], codes.logit_weights[place % COARSE]) for place in range(7)], dim=1
    )
    torch.testing.assert_close(codes.logits(hidden), expected)
    one = [codes.logits_of_one(hidden[:, place], torch.tensor(place)) for place in range(7)]
    torch.testing.assert_close(torch.stack(one, dim=1), expected)
    ids: Tensor = torch.randint(CODES, (2, 7))
    each = [codes.embed_one(ids[:, place], torch.tensor(place)) for place in range(7)]
    torch.testing.assert_close(torch.stack(each, dim=1), codes.embed(ids))
