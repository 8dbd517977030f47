"""The platform that lets unmodified Megatron train on CPU and gloo; `activate` puts it in force.

`host.pretrain` activates it where there is no GPU; on a GPU machine none of it is ever in force. The parts: `device`
chooses, `flags` adds the flags such a machine needs, `bootstrap` prepares the process, `torch_mode`, `torch_rows`,
`gloo_rows`, `megatron_rows`, `optimizer_rows` and `async_rows` are what changes.
"""

from megatron_dyn.host.cpu.platform import CPU_ROWS, activate

__all__ = ["CPU_ROWS", "activate"]
