"""A layer specification for `--spec MODULE NAME`: Megatron's own local one, reached by the flag."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

plain_layer = get_gpt_layer_local_spec()
