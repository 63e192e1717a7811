"""KV events: changes of the index, published in vLLM's format."""
