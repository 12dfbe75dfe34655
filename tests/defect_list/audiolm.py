"""Defects of the reference package's semantic, coarse and fine transformers and of AudioLM and their trainers (A: 1, 2, 19 and 23 to 37)."""

from defect_list.entry import Defect, Edit

TRANSFORMERS, STAGE = "models/audiolm/transformers.py", "models/audiolm/stage.py"
WRAPPERS, GENERATE = "models/audiolm/wrappers.py", "models/audiolm/generate.py"
PIPELINE, CONDITIONING = "models/audiolm/pipeline.py", "models/text/conditioning.py"
TASK, TRAINERS = "models/audiolm/task.py", "models/audiolm/trainers.py"
ATTENTION, DECODE, SOUNDSTREAM = "nn/attention.py", "nn/decode.py", "models/soundstream/model.py"

TESTS = "models/audiolm"
NETWORKS, LEARNING = f"{TESTS}/test_transformers.py", f"{TESTS}/test_wrappers.py"
MAKING, SHARED, WHOLE = f"{TESTS}/test_generate.py", f"{TESTS}/test_stage.py", f"{TESTS}/test_pipeline.py"
PLAIN_LOOPS = tuple(
    f"{MAKING}::test_{name}_are_those_of_a_plain_loop"
    for name in ("semantic_tokens", "coarse_codes", "fine_codes", "delayed_codes")
)

DEFECTS = [
    Defect(
        "A-1",
        "ends are taught in training mode alone: after a validation that leaves it, never again",
        (
            Edit(
                WRAPPERS,
                'return {"semantic": with_end(semantic_token_ids, is_end, self.transformer.eos_id)}',
                'return {"semantic": with_end(semantic_token_ids, is_end if self.training else None, self.transformer.eos_id)}',
            ),
        ),
        (f"{LEARNING}::test_only_what_truly_ends_is_taught_to_end",),
    ),
    Defect(
        "A-1",
        "forgetful masking hangs on the mode of another module than the one that training switches",
        (
            Edit(
                STAGE,
                "return self.mask_prob if self.training else 0.0",
                "return self.mask_prob if self.transformer.training else 0.0",
            ),
        ),
        (f"{LEARNING}::test_the_owners_mode_decides",),
    ),
    Defect(
        "A-1",
        "and nothing is forgotten any more: training goes on in the mode of the validation",
        (
            Edit(
                STAGE,
                "return self.mask_prob if self.training else 0.0",
                "return self.mask_prob if self.transformer.training != self.training else 0.0",
            ),
        ),
        (f"{TESTS}/test_trainers.py::test_training_goes_on_as_before_after_a_validation",),
    ),
    Defect(
        "A-2",
        "the fine transformer is run past the wrapper that shares gradients: every process trains its own",
        (Edit(TASK, 'return self.networks["model"](', "return self.model("),),
        (f"{TESTS}/test_trainers.py::test_both_processes_train_one_fine_transformer",),
    ),
    Defect(
        "A-19",
        "token ids find no place in a batch",
        (Edit(TRAINERS, '        "token_ids": Field(is_tensor(False, 3), "an integer tensor [b, t, q]"),\n', ""),),
        (f"{TESTS}/test_trainers.py::test_embedded_texts_are_told_from_waves",),
    ),
    Defect(
        "A-19",
        "what a coarse trainer's tuples hold is told by their order alone, and a text goes to the codec",
        (
            Edit(
                TRAINERS,
                "        audio_conditioner: Any = None,\n        ds_fields: Sequence[str] | None = None,\n",
                "        audio_conditioner: Any = None,\n"
                '        ds_fields: Sequence[str] | None = ("raw_wave", "raw_wave_for_codec", "text"),\n',
            ),
        ),
        (f"{TESTS}/test_trainers.py::test_tuples_are_waves_tokens_and_texts_by_name_or_type",),
    ),
    Defect(
        "A-23",
        "guidance compares the text with itself: the same logits for twice the cost",
        (
            Edit(
                CONDITIONING, "        return stacked(context, nothing)\n", "        return stacked(context, context)\n"
            ),
        ),
        (
            f"{NETWORKS}::test_texts_and_guidance_change_the_logits",
            f"{NETWORKS}::test_embedded_texts_do_the_same",
        ),
    ),
    Defect(
        "A-23",
        "and so does guidance while tokens are made",
        (
            Edit(
                GENERATE,
                "        context = stacked(context, nothing)\n",
                "        context = stacked(context, context)\n",
            ),
        ),
        (f"{MAKING}::test_guidance_is_heard", *PLAIN_LOOPS),
    ),
    Defect(
        "A-23",
        "embedded texts are never dropped: nothing is learned for guidance",
        (
            Edit(
                CONDITIONING,
                "        return Context(embeddings, mask if keep is None else mask & keep[:, None])\n",
                '        is_embedded = texts.get("text_embeds") is not None\n'
                "        return Context(embeddings, mask if keep is None or is_embedded else mask & keep[:, None])\n",
            ),
        ),
        (f"{NETWORKS}::test_embedded_texts_do_the_same",),
    ),
    Defect(
        "A-24",
        "text embeddings are inference tensors: training in single precision crashes",
        (
            Edit(
                CONDITIONING,
                "            text_embeds = text_embeds.clone()  # autograd refuses what was made in inference mode\n",
                "            pass\n",
            ),
        ),
        (
            "models/text/test_conditioning.py::test_inference_tensors_can_be_learned_from",
            f"{NETWORKS}::test_embeddings_made_in_inference_mode_can_be_learned_from",
        ),
    ),
    Defect(
        "A-25",
        "with a cache the one query of a step is taken for the first, and attends to the first key alone",
        (
            Edit(
                ATTENTION,
                "out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, dropout_p=dropout)",
                "out = F.scaled_dot_product_attention(grouped, keys[:, :, :1], values[:, :, :1], dropout_p=dropout)",
            ),
        ),
        PLAIN_LOOPS,
    ),
    Defect(
        "A-26",
        "with flash_attn nothing has a position: the order of the past is lost",
        (
            Edit(
                TRANSFORMERS,
                "            causal=True,\n            qk_norm=True,\n",
                '            causal=True,\n            positions="none" if flash_attn else "rotary",\n            qk_norm=True,\n',
            ),
        ),
        (f"{NETWORKS}::test_places_matter", f"{NETWORKS}::test_flash_attn_changes_nothing"),
    ),
    Defect(
        "A-27",
        "a text in front of the tokens is left out where there is a cache",
        (
            Edit(
                GENERATE,
                "    packed, beside = network.sequence(parts, context)\n",
                "    packed, beside = network.sequence(parts, None if network.has_prefix else context)\n",
            ),
        ),
        PLAIN_LOOPS,
    ),
    Defect(
        "A-28",
        "the last code of a quantizer is banned as if it were the end, which the fine stage does not have",
        (
            Edit(
                GENERATE,
                "        if self.vocabulary == self.codes.codebook_size:\n            return None\n",
                "        if self.vocabulary == self.codes.codebook_size:\n"
                "            last = torch.arange(self.vocabulary, device=index.device) == self.vocabulary - 1\n"
                "            return ~last | (index % self.codes.num_quantizers == 0)\n",
            ),
        ),
        (f"{MAKING}::test_every_code_can_be_drawn_by_every_quantizer",),
    ),
    Defect(
        "A-29",
        "prompts of unequal length go on behind their padding",
        (
            Edit(
                GENERATE,
                "    start = network.semantic.part(prime_ids)\n",
                "    start = network.semantic.part(prime_ids, is_last=True)\n",
            ),
        ),
        (PLAIN_LOOPS[0],),
    ),
    Defect(
        "A-30",
        "the embeddings of quantizers overlap: the last of one is the first of the next",
        (
            Edit(
                TRANSFORMERS,
                "self.embedding(ids.clamp(min=0) + quantizer * self.codebook_size)",
                "self.embedding(ids.clamp(min=0) + quantizer * (self.codebook_size - 1))",
            ),
        ),
        (f"{NETWORKS}::test_each_quantizer_has_embeddings_of_its_own",),
    ),
    Defect(
        "A-30",
        "what stands where a quantizer is silent is the first code of the next",
        (
            Edit(
                TRANSFORMERS,
                "self.codes.embedding(columns + quantizer * (self.codebook_size + 1))",
                "self.codes.embedding(columns + quantizer * self.codebook_size)",
            ),
        ),
        (f"{NETWORKS}::test_each_quantizer_has_embeddings_of_its_own", PLAIN_LOOPS[3]),
    ),
    Defect(
        "A-31",
        "with groups of quantizers the codes come group by group: the coarse ones are all levels of the first group",
        (
            Edit(
                SOUNDSTREAM,
                'return rearrange(codes, "b t (g q) -> b t (q g)", g=self.groups)',
                "return codes",
            ),
        ),
        (f"{SHARED}::test_groups_of_quantizers_are_coarse_together",),
    ),
    Defect(
        "A-32",
        "without a codec, which is optional, a stage cannot be built",
        (
            Edit(
                STAGE, "    if codec is not None:\n        check_sizes(codec", "    if True:\n        check_sizes(codec"
            ),
        ),
        (f"{SHARED}::test_a_stage_without_networks_learns_and_generates_tokens_and_says_what_it_cannot",),
    ),
    Defect(
        "A-32",
        "fine codes that are padding are looked up as codes",
        (
            Edit(
                TRANSFORMERS,
                "self.embedding(ids.clamp(min=0) + quantizer * self.codebook_size)",
                "self.embedding(ids + quantizer * self.codebook_size)",
            ),
        ),
        (
            f"{NETWORKS}::test_a_row_of_a_padded_batch_gives_what_it_gives_alone",
            f"{NETWORKS}::test_a_fine_network_may_have_another_padding",
        ),
    ),
    Defect(
        "A-33",
        "semantic tokens that are padding are masked in training and heard in generation",
        (
            Edit(
                GENERATE,
                "    parts = [network.semantic.part(semantic_token_ids), network.coarse",
                "    parts = [network.semantic.part(semantic_token_ids, is_last=True), network.coarse",
            ),
        ),
        (PLAIN_LOOPS[1],),
    ),
    Defect(
        "A-33",
        "the frames of the prompt do not count as part of max_time_steps",
        (
            Edit(GENERATE, "(max_time_steps - shortest) * q, asked)", "max_time_steps * q, asked)"),
            Edit(
                GENERATE, "    return joined(prime, frames)[:, :max_time_steps]\n", "    return joined(prime, frames)\n"
            ),
        ),
        (f"{MAKING}::test_the_prompt_counts",),
    ),
    Defect(
        "A-33",
        "generation goes on to its full length when every row has ended",
        (
            Edit(
                DECODE,
                "                    if is_finished:\n                        break\n",
                "",
            ),
        ),
        (f"{MAKING}::test_it_stops_when_all_rows_have_ended",),
    ),
    Defect(
        "A-34",
        "a prompt's path is checked for being given, not for being there",
        (Edit(PIPELINE, "    if not path.is_file():\n", "    if path is None:\n"),),
        (f"{WHOLE}::test_mistakes_get_one_sentence",),
    ),
    Defect(
        "A-34",
        "include_eos_in_output is accepted and ignored",
        (Edit(GENERATE, "    if include_eos:\n", "    if False:\n"),),
        (f"{MAKING}::test_rows_that_ended_are_padded_and_the_end_can_be_shown",),
    ),
    Defect(
        "A-34",
        "attn_dropout is accepted and ignored",
        (Edit(TRANSFORMERS, "            attn_dropout=attn_dropout,\n", "            attn_dropout=0.0,\n"),),
        (f"{NETWORKS}::test_dropout_acts_in_training_alone",),
    ),
    Defect(
        "A-35",
        "a text encoder is read for networks that read no texts",
        (
            Edit(
                CONDITIONING,
                "        self.text_encoder, self.text_proj, self.code_table = None, None, None\n",
                "        self.text_encoder, self.text_proj, self.code_table = None, None, None\n        build_text_encoder(t5_name)\n",
            ),
        ),
        (f"{NETWORKS}::test_nothing_is_read_from_elsewhere_where_no_text_is_read",),
    ),
    Defect(
        "A-35",
        "embedded texts are moved to where the network is, and the outcome of that is dropped",
        (
            Edit(
                CONDITIONING,
                "        return text_embeds.to(weight), mask.to(weight.device)\n",
                "        text_embeds.to(weight)\n        return text_embeds, mask\n",
            ),
        ),
        ("models/text/test_conditioning.py::test_embeddings_of_another_precision_are_welcome",),
    ),
    Defect(
        "A-37",
        "every crop ends with the token of the end: sounds stop where crops did",
        (
            Edit(
                STAGE,
                "    if is_end is None:\n        return longer\n    lengths",
                "    is_end = torch.ones(len(ids), dtype=torch.bool, device=ids.device)\n    lengths",
            ),
        ),
        (
            f"{SHARED}::test_the_end_stands_behind_rows_that_truly_end",
            f"{LEARNING}::test_only_what_truly_ends_is_taught_to_end",
            f"{LEARNING}::test_semantic_loss_by_hand",
        ),
    ),
]
