"""MaskGit: pictures from words by filling in masked tokens (MaskGIT, Chang et al. 2022; Muse, Chang et al. 2023).

Training masks a random part of a picture's tokens and asks for them back:

    u ~ U(0, 1),  round(cos(pi u / 2) n) tokens masked (at least one),  loss = cross-entropy of the masked ones

The picture is tokenised by a frozen `VQGanVAE`, or comes as token ids. A super-resolution MaskGit (`cond_image_size`) also
sees the tokens of the picture at low resolution, while it learns as well as when it generates.

Letters: b batch, n tokens, c image channels, h height, w width (of the picture, or of the token grid where said), v vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from helicon.models.muse.generate import Canvas, Decoding, Filler, Reader, Sampler
from helicon.models.muse.transformer import Context, SelfCritic, Transformer, critic_loss
from helicon.models.muse.vqgan import VQGanVAE
from helicon.nn.codes import check_ids
from helicon.nn.network import Network, named
from helicon.nn.numbers import check_probabilities
from helicon.nn.sampling import sample_gumbel


@named
def cosine_schedule(progress: Tensor) -> Tensor:
    """The part of the tokens that is masked, from all of them at 0 to none at 1."""
    return torch.cos(progress * torch.pi / 2)


class Losses(NamedTuple):
    """What `MaskGit` learns from; all but `total` are for looking at."""

    total: Tensor
    cross_entropy: Tensor  # nats a masked token
    accuracy: Tensor  # of the likeliest token
    critic: Tensor | None


class Masked(NamedTuple):
    """A batch of tokens, some of them hidden, and where those are."""

    x: Tensor  # [b, n] what the network sees
    mask: Tensor  # [b, n] the tokens to predict
    places: Tensor  # [k] indices of those among all b * n tokens, filled up with others
    is_real: Tensor  # [k] False for what is filled up


class MaskGit(Network):
    parts: ClassVar[tuple[str, ...]] = ("transformer", "token_critic")

    vae: VQGanVAE | None
    cond_vae: VQGanVAE | None
    token_critic: Transformer | SelfCritic | None

    def __init__(
        self,
        image_size: int,
        transformer: Transformer,
        noise_schedule: Callable[..., Any] = cosine_schedule,
        token_critic: Transformer | SelfCritic | None = None,
        self_token_critic: bool = False,
        vae: VQGanVAE | None = None,
        cond_vae: VQGanVAE | None = None,
        cond_image_size: int | None = None,
        cond_drop_prob: float = 0.5,
        self_cond_prob: float = 0.9,
        no_mask_token_prob: float = 0.0,
        critic_loss_weight: float = 1.0,
        *,
        class_names: Sequence[str] | None = None,
    ):
        """
        Args:
            image_size: pixels a side.
            noise_schedule: falls from 1 to 0; to be saved it must be registered with `helicon.nn.network.named`.
            token_critic: judges the tokens while sampling, and is trained along (Lezama et al. 2022).
            self_token_critic: the transformer is its own critic, with one more layer.
            vae: the tokenizer. A frozen copy is used: it is a stage, never trained here and always in evaluation mode. None
                learns from token ids alone.
            cond_vae: tokenizer of the low-resolution picture; by default the same.
            cond_image_size: pixels a side of the low-resolution picture this MaskGit enlarges.
            cond_drop_prob: how often a row learns without its text or class, for guidance.
            self_cond_prob: how often a row sees its own first embeddings (where the transformer has `self_cond`).
            no_mask_token_prob: how often a token that is to be predicted is not hidden.
            class_names: what the classes are called, in their order; a trainer that finds them in folders names them (`name_classes`).
        """
        super().__init__()
        if token_critic is not None and self_token_critic:
            raise ValueError("give a token_critic or self_token_critic=True, not both")
        if isinstance(token_critic, SelfCritic) and token_critic.net is transformer:
            # The same thing in other words; saved as a part of its own it would bring a second transformer along.
            self.arguments |= {"token_critic": None, "self_token_critic": True}
        if cond_vae is not None and cond_image_size is None:
            raise ValueError("cond_vae belongs to super-resolution: give cond_image_size too")
        check_probabilities(
            cond_drop_prob=cond_drop_prob, self_cond_prob=self_cond_prob, no_mask_token_prob=no_mask_token_prob
        )
        self.image_size, self.cond_image_size = image_size, cond_image_size
        self.cond_drop_prob, self.self_cond_prob = cond_drop_prob, self_cond_prob
        self.no_mask_token_prob, self.critic_loss_weight = no_mask_token_prob, critic_loss_weight
        self.noise_schedule = noise_schedule
        self.mean_masked = _mean_masked(noise_schedule)
        self.filler = Filler()
        self.transformer = transformer
        self.token_critic = SelfCritic(transformer) if self_token_critic else token_critic
        # Not submodules: their weights and their mode are not this network's to change (see _apply).
        self.__dict__["vae"] = self._stage("vae", vae)
        self.__dict__["cond_vae"] = self._stage("cond_vae", cond_vae)
        if cond_image_size is not None and cond_vae is None:
            self.__dict__["cond_vae"] = self.vae
        self._check()
        self.class_names: list[str] | None = None
        if class_names is not None:
            self.name_classes(class_names)

    def _stage(self, name: str, vae: VQGanVAE | None) -> VQGanVAE | None:
        if vae is not None:
            self.arguments[name] = vae = vae.copy_for_eval()
        return vae

    def _check(self) -> None:
        transformer, critic, vae, cond_vae = self.transformer, self.token_critic, self.vae, self.cond_vae
        if transformer.mask_id is None:
            raise ValueError("the transformer has no mask token: give a MaskGitTransformer, or add_mask_id=True")
        if vae is not None:
            num_tokens, side = vae.codebook_size, vae.get_encoded_fmap_size(self.image_size)
            if num_tokens != transformer.num_tokens:
                raise ValueError(
                    f"the vae has {num_tokens} codes and the transformer num_tokens={transformer.num_tokens}"
                )
            if side**2 > transformer.seq_len:
                raise ValueError(
                    f"pictures of image_size={self.image_size} have {side**2} tokens, more than seq_len={transformer.seq_len}"
                )
        if self.cond_image_size is not None and not transformer.layers.cross_attend:
            raise ValueError(
                "the transformer has no context to put a low-resolution picture in: give it cond_num_tokens"
            )
        table = transformer.token_emb if transformer.cond_emb is None else transformer.cond_emb
        if cond_vae is not None and cond_vae.codebook_size > table.num_codes:
            raise ValueError(
                f"the low-resolution tokenizer has {cond_vae.codebook_size} codes and the transformer takes "
                f"{table.num_codes}: build it with cond_num_tokens={cond_vae.codebook_size}"
            )
        if isinstance(critic, Transformer):
            for name in (
                "num_tokens",
                "seq_len",
                "t5_name",
                "text_embed_dim",
                "num_classes",
                "condition_on_text",
                "cond_num_tokens",
            ):
                if critic.arguments[name] != transformer.arguments[name]:
                    raise ValueError(
                        f"the token_critic sees what the transformer does, but its {name} is {critic.arguments[name]!r} "
                        f"and not {transformer.arguments[name]!r}"
                    )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "MaskGit":
        """Takes the tokenizers along to another device; their precision stays, for tokens depend on it."""
        super()._apply(fn, recurse)
        for stage in (self.vae, self.cond_vae):
            if stage is not None:
                stage.to(self.device)
        return self

    @property
    def device(self) -> torch.device:
        return self.transformer.device

    @property
    def fmap_size(self) -> int:
        """Tokens a side of a whole picture."""
        if self.vae is not None:
            return self.vae.get_encoded_fmap_size(self.image_size)
        return math.isqrt(self.transformer.seq_len)

    # ------------------------------------------------------------------ pictures to tokens

    def tokenize(self, images: Float[Tensor, "b c h w"]) -> Int[Tensor, "b code_h code_w"]:
        """The token ids of pictures with values in [0, 1]."""
        if self.vae is None:
            raise ValueError("this MaskGit was built without a vae: give token ids, or build it with vae=...")
        return token_ids(self.vae, images)

    def tokenize_low_resolution(self, images: Float[Tensor, "b c h w"]) -> Int[Tensor, "b code_h code_w"]:
        """The token ids of pictures scaled to `cond_image_size`."""
        if self.cond_vae is None or self.cond_image_size is None:
            raise ValueError(
                "this MaskGit has no tokenizer for low-resolution pictures: give cond_image_size and a vae, or token ids"
            )
        size = (self.cond_image_size, self.cond_image_size)
        if images.shape[-2:] != size:
            images = F.interpolate(images.float(), size, mode="bilinear", antialias=True)
        return token_ids(self.cond_vae, images)

    def _ids(self, images_or_ids: Tensor) -> Int[Tensor, "b ..."]:
        """Pictures are floats of any precision, [b, c, h, w]; ids are integers, [b, n] or [b, h, w]."""
        if images_or_ids.is_floating_point():
            return self.tokenize(images_or_ids)
        if images_or_ids.ndim not in (2, 3):
            raise ValueError(
                f"integers of shape {tuple(images_or_ids.shape)} are neither token ids [b, n] or [b, h, w] nor pictures, "
                f"which are floats in [0, 1]"
            )
        check_ids(images_or_ids, self.transformer.num_tokens)
        return images_or_ids

    def _check_grid(self, *grid: int) -> None:
        """Raises where tokens, in a grid or in a row, are not those of one picture: places are learned, and theirs would be others'."""
        side = self.fmap_size
        if grid not in ((side, side), (side * side,)):
            raise ValueError(
                f"a picture of {' x '.join(map(str, grid))} tokens is none for this MaskGit, which knows the places of "
                f"{side} x {side}, those of image_size={self.image_size}: give pictures of that size (data.image_size in a recipe)"
            )

    def name_classes(self, names: Sequence[str]) -> None:
        """Says what the classes are called; the names are saved with the network."""
        names, table = list(names), self.transformer.class_emb
        count = 0 if table is None else table.num_embeddings
        if len(names) != count or len(set(names)) != count:
            raise ValueError(
                f"there are {len(set(names))} classes ({some_of(names)}), and this MaskGit has {count or 'none'}: build it with "
                f"num_classes={len(set(names))} (model.transformer.num_classes in a recipe)"
            )
        if self.class_names not in (None, names):
            raise ValueError(f"the classes are called {some_of(self.class_names or ())} already, not {some_of(names)}")
        self.class_names = self.arguments["class_names"] = names

    def class_numbers(self, classes: int | str | Tensor | Sequence[int | str]) -> list[int]:
        """The numbers of classes that are given by name or by number; one alone may stand without a list."""
        if isinstance(classes, Tensor):
            classes = classes.tolist()
        return [self._class_number(given) for given in ([classes] if isinstance(classes, (int, str)) else classes)]

    def _class_number(self, given: int | str) -> int:
        names, table = self.class_names or [], self.transformer.class_emb
        if table is None:
            raise ValueError("this MaskGit has no classes: leave them out, or build its transformer with num_classes")
        for name in (str(given), str(given).replace("_", " ")):  # a number, too, may be the name of a folder
            if name in names:
                return names.index(name)
        last = table.num_embeddings - 1
        if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= last:
            return given
        known = f"0 to {last}" if not names else f"{some_of(names)} (or 0 to {last})"
        raise ValueError(f"there is no class {given}: this MaskGit knows {known}")

    def class_name(self, number: int) -> str:
        return f"class {number}" if self.class_names is None else self.class_names[number]

    def _low_resolution_ids(
        self, images_or_ids: Tensor | None, cond_images: Tensor | None, cond_token_ids: Tensor | None
    ) -> Tensor | None:
        """What a super-resolution MaskGit is shown: the ids given, the picture given, or the picture itself made small."""
        if self.cond_image_size is None:
            if cond_images is not None or cond_token_ids is not None:
                raise ValueError(
                    "low-resolution pictures belong to super-resolution: build MaskGit with cond_image_size"
                )
            return None
        if cond_token_ids is not None:
            return cond_token_ids
        if cond_images is None and images_or_ids is not None and images_or_ids.is_floating_point():
            cond_images = images_or_ids
        if cond_images is None:
            raise ValueError("super-resolution needs the low-resolution picture: give cond_images or cond_token_ids")
        return self.tokenize_low_resolution(cond_images)

    # ------------------------------------------------------------------ learning

    def forward(
        self,
        images_or_ids: Float[Tensor, "b c h w"] | Int[Tensor, "b ..."],
        ignore_index: int = -1,
        cond_images: Float[Tensor, "b c low_h low_w"] | None = None,
        cond_token_ids: Int[Tensor, "b ..."] | None = None,
        texts: Sequence[str] | None = None,
        text_embeds: Float[Tensor, "b t e"] | None = None,
        cond_drop_prob: float | None = None,
        train_only_generator: bool = False,
        sample_temperature: float | None = None,
        *,
        return_losses: bool = False,
        **condition: Any,
    ) -> Tensor | Losses:
        """The loss, or with `return_losses` its parts too.

        `condition` may hold text_mask, text_ids and classes, as for the transformer; classes also by name. `ignore_index` is any integer that is no
        token. `sample_temperature` is that of the tokens the critic is shown; by default random for each batch.
        """
        ids = self._ids(images_or_ids)
        self._check_grid(*ids.shape[1:])
        ids = ids.flatten(1)
        low = self._low_resolution_ids(images_or_ids, cond_images, cond_token_ids)
        drop = self.cond_drop_prob if cond_drop_prob is None else cond_drop_prob
        given = {"texts": texts, "text_embeds": text_embeds, **condition}
        classes = given.get("classes")
        if classes is not None and not isinstance(classes, Tensor):
            given["classes"] = torch.tensor(self.class_numbers(classes), device=ids.device)
        self.transformer.check_condition(len(ids), drop, **given)
        keep = self.transformer.draw_keep(len(ids), drop)
        given |= {"conditioning_token_ids": low, "keep": keep}
        context = self.transformer.context(**given) or self.transformer.no_context(len(ids))
        masked = self._mask(ids)
        logits = self._masked_logits(masked, context)
        labels = torch.where(masked.is_real, ids.flatten()[masked.places], ignore_index)
        summed = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
        # Over the number of masked tokens to be expected, not the number drawn: so that the rows of all micro-batches and
        # ranks count alike, and the gradient of accumulated batches is exactly that of one great batch (Task.weight counts rows).
        total = summed / (ids.numel() * self.mean_masked)
        count = masked.is_real.sum()
        accuracy = ((logits.argmax(dim=-1) == labels) & masked.is_real).sum() / count
        critic_error = None
        if self.token_critic is not None and not train_only_generator:
            if isinstance(self.token_critic, Transformer):  # or else it shares the transformer's context
                context = self.token_critic.context(**given) or self.token_critic.no_context(len(ids))
            seen = self._filled(ids, masked, logits.detach(), sample_temperature)
            critic_error = critic_loss(self.token_critic(seen, context=context), seen != ids)
            total = total + self.critic_loss_weight * critic_error
        if not return_losses:
            return total
        critic_part = None if critic_error is None else critic_error.detach()
        return Losses(total, (summed / count).detach(), accuracy, critic_part)

    def num_places(self, rows: int, n: int) -> int:
        """The most tokens that are ever masked in a batch: a falling schedule over strata exceeds its mean by less than a row."""
        return min(rows * n, math.ceil(n * (rows * self.mean_masked + 1)) + rows + 1)

    def _mask(self, ids: Int[Tensor, "b n"]) -> Masked:
        """Hides a random part of each row.

        The rows of a batch draw u from its b equal strata, one each, in random order. Each u is still uniform, the
        batches vary less, and the number of masked tokens is bounded well below b * n: so the head, most of the memory,
        sees about two thirds of the tokens, in tensors whose shape does not depend on what was drawn.
        """
        rows, n = ids.shape
        assert self.transformer.mask_id is not None
        stratum = torch.rand(rows, device=ids.device).argsort()
        u = (stratum + torch.rand(rows, device=ids.device)) / rows
        count = (self.noise_schedule(u) * n).round().clamp(1, n)
        mask = torch.rand(rows, n, device=ids.device).argsort(dim=1).argsort(dim=1) < count[:, None]
        hidden = mask
        if self.no_mask_token_prob:
            hidden = mask & (torch.rand(rows, n, device=ids.device) >= self.no_mask_token_prob)
        places = mask.flatten().to(torch.uint8).argsort(descending=True, stable=True)[: self.num_places(rows, n)]
        return Masked(torch.where(hidden, self.transformer.mask_id, ids), mask, places, mask.flatten()[places])

    def _masked_logits(self, masked: Masked, context: Context | None) -> Float[Tensor, "k v"]:
        """Logits at the masked places; the codebook-sized product is done for no other."""
        transformer, before = self.transformer, None
        if transformer.self_cond and self.self_cond_prob:
            # Chosen row by row, so that every weight takes part in each step (distributed training waits for all of them).
            with torch.no_grad():
                before = transformer.embed(masked.x, context=context)
            before = before * (torch.rand(len(before), 1, 1, device=before.device) < self.self_cond_prob)
        embed = transformer.embed(masked.x, context=context, self_cond_embed=before)
        return transformer.to_logits(embed.flatten(0, 1)[masked.places]).float()

    def _filled(
        self, ids: Int[Tensor, "b n"], masked: Masked, logits: Float[Tensor, "k v"], temperature: float | None
    ) -> Int[Tensor, "b n"]:
        """The tokens as the critic sees them, drawn where they were masked."""
        heat = torch.rand((), device=ids.device) if temperature is None else torch.full_like(logits[0, 0], temperature)
        drawn = sample_gumbel(logits / heat.clamp(min=1e-6), torch.rand_like(logits))
        true = ids.flatten()
        return true.scatter(0, masked.places, torch.where(masked.is_real, drawn, true[masked.places])).view_as(ids)

    # ------------------------------------------------------------------ making pictures

    @torch.no_grad()
    def generate(
        self,
        texts: Sequence[str] | None = None,
        negative_texts: Sequence[str] | None = None,
        cond_images: Float[Tensor, "low_b c low_h low_w"] | None = None,
        fmap_size: int | None = None,
        temperature: float = 1.0,
        topk_filter_thres: float = 0.9,
        can_remask_prev_masked: bool = False,
        force_not_use_token_critic: bool = False,
        timesteps: int = 18,
        cond_scale: float = 3.0,
        critic_noise_scale: float = 1.0,
        *,
        text_embeds: Float[Tensor, "text_b t e"] | None = None,
        classes: Int[Tensor, "class_b"] | Sequence[int | str] | int | str | None = None,
        cond_token_ids: Int[Tensor, "low_b ..."] | None = None,
        batch_size: int | None = None,
        sampler: Sampler = "confidence",
        choice_temperature: float = 4.5,
        cond_scale_schedule: Literal["constant", "linear"] = "constant",
        images: Float[Tensor, "given_b c h w"] | Int[Tensor, "given_b code_h code_w"] | None = None,
        repaint: Tensor | None = None,  # booleans [b, h, w]: see _canvas
        seed: int | None = None,
        return_ids: bool = False,
    ) -> Float[Tensor, "b c h w"] | Int[Tensor, "b code_h code_w"]:
        """Pictures with values in [0, 1], or with `return_ids` their tokens.

        On a GPU the network runs in bf16, and a step is compiled and captured when pictures of a new number or size are made:
        the first ones take long, the others are fast. `self.filler` (`helicon.models.muse.generate.Filler`) says otherwise.

        Args:
            texts: one for each picture; one alone is used for all of `batch_size`. None: whatever the model likes.
            classes: by number, or by name where they have names; one for each picture, or one for all.
            negative_texts: what the pictures shall not be; guidance leads away from it.
            cond_images: the pictures to enlarge (super-resolution), of any size.
            fmap_size: tokens a side; no other than those of a picture of `image_size`, whose places are learned.
            timesteps, temperature, topk_filter_thres, can_remask_prev_masked, cond_scale, critic_noise_scale, sampler,
                choice_temperature, cond_scale_schedule: see `helicon.models.muse.generate.Decoding`.
            images, repaint: pictures (or token grids) of which the marked region, True = made anew, is painted again and the
                rest stays. A region at the edge extends a picture. One picture may have several regions, and one region serve for all.
            seed: the same seed gives the same pictures; None draws from torch's own generator.
        """
        decoding = Decoding(
            sampler,
            timesteps,
            temperature,
            topk_filter_thres,
            choice_temperature,
            can_remask_prev_masked,
            cond_scale,
            cond_scale_schedule,
            critic_noise_scale,
        )
        if self.vae is None and not return_ids:
            raise ValueError("without a vae there are tokens only: write return_ids=True")
        if fmap_size not in (None, self.fmap_size):
            raise ValueError(
                f"fmap_size={fmap_size}, and this MaskGit knows the places of {self.fmap_size} tokens a side alone: leave it out"
            )
        if classes is not None:
            classes = self.class_numbers(classes)
        rows = _rows(
            batch_size, texts, negative_texts, text_embeds, classes, cond_images, cond_token_ids, images, repaint
        )
        low = self._low_resolution_ids(None, cond_images, cond_token_ids)
        generator = None if seed is None else torch.Generator(self.device).manual_seed(seed)
        with self.filler.running(self) as dtype:
            condition = self._condition(rows, texts, text_embeds, classes, dtype)
            negative = None if negative_texts is None else self._condition(rows, negative_texts, None, None, dtype)
            is_guided = self.transformer.is_conditional and cond_scale != 1 and bool(condition or negative)
            condition["conditioning_token_ids"] = None if low is None else low.expand(rows, *low.shape[1:])
            critic = None if force_not_use_token_critic or sampler == "halton" else self.token_critic
            predictor = Reader.of(self.transformer, rows, is_guided, negative, **condition)
            judge = None if critic is None else Reader.of(critic, rows, is_guided, negative, **condition)
            ids, unknown = self._canvas(rows, images, repaint)
            grid = (ids.shape[1], ids.shape[2])
            canvas = Canvas(ids.flatten(1), unknown.flatten(1), grid)
            judges_visible = self.no_mask_token_prob > 0
            filled = self.filler.fill(
                predictor, judge, canvas, decoding, self.noise_schedule, generator, judges_visible
            )
        ids = filled.unflatten(1, grid)
        return ids if return_ids else self._painted(ids, images, repaint)

    def _condition(
        self,
        rows: int,
        texts: Sequence[str] | None,
        text_embeds: Tensor | None,
        classes: Sequence[int] | None,
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        """The keywords of `Transformer.context`, with one text or class repeated for all rows."""
        found: dict[str, Any] = {}
        if texts is not None:
            found |= self.transformer.read_texts(texts)
        if text_embeds is not None:
            found["text_embeds"] = text_embeds.to(self.device)
        if classes is not None:
            found["classes"] = torch.tensor(classes, device=self.device)
        if "text_embeds" in found:
            found["text_embeds"] = found["text_embeds"].to(dtype)
        return {name: value.expand(rows, *value.shape[1:]) for name, value in found.items()}

    def _canvas(
        self, rows: int, images: Tensor | None, repaint: Tensor | None
    ) -> tuple[Int[Tensor, "b h w"], Bool[Tensor, "b h w"]]:
        """The tokens to start from, and which of them are to be found."""
        if (images is None) != (repaint is None):
            raise ValueError("images and repaint belong together: the pictures, and the region of them to paint again")
        if images is None or repaint is None:
            unknown = torch.ones(rows, self.fmap_size, self.fmap_size, dtype=torch.bool, device=self.device)
            return torch.zeros_like(unknown, dtype=torch.long), unknown
        if repaint.dtype != torch.bool or repaint.ndim != 3:
            raise ValueError(
                f"repaint must be booleans [b, h, w], True where to paint, and is {repaint.dtype} {list(repaint.shape)}: "
                "a mask of numbers [b, 1, h, w] becomes one by mask[:, 0] > 0.5"
            )
        images, repaint = images.to(self.device), repaint.to(self.device)
        ids = self._ids(images)
        self._check_grid(*ids.shape[1:])
        if images.shape[-2:] != repaint.shape[-2:]:
            raise ValueError(f"repaint is {tuple(repaint.shape[-2:])} and the pictures are {tuple(images.shape[-2:])}")
        # A token is made anew if any pixel of its cell is.
        cell = 2**self.vae.layers if self.vae is not None and images.is_floating_point() else 1
        unknown = F.max_pool2d(repaint[:, None].float(), cell, ceil_mode=True)[:, 0] > 0
        return ids.expand(rows, -1, -1), unknown.expand(rows, -1, -1)

    def _painted(self, ids: Tensor, images: Tensor | None, repaint: Tensor | None) -> Float[Tensor, "b c h w"]:
        """The picture the tokens stand for; what was not to be painted again stays as it was, to the pixel."""
        assert self.vae is not None
        with torch.autocast(self.device.type, enabled=False):
            made = self.vae.decode_from_ids(ids).clamp(0, 1)
        if images is None or repaint is None or not images.is_floating_point():
            return made[..., : self.image_size, : self.image_size]  # without what fills up the last cells
        height, width = images.shape[-2:]
        return torch.where(repaint.to(made.device)[:, None], made[..., :height, :width], images.to(made))


def token_ids(vae: VQGanVAE, images: Float[Tensor, "b c h w"]) -> Int[Tensor, "b code_h code_w"]:
    """Of pictures; always in the tokenizer's own precision, as which tokens a picture has must not depend on who asks."""
    with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
        return vae.encode(images.to(next(vae.parameters()).dtype))[1]


def _mean_masked(schedule: Callable[..., Any]) -> float:
    """The mean of a schedule, which must fall from at most 1 to at least 0."""
    values = schedule((torch.arange(4096, dtype=torch.float64) + 0.5) / 4096)
    if not (values.max() <= 1 and values.min() >= 0 and (values.diff() <= 0).all()):
        raise ValueError("noise_schedule must fall from 1 to 0: it gives the part of the tokens that is masked")
    return float(values.mean())


def _rows(batch_size: int | None, *given: Any) -> int:
    """How many pictures: what is given for each must agree; one alone is for all."""
    sizes = {len(value) for value in given if value is not None}
    rows = max(sizes, default=1) if batch_size is None else batch_size
    if rows < 1:
        raise ValueError(f"{rows} pictures cannot be made: give at least one text, or batch_size=1")
    if sizes - {1, rows}:
        asked = "one number is needed" if batch_size is None else f"batch_size={batch_size}"
        raise ValueError(
            f"there are conditions for {' and '.join(map(str, sorted(sizes - {1})))} pictures, and {asked}: give one for all, or as "
            "many as there are pictures"
        )
    return rows


def some_of(names: Sequence[str], most: int = 8) -> str:
    """A list in words, cut short where it is long."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
