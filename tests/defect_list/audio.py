"""Defects of the reference package's audio trainers (A, up to 22).

What they share with the other training loops stands in engine.py and image.py: DEFECTS.md says where.
"""

from defect_list.entry import Defect, Edit

TRAINER, STATE, FEED, OPTIM = "engine/trainer.py", "engine/state.py", "engine/feed.py", "engine/optim.py"
TASK = "models/soundstream/task.py"
MODEL = "models/soundstream/model.py"
LOSSES = "models/soundstream/losses.py"
TRAINERS = "models/soundstream/trainers.py"
AUDIO = "data/audio.py"
TESTS = "models/soundstream"

DEFECTS = [
    Defect(
        "A-3",
        "each discriminator has a backward pass of its own, of one forward: the processes' discriminators drift apart",
        (
            Edit(
                TASK,
                "        total = total_of_discriminators(terms)\n",
                "        *others, last = terms.values()\n"
                "        for term in others:\n"
                "            term.backward(retain_graph=True)\n"
                "        total = last\n",
            ),
        ),
        (f"{TESTS}/test_trainers.py::test_both_processes_have_one_codec_and_the_same_discriminators",),
    ),
    Defect(
        "A-3",
        "the discriminators are called past their wrapper, and never synchronised",
        (
            Edit(
                TASK,
                '            fake, outputs.target, self.networks["discriminator"], with_penalty\n',
                "            fake, outputs.target, self.model.discriminators, with_penalty\n",
            ),
        ),
        (
            f"{TESTS}/test_task.py::test_networks_are_called_through_the_tasks_own_table",
            f"{TESTS}/test_task.py::test_two_processes_stay_equal_discriminators_too_and_balance_alike",
            f"{TESTS}/test_trainers.py::test_both_processes_have_one_codec_and_the_same_discriminators",
        ),
    ),
    Defect(
        "A-4",
        "discr_max_grad_norm looks for the discriminators on a distributed wrapper, which has none",
        (
            Edit(
                TRAINER,
                "            norm, bad_here = self.optimizers[update.network].apply(bad, self.scale.value if self.scale else None)\n",
                "            largest = self.options.discr_max_grad_norm\n"
                "            if update.network != first and largest is not None:\n"
                "                nn.utils.clip_grad_norm_(self.wrapped[update.network].members.parameters(), largest)\n"
                "            norm, bad_here = self.optimizers[update.network].apply(bad, self.scale.value if self.scale else None)\n",
            ),
        ),
        (f"{TESTS}/test_trainers.py::test_both_processes_have_one_codec_and_the_same_discriminators",),
    ),
    Defect(
        "A-5",
        "the step is read from the path of the checkpoint, and not from the checkpoint",
        (
            Edit(
                STATE,
                '    trainer.step = document["step"]\n',
                '    numbers = "".join(letter if letter.isdigit() else " " for letter in str(path)).split()\n'
                "    trainer.step = int(numbers[-1]) if numbers else 0\n",
            ),
        ),
        (f"{TESTS}/test_trainers.py::test_the_step_is_in_the_checkpoint_and_not_in_its_name",),
    ),
    Defect(
        "A-6",
        "the running balance of the losses is not in the checkpoint",
        (
            Edit(
                LOSSES,
                '        self.register_buffer("sums", torch.zeros(len(names)))\n'
                '        self.register_buffer("counts", torch.zeros(len(names)))\n',
                '        self.register_buffer("sums", torch.zeros(len(names)), persistent=False)\n'
                '        self.register_buffer("counts", torch.zeros(len(names)), persistent=False)\n',
            ),
        ),
        (
            f"{TESTS}/test_trainers.py::test_a_resumed_run_equals_the_unbroken_one_bit_for_bit",
            f"{TESTS}/test_losses.py::test_sizes_are_averaged_over_steps_and_saved",
        ),
    ),
    Defect(
        "A-6",
        "the loss scale of fp16 is not resumed",
        (
            Edit(
                STATE,
                '    if trainer.scale is not None and loaded.has(f"{STATE_FOLDER}/loss_scale.safetensors"):\n',
                "    if False:\n",
            ),
        ),
        (f"{TESTS}/test_trainers.py::test_a_resumed_run_goes_on_with_its_loss_scale",),
    ),
    Defect(
        "A-6",
        "a resumed run is a new one for its tracker",
        (Edit(STATE, '    trainer.trackers.run_id = document["tracker_run"]\n', ""),),
        (f"{TESTS}/test_trainers.py::test_a_resumed_run_is_the_same_run_for_its_tracker",),
    ),
    Defect(
        "A-7",
        "no checkpoint is ever deleted",
        (
            Edit(
                "engine/checkpoint.py",
                "    if keep_last == 0 or len(folders) <= keep_last:\n        return\n",
                "    if True:\n        return\n",
            ),
        ),
        (
            "engine/test_checkpoint.py::test_pruning_keeps_the_last_and_the_best",
            "engine/test_checkpoint.py::test_submitting_waits_for_the_write_before_and_prunes",
        ),
    ),
    Defect(
        "A-7",
        "a checkpoint of step 0 is always written",
        (
            Edit(
                TRAINER,
                "            while self.step < self.options.num_train_steps:\n",
                "            if self.step == 0:\n"
                "                self._save_once()\n"
                "            while self.step < self.options.num_train_steps:\n",
            ),
        ),
        (
            "engine/test_trainer.py::test_the_final_step_is_saved_whatever_the_interval",
            f"{TESTS}/test_trainers.py::test_a_resumed_run_equals_the_unbroken_one_bit_for_bit",
        ),
    ),
    Defect(
        "A-8",
        "set_model_as_ema_model_ copies the other way: the average is lost",
        (
            Edit(
                "engine/ema.py",
                "        self._forget_whole_copies()\n"
                "        for average, online in zip(self.average, self.online, strict=True):\n"
                "            online.copy_(average)\n",
                "        self._forget_whole_copies()\n"
                "        for average, online in zip(self.average, self.online, strict=True):\n"
                "            average.copy_(online)\n",
            ),
        ),
        (
            "engine/test_ema.py::test_copy_to_online_makes_the_weights_the_averaged_ones",
            "engine/test_trainer.py::test_set_model_as_ema_model_gives_the_online_network_the_averaged_weights",
            f"{TESTS}/test_trainers.py::test_set_model_as_ema_model_does_what_its_name_says",
        ),
    ),
    Defect(
        "A-8",
        "the trainer's tokenize uses a name that is not there",
        (
            Edit(
                TRAINERS,
                "            return self.unwrapped_soundstream.tokenize(audio.to(self.device))\n",
                "            return ema_model.tokenize(audio.to(self.device))  # type: ignore[name-defined] # noqa: F821\n",
            ),
        ),
        (f"{TESTS}/test_trainers.py::test_tokenize_uses_the_averaged_weights_and_leaves_everything_as_it_was",),
    ),
    Defect(
        "A-9",
        "the number of validation batches is a bool: one batch is looked at, whatever was asked for",
        (
            Edit(
                TRAINER, "self.feed.valid.validation(self.options.val_num_batches)", "self.feed.valid.validation(True)"
            ),
        ),
        (
            "engine/test_trainer.py::test_validation_looks_at_the_number_of_batches_asked_for_whatever_the_accumulation",
            f"{TESTS}/test_trainers.py::test_validation_looks_at_the_number_of_batches_asked_for",
        ),
    ),
    Defect(
        "A-10",
        "the validation set given is overwritten by a split of the training set",
        (
            Edit(
                FEED,
                "        if dataset is not None and val_dataset is None and val_dataloader is None and options.valid_frac > 0:\n",
                "        if dataset is not None and options.valid_frac > 0:\n",
            ),
        ),
        (
            "engine/test_trainer.py::test_the_given_validation_set_is_the_one_used",
            f"{TESTS}/test_trainers.py::test_the_validation_set_given_is_the_one_used",
        ),
    ),
    Defect(
        "A-10",
        "or by the training set itself",
        (
            Edit(
                FEED,
                "            dataset, val_dataset = split(dataset, options.valid_frac, options.random_split_seed)\n",
                "            dataset, val_dataset = split(dataset, options.valid_frac, options.random_split_seed)\n"
                "        elif dataset is not None:\n"
                "            val_dataset = dataset\n",
            ),
        ),
        (
            "engine/test_trainer.py::test_the_given_validation_set_is_the_one_used",
            f"{TESTS}/test_trainers.py::test_the_validation_set_given_is_the_one_used",
        ),
    ),
    Defect(
        "A-11",
        "the samples of a step overwrite those of the step before",
        (Edit(TRAINER, 'write(folder / f"step-{self.step:08d}-{name}")', "write(folder / name)"),),
        (f"{TESTS}/test_trainers.py::test_samples_of_every_time_are_kept_and_validation_is_measured",),
    ),
    Defect(
        "A-11",
        "and all samples of a step one file",
        (Edit(TASK, 'f"{number:02d}-{name}.wav"', 'f"{name}.wav"'),),
        (
            f"{TESTS}/test_task.py::test_samples_are_numbered_files_beside_their_originals_and_a_picture",
            f"{TESTS}/test_trainers.py::test_samples_of_every_time_are_kept_and_validation_is_measured",
        ),
    ),
    Defect(
        "A-11",
        "a codec is never validated",
        (
            Edit(
                TRAINER,
                "            if self.feed.valid is not None and (saves or due(options.val_every or options.save_results_every)):\n",
                "            if len(self.raw) == 1 and self.feed.valid is not None and due(options.save_results_every):\n",
            ),
        ),
        (f"{TESTS}/test_trainers.py::test_samples_of_every_time_are_kept_and_validation_is_measured",),
    ),
    Defect(
        "A-12",
        "a trainer is a module whose train() trains: eval() runs the whole training",
        (
            Edit(TRAINER, "class Trainer(Surface):\n", "class Trainer(Surface, nn.Module):\n"),
            Edit(
                TRAINER,
                "        self.task = task\n        self.options = ",
                "        nn.Module.__init__(self)\n        self.task = task\n        self.options = ",
            ),
        ),
        (
            "engine/test_trainer.py::test_a_trainer_is_no_module_and_keeps_the_words_of_scripts",
            f"{TESTS}/test_trainers.py::test_two_trainers_in_one_process_and_a_trainer_is_no_module",
        ),
    ),
    Defect(
        "A-13",
        "clearing a folder that is not there fails",
        (
            Edit(
                STATE,
                "        if found and not resume:\n            with checkpoint.locked(folder):",
                "        if clear and not resume:\n            with checkpoint.locked(folder):",
            ),
        ),
        (f"{TESTS}/test_trainers.py::test_a_folder_that_is_not_there_need_not_be_cleared",),
    ),
    Defect(
        "A-14",
        "without a warm-up, the default, the schedule fails",
        (
            Edit(
                OPTIM,
                "        done = min(1.0, (self.updates + 1) / warmup) if warmup else 1.0\n",
                "        done = min(1.0, (self.updates + 1) / warmup)\n",
            ),
        ),
        (
            "engine/test_schedules.py::test_without_a_warm_up_the_rate_is_there_from_the_first_step",
            f"{TESTS}/test_trainers.py::test_each_network_has_its_own_clipping_and_rate",
        ),
    ),
    Defect(
        "A-15",
        "the codec's loss leaves gradients on the discriminators, which enter its clipping",
        (
            Edit(LOSSES, "        leaf = audio.detach().requires_grad_(trains)\n", "        leaf = audio\n"),
            Edit(
                LOSSES,
                "        if not trains:\n            return total, known\n",
                "        if audio is leaf:\n            return total, known\n",
            ),
        ),
        (
            f"{TESTS}/test_losses.py::test_the_gradient_reaches_the_audio_alone",
            f"{TESTS}/test_task.py::test_each_update_trains_its_own_network_and_nobody_elses",
        ),
    ),
    Defect(
        "A-16",
        "the discriminators' step runs the codec again, with a graph, and its codebooks learn a second time",
        (
            Edit(
                TASK,
                "        fake = without_padding(outputs.reconstruction.audio.detach(), outputs.lengths)\n",
                '        again = self.networks["generator"](outputs.target).audio\n'
                "        fake = without_padding(again, outputs.lengths)\n",
            ),
        ),
        (
            f"{TESTS}/test_task.py::test_both_updates_share_one_reconstruction_and_one_look_at_the_real_sound",
            f"{TESTS}/test_task.py::test_the_codebooks_learn_once_a_step",
        ),
    ),
    Defect(
        "A-16",
        "so does the discriminators' loss that a user asks for",
        (
            Edit(
                MODEL,
                "        with torch.no_grad(), self._evaluating():  # the codebooks learn",
                "        with torch.enable_grad():  # the codebooks learn",
            ),
        ),
        (f"{TESTS}/test_model.py::test_the_discriminators_loss_leaves_the_codec_alone",),
    ),
    Defect(
        "A-17",
        "trackers are not told the hyper-parameters",
        (Edit("engine/tracking.py", "config=dict(hyper_parameters)", "config=None"),),
        (
            "engine/test_tracking.py::test_a_tracker_gets_the_hyper_parameters_and_every_report_with_its_step",
            "engine/test_tracking.py::test_a_block_names_the_project_and_the_hyper_parameters",
        ),
    ),
    Defect(
        "A-17",
        "trackers are started twice",
        (
            Edit(
                "engine/tracking.py",
                "        if not self.wanted or self.started:\n            return\n",
                "        if not self.wanted:\n            return\n",
            ),
        ),
        ("engine/test_tracking.py::test_a_block_names_the_project_and_the_hyper_parameters",),
    ),
    Defect(
        "A-17",
        "trackers are not ended when training raises",
        (
            Edit(
                "engine/surface.py",
                "        try:\n            yield\n        finally:\n            self.trackers.end()\n",
                "        yield\n        self.trackers.end()\n",
            ),
        ),
        (
            "engine/test_trainer.py::test_wandb_tracker_passes_hyper_parameters_on_and_ends_when_training_raises",
            "engine/test_tracking.py::test_a_block_names_the_project_and_the_hyper_parameters",
        ),
    ),
    Defect(
        "A-18",
        "a second trainer in one process is refused for ever",
        (
            Edit(
                TRAINER,
                "        self.task = task\n        self.options = ",
                '        assert not hasattr(Trainer, "made"), "one trainer at a time"\n'
                '        setattr(Trainer, "made", True)\n'
                "        self.task = task\n"
                "        self.options = ",
            ),
        ),
        (
            "engine/test_trainer.py::test_two_trainers_in_one_process_do_not_disturb_each_other",
            f"{TESTS}/test_trainers.py::test_two_trainers_in_one_process_and_a_trainer_is_no_module",
        ),
    ),
    Defect(
        "A-20",
        "a length that is no whole number of seconds is not understood",
        (
            Edit(
                AUDIO,
                "            return round(self.max_length_seconds * highest) * self.grid // highest\n",
                "            return int(self.max_length_seconds) * self.grid\n",
            ),
        ),
        (
            "data/test_audio.py::test_lengths_in_seconds_may_be_fractions",
            f"{TESTS}/test_trainers.py::test_every_source_gives_its_sounds_each_once_an_epoch",
        ),
    ),
    Defect(
        "A-21",
        "the discriminators are averaged, and saved once more",
        (Edit(TASK, 'averaged=("generator",))', "averaged=tuple(networks))"),),
        (
            f"{TESTS}/test_task.py::test_what_is_trained_and_averaged",
            f"{TESTS}/test_trainers.py::test_the_average_is_of_the_codec_alone_and_copies_codebooks",
        ),
    ),
    Defect(
        "A-21",
        "codebooks, which are running means already, are mixed with their own past",
        (
            Edit(
                "engine/ema.py",
                "[isinstance(t, nn.Parameter) and t.is_floating_point() for t in self.online]",
                "[t.is_floating_point() for t in self.online]",
            ),
        ),
        (
            "engine/test_ema.py::test_buffers_are_copied_not_averaged",
            f"{TESTS}/test_trainers.py::test_the_average_is_of_the_codec_alone_and_copies_codebooks",
        ),
    ),
]
