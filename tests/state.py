"""All that a level sets of a thread's state, to be compared before and after a call."""

import torch
from torch.autograd import forward_ad

from forall._core import levels


def state():
    """All that a level touches: our stack, torch's modes, grad mode, forward mode."""
    keys = torch._C.DispatchKey
    return {
        "levels": levels.top(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "functions on": torch._C._is_torch_function_enabled(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "forward mode": torch._C._is_fwd_grad_enabled(),
        "forward level": forward_ad._current_level,
        "excluded": [
            torch._C._dispatch_tls_is_dispatch_key_excluded(k)
            for k in (
                keys.AutogradFunctionality,
                keys.ADInplaceOrView,
                keys.Conjugate,
                keys.Python,
                keys.PythonTLSSnapshot,
            )
        ],
        "included": [
            torch._C._dispatch_tls_is_dispatch_key_included(k)
            for k in (keys.Python, keys.PythonTLSSnapshot)
        ],
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
    }
