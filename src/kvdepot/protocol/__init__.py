"""The protocol that client and server share: messages, keys, layouts, status, endpoints and authentication."""
