"""The FSDP training engine that all roles share: sharding, micro-batches, objectives, optimizer, checkpoints."""
