"""Shared by the benchmarks: timing on any device, where the time goes, what the hardware is, a table and a json file."""

import argparse
import json
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What the command line says, with the options that all measurements of speed have."""
    parser.add_argument("--repeats", type=int, default=5, help="measurements, of 10 training steps or one call each")
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels that took most of the time, and their kinds"
    )
    parser.add_argument(
        "--compile", choices=("auto", "graphs"), default="auto", help="the trainer's option: graphs records whole steps"
    )
    parser.add_argument("--out", type=Path, help="where to write the numbers as json")
    return parser.parse_args()


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(function: Callable[[], object], repeats: int = 10, warm_up: int = 2) -> float:
    """The median time of one call, after some that do not count."""
    for _ in range(warm_up):
        function()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak_gib() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def hardware() -> dict[str, Any]:
    cpu_file = Path("/proc/cpuinfo")
    lines = cpu_file.read_text().splitlines() if cpu_file.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def measured(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row, said at once: the table comes at the end, and what is stopped before has not been for nothing."""
    print("; ".join(f"{name} {_cell(value)}" for name, value in row.items() if value is not None), flush=True)
    return dict(row)


def show(name: str, rows: Sequence[Mapping[str, Any]], out: Path | None) -> None:
    """Prints a Markdown table of the rows and writes them with the hardware they were measured on."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(_cell(row.get(column)) for column in columns)} |")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"benchmark": name, "hardware": hardware(), "rows": list(rows)}, indent=2) + "\n")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


# What a kernel (or, on a CPU, an operator) does, by what its name contains; the first that fits.
KINDS = {
    "compiled elementwise and norms": ("triton", "graph_0_cpp_fused"),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "convolution": ("conv", "cudnn", "fprop", "dgrad", "wgrad"),
    "matrix product": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "aten::mm", "aten::addmm", "aten::bmm"),
    "optimizer and averages": ("adam", "multi_tensor", "foreach"),
    "sorting": ("sort", "topk", "radix"),
    "random numbers": ("distribution", "uniform"),
    "copies": ("memcpy", "memset", "copy"),
}


def profiled(title: str, work: Callable[[], object], rows: int = 15) -> None:
    """Prints the kernels that took most of the time, and the share of each kind."""
    with torch.profiler.profile() as profile:
        work()
        synchronize()
    is_cuda = torch.cuda.is_available()
    kind, time = (DeviceType.CUDA, "self_device_time_total") if is_cuda else (DeviceType.CPU, "self_cpu_time_total")
    events = [
        e for e in profile.key_averages() if e.device_type == kind and not getattr(e, "is_user_annotation", False)
    ]
    total = sum(getattr(event, time) for event in events)
    print(f"\n{title}: {total / 1000:.1f} ms on the {'GPU' if is_cuda else 'CPU'}")
    for event in sorted(events, key=lambda event: -getattr(event, time))[:rows]:
        print(f"{getattr(event, time) / total:6.1%} {event.count:6} x  {event.key[:110]}")
    shares: Counter[str] = Counter()
    for event in events:
        shares[_kind(event.key)] += getattr(event, time)
    print("; ".join(f"{name} {share / total:.1%}" for name, share in shares.most_common()))


def _kind(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), "other")
