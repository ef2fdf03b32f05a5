"""Flags of torch that decide what a step traces to, and that have no public reader which costs as little.

Private to torch: `torch._C._get_mkldnn_enabled` and `_set_mkldnn_enabled`, whether oneDNN is on, for the whole process
(`torch.backends.mkldnn.flags()` also sets a TF32 option, with a warning where there is none);
`torch._C._is_any_autocast_enabled`, true if autocast is on for any device, in one call for all of them. Every call of a
step asks, so they are bound as they are.
"""

import torch

onednn_enabled = torch._C._get_mkldnn_enabled
"""Whether oneDNN is on."""

set_onednn_enabled = torch._C._set_mkldnn_enabled
"""Turn oneDNN on or off, for the whole process."""

any_autocast_enabled = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device, in this thread."""
