"""What is stored and removed, published as vLLM publishes it."""
