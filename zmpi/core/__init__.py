"""The mechanism: each rank keeps one shard of the state; a layer is whole only while in use."""
