"""Mixture of experts: how evenly tokens spread over experts, and routers that spread them better (`--dyn-moe`)."""
