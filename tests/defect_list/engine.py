"""Defects of the reference packages' training loops (D-T), and traps of Accelerate that fail silently (E)."""

from defect_list.entry import Defect, Edit

TRAINER, OPTIM, STATE, RUNTIME = "engine/trainer.py", "engine/optim.py", "engine/state.py", "engine/runtime.py"

DEFECTS = [
    Defect(
        "D-T1",
        "the warm-up lowers the rate before the schedule records it: it stays at lr / warmup_steps for ever",
        (
            Edit(
                OPTIM,
                "self._carrier = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=settings.lr, momentum=0.9)",
                "self._carrier = torch.optim.SGD(\n"
                "            [nn.Parameter(torch.zeros(1))], lr=settings.lr / max(1, settings.warmup_steps), momentum=0.9\n"
                "        )",
            ),
        ),
        (
            "engine/test_schedules.py::test_a_warm_up_ends_at_the_full_rate_and_stays_there",
            "engine/test_schedules.py::test_a_warm_up_multiplies_the_schedule_below_it",
        ),
    ),
    Defect(
        "D-T2",
        "validation leaves the network in evaluation mode for the rest of the training",
        (
            Edit(
                TRAINER,
                "            for module, was_training in before:\n                module.training = was_training\n",
                "            pass\n",
            ),
        ),
        (
            "engine/test_trainer.py::test_validation_and_sampling_leave_every_mode_as_it_was",
            "engine/test_trainer.py::test_validating_more_often_does_not_change_training",
        ),
    ),
    Defect(
        "D-T3",
        "validation batches stay on the CPU while the network is on the GPU",
        (
            Edit(
                TRAINER,
                "                batch = self.runtime.to_device(self.prepare(batch))\n",
                "                batch = self.prepare(batch)\n",
            ),
        ),
        ("engine/test_trainer.py::test_what_the_task_is_given_was_moved_to_the_device",),
    ),
    Defect(
        "D-T4",
        "the average is copied before the network is moved, and stays where it was",
        (
            Edit(
                TRAINER,
                "        task.move_to(self.device)\n",
                "        self.raw = dict(task.networks)\n"
                "        self.ema = self._averaged()\n"
                "        task.move_to(self.device)\n",
            ),
            Edit(TRAINER, "        self.ema = self._averaged()\n        self.scale", "        self.scale"),
        ),
        ("engine/test_ema.py::test_the_average_follows_where_a_trainer_puts_the_network",),
    ),
    Defect(
        "D-T5",
        "a checkpoint of bare names is loaded into wrapped networks: no resume on several processes",
        (
            Edit(
                STATE,
                "    own = trainer.task.model.own_tensors()\n",
                '    prefix = "module." if trainer.is_distributed else ""\n'
                "    own = {prefix + name: value for name, value in trainer.task.model.own_tensors().items()}\n",
            ),
        ),
        ("engine/test_distributed.py::test_a_run_of_two_processes_resumes_exactly_on_both",),
    ),
    Defect(
        "D-T5",
        "the main process alone has an average",
        (
            Edit(
                TRAINER,
                "        if not options.use_ema or not networks:\n",
                "        if not options.use_ema or not networks or not (self.is_main or self.runtime.shards):\n",
            ),
        ),
        ("engine/test_distributed.py::test_validation_is_averaged_over_all_ranks",),
    ),
    Defect(
        "D-T6",
        "the checkpoint lacks the configuration that rebuilds the network",
        (Edit(STATE, '        CONFIG_FILE: {**model.config(), "stages": stages},\n', ""),),
        ("engine/test_trainer.py::test_helicon_load_rebuilds_the_averaged_network_from_the_folder_alone",),
    ),
    Defect(
        "D-T6",
        "options of the average are accepted and ignored",
        (
            Edit(
                TRAINER,
                "EMA(networks, options.ema_beta, options.ema_update_after_step, options.ema_update_every)",
                "EMA(networks, options.ema_beta)",
            ),
        ),
        ("engine/test_ema.py::test_the_options_of_a_trainer_reach_its_average",),
    ),
    Defect(
        "D-T7",
        "with fewer samples than a batch the loop waits for ever",
        (Edit("data/loader.py", "        if len(self.dataset) < self.global_batch:\n", "        if False:\n"),),
        (
            "engine/test_trainer.py::test_fewer_samples_than_a_batch_is_an_error_and_not_a_hang",
            "data/test_loader.py::test_fewer_samples_than_a_step_is_an_error_at_once",
            "models/muse/test_vqgan_trainer.py::test_what_cannot_be_trained_on_is_told_in_one_sentence",
        ),
    ),
    Defect(
        "D-T7",
        "a user's own loader that gives nothing is asked again for ever",
        (
            Edit(
                "data/foreign.py",
                "            if is_empty:\n                self._raise_empty()\n            epoch, number, is_resumed",
                "            epoch, number, is_resumed",
            ),
        ),
        ("data/test_foreign.py::test_an_iterator_that_ends_is_an_error",),
    ),
    Defect(
        "D-T8",
        "the logged loss is that of the last micro-batch",
        (
            Edit(
                TRAINER,
                "logs[key] = logs[key] + value.detach() if key in logs else value.detach()",
                "logs[key] = value.detach()",
            ),
        ),
        ("engine/test_loop.py::test_accumulation_does_not_change_the_logged_loss",),
    ),
    Defect(
        "D-T8",
        "training is logged at the step before, validation at the step after",
        (Edit(TRAINER, "self._pending = Pending(step, logs,", "self._pending = Pending(step - 1, logs,"),),
        ("engine/test_trainer.py::test_logged_numbers_are_in_metrics_jsonl",),
    ),
    Defect(
        "D-T8",
        "validation takes val_num_batches times grad_accum_every batches",
        (
            Edit(
                TRAINER,
                "self.feed.valid.validation(self.options.val_num_batches)",
                "self.feed.valid.validation(\n"
                "                self.options.val_num_batches and self.options.val_num_batches * self.options.grad_accum_every\n"
                "            )",
            ),
        ),
        ("engine/test_trainer.py::test_validation_looks_at_the_number_of_batches_asked_for_whatever_the_accumulation",),
    ),
    Defect(
        "D-T9",
        "the keywords for Accelerate are changed in place",
        (
            Edit(
                RUNTIME,
                "    kwargs = dict(options.accelerate_kwargs)\n",
                "    kwargs: Any = options.accelerate_kwargs\n",
            ),
        ),
        ("engine/test_runtime.py::test_the_users_keywords_are_not_changed_and_do_not_leak_into_the_next_run",),
    ),
    Defect(
        "D-T9",
        "and their mutable default is shared by all later trainers",
        (
            Edit(
                RUNTIME,
                "    kwargs = dict(options.accelerate_kwargs)\n",
                "    kwargs: Any = options.accelerate_kwargs\n",
            ),
            Edit(
                "engine/options.py",
                "    accelerate_kwargs: Mapping[str, Any] = field(default_factory=dict)",
                "    accelerate_kwargs: Mapping[str, Any] = field(default_factory=lambda shared={}: shared)",
            ),
        ),
        ("engine/test_trainer.py::test_the_tracker_of_one_trainer_is_not_that_of_the_next",),
    ),
    Defect(
        "D-T10",
        "each parameter group is clipped by its own norm",
        (
            Edit(
                OPTIM,
                "            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.settings.max_grad_norm, norm, foreach=True)\n",
                "            for group in [group for optimizer in self.optimizers for group in optimizer.param_groups]:\n"
                '                torch.nn.utils.clip_grad_norm_(group["params"], self.settings.max_grad_norm)\n',
            ),
        ),
        ("engine/test_optim.py::test_one_norm_is_taken_over_the_whole_network",),
    ),
    Defect(
        "D-T10",
        "keywords that the optimizer does not have are swallowed",
        (Edit(OPTIM, "betas=settings.betas, fused=True, **kwargs)", "betas=settings.betas, fused=True)"),),
        ("engine/test_optim.py::test_keywords_an_optimizer_lacks_are_not_swallowed",),
    ),
    Defect(
        "D-T11",
        "backward runs inside autocast",
        (
            Edit(
                TRAINER,
                "                        (total if self.scale is None else total * self.scale.value).backward()\n",
                "                        with self.runtime.autocast():\n"
                "                            (total if self.scale is None else total * self.scale.value).backward()\n",
            ),
        ),
        ("engine/test_loop.py::test_every_loss_is_computed_in_autocast_and_differentiated_outside_of_it",),
    ),
    Defect(
        "D-T11",
        "every step waits for all processes",
        (
            Edit(
                TRAINER, "            self.step += 1\n", "            self.step += 1\n            self.runtime.wait()\n"
            ),
        ),
        ("engine/test_loop.py::test_steps_outside_logging_wait_for_no_other_process",),
    ),
    Defect(
        "D-T11",
        "every step reads its loss from the device",
        (
            Edit(
                TRAINER,
                "                        total = loss.total * share\n",
                "                        total = loss.total * share\n                        total.item()\n",
            ),
        ),
        ("engine/test_loop.py::test_the_steps_outside_logging_never_wait_for_the_device",),
    ),
    Defect(
        "D-T11",
        "unused parameters are looked for at every step",
        (
            Edit(
                RUNTIME,
                '**{"gradient_as_bucket_view": True,',
                '**{"find_unused_parameters": True, "gradient_as_bucket_view": True,',
            ),
        ),
        ("engine/test_distributed.py::test_no_search_for_unused_parameters_is_paid_for",),
    ),
    Defect(
        "D-T12",
        "the checkpoint holds the online network a second time, with the average",
        (
            Edit(
                STATE,
                "tensors[EMA_FILE] = {name: _copied(averages[id(value)]) for name, value in own.items() if id(value) in averages}",
                "tensors[EMA_FILE] = {name: _copied(averages.get(id(value), value)) for name, value in own.items()}",
            ),
        ),
        (
            "models/muse/test_vqgan_trainer.py::test_a_checkpoint_holds_every_weight_once_and_the_average_of_the_autoencoder_alone",
        ),
    ),
    Defect(
        "D-T12",
        "the last step is not saved",
        (
            Edit(
                TRAINER,
                "            if saves or self._owes_checkpoint:\n",
                "            if step % options.save_model_every == 0:\n",
            ),
            Edit(TRAINER, "            self._save_once(final=True)\n            self.writer.finish()\n", ""),
        ),
        ("engine/test_trainer.py::test_the_final_step_is_saved_whatever_the_interval",),
    ),
    Defect(
        "D-T12",
        "the random state is not resumed",
        (Edit(STATE, "        set_random_state(states[rank])\n", "        pass\n"),),
        ("engine/test_resume.py::test_a_stopped_and_resumed_run_equals_the_unbroken_one_bit_for_bit",),
    ),
    Defect(
        "D-T12",
        "the data position is not resumed",
        (Edit(STATE, 'trainer.position = Position(**document["position"])', "trainer.position = Position()"),),
        (
            "engine/test_resume.py::test_a_stopped_and_resumed_run_equals_the_unbroken_one_bit_for_bit",
            "models/muse/test_vqgan_trainer.py::test_a_resumed_run_equals_the_unbroken_one_bit_for_bit",
        ),
    ),
    Defect(
        "D-T12",
        "a checkpoint is written in place: a kill leaves half of one",
        (
            Edit(
                "engine/checkpoint.py",
                '    temporary = folder.with_name(f".{folder.name}.writing")\n',
                "    temporary = folder\n",
            ),
            Edit("engine/checkpoint.py", "        _replace(temporary, folder)\n", ""),
        ),
        (
            "engine/test_checkpoint.py::test_a_fault_at_every_step_leaves_the_old_or_the_new_one_whole_and_nothing_else",
            "engine/test_resume.py::test_a_kill_at_every_moment_of_a_save_leaves_a_whole_checkpoint",
        ),
    ),
    Defect(
        "D-T12",
        "batches that are neither tuples nor dicts are not known",
        (
            Edit(
                "data/fields.py",
                "    values: Sequence[Any] = [sample] if is_one else sample\n",
                "    values: Sequence[Any] = sample\n",
            ),
        ),
        (
            "data/test_fields.py::test_a_bare_sample_is_one_entry",
            "models/muse/test_vqgan_trainer.py::test_every_source_gives_its_pictures_each_once_an_epoch",
        ),
    ),
    Defect(
        "D-T13",
        "training does not switch to train mode: after an evaluation it runs in evaluation mode",
        (
            Edit(
                TRAINER,
                "                with self._mode(True):\n                    self._inside_session = True\n",
                "                with nullcontext():\n                    self._inside_session = True\n",
            ),
        ),
        ("engine/test_trainer.py::test_training_runs_in_train_mode_also_after_someone_called_eval",),
    ),
    Defect(
        "E-1",
        "`accumulate()` entered once per network: its count runs ahead, and the discriminator never moves",
        (
            Edit(
                TRAINER,
                "                    with self._only(update.network):\n",
                "                    self.accelerator.gradient_accumulation_steps = len(micro)\n"
                "                    accumulating = self.accelerator.accumulate(self.wrapped[update.network])\n"
                "                    with accumulating, self._only(update.network):\n"
                "                        self.optimizers[update.network].waits = not self.accelerator.sync_gradients\n",
            ),
            Edit(
                TRAINER,
                "            norm, bad_here = self.optimizers[update.network].apply(bad, self.scale.value if self.scale else None)\n",
                "            if self.optimizers[update.network].waits:\n"
                "                continue\n"
                "            norm, bad_here = self.optimizers[update.network].apply(bad, self.scale.value if self.scale else None)\n",
            ),
        ),
        ("engine/test_loop.py::test_two_networks_equal_the_plain_loop",),
    ),
    Defect(
        "E-2",
        "the other network is not frozen during an update, and keeps gradients that are not its own",
        (
            Edit(
                TRAINER,
                "        others = [p for other, parameters in self._trainable.items() if other != name for p in parameters]\n",
                "        others: list[nn.Parameter] = []\n",
            ),
        ),
        (
            "engine/test_loop.py::test_two_networks_equal_the_plain_loop",
            "engine/test_loop.py::test_an_update_moves_its_own_network_alone",
        ),
    ),
    Defect(
        "E-3",
        "a prepared scheduler advances once for each process",
        (
            Edit(
                TRAINER,
                "            optimizer.schedule.advance()\n",
                "            optimizer.schedule.advance(self.runtime.world_size)\n",
            ),
        ),
        ("engine/test_distributed.py::test_a_schedule_advances_once_a_step_on_any_number_of_processes",),
    ),
    Defect(
        "E-4",
        "optimizer state comes back in another memory layout than its channels_last parameter, and is paired wrongly",
        (
            Edit(
                OPTIM,
                "    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)\n",
                "    return value.to(parameter.device, copy=True)\n",
            ),
        ),
        (
            "engine/test_optim.py::test_state_from_a_file_fits_a_network_of_another_layout_in_memory",
            "models/muse/test_vqgan_trainer.py::test_a_resumed_run_equals_the_unbroken_one_bit_for_bit",
        ),
    ),
]
