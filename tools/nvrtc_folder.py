"""Prints the folder of the NVRTC that came with this interpreter's torch, for tests."""

import sys
from pathlib import Path


def main():
    """Find libnvrtc in the folders that wheels put it in; fail if it is in none."""
    folders = [Path(folder) / "nvidia" for folder in sys.path if folder]
    found = sorted(library for folder in folders for library in folder.glob("*/lib/libnvrtc.so.*"))
    if not found:
        looked_at = ", ".join(str(folder) for folder in folders)
        sys.exit(f"gflow: no libnvrtc.so.* below {looked_at}: is this torch built for CUDA?")
    print(found[-1].parent)


if __name__ == "__main__":
    main()
