"""How an engine's KV memory becomes visible to the server, one module a kind of device."""
