"""GPUs of this machine: which there are, and how much a task uses its own (through nvidia-ml-py, if installed)."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pslite.job.step_time_and_usage_statistics import GpuUsage

#: the devices that a process sees, as CUDA has it
VISIBLE = "CUDA_VISIBLE_DEVICES"
#: variables that say which devices a task has; the first one that is set counts. Slurm and container runtimes set them
_VISIBLE = (VISIBLE, "NVIDIA_VISIBLE_DEVICES")
#: has a folder for each device of the machine
_DRIVER = Path("/proc/driver/nvidia/gpus")
_NONE = frozenset({"", "-1", "none", "void", "NoDevFiles"})


def visible_gpus(environ: Mapping[str, str], driver: Path = _DRIVER) -> list[str]:
    """Return the GPUs that a process with that environment sees, as CUDA_VISIBLE_DEVICES names them."""
    listed = environ.get(VISIBLE)
    if listed is None:
        return [str(index) for index in range(len([*driver.iterdir()]))] if driver.is_dir() else []
    names = [] if listed.strip() in _NONE else [name.strip() for name in listed.split(",")]
    # CUDA ignores what follows a name that is no device
    return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))


def gpu_for_task(gpus: Sequence[str], used: Mapping[str, int], share: int = 1000) -> str:
    """Return the GPU for a task that uses a share of one (in thousandths, as `used`).

    It is the fullest of those that have room for the task, so that others stay whole; if none has, the least used.
    """
    amounts = {gpu: used.get(gpu, 0) for gpu in gpus}
    with_room = [gpu for gpu in gpus if amounts[gpu] + share <= 1000]
    return max(with_room, key=amounts.__getitem__) if with_room else min(gpus, key=amounts.__getitem__)


@dataclass(frozen=True)
class Gpus:
    """Samples how much GPUs are used."""

    #: the module `pynvml`, initialized
    driver: Any
    #: handles of the devices
    devices: Sequence[Any]

    def sample(self) -> tuple[GpuUsage, ...]:
        """Return how much each device is used; devices that do not answer are left out."""
        found = []
        for device in self.devices:
            try:
                memory = self.driver.nvmlDeviceGetMemoryInfo(device)
                found.append(
                    GpuUsage(
                        name=_text(self.driver.nvmlDeviceGetName(device)),
                        percent=self._percent(device),
                        memory_bytes=int(memory.used),
                        memory_total=int(memory.total),
                    )
                )
            except self.driver.NVMLError:
                continue
        return tuple(found)

    def _percent(self, device: Any) -> float:
        try:
            return float(self.driver.nvmlDeviceGetUtilizationRates(device).gpu)
        except self.driver.NVMLError:
            return 0.0  # a part of a device (MIG) has none

    def close(self) -> None:
        """Shut the driver interface down."""
        with contextlib.suppress(self.driver.NVMLError):
            self.driver.nvmlShutdown()


def open_gpus(environ: Mapping[str, str], load: Callable[[str], Any] = importlib.import_module) -> Gpus | None:
    """Return the devices that a task with that environment has; None without devices, driver or nvidia-ml-py.

    Devices are those of CUDA_VISIBLE_DEVICES (numbers are taken in the driver's order, CUDA_DEVICE_ORDER=PCI_BUS_ID),
    all where it is not set.

    """
    listed = next((environ[name] for name in _VISIBLE if name in environ), "all")
    if listed.strip() in _NONE:
        return None
    try:
        driver = load("pynvml")
    except ImportError:
        return None
    try:
        driver.nvmlInit()
    except driver.NVMLError:
        return None
    devices = []
    names = [str(i) for i in range(driver.nvmlDeviceGetCount())] if listed.strip() == "all" else listed.split(",")
    for name in names:
        try:
            devices.append(_handle(driver, name.strip()))
        except driver.NVMLError:
            break  # as CUDA does: what comes after one that is not there is not used
    gpus = Gpus(driver, devices)
    if not devices:
        gpus.close()
        return None
    return gpus


def _handle(driver: Any, name: str) -> Any:
    if name.isdigit():
        return driver.nvmlDeviceGetHandleByIndex(int(name))
    return driver.nvmlDeviceGetHandleByUUID(name)


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name
