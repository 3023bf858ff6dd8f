"""Clients of NVFLARE for the tests, which its simulator loads in processes of its own."""

from typing import Any

import numpy as np
from nvflare.apis.shareable import Shareable
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fairwind.nvflare import AlgorithmExecutor


class NaNExecutor(AlgorithmExecutor):
    """A client whose updates are not finite."""

    def execute(self, task_name: str, shareable: Any, fl_ctx: Any, abort_signal: Any) -> Shareable:
        model = FLModelUtils.from_shareable(super().execute(task_name, shareable, fl_ctx, abort_signal))
        if model.params:
            model.params = {name: array * np.float32(np.nan) for name, array in model.params.items()}
        return FLModelUtils.to_shareable(model)
