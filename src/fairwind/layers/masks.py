"""Attention masks of Hugging Face transformers, whose values cannot be read under `vmap`."""

import sys
from functools import wraps
from typing import Any

from torch._C._functorch import is_functorch_wrapped_tensor


def leave_masks_unread() -> None:
    """Makes transformers treat stacked tensors like traced ones.

    It drops masks that are true everywhere, unless they are traced; for a stacked mask this cannot be
    decided. Other tensors are not affected.
    """
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    original = getattr(utils, "is_fake_tensor", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def is_fake_tensor(x: Any) -> bool:
        return bool(original(x)) or is_functorch_wrapped_tensor(x)

    utils.is_fake_tensor = is_fake_tensor
