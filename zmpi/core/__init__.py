"""The mechanism: state kept apart, one shard per rank; a layer put together only while it is computed."""
