"""Defects of the reference package's image trainer (D-R) and image tokenizer (D-V)."""

from defect_list.entry import Defect, Edit

TRAINER, STATE = "engine/trainer.py", "engine/state.py"
TASK, VQGAN, PERCEPTUAL = "models/muse/task.py", "models/muse/vqgan.py", "models/muse/perceptual.py"

UNAUGMENTED = (
    "        val_dataset = None if val_dataset is None else unaugmented(val_dataset)  # also the one a user gives\n"
)

DEFECTS = [
    Defect(
        "D-R1",
        "apply_grad_penalty_every has no effect: the discriminator pays the penalty at every step",
        (Edit(TASK, "        with_penalty = every > 0 and step % every == 0\n", "        with_penalty = True\n"),),
        (
            "models/muse/test_task.py::test_the_gradient_penalty_has_the_cadence_asked_for",
            "models/muse/test_task.py::test_a_step_without_penalty_costs_the_discriminator_no_second_derivative",
            "models/muse/test_vqgan_trainer.py::test_the_penalty_is_paid_at_the_steps_asked_for",
        ),
    ),
    Defect(
        "D-R2",
        "the discriminator's loss without the penalty raises UnboundLocalError",
        (
            Edit(VQGAN, "        if not with_penalty:\n            return loss, parts\n", ""),
            Edit(
                VQGAN,
                '        with torch.compiler.set_stance("force_eager"):\n'
                "            penalty = losses.gradient_penalty(partial(discriminator, full_precision=True), images)\n",
                "        if with_penalty:\n"
                "            penalty = losses.gradient_penalty(partial(discriminator, full_precision=True), images)\n",
            ),
        ),
        (
            "models/muse/test_vqgan.py::test_the_discriminator_loss_with_and_without_the_penalty",
            "models/muse/test_vqgan_trainer.py::test_the_penalty_is_paid_at_the_steps_asked_for",
        ),
    ),
    Defect(
        "D-R3",
        "ema_beta is ignored: 0.9999 in place of the 0.995 asked for",
        (Edit(TRAINER, "EMA(networks, options.ema_beta,", "EMA(networks, 0.9999,"),),
        (
            "engine/test_ema.py::test_the_options_of_a_trainer_reach_its_average",
            "models/muse/test_vqgan_trainer.py::test_the_decay_asked_for_is_the_decay_used",
        ),
    ),
    Defect(
        "D-R4",
        "optimizers are built from sets and their state is stored by position: a resume gives moments to other parameters",
        (
            Edit(
                "engine/optim.py",
                "        self.named = {name: p for name, p in network.named_parameters() if p.requires_grad}\n",
                "        self.named = {str(i): p for i, p in enumerate({p for p in network.parameters() if p.requires_grad})}\n",
            ),
        ),
        ("engine/test_optim.py::test_state_finds_its_parameter_in_a_network_of_another_order",),
    ),
    Defect(
        "D-R5",
        "a checkpoint without the step: a resumed run starts at 0 and overwrites the first files",
        (Edit(STATE, '    trainer.step = document["step"]\n', ""),),
        (
            "engine/test_resume.py::test_a_stopped_and_resumed_run_equals_the_unbroken_one_bit_for_bit",
            "models/muse/test_vqgan_trainer.py::test_a_resumed_run_equals_the_unbroken_one_bit_for_bit",
        ),
    ),
    Defect(
        "D-R5",
        "a checkpoint without the average",
        (
            Edit(
                STATE,
                "    if trainer.ema is not None:\n        averages = trainer.ema.by_identity()\n        tensors",
                "    if False:\n        averages = trainer.ema.by_identity()\n        tensors",
            ),
        ),
        (
            "engine/test_resume.py::test_a_stopped_and_resumed_run_equals_the_unbroken_one_bit_for_bit",
            "models/muse/test_vqgan_trainer.py::test_a_resumed_run_equals_the_unbroken_one_bit_for_bit",
        ),
    ),
    Defect(
        "D-R6",
        "the file of averaged weights has the names of a wrapper, and the network cannot load it",
        (
            Edit(
                STATE,
                "tensors[EMA_FILE] = {name: _copied(averages[id(value)])",
                'tensors[EMA_FILE] = {f"ema_model.{name}": _copied(averages[id(value)])',
            ),
        ),
        (
            "engine/test_trainer.py::test_helicon_load_rebuilds_the_averaged_network_from_the_folder_alone",
            "models/muse/test_vqgan_trainer.py::test_a_checkpoint_gives_any_network_its_averaged_weights",
        ),
    ),
    Defect(
        "D-R7",
        "without a GAN the trainer cannot be built",
        (
            Edit(
                TASK,
                '        if vae.discr is not None:\n            networks["discriminator"] = vae.discr\n',
                '        networks["discriminator"] = vae.discr  # type: ignore[assignment]\n',
            ),
        ),
        (
            "models/muse/test_task.py::test_training_without_a_gan",
            "models/muse/test_vqgan_trainer.py::test_without_a_gan_the_trainer_trains_logs_saves_and_resumes",
        ),
    ),
    Defect(
        "D-R8",
        "the generator is clipped by a norm over the discriminator's gradients too",
        (
            Edit(
                TRAINER,
                '        for update in updates:\n            prefix = ""',
                "        if self.options.max_grad_norm is not None:\n"
                "            nn.utils.clip_grad_norm_(self.task.model.parameters(), self.options.max_grad_norm)\n"
                "        for update in updates:\n"
                '            prefix = ""',
            ),
        ),
        (
            "engine/test_loop.py::test_each_network_is_clipped_by_its_own_norm",
            "engine/test_loop.py::test_two_networks_equal_the_plain_loop",
        ),
    ),
    Defect(
        "D-R8",
        "the perceptual backbone keeps gradients, which grow from step to step and enter the clipping",
        (
            Edit(
                VQGAN,
                "        gradient = torch.autograd.grad(loss, leaf)[0] if trains else None\n",
                "        gradient = None\n"
                "        if trains:\n"
                "            loss.backward()\n"
                "            gradient = leaf.grad\n",
            ),
            Edit(PERCEPTUAL, "        self.requires_grad_(False)\n", ""),
        ),
        (
            "models/muse/test_task.py::test_each_update_trains_its_own_network_and_nobody_elses",
            "models/muse/test_task.py::test_gradient_norms_do_not_grow_from_step_to_step",
            "models/muse/test_vqgan.py::test_the_generator_loss_leaves_no_gradient_on_discriminator_or_backbone",
        ),
    ),
    Defect(
        "D-R9",
        "the constructor asks on the console whether to delete the user's folder",
        (
            Edit(
                STATE,
                "    if began and not resume and not clear:\n        raise FileExistsError(",
                "    if began and not resume and not clear:\n"
                '        clear = input("delete? ") == "y"\n'
                "    if began and not resume and not clear:\n"
                "        raise FileExistsError(",
            ),
        ),
        ("engine/test_results_folder.py::test_a_folder_that_holds_something_is_neither_wiped_nor_asked_about",),
    ),
    Defect(
        "D-R9",
        "every process deletes the folder",
        (
            Edit(
                STATE,
                "    if runtime.is_main:\n        if found and not resume:\n",
                "    if found and not resume:\n        shutil.rmtree(folder, ignore_errors=True)\n    if True:\n"
                "        if False:\n",
            ),
        ),
        ("engine/test_distributed.py::test_one_process_alone_clears_and_writes",),
    ),
    Defect(
        "D-R10",
        "sampling keeps the graph",
        (
            Edit(
                TRAINER,
                "        with self._mode(False), torch.no_grad():\n            for name, weights in kinds.items():\n",
                "        with self._mode(False):\n            for name, weights in kinds.items():\n",
            ),
        ),
        ("engine/test_trainer.py::test_sampling_keeps_no_graph",),
    ),
    Defect(
        "D-R10",
        "so do the image tokenizer's samples",
        (
            Edit(
                TASK,
                "    @torch.no_grad()\n    def sample(self, batch: Batch, seed: int) -> Tensor:\n",
                "    def sample(self, batch: Batch, seed: int) -> Tensor:\n",
            ),
        ),
        ("models/muse/test_task.py::test_samples_are_one_grid_of_originals_and_both_reconstructions_without_a_graph",),
    ),
    Defect(
        "D-R10",
        "every process writes the same picture",
        (
            Edit(
                TRAINER,
                "        if not (self.is_main or self.runtime.shards):\n            return\n",
                "",
            ),
            Edit(
                TRAINER,
                '        if self.is_main:\n            folder = self.results_folder / "samples"\n',
                '        if True:\n            folder = self.results_folder / "samples"\n',
            ),
        ),
        ("engine/test_distributed.py::test_one_process_alone_clears_and_writes",),
    ),
    Defect(
        "D-R10",
        "held-out pictures are mirrored at random",
        (
            Edit("data/split.py", "Subset(unaugmented(dataset), valid)", "Subset(dataset, valid)"),
            Edit("engine/feed.py", UNAUGMENTED, ""),
        ),
        (
            "data/test_split.py::test_validation_is_not_augmented_and_training_still_is",
            "data/test_image.py::test_a_split_of_pictures_augments_the_training_part_only",
            "models/muse/test_vqgan_trainer.py::test_pictures_are_mirrored_for_training_and_never_for_validation",
        ),
    ),
    Defect(
        "D-R10",
        "so are the pictures of a validation set that the user gives",
        (Edit("engine/feed.py", UNAUGMENTED, ""),),
        ("models/muse/test_vqgan_trainer.py::test_pictures_are_mirrored_for_training_and_never_for_validation",),
    ),
    Defect(
        "D-R10",
        "the online and the averaged network are shown different pictures",
        (
            Edit(
                TRAINER,
                "                    samples[name] = self.task.sample(self._sample_batch, self.options.seed)\n",
                "                    others = self.runtime.to_device(self.prepare(next(self.feed.train.steps())[0]))\n"
                '                    chosen = others if name == "ema" else self._sample_batch\n'
                "                    samples[name] = self.task.sample(chosen, self.options.seed)\n",
            ),
        ),
        (
            "models/muse/test_vqgan_trainer.py::test_one_grid_shows_originals_and_what_both_weights_make_of_the_same_pictures",
        ),
    ),
    Defect(
        "D-R11",
        "gradients are synchronised at every micro-batch",
        (
            Edit(
                TRAINER,
                "            with nullcontext() if is_last else self.runtime.without_sync(active):\n",
                "            with nullcontext():\n",
            ),
        ),
        ("engine/test_distributed.py::test_gradients_are_synchronised_once_a_step_whatever_the_accumulation",),
    ),
    Defect(
        "D-R11",
        "the discriminator's step runs outside of autocast",
        (
            Edit(
                TRAINER,
                "                        with self.runtime.autocast():\n                            loss = update.loss(outputs)\n",
                "                        with self.runtime.autocast() if update.network == first else nullcontext():\n"
                "                            loss = update.loss(outputs)\n",
            ),
        ),
        ("engine/test_loop.py::test_every_loss_is_computed_in_autocast_and_differentiated_outside_of_it",),
    ),
    Defect(
        "D-R11",
        "the discriminator's step runs the autoencoder again, with a graph",
        (
            Edit(
                TASK,
                '        discriminator = self.networks["discriminator"]\n        return Loss(\n',
                '        discriminator = self.networks["discriminator"]\n'
                '        outputs = self.forward({"images": outputs.images})\n'
                "        return Loss(\n",
            ),
        ),
        ("models/muse/test_task.py::test_both_updates_share_one_reconstruction",),
    ),
    Defect(
        "D-R11",
        "the average is a part of what is trained and synchronised",
        (
            Edit(
                "engine/ema.py",
                "        self.average = [t.detach().clone() for t in self.online]\n",
                "        self.average = [t.detach().clone().requires_grad_(t.requires_grad) for t in self.online]\n",
            ),
        ),
        ("engine/test_ema.py::test_the_average_does_not_follow_gradients",),
    ),
    Defect(
        "D-R12",
        "steps are counted in float32, which stops at 2^24",
        (
            Edit(
                TRAINER,
                "            self.step += 1\n",
                "            self.step = int(torch.tensor(self.step, dtype=torch.float32) + 1)\n",
            ),
        ),
        ("engine/test_trainer.py::test_steps_are_counted_beyond_what_a_float_can_count",),
    ),
    Defect(
        "D-R12",
        "nothing is said unless there is a discriminator",
        (
            Edit(
                TRAINER,
                "        if self._pending is None:\n            return\n",
                "        if self._pending is None or len(self.raw) == 1:\n            return\n",
            ),
        ),
        (
            "engine/test_trainer.py::test_logged_numbers_are_in_metrics_jsonl",
            "models/muse/test_vqgan_trainer.py::test_without_a_gan_the_trainer_trains_logs_saves_and_resumes",
        ),
    ),
    Defect(
        "D-V1",
        "a missing comma: the vector-quantized path cannot be built",
        (
            Edit(
                VQGAN,
                "    return VectorQuantizer(dim, codebook_size, **vq_kwargs)\n",
                "    return VectorQuantizer(dim, codebook_size, True **vq_kwargs)\n",
            ),
        ),
        ("models/muse/test_vqgan.py::test_the_vector_quantized_path_can_be_built_and_trained",),
    ),
    Defect(
        "D-V1",
        "vq_kwargs are overwritten",
        (Edit(VQGAN, "            {**vq_kwargs, **vq_keywords},\n", "            vq_keywords,\n"),),
        (
            "models/muse/test_vqgan.py::test_the_vector_quantized_path_can_be_built_and_trained",
            "models/muse/test_vqgan.py::test_the_defaults_of_the_vector_quantizer_are_the_documented_ones",
        ),
    ),
    Defect(
        "D-V1",
        "codes are looked up in a codebook that does not exist",
        (
            Edit(
                VQGAN,
                '        values = self.quantizer.decode(rearrange(ids, "b h w -> b (h w)"))\n',
                '        values = self.codebook(rearrange(ids, "b h w -> b (h w)"))\n',
            ),
        ),
        ("models/muse/test_vqgan.py::test_images_to_codes_and_back",),
    ),
    Defect(
        "D-V1",
        "unknown keywords are swallowed",
        (Edit(VQGAN, "    for key in kwargs:\n", "    for key in ():\n"),),
        ("models/muse/test_vqgan.py::test_unknown_keywords_are_refused_by_naming_the_nearest",),
    ),
    Defect(
        "D-V2",
        "the perceptual backbone is a trainable part of the network, and Adam trains it",
        (
            Edit(VQGAN, '        self.__dict__["perceptual"] = vgg\n', "        self.perceptual = vgg\n"),
            Edit(PERCEPTUAL, "        self.requires_grad_(False)\n", ""),
        ),
        ("models/muse/test_vqgan.py::test_the_backbone_is_neither_trained_nor_counted_nor_switched_to_training",),
    ),
    Defect(
        "D-V2",
        "train() turns the backbone's dropout on: an image is at a distance from itself",
        (Edit(PERCEPTUAL, "        return super().train(False)\n", "        return super().train(mode)\n"),),
        ("models/muse/test_perceptual.py::test_an_image_is_at_distance_zero_from_itself_in_training_too",),
    ),
    Defect(
        "D-V2",
        "the backbone sees images that are not normalised as it has learned",
        (
            Edit(
                PERCEPTUAL,
                "        features = self.backbone((images - self.mean) / self.std)\n",
                "        features = self.backbone(images)\n",
            ),
        ),
        ("models/muse/test_perceptual.py::test_the_distance_is_that_of_unit_length_features",),
    ),
    Defect(
        "D-V2",
        "a backbone that nobody asked for is made (and downloaded) on first use",
        (
            Edit(
                VQGAN,
                "        if vgg is not None and not isinstance(vgg, PerceptualLoss):\n            vgg = PerceptualLoss(vgg)\n",
                "        if not isinstance(vgg, PerceptualLoss):\n"
                "            vgg = PerceptualLoss(nn.Conv2d(3, 4, 3) if vgg is None else vgg)\n",
            ),
        ),
        ("models/muse/test_vqgan.py::test_the_default_has_no_perceptual_loss_and_downloads_nothing",),
    ),
    Defect(
        "D-V3",
        "without a GAN the quantizer's loss is dropped",
        (
            Edit(
                VQGAN,
                "        return loss + quantized.loss, {",
                "        return loss if discriminator is None else loss + quantized.loss, {",
            ),
        ),
        (
            "models/muse/test_vqgan.py::test_the_quantizer_loss_counts_without_a_gan_too",
            "models/muse/test_task.py::test_training_without_a_gan",
        ),
    ),
    Defect(
        "D-V4",
        "the loss cannot be had without gradients: no validation",
        (
            Edit(
                VQGAN,
                "        trains = reconstruction.images.requires_grad and torch.is_grad_enabled()\n",
                "        trains = True\n",
            ),
        ),
        ("models/muse/test_vqgan.py::test_the_loss_can_be_asked_for_without_gradients",),
    ),
    Defect(
        "D-V5",
        "copy_for_eval moves the caller's network to the CPU and leaves it there",
        (Edit(VQGAN, "        copied = copy.deepcopy(self)\n", "        copied = copy.deepcopy(self.cpu())\n"),),
        ("models/muse/test_vqgan.py::test_copy_for_eval_leaves_the_network_as_it_is",),
    ),
    Defect(
        "D-V5",
        "the caller's images are marked as needing a gradient",
        (
            Edit(
                "models/muse/losses.py",
                "    images = images.detach().float().requires_grad_()\n",
                "    images = images.requires_grad_()\n",
            ),
        ),
        (
            "models/muse/test_vqgan.py::test_the_discriminator_loss_with_and_without_the_penalty",
            "models/muse/test_discriminator.py::test_gradient_penalty_trains_the_discriminator_and_leaves_the_images_alone",
        ),
    ),
    Defect(
        "D-V6",
        "the backbone is left out of the network's own state_dict alone: what holds the network finds keys missing",
        (
            Edit(VQGAN, '        self.__dict__["perceptual"] = vgg\n', "        self.perceptual = vgg\n"),
            Edit(
                VQGAN,
                "    @property\n    def device(self)",
                "    def state_dict(self, *args: Any, **kwargs: Any) -> Any:\n"
                "        kept = super().state_dict(*args, **kwargs)\n"
                '        return {name: value for name, value in kept.items() if not name.startswith("perceptual.")}\n'
                "\n"
                "    @property\n"
                "    def device(self)",
            ),
        ),
        ("models/muse/test_vqgan.py::test_the_backbone_is_not_in_the_state_and_a_parent_loads_without_it",),
    ),
]
