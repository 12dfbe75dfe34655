import math
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from helicon.models.muse import generate
from helicon.models.muse.generate import Decoding, Filler, Rules, halton_order
from helicon.models.muse.maskgit import MaskGit, cosine_schedule
from helicon.models.muse.transformer import MaskGitTransformer, TokenCritic
from helicon.nn.sampling import guide, keep_top_k, num_kept, sample_gumbel
from models.muse.small_maskgit import BYTES, SAMPLERS, SIZES, TEXTS, build, each_sampler, inputs_of, tokenizer

# ---------------------------------------------------------------------------------------------- learning


WORDS = ["ant", "bee", "cat", "dog"]
PATTERNS = torch.randint(16, (4, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def trained() -> MaskGit:
    """Has learned one pattern of tokens for each of four words."""
    torch.manual_seed(1)
    transformer = MaskGitTransformer(
        num_tokens=16, dim=32, seq_len=16, depth=1, heads=2, dim_head=16, t5_name=BYTES, self_cond=True
    )
    maskgit = MaskGit(16, transformer, self_token_critic=True, cond_drop_prob=0.2)
    optimizer = torch.optim.AdamW(maskgit.parameters(), lr=6e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 200)
    losses = []
    for _ in range(200):
        chosen = torch.randint(4, (16,))
        loss = maskgit(PATTERNS[chosen], texts=[WORDS[i] for i in chosen], return_losses=True)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.cross_entropy.item())
    assert losses[0] > 2.5 and sum(losses[-10:]) / 10 < 0.6, losses[-10:]
    return maskgit.eval()


def right(maskgit: MaskGit, texts: list[str] | None, **options: Any) -> float:
    ids = maskgit.generate(texts, return_ids=True, seed=0, batch_size=4, timesteps=6, cond_scale=1.5, **options)
    return (ids.flatten(1) == PATTERNS).float().mean().item()


@each_sampler
@pytest.mark.parametrize("use_critic", [True, False])
def test_it_makes_what_the_words_say(trained: MaskGit, sampler: str, use_critic: bool):
    assert right(trained, WORDS, sampler=sampler, force_not_use_token_critic=not use_critic) > 0.9
    assert right(trained, None, sampler=sampler, force_not_use_token_critic=not use_critic) < 0.6


def test_it_makes_the_rest_of_a_picture(trained: MaskGit):
    """Without words: half of the tokens tell which pattern it is."""
    ids, repaint = PATTERNS.view(4, 4, 4), torch.zeros(4, 4, 4, dtype=torch.bool)
    repaint[:, 2:] = True
    known = torch.where(repaint, 0, ids)
    made = trained.generate(images=known, repaint=repaint, seed=0, timesteps=6, temperature=0.0, return_ids=True)
    assert torch.equal(made[~repaint], ids[~repaint])
    alone = trained.generate(batch_size=4, seed=0, timesteps=6, temperature=0.0, return_ids=True)
    assert (made == ids)[repaint].float().mean() > 0.75 and (alone == ids)[repaint].float().mean() < 0.5


def test_a_negative_text_leads_away(trained: MaskGit):
    """D-X2: negative prompts crash in the reference."""
    ids = trained.generate(["ant"], ["bee"], seed=0, timesteps=6, cond_scale=1.5, return_ids=True).flatten(1)
    assert (ids == PATTERNS[0]).float().mean() > 0.9
    away = trained.generate(None, ["bee"] * 20, seed=0, timesteps=6, cond_scale=2.0, return_ids=True).flatten(1)
    agreement = (away[:, None] == PATTERNS).float().mean(dim=-1)
    assert (agreement.argmax(dim=1) == 1).float().mean() < 0.1


# ---------------------------------------------------------------------------------------------- the samplers


def test_the_halton_order_is_that_of_its_definition():
    """Points (1/2, 1/3), (1/4, 2/3), (3/4, 1/9), (1/8, 4/9), (5/8, 7/9), ... across and down."""
    order = halton_order(4, 4)
    assert sorted(order) == list(range(16))
    assert [order.index(turn) for turn in range(5)] == [6, 9, 3, 4, 14]
    wide = halton_order(2, 6)
    assert sorted(wide) == list(range(12)) and wide[3] == 0


@pytest.mark.parametrize(
    ("sampler", "counts"),
    [
        ("confidence", [max(1, int(math.cos(math.pi / 2 * step / 5) * 16)) for step in range(5)]),
        ("halton", [max(1, int(math.cos(math.pi / 2 * step / 5) * 16)) for step in range(5)]),
        ("reference", [max(1, int(math.cos(math.pi / 2 * step / 4) * 16)) for step in range(5)]),
    ],
)
def test_as_many_tokens_are_masked_as_the_schedule_says(sampler: str, counts: list[int]):
    maskgit = build()
    seen = inputs_of(maskgit)
    ids = maskgit.generate(TEXTS, sampler=sampler, timesteps=5, return_ids=True)
    assert [(x == 64).sum(dim=1).tolist() for x in seen] == [[count] * 4 for count in counts]
    assert ids.max() < 64


@each_sampler
def test_a_token_that_stayed_stays(sampler: str):
    maskgit = build()
    seen = inputs_of(maskgit)
    ids = maskgit.generate(TEXTS, sampler=sampler, timesteps=6, return_ids=True).flatten(1)
    for before, after in zip(seen, [*seen[1:], torch.cat((ids, ids))], strict=True):
        assert (before == after)[before != 64].all()


@pytest.mark.parametrize("no_mask_token_prob", [0.0, 0.3])
def test_tokens_may_be_masked_again(no_mask_token_prob: float):
    """D-X9: the reference refuses unless it was trained to predict tokens that it sees."""
    maskgit = build(no_mask_token_prob=no_mask_token_prob)
    seen = inputs_of(maskgit)
    maskgit.generate(TEXTS, timesteps=6, can_remask_prev_masked=True, return_ids=True, choice_temperature=30.0, seed=0)
    again = [((before != 64) & (after == 64)).any() for before, after in pairwise(seen)]
    assert any(again)


def test_halton_unmasks_in_its_order():
    maskgit = build()
    seen = inputs_of(maskgit)
    maskgit.generate(TEXTS, sampler="halton", timesteps=4, return_ids=True)
    order = torch.tensor(halton_order(4, 4))
    for x in seen:
        assert torch.equal(x == 64, (order >= 16 - (x == 64).sum(dim=1, keepdim=True)))


def reference_sampler(maskgit: MaskGit, texts: list[str], steps: int, scale: float) -> torch.Tensor:
    """As muse-maskgit-pytorch describes it, with two passes and nothing kept, at temperature 0."""
    ids, scores = torch.full((len(texts), 16), 64), torch.zeros(len(texts), 16)
    for progress in torch.linspace(0, 1, steps, dtype=torch.float64):
        count = max(int(torch.cos(progress * math.pi / 2) * 16), 1)
        ids.scatter_(1, scores.topk(count, dim=1).indices, 64)
        cond = maskgit.transformer(ids, texts=texts)
        null = maskgit.transformer(ids, cond_drop_prob=1.0)
        logits = null + (cond - null) * scale
        is_masked = ids == 64
        ids = torch.where(is_masked, logits.argmax(dim=-1), ids)
        scores = 1 - logits.softmax(dim=-1).gather(2, ids[..., None])[..., 0]
        scores = scores.masked_fill(~is_masked, -1e5)
    return ids


def test_the_reference_s_sampler_is_the_reference_s():
    maskgit = build().eval()
    with torch.no_grad():
        expected = reference_sampler(maskgit, TEXTS, 5, 2.5)
    ids = maskgit.generate(TEXTS, sampler="reference", temperature=0.0, timesteps=5, cond_scale=2.5, return_ids=True)
    assert torch.equal(ids.flatten(1), expected)


def drawn_at(decoding: Decoding, logits: torch.Tensor, step: int) -> torch.Tensor:
    rules = Rules.of(decoding, has_critic=False, judges_visible=False)
    return rules.draw(logits, decoding.numbers()[step, 0], None if rules.is_greedy else torch.rand(logits.shape))


def test_what_fades_fades():
    reference, confidence = Decoding("reference", 4), Decoding("confidence", 4)
    logits = torch.tensor([2.0, 1.0, 0.0, -5.0]).expand(2000, 1, 4)
    torch.manual_seed(0)
    first = [(drawn_at(d, logits, 0) == 0).float().mean().item() for d in (reference, confidence)]
    last = [(drawn_at(d, logits, 3) == 0).float().mean().item() for d in (reference, confidence)]
    assert first == [1.0, 1.0]  # the upper tenth of four tokens is one
    wide = Decoding("confidence", 4, topk_filter_thres=0.0), Decoding("reference", 4, topk_filter_thres=0.0)
    plain = torch.tensor([2.0, 1.0, 0.0, -5.0])
    for decoding, step, temperature in ((wide[0], 0, 1.0), (wide[0], 3, 1.0), (wide[1], 0, 0.75), (wide[1], 2, 0.25)):
        drawn = (drawn_at(decoding, logits, step) == 0).float().mean().item()
        assert drawn == pytest.approx((plain / temperature).softmax(0)[0].item(), abs=0.04)
    assert last[0] == 1.0 and (drawn_at(wide[1], logits, 3) == 0).all()
    assert (drawn_at(Decoding(temperature=0.0, topk_filter_thres=0.0), logits, 0) == 0).all()


def test_only_the_likeliest_tokens_are_drawn():
    logits = torch.randn(1, 500, 20)
    drawn = drawn_at(Decoding(topk_filter_thres=0.9, temperature=50.0), logits, 0)
    assert keep_top_k(logits, 2).gather(-1, drawn[..., None]).isfinite().all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timesteps": 0}, "timesteps=0"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"topk_filter_thres": 1.5}, "topk_filter_thres=1.5"),
        ({"temperature": math.nan}, "temperature=nan must be a finite number"),
        ({"topk_filter_thres": math.nan}, "topk_filter_thres=nan"),
        ({"choice_temperature": -math.inf}, "choice_temperature=-inf"),
        ({"cond_scale": math.inf}, "cond_scale=inf"),
        ({"critic_noise_scale": math.nan}, "critic_noise_scale=nan"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        Decoding(**options)


# ---------------------------------------------------------------------------------------------- one step for all steps


@torch.no_grad()
def plain_loop(
    maskgit: MaskGit, texts: list[str], decoding: Decoding, unknown: torch.Tensor, use_critic: bool, seed: int
) -> torch.Tensor:
    """Step after step with the host's own numbers, nothing kept in place and noise drawn where it is used."""
    transformer, critic, generator = maskgit.transformer, maskgit.token_critic, torch.Generator().manual_seed(seed)
    draw = lambda like: torch.rand(like.shape, generator=generator)
    context = transformer.read_context(transformer.guided_context(len(texts), **transformer.read_texts(texts)))
    ids, is_masked, embed = torch.zeros_like(unknown, dtype=torch.long), unknown, None
    scores = torch.tensor(halton_order(4, 4), dtype=torch.float32).expand(unknown.shape)
    confidence = torch.zeros(unknown.shape)
    for step, fraction in enumerate(decoding.masked_fractions(cosine_schedule)):
        if step:
            order = scores.masked_fill(~unknown, -torch.inf).argsort(dim=1, descending=True).argsort(dim=1)
            is_masked = (order < (fraction * unknown.sum(dim=1, keepdim=True)).floor().clamp(min=1)) & unknown
        x = torch.where(is_masked, 64, ids)
        outputs, embed = transformer(torch.cat((x, x)), True, context=context, self_cond_embed=embed)
        logits = guide(*outputs.chunk(2), decoding.scale(step))
        temperature, drawn = decoding.token_temperature(step), logits.argmax(dim=-1)
        if temperature:
            kept = keep_top_k(logits, num_kept(decoding.topk_filter_thres, 64))
            drawn = sample_gumbel(kept / temperature, draw(kept))
        ids = torch.where(is_masked, drawn, ids)
        if decoding.sampler == "halton":
            continue
        if use_critic:
            judged = guide(*critic(torch.cat((ids, ids)), context=context).chunk(2), decoding.scale(step))[..., 0]
            scores = judged + (draw(judged) - 0.5) * decoding.critic_noise_scale * decoding.left(step)
            continue
        likely = logits.log_softmax(dim=-1).gather(-1, ids[..., None])[..., 0]
        confidence = torch.where(is_masked, likely, confidence)
        noisy = confidence
        if decoding.sampler == "confidence":
            inside = draw(confidence).clamp(min=torch.finfo(torch.float32).tiny, max=1 - 1e-7)
            noisy = confidence - decoding.choice_temperature * decoding.left(step) * (-inside.log()).log()
        scores = -noisy
        if not decoding.can_remask_prev_masked:
            scores = scores.masked_fill(~is_masked, -torch.inf)
    return ids


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 1.7, "topk_filter_thres": 0.6, "choice_temperature": 11.3},
    "likeliest": {"temperature": 0.0},
    "growing guidance": {"cond_scale": 4.7, "cond_scale_schedule": "linear"},
    "masked again": {"can_remask_prev_masked": True, "choice_temperature": 30.0},
    "noisy critic": {"critic_noise_scale": 3.3},
}


@each_sampler
@pytest.mark.parametrize("use_critic", [True, False])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_step_with_numbers_on_the_device_is_the_plain_one(sampler: str, use_critic: bool, options: dict[str, Any]):
    """Token by token, for every sampler; also where only a region is to be found."""
    maskgit = build({"t5_name": BYTES, "self_cond": True}, self_token_critic=True).eval()
    decoding = Decoding(sampler=sampler, timesteps=7, **options)
    unknown = torch.rand(2, 16, generator=torch.Generator().manual_seed(3)) < 0.8
    for seed, region in ((0, torch.ones_like(unknown)), (1, unknown)):
        expected = plain_loop(maskgit, TEXTS, decoding, region, use_critic, seed)
        made = maskgit.generate(
            TEXTS,
            images=torch.zeros(2, 4, 4, dtype=torch.long),
            repaint=region.view(2, 4, 4),
            **{field.name: getattr(decoding, field.name) for field in fields(decoding)},
            force_not_use_token_critic=not use_critic,
            seed=seed,
            return_ids=True,
        )
        assert torch.equal(made.flatten(1), expected)


def test_the_weights_run_in_another_type_and_are_put_back():
    maskgit, seen = build(), []
    maskgit.transformer.register_forward_hook(lambda module, inputs, output: seen.append(output[0].dtype))
    before = {name: tensor.clone() for name, tensor in maskgit.state_dict().items()}
    maskgit.filler = Filler(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        first = maskgit.generate(TEXTS, timesteps=3, seed=0, return_ids=True)
    assert set(seen) == {torch.bfloat16}
    for name, tensor in maskgit.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, before[name])
    with torch.no_grad():
        maskgit.transformer.token_emb.own.weight.mul_(-1)  # the weights of the day are used
    assert not torch.equal(maskgit.generate(TEXTS, timesteps=3, seed=0, return_ids=True), first)


def test_there_is_no_graph_without_a_gpu():
    maskgit = build()
    maskgit.filler = Filler(capture=True)
    with pytest.raises(ValueError, match="needs a CUDA device"):
        maskgit.generate(TEXTS, return_ids=True)


def test_a_copied_model_makes_the_same_pictures():
    maskgit = build()
    expected = maskgit.generate(TEXTS, timesteps=3, seed=0, return_ids=True)
    copied = deepcopy(maskgit)
    assert copied.filler is not maskgit.filler
    assert torch.equal(copied.generate(TEXTS, timesteps=3, seed=0, return_ids=True), expected)


@pytest.mark.slow
def test_compiled_it_learns_and_makes_the_same():
    """In a process of its own: the compiler cannot see through the type checks of this one."""
    script = Path(__file__).with_name("compile_maskgit.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["learns", "makes"]


@pytest.fixture
def on_gpu() -> MaskGit:
    return build({"t5_name": BYTES, "self_cond": True}, self_token_critic=True).cuda()


@pytest.mark.gpu
@each_sampler
@pytest.mark.parametrize("use_critic", [True, False])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_captured_steps_are_eager_steps(on_gpu: MaskGit, sampler: str, use_critic: bool, options: dict[str, Any]):
    make = lambda filler, seed, texts: _made_with(
        on_gpu, filler, seed, texts, sampler=sampler, force_not_use_token_critic=not use_critic, **options
    )
    captured, eager = Filler(compile=False), Filler(capture=False)
    for seed, texts in enumerate((TEXTS, ["another", "and one of quite another length"], TEXTS)):
        assert torch.equal(make(captured, seed, texts), make(eager, seed, texts))
        with torch.no_grad():
            on_gpu.transformer.token_emb.own.weight.mul_(1.1)  # a captured graph reads the weights of the day
    assert len(captured._sessions) == 2  # two lengths of text


@pytest.mark.gpu
def test_captured_steps_serve_other_numbers_of_steps(on_gpu: MaskGit):
    captured, eager = Filler(compile=False), Filler(capture=False)
    for options in ({"timesteps": 3}, {"timesteps": 9, "cond_scale": 5.0, "temperature": 0.7}):
        assert torch.equal(*(_made_with(on_gpu, filler, 0, TEXTS, **options) for filler in (captured, eager)))
    assert len(captured._sessions) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [True, False])
def test_the_loop_never_waits_for_the_device(on_gpu: MaskGit, capture: bool, monkeypatch: pytest.MonkeyPatch):
    run = generate._Session.run

    def watched(*arguments: Any) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(generate._Session, "run", watched)
    for sampler in SAMPLERS:
        _made_with(on_gpu, Filler(capture=capture, compile=False), 0, TEXTS, sampler=sampler)


def _made_with(maskgit: MaskGit, filler: Filler, seed: int, texts: list[str], **options: Any) -> torch.Tensor:
    maskgit.filler = filler
    return maskgit.generate(texts, seed=seed, return_ids=True, **{"timesteps": 6, **options})


# ---------------------------------------------------------------------------------------------- guidance and conditions


def test_guidance_is_one_batch_and_texts_are_read_once():
    maskgit, calls = build(), []
    seen = inputs_of(maskgit)
    cross = maskgit.transformer.layers.layers[0].cross.block.to_kv
    cross.register_forward_hook(lambda *_: calls.append("keys"))
    maskgit.transformer.text_encoder.transformer.register_forward_hook(lambda *_: calls.append("text"))
    maskgit.generate(TEXTS, timesteps=5, return_ids=True)
    assert [len(x) for x in seen] == [4] * 5 and calls == ["text", "text", "keys"]  # the text, and the same without it
    seen.clear()
    maskgit.generate(TEXTS, timesteps=2, cond_scale=1, return_ids=True)
    assert [len(x) for x in seen] == [2] * 2


def test_guidance_may_grow_from_step_to_step():
    assert [Decoding(timesteps=3, cond_scale=5.0).scale(step) for step in range(3)] == [5.0] * 3
    linear = Decoding(timesteps=3, cond_scale=5.0, cond_scale_schedule="linear")
    assert [linear.scale(step) for step in range(3)] == [1.0, 3.0, 5.0]
    assert Decoding(timesteps=1, cond_scale=5.0, cond_scale_schedule="linear").scale(0) == 5.0
    maskgit = build()
    one, other = (
        maskgit.generate(TEXTS, cond_scale_schedule=schedule, timesteps=4, seed=0, temperature=0.0, return_ids=True)
        for schedule in ("constant", "linear")
    )
    assert not torch.equal(one, other)


def test_one_text_may_make_many_pictures():
    maskgit = build()
    many = maskgit.generate(["a"], batch_size=3, seed=0, timesteps=3, return_ids=True)
    assert torch.equal(many, maskgit.generate(["a"] * 3, seed=0, timesteps=3, return_ids=True))
    assert len(many.flatten(1).unique(dim=0)) > 1
    with pytest.raises(ValueError, match="batch_size=3"):
        maskgit.generate(TEXTS, batch_size=3, return_ids=True)
    for none in ({"batch_size": -3}, {"texts": ["a"], "batch_size": 0}, {"texts": []}):
        with pytest.raises(ValueError, match="pictures cannot be made: give at least one text"):
            maskgit.generate(**none, return_ids=True)


@pytest.mark.parametrize("conditions", ["classes", "embedded", "nothing"])
def test_conditions_of_every_kind(conditions: str):
    """D-X9: the reference needs texts."""
    options, one, other = {
        "classes": ({"num_classes": 3}, {"classes": [0, 2]}, {"classes": torch.tensor([1, 1])}),
        "embedded": (
            {"text_embed_dim": 4},
            {"text_embeds": torch.ones(2, 3, 4)},
            {"text_embeds": -torch.ones(2, 1, 4)},
        ),
        "nothing": ({"condition_on_text": False}, {"batch_size": 2}, {"batch_size": 2}),
    }[conditions]
    maskgit = build(options)
    results = [maskgit.generate(**given, seed=0, timesteps=3, return_ids=True) for given in (one, other)]
    assert results[0].shape == (2, 4, 4) and torch.equal(*results) == (conditions == "nothing")


def test_one_class_may_stand_alone_and_one_of_two_numbers_is_refused():
    maskgit = build({"num_classes": 3}, class_names=["fox", "owl", "1"])
    options: dict[str, Any] = {"timesteps": 1, "return_ids": True, "seed": 0, "batch_size": 2}
    alone, listed, named = (maskgit.generate(classes=given, **options) for given in (2, [2, 2], "1"))
    assert torch.equal(alone, listed) and torch.equal(alone, named)
    assert maskgit.class_numbers([0, "owl", 1, "1"]) == [0, 1, 2, 2]  # what is a name is meant as one
    for given in ("cat", True, 3):
        with pytest.raises(ValueError, match=rf"no class {given}: this MaskGit knows fox, owl, 1 \(or 0 to 2\)"):
            maskgit.generate(classes=given, **options)
    with pytest.raises(ValueError, match="has no classes"):
        build().generate(["a"], classes=0, **options)
    with pytest.raises(ValueError, match=r"conditions for 3 pictures, and batch_size=2: give one for all"):
        maskgit.generate(classes=[0, 1, 2], cond_scale=2, **options)


@pytest.mark.parametrize("classes", [[0, 7], torch.tensor([0, 7])])
def test_a_class_that_is_not_there_is_refused(classes: Any):
    with pytest.raises(ValueError, match="there is no class 7: this MaskGit knows 0 to 2"):
        build({"num_classes": 3}).generate(classes=classes, timesteps=1, return_ids=True)


def test_self_conditioning_passes_embeddings_on():
    maskgit = build({"condition_on_text": False, "self_cond": True})
    given: list[Any] = []
    maskgit.transformer.register_forward_pre_hook(
        lambda module, inputs, kwargs: given.append(kwargs["self_cond_embed"].clone()), with_kwargs=True
    )
    made: list[Any] = []
    maskgit.transformer.layers.register_forward_hook(lambda module, inputs, output: made.append(output))
    maskgit.generate(batch_size=2, timesteps=3, return_ids=True)
    assert not given[0].any() and given[0].shape == (2, 16, 20)
    assert all(map(torch.equal, given[1:], made[:-1]))


def test_the_critic_decides_where_there_is_one():
    torch.manual_seed(1)
    critic = TokenCritic(**SIZES, t5_name=BYTES)
    maskgit, judged = build(token_critic=critic), []
    critic.register_forward_pre_hook(lambda module, inputs: judged.append(len(inputs[0])))
    options: dict[str, Any] = {"timesteps": 4, "seed": 0, "return_ids": True, "critic_noise_scale": 0.0}
    with_critic = maskgit.generate(TEXTS, **options)
    assert judged == [4] * 4
    without = maskgit.generate(TEXTS, force_not_use_token_critic=True, **options)
    maskgit.generate(TEXTS, sampler="halton", **options)
    assert len(judged) == 4 and not torch.equal(with_critic, without)
    seen = inputs_of(maskgit)
    with torch.no_grad():
        critic.token_emb.of_digits.weight.zero_()
        critic.token_emb.own.weight.zero_()
        critic.token_emb.own.weight[:32] = 1
        critic.layers.forward = lambda x, **_: x  # type: ignore[method-assign]
        critic.head.weight.fill_(1.0)  # tokens below 32 are never the true ones
    maskgit.generate(TEXTS, **{**options, "cond_scale": 1.0, "temperature": 8.0})  # many different ones to choose from
    ids = seen[1]
    assert (ids[ids != 64] >= 32).float().mean() > 0.9


# ---------------------------------------------------------------------------------------------- pictures


def test_pictures_lie_between_0_and_1_and_modes_are_put_back():
    maskgit = build(vae=tokenizer()).train()
    maskgit.transformer.layers.eval()
    with torch.no_grad():
        maskgit.vae.autoencoder.decoder.last.weight.mul_(100)
    images = maskgit.generate(TEXTS, timesteps=2, seed=0)
    assert images.shape == (2, 3, 16, 16) and (images.min(), images.max()) == (0, 1) and not images.requires_grad
    assert maskgit.transformer.training and not maskgit.transformer.layers.training and not maskgit.vae.training
    ids = maskgit.generate(TEXTS, timesteps=2, seed=0, return_ids=True)
    torch.testing.assert_close(maskgit.vae.decode_from_ids(ids).clamp(0, 1), images)


@pytest.mark.parametrize("size", [13, 15])
def test_pictures_have_the_size_asked_for_though_their_last_tokens_reach_further(size: int):
    torch.manual_seed(0)
    maskgit = MaskGit(size, MaskGitTransformer(**SIZES, condition_on_text=False), vae=tokenizer())
    made, ids = (maskgit.generate(timesteps=1, seed=0, return_ids=return_ids) for return_ids in (False, True))
    assert made.shape == (1, 3, size, size)
    assert torch.equal(made, maskgit.vae.decode_from_ids(ids)[..., :size, :size].clamp(0, 1))
    everything = {"images": ids, "repaint": torch.ones(1, 4, 4, dtype=torch.bool)}
    assert maskgit.generate(**everything, timesteps=1).shape == (1, 3, size, size)


@pytest.mark.parametrize("side", [0, -2, 2, 9])
def test_a_grid_whose_places_are_not_learned_is_refused(side: int):
    maskgit = build({"condition_on_text": False})
    with pytest.raises(ValueError, match=f"fmap_size={side}, .* places of 4 tokens a side alone: leave it out"):
        maskgit.generate(fmap_size=side, timesteps=1, return_ids=True)
    assert maskgit.generate(fmap_size=4, timesteps=1, return_ids=True).shape == (1, 4, 4)
    wide = torch.zeros(1, 2, 8, dtype=torch.long)  # as many tokens, at other places
    with pytest.raises(ValueError, match="a picture of 2 x 8 tokens"):
        maskgit.generate(images=wide, repaint=wide == 0, timesteps=1, return_ids=True)


def test_dropout_does_not_act():
    maskgit = build({"t5_name": BYTES, "dropout": 0.5}).train()
    one, other = (
        maskgit.generate(TEXTS, seed=0, timesteps=3, temperature=0.0, sampler="halton", return_ids=True)
        for _ in range(2)
    )
    assert torch.equal(one, other)


@each_sampler
def test_a_seed_decides_everything_and_disturbs_nothing(sampler: str):
    maskgit = build(self_token_critic=True)
    make: Callable[[int | None], torch.Tensor] = lambda seed: maskgit.generate(
        TEXTS, sampler=sampler, timesteps=3, seed=seed, return_ids=True
    )
    torch.manual_seed(0)
    first = make(7)
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(0))
    assert torch.equal(make(7), first) and not torch.equal(make(8), first)
    torch.manual_seed(3)
    unseeded = make(None)
    torch.manual_seed(3)
    assert torch.equal(make(None), unseeded)


def test_the_schedule_may_be_another():
    maskgit = build(noise_schedule=lambda progress: 1 - progress)
    seen = inputs_of(maskgit)
    maskgit.generate(TEXTS, timesteps=4, return_ids=True)
    assert [int((x[0] == 64).sum()) for x in seen] == [16, 12, 8, 4]
    assert maskgit.mean_masked == pytest.approx(0.5) and build().mean_masked == pytest.approx(2 / math.pi)
    assert cosine_schedule(torch.tensor(0.0)) == 1
