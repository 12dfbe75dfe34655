"""Where a run runs: processes, device, precision, compilation, random states. The one place that knows Accelerate."""

import atexit
import gc
import inspect
import logging
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from helicon.engine.compiling import compile_in_place
from helicon.engine.options import TrainerOptions
from helicon.engine.task import Batch

logger = logging.getLogger(__name__)

# Dense bf16 peak of known GPUs in FLOP/s, from the vendors' data sheets, for model FLOP utilisation.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
    "3090": 71e12,
}


class Runtime:
    """The processes and the device of a run."""

    def __init__(self, options: TrainerOptions):
        _refuse_settings_of_another_loop(options)
        self.accelerator = options.accelerator or _accelerator(options)
        self.device: torch.device = self.accelerator.device
        self.rank: int = self.accelerator.process_index
        self.world_size: int = self.accelerator.num_processes
        if self.is_distributed:
            atexit.unregister(_end_gloo)
            atexit.register(_end_gloo)
        self.precision = _precision(options, self.device)
        is_cuda = self.device.type == "cuda"
        self.compiles = options.compile is True or (options.compile in ("auto", "graphs") and is_cuda)
        self.records = options.compile == "graphs" and is_cuda and self.world_size == 1
        if options.compile == "graphs" and not self.records and self.is_main:
            logger.warning(
                'compile="graphs" records the steps of a single process: this run is only compiled'
                if is_cuda
                else f'compile="graphs" is for CUDA: this run, on {self.device.type}, is not compiled'
            )
        self._is_starting = self.compiles
        self.shards = options.shard
        if self.shards and self.world_size == 1:
            raise ValueError("shard=True needs several processes: start the run with torchrun, or leave it out")

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        return bool(self.accelerator.is_local_main_process)

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "no":
            return nullcontext()
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)

    def wrap(self, network: nn.Module, compiled: Iterable[nn.Module] = ()) -> nn.Module:
        """The network as the loop calls it: it or parts of it compiled in place, and synchronised or sharded over the processes."""
        for module in compiled if self.compiles else ():
            compile_in_place(module)
        if self.is_distributed:
            self._equalise(network)
        if self.shards:
            for module in network.modules():
                if isinstance(module, nn.ModuleList):
                    for layer in module:
                        fully_shard(layer)
            return cast(nn.Module, fully_shard(network))
        if not self.is_distributed:
            return network
        handler = self.accelerator.ddp_handler
        chosen: dict[str, Any] = handler.to_kwargs() if handler is not None else {}
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        # Buffers are not broadcast at each step: those that must agree (codebooks) are made to agree where they change.
        names = inspect.signature(DistributedDataParallel).parameters
        sync = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        if sync != "broadcast_buffers":
            chosen.pop("broadcast_buffers", None)
        return DistributedDataParallel(
            network, device_ids=device_ids, **{"gradient_as_bucket_view": True, **chosen, sync: False}
        )

    @staticmethod
    @torch.no_grad()
    def _equalise(network: nn.Module) -> None:
        """Every process starts from the first one's parameters and buffers, whatever seed its script had."""
        for tensor in (*network.parameters(), *network.buffers()):
            dist.broadcast(tensor.detach(), 0)

    def freeze(self, module: nn.Module) -> None:
        """A module that is only used: compiled, in evaluation mode, without gradients of its own."""
        module.requires_grad_(False).eval()
        if self.compiles:
            compile_in_place(module)

    @contextmanager
    def step(self, networks: Iterable[nn.Module]) -> Iterator[None]:
        """Around a training step. One in which a network takes its beginning from the data is not compiled: it is the only one."""
        is_first = self._is_starting and any(
            getattr(m, "starts_from_data", False) for network in networks for m in network.modules()
        )
        self._is_starting = is_first
        with torch.compiler.set_stance("force_eager") if is_first else nullcontext(), self._kernels_by_trial():
            yield

    @contextmanager
    def _kernels_by_trial(self) -> Iterator[None]:
        """Where few shapes come again and again it pays to try all kernels of a convolution once: what cuDNN would choose
        untried may be the slowest."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before or self.records
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    @contextmanager
    def without_sync(self, networks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Inside, backward leaves the gradients on this process: for all micro-batches but the last."""
        with ExitStack() as stack:
            for network in networks.values():
                if isinstance(network, DistributedDataParallel):
                    stack.enter_context(network.no_sync())
                elif self.shards:
                    sharded = cast(FSDPModule, network)
                    sharded.set_requires_gradient_sync(False)
                    stack.callback(sharded.set_requires_gradient_sync, True)
            yield

    @contextmanager
    def whole(self, networks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Inside, sharded networks hold their parameters whole: a sampler calls parts of them, not only the network itself."""
        sharded = [m for network in networks.values() for m in network.modules() if isinstance(m, FSDPModule)]
        for module in sharded:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in sharded:
                module.reshard()
                module.set_reshard_after_forward(
                    module not in networks.values(), recurse=False
                )  # as fully_shard had it

    def to_device(self, batch: Batch) -> Batch:
        return {key: _moved(value, self.device) for key, value in batch.items()}

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes, on the device."""
        if self.is_distributed:
            dist.all_reduce(value)
        return value

    def any(self, flag: Tensor) -> Tensor:
        """Whether the flag is set on any process."""
        return self.sum(flag.float()) > 0 if self.is_distributed else flag

    def gather(self, value: Any) -> list[Any]:
        """A small python object of every process, in the order of ranks."""
        if not self.is_distributed:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def wait(self) -> None:
        self.accelerator.wait_for_everyone()

    def peak_flops(self) -> float | None:
        if self.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.device)
        return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)


def _end_gloo() -> None:
    """Ends gloo's threads before Python goes: left to themselves, they abort a third of the processes that end well."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        gc.collect()  # networks that were wrapped hold their groups
        dist.destroy_process_group()


def _accelerator(options: TrainerOptions) -> Accelerator:
    kwargs = dict(options.accelerate_kwargs)
    kwargs.pop("mixed_precision", None)  # the loop's own: see _precision
    if kwargs.pop("split_batches", False):
        raise ValueError("write split_batches=True as an option of the trainer, not in accelerate_kwargs")
    handlers = list(kwargs.pop("kwargs_handlers", None) or [])
    if not any(isinstance(handler, InitProcessGroupKwargs) for handler in handlers):
        handlers.append(InitProcessGroupKwargs(timeout=timedelta(seconds=options.init_process_group_timeout_seconds)))
    trackers = _trackers(options, kwargs.pop("log_with", None))
    if trackers:
        kwargs["log_with"] = trackers
    if not torch.accelerator.is_available():
        kwargs["cpu"] = True
    accelerator = Accelerator(kwargs_handlers=handlers, **kwargs)
    # Accelerate leaves out what is not installed.
    if len(accelerator.log_with) < len(trackers) and "all" not in trackers:
        names = ", ".join(str(getattr(tracker, "name", tracker)) for tracker in trackers)
        raise ValueError(
            f"not all of the trackers asked for ({names}) are installed: pip install the missing one, or leave it out"
        )
    return accelerator


def _trackers(options: TrainerOptions, more: Any) -> list[Any]:
    """The trackers asked for in each of the three ways, each once: by the two options, and to Accelerate itself."""
    found: list[Any] = []
    for asked in (options.trackers, more, "wandb" if options.use_wandb_tracking else None):
        for tracker in asked if isinstance(asked, (list, tuple)) else [asked]:
            tracker = getattr(tracker, "value", tracker)  # Accelerate's own enumeration of names
            if tracker is not None and tracker not in found:
                found.append(tracker)
    return found


def _refuse_settings_of_another_loop(options: TrainerOptions) -> None:
    """What Accelerate is told, by arguments or by `accelerate launch`, and the loop here does in its own way."""
    launched = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    steps = options.accelerate_kwargs.get("gradient_accumulation_steps", launched)
    steps = getattr(options.accelerator, "gradient_accumulation_steps", steps)
    if str(steps) not in ("1", "auto"):
        raise ValueError(f"gradient_accumulation_steps={steps}: write it as grad_accum_every, an option of the trainer")
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("1", "true"):
            raise ValueError(
                f"accelerate launch is configured for {name}, which is not used here: start with torchrun, and with "
                "trainer.shard=true where a network is too large for one device"
            )


def _precision(options: TrainerOptions, device: torch.device) -> str:
    chosen = options.mixed_precision
    if chosen == "auto":
        asked = options.accelerate_kwargs.get("mixed_precision")
        if asked is not None and asked not in ("no", "bf16", "fp16"):
            raise ValueError(f"mixed_precision={asked!r} in accelerate_kwargs must be one of 'no', 'bf16', 'fp16'")
        launched = os.environ.get("ACCELERATE_MIXED_PRECISION")  # by `accelerate launch`
        own: Any = getattr(options.accelerator, "mixed_precision", launched)
        if asked is not None:
            chosen = asked
        elif own in ("bf16", "fp16"):  # "no" is also what a user who said nothing has
            chosen = own
        else:
            chosen = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "no"
    if chosen == "fp16" and device.type == "cpu":
        raise ValueError("mixed_precision='fp16' needs a GPU: use 'bf16' or 'no' on a CPU")
    return chosen


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return [item.to(device, non_blocking=True) for item in value]
    return value


def random_state() -> dict[str, Any]:
    """The state of every global random generator of this process, as json."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "python": [version, list(words), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_bytes(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # It takes no larger one, and a user's (the time in nanoseconds, say) is multiplied before.
    torch.manual_seed(seed % 2**63)


@contextmanager
def fixed_randomness(seed: int) -> Iterator[None]:
    """Inside, every global generator starts from `seed`; after it, training's randomness goes on as if nothing had been drawn."""
    state = random_state()
    seed_everything(seed)
    try:
        yield
    finally:
        set_random_state(state)


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
