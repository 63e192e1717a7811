"""kvdepot: a KV-cache server for LLM engines. Prefill once, reuse everywhere.

Client code imports from `kvdepot.adapters`; `kvdepot serve` starts the server; vLLM finds
`KVDepotConnector` through its plugin entry point. docs/internals describes the files.
"""

__version__ = "0.1.0"
