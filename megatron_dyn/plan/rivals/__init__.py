"""What others do, behind the same interface: the paper's balancers, DeepSpeed's, Megatron's own splits."""
