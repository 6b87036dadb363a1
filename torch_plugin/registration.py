"""How torch learns the name ``gflow``.

This runs at ``import torch``, so the native library is not loaded here but when a group is made.
"""

from __future__ import annotations

from typing import Any

NAME = "gflow"


def register() -> None:
    """Register the backend with ``torch.distributed``; calling it again does nothing.

    torch calls this by itself, through the package's entry points.

    Example:
        >>> import gflow
        >>> gflow.register()
    """
    import torch.distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    from gflow.accelerator import KNOWN

    devices = ["cpu", *(one.device_type for one in KNOWN)]
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)


def register_on_older_torch() -> None:
    """Register at ``import torch`` where torch cannot look a backend up by its name.

    An exception here would break ``import torch`` for every program in this environment, so it
    becomes a warning; ``init_process_group`` then does not know the name.

    Example:
        >>> import gflow
        >>> gflow.register_on_older_torch()
    """
    try:
        import torch.distributed as dist

        if not hasattr(dist.Backend, "_ensure_backend_registered"):
            register()
    except Exception as error:
        import warnings

        warnings.warn(f"gflow could not register with torch.distributed: {error}", stacklevel=2)


def _create(backend_options: Any, pg_options: Any) -> Any:
    from gflow.group import create

    return create(backend_options, pg_options)
