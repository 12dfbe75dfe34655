"""Defects of the reference package's MaskGit, transformers and Muse (D-X)."""

from defect_list.entry import Defect, Edit

MASKGIT, TRANSFORMER = "models/muse/maskgit.py", "models/muse/transformer.py"
PIPELINE, VQGAN = "models/muse/pipeline.py", "models/muse/vqgan.py"
ATTENTION, ENCODER = "nn/attention.py", "models/text/pretrained.py"

ATTEND = "F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, dropout_p=dropout, is_causal=is_causal)"

DEFECTS = [
    Defect(
        "D-X1",
        "super-resolution is trained without the low-resolution picture, which goes to a variable that nothing reads",
        (Edit(MASKGIT, '"conditioning_token_ids": low, "keep"', '"conditioning_token_ids": None, "keep"'),),
        (
            "models/muse/test_maskgit.py::test_super_resolution_learns_with_the_low_resolution_picture",
            "models/muse/test_task.py::test_super_resolution_is_shown_the_small_picture",
        ),
    ),
    Defect(
        "D-X2",
        "negative prompts always crash: the logits are computed from a name that is not there",
        (
            Edit(
                TRANSFORMER,
                "x, cond_scale, texts=texts, text_embeds=text_embed, negative_text=negative, **rest",
                "x, *args, texts=texts, text_embeds=text_embed, negative_text=negative, **rest",
            ),
        ),
        (
            "models/muse/test_transformer.py::test_negative_prompts_work",
            "models/muse/test_transformer.py::test_the_critics_judge_each_token",
        ),
    ),
    Defect(
        "D-X2",
        "and so do they while pictures are made",
        (
            Edit(
                MASKGIT,
                "negative = None if negative_texts is None else ",
                "negative = None if negative_texts is None else args or ",
            ),
        ),
        ("models/muse/test_generate.py::test_a_negative_text_leads_away",),
    ),
    Defect(
        "D-X3",
        "without a vae, which is optional, MaskGit cannot be built: token ids alone are not enough to train on",
        (
            Edit(
                MASKGIT, 'self.__dict__["vae"] = self._stage("vae", vae)', 'self.__dict__["vae"] = vae.copy_for_eval()'
            ),
        ),
        (
            "models/muse/test_maskgit.py::test_it_learns_from_token_ids_without_a_vae",
            "models/muse/test_trainers.py::test_token_ids_without_a_tokenizer",
        ),
    ),
    Defect(
        "D-X4",
        "the tokenizer is switched to training with MaskGit: its codebook moves with every batch that it reads",
        (Edit(MASKGIT, 'self.__dict__["vae"] = self._stage(', "self.vae = self._stage("),),
        ("models/muse/test_maskgit.py::test_the_tokenizer_stays_frozen_and_in_evaluation_mode",),
    ),
    Defect(
        "D-X4",
        "making pictures puts every module into the mode of the outermost one",
        (
            Edit(
                MASKGIT,
                "        return ids if return_ids else self._painted(",
                "        self.train(self.training)\n        return ids if return_ids else self._painted(",
            ),
        ),
        ("models/muse/test_generate.py::test_pictures_lie_between_0_and_1_and_modes_are_put_back",),
    ),
    Defect(
        "D-X4",
        "the weights of the frozen tokenizer take gradients",
        (Edit(VQGAN, "return copied.requires_grad_(False).eval()", "return copied.eval()"),),
        ("models/muse/test_maskgit.py::test_the_tokenizer_stays_frozen_and_in_evaluation_mode",),
    ),
    Defect(
        "D-X5",
        "colours are not clamped before they become bytes: 1.02 is pixel 4, bright speckle in dark",
        (
            Edit(PIPELINE, ".clamp(0, 1).mul(255)", ".mul(255)"),
            Edit(MASKGIT, "self.vae.decode_from_ids(ids).clamp(0, 1)", "self.vae.decode_from_ids(ids)"),
        ),
        (
            "models/muse/test_pipeline.py::test_colours_are_clamped_before_they_become_bytes",
            "models/muse/test_generate.py::test_pictures_lie_between_0_and_1_and_modes_are_put_back",
        ),
    ),
    Defect(
        "D-X6",
        "attention is always spelled out in Python, and never torch's own kernel",
        (
            Edit(
                ATTENTION,
                ATTEND,
                "(queries @ keys.mT * queries.shape[-1] ** -0.5 + (0 if bias is None else bias)).softmax(-1) @ values",
            ),
        ),
        ("models/muse/test_transformer.py::test_attention_is_scaled_dot_product_attention",),
    ),
    Defect(
        "D-X6",
        "the dropout of attention is ignored",
        (Edit(ATTENTION, ATTEND, ATTEND.replace("dropout_p=dropout, ", "")),),
        ("nn/test_transformer.py::test_dropout_acts_in_training_alone",),
    ),
    Defect(
        "D-X7",
        "the text encoder stays where it was when the network is moved",
        (Edit(ENCODER, "        self.backbone._apply(fn, recurse)  # moves with its parent\n", ""),),
        (
            "models/muse/test_transformer.py::test_texts_are_read_where_the_network_is",
            "models/text/test_pretrained.py::test_it_moves_with_its_parent",
        ),
    ),
    Defect(
        "D-X7",
        "embedded texts are moved to the network's device, and the outcome of that is dropped",
        (
            Edit(
                ENCODER,
                "        return TextEmbedding(sent(padded, self.device), sent(mask, self.device))\n",
                "        padded.to(self.device)\n        return TextEmbedding(padded, mask)\n",
            ),
        ),
        ("models/muse/test_transformer.py::test_texts_that_were_read_before_come_out_where_the_network_is_now",),
    ),
    Defect(
        "D-X7",
        "the tokenizer is asked by a method that transformers no longer has",
        (
            Edit(
                ENCODER,
                'self.tokenizer(text, verbose=False)["input_ids"]',
                'self.tokenizer.batch_encode_plus([text])["input_ids"][0]',
            ),
        ),
        ("models/muse/test_transformer.py::test_texts_are_read_where_the_network_is",),
    ),
    Defect(
        "D-X8",
        "pictures in half precision are taken for token ids",
        (
            Edit(
                MASKGIT,
                "if images_or_ids.is_floating_point():\n            return self.tokenize(",
                "if images_or_ids.dtype == torch.float:\n            return self.tokenize(",
            ),
        ),
        ("models/muse/test_maskgit.py::test_pictures_of_any_precision_are_pictures",),
    ),
    Defect(
        "D-X9",
        "low-resolution tokens have no places: a picture and its mirror image are one condition",
        (Edit(TRANSFORMER, " + place_features(height, width, self.dim, ids.device).to(embed.own.weight.dtype)", ""),),
        ("models/muse/test_transformer.py::test_low_resolution_tokens_have_places",),
    ),
    Defect(
        "D-X9",
        "a norm that nothing uses: distributed training waits for its gradient",
        (
            Edit(
                TRANSFORMER,
                "        self.head = None if self.dim_out == num_tokens else",
                "        self.norm = nn.LayerNorm(dim)\n        self.head = None if self.dim_out == num_tokens else",
            ),
        ),
        (
            "models/muse/test_transformer.py::test_every_kind_of_condition_is_seen_and_trains_every_weight",
            "models/muse/test_maskgit.py::test_every_weight_takes_part_in_each_step",
            "models/muse/test_task.py::test_maskgit_every_weight_learns_in_every_step",
        ),
    ),
    Defect(
        "D-X9",
        "the layers of self-conditioning are there without self-conditioning, and never used",
        (
            Edit(TRANSFORMER, "FeedForward(dim) if self_cond else None", "FeedForward(dim)"),
            Edit(TRANSFORMER, "        if self.self_cond_to_init_embed is not None:\n", "        if self.self_cond:\n"),
        ),
        (
            "models/muse/test_transformer.py::test_every_kind_of_condition_is_seen_and_trains_every_weight",
            "models/muse/test_task.py::test_maskgit_every_weight_learns_in_every_step",
        ),
    ),
    Defect(
        "D-X9",
        "label 0, a real token, is left out of the loss",
        (Edit(TRANSFORMER, "        ignore_index: int = -1,\n", "        ignore_index: int = 0,\n"),),
        ("models/muse/test_transformer.py::test_token_zero_is_learned_like_any_other",),
    ),
    Defect(
        "D-X9",
        "tokens may be masked again only by a network that has learned to predict those it sees",
        (
            Edit(
                MASKGIT,
                "        if self.vae is None and not return_ids:\n",
                "        assert not can_remask_prev_masked or self.no_mask_token_prob > 0\n"
                "        if self.vae is None and not return_ids:\n",
            ),
        ),
        ("models/muse/test_generate.py::test_tokens_may_be_masked_again",),
    ),
    Defect(
        "D-X9",
        "texts are mandatory: neither classes nor nothing at all can be the condition",
        (
            Edit(
                TRANSFORMER,
                "self.condition_on_text = num_classes is None if condition_on_text is None else condition_on_text",
                "self.condition_on_text = True",
            ),
        ),
        (
            "models/muse/test_transformer.py::test_every_kind_of_condition_is_seen_and_trains_every_weight",
            "models/muse/test_trainers.py::test_classes",
        ),
    ),
]
