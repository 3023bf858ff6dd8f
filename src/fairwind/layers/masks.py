"""Attention masks of Hugging Face transformers, whose values cannot be read while models are stacked."""

import sys
from functools import wraps
from typing import Any

from torch._C._functorch import is_functorch_wrapped_tensor


def leave_masks_unread() -> None:
    """Lets transformers treat stacked tensors as it treats tensors being traced.

    It looks whether a mask is true everywhere, to leave it out, unless the mask is traced; a stacked tensor
    has no one answer. For all other tensors nothing changes.
    """
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    original = getattr(utils, "is_fake_tensor", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def is_fake_tensor(x: Any) -> bool:
        return bool(original(x)) or is_functorch_wrapped_tensor(x)

    utils.is_fake_tensor = is_fake_tensor
