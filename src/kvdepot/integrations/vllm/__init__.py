"""vLLM's connector, and what it consists of; importing this package does not import vLLM."""
