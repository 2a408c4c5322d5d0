"""What the benchmarks share: where results go, and the hardware's name."""

import platform
import re
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def hardware() -> str:
    """The processor's name and the number of threads it has, as a file name."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    name = names[0] if names else platform.processor() or platform.machine()
    return re.sub(r"\W+", "-", f"{name} x{len(names) or 1}").strip("-").lower()
