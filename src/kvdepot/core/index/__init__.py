"""The index of chunks, and its recovery from the records of an earlier server."""
