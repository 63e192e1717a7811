"""Parts for testing kvdepot and what is built on it; nothing here runs in production."""
