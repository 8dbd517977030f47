"""What a step costs: Megatron's schedules operation by operation, and a simulator of them."""
